"""The prompt's three parts: head, body and question, encoded apart so ids never merge across them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvedit.errors import ContextError
from kvedit.tokens.splice import Tokens
from kvedit.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """The layout that a session keeps, so that its ids never change with a template.

    Attributes:
        head_ids: Ids before the document.
        before_question: Text between document and question, special tokens included.
        after_question: Text after the question, special tokens included.
        before_next: Text between an answer and the next question of a conversation.
    """

    head_ids: tuple[int, ...]
    before_question: str
    after_question: str
    before_next: str

    def question_ids(
        self, tokenizer: Tokenizer, question: str, *, next_turn: bool = False
    ) -> npt.NDArray[np.int64]:
        """Encode the part after the document, or after the last answer. `int64 [Nq]`."""
        return np.array(
            [
                *tokenizer.encode_template(self.before_next if next_turn else self.before_question),
                *tokenizer.encode_text(question).ids,
                *tokenizer.encode_template(self.after_question),
            ],
            dtype=np.int64,
        )


_LONG = 16  # characters a token: no document that fits has more, except one of blanks


def encode_body(tokenizer: Tokenizer, text: str, context_length: int) -> Tokens:
    """Encode a document. One that is far too long is refused by its start, without encoding all of it.

    Raises:
        ContextError: Says how many tokens that start has.
    """
    start = _LONG * context_length
    while start < len(text):
        tokens = len(tokenizer.encode_text(text[:start]))
        if tokens > 2 * context_length:  # where a text is cut changes the ids at its end only
            raise ContextError(
                f"The first {start} of the document's {len(text)} characters are {tokens} tokens already, "
                f"and the model's context holds {context_length}.",
                "Shorten the document, or choose a model with a longer context.",
            )
        start *= 4
    return tokenizer.encode_text(text)


def check_context(tokens: int, more: int, what: str, context_length: int) -> None:
    """Refuse what does not fit; nothing is ever cut.

    Args:
        tokens: Of head and document.
        more: Tokens that come after them.
        what: What those are.
        context_length: Positions that the model was made for.

    Raises:
        ContextError: Names both numbers.
    """
    if tokens + more > context_length:
        raise ContextError(
            f"The document ({tokens} tokens) and {what} ({more}) need {tokens + more} tokens, "
            f"and the model's context holds {context_length}.",
            "Shorten the document or the answer, or choose a model with a longer context.",
        )
