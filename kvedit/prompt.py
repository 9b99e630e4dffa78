"""The prompt's three parts: head, body and question, encoded apart so ids never merge across them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvedit.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """The layout that a session keeps, so that its ids never change with a template.

    Attributes:
        head_ids: Ids before the document.
        before_question: Text between document and question, special tokens included.
        after_question: Text after the question, special tokens included.
    """

    head_ids: tuple[int, ...]
    before_question: str
    after_question: str

    def question_ids(self, tokenizer: Tokenizer, question: str) -> npt.NDArray[np.int64]:
        """Encode the part after the document. `int64 [Nq]`."""
        return np.array(
            [
                *tokenizer.encode_template(self.before_question),
                *tokenizer.encode_text(question).ids,
                *tokenizer.encode_template(self.after_question),
            ],
            dtype=np.int64,
        )
