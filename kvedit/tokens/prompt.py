"""The three parts of a prompt: head, body and question, tokenized separately so no token spans two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvedit.errors import ContextError
from kvedit.tokens.splice import Tokens
from kvedit.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """The layout of a prompt. A session stores it, so a later change of the template cannot change its ids.

    Attributes:
        head_ids: Ids before the document.
        before_question: Text between document and question, including special tokens.
        after_question: Text after the question, including special tokens.
        before_next: Text between an answer and the next question of a conversation.
    """

    head_ids: tuple[int, ...]
    before_question: str
    after_question: str
    before_next: str

    def question_ids(
        self, tokenizer: Tokenizer, question: str, *, next_turn: bool = False
    ) -> npt.NDArray[np.int64]:
        """Tokenize the part after the document, or after the last answer. `int64 [Nq]`."""
        return np.array(
            [
                *tokenizer.encode_template(self.before_next if next_turn else self.before_question),
                *tokenizer.encode_text(question).ids,
                *tokenizer.encode_template(self.after_question),
            ],
            dtype=np.int64,
        )


_LONG = 16  # characters per token; no document that fits has more, except one of blanks


def encode_body(tokenizer: Tokenizer, text: str, context_length: int) -> Tokens:
    """Tokenize a document.

    A text that is far too long is refused after tokenizing only its beginning.

    Raises:
        ContextError: Far too long; names the number of tokens in the beginning.
    """
    start = _LONG * context_length
    while start < len(text):
        tokens = len(tokenizer.encode_text(text[:start]))
        if tokens > 2 * context_length:  # cutting a text changes only the ids at its end
            raise ContextError(
                f"The first {start} of the document's {len(text)} characters are {tokens} tokens, "
                f"but the model's context has {context_length}.",
                "Shorten the document, or choose a model with a longer context.",
            )
        start *= 4
    return tokenizer.encode_text(text)


def check_context(tokens: int, more: int, what: str, context_length: int) -> None:
    """Raise if a prompt does not fit the context; text is never truncated.

    Args:
        tokens: Number of tokens in head and document.
        more: Number of tokens after them.
        what: Description of those, for the message.
        context_length: Number of positions that the model supports.

    Raises:
        ContextError: It does not fit; names both numbers.
    """
    if tokens + more > context_length:
        raise ContextError(
            f"The document ({tokens} tokens) and {what} ({more}) need {tokens + more} tokens, "
            f"but the model's context has {context_length}.",
            "Shorten the document or the answer, or choose a model with a longer context.",
        )
