"""Delimiters after the edit. Motivated by Models Take Notes at Prefill (arXiv 2606.17107).

That paper finds conclusions about a field stored on the punctuation, line ends and control tokens
after it; 2609.17983 also has such an arm. Only the token class is used, not the causal ranking, and
no system is reproduced.
"""

from __future__ import annotations

import string
import unicodedata
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvedit.names import Support
from kvedit.policies.evidence import Evidence, best_of_unit
from kvedit.policies.scores import Scores
from kvedit.policies.seam import nearness
from kvedit.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Structural:
    """Score delimiter rows above all others, and each group by closeness to the seam before."""

    support: Support = "rows"
    reads_cache: ClassVar[bool] = False

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        rows = nearness(evidence)
        rows[_delimiters(evidence.model.tokenizer, evidence.ids)] += len(evidence.ids) + 1
        return Scores(rows, best_of_unit(rows, evidence))


def _delimiters(tokenizer: Tokenizer, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which ids are only punctuation, line ends or control tokens. `bool [T]`."""
    distinct, back = np.unique(ids, return_inverse=True)
    # Decode in pairs: some tokenizers drop the space before a first word, and a space is no delimiter.
    texts = [tokenizer.decode([token, token]) for token in distinct.tolist()]
    flags = np.array([_delimits(text) for text in texts], dtype=bool)
    return flags[back]


def _delimits(text: str) -> bool:
    """Return whether a decoded token is a delimiter; a control token decodes to an empty string."""
    marks = text.strip()
    if not marks:
        return not text or "\n" in text
    return all(
        mark.isspace() or mark in string.punctuation or unicodedata.category(mark)[0] == "P" for mark in marks
    )
