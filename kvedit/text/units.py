"""Text units: the half-open spans of a text at sentence, line and paragraph ends.

Semantic-Unit Refresh recomputes whole units, because a relevant token alone does not bring
the neighbours that give it its meaning (Budgeted KV-Cache Repair, section 3.2). Knows
characters and nothing else.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

UNIT_CAP = 64
"""Tokens in a unit at most; a longer sentence is cut into equal pieces."""

# A sentence ends at its stop, with closing quotes or brackets, before a space; in a script that
# puts no space there, at the stop and what closes after it. A line always ends. White space after
# a sentence opens the next one, as byte-level tokens have it.
_CLOSING = """"'”’»)\\]」』）〕】》〉"""
_BOUNDARY = re.compile(rf"(?<=[.!?؟۔।])[{_CLOSING}]*(?=[ \t])|[。！？｡]+[{_CLOSING}]*(?:\r?\n\s*)?|\n\s*")


def unit_starts(text: str) -> IntArray:
    """Find the character at which each unit of `text` starts. `int64 [U]`, the first is 0."""
    ends = [match.end() for match in _BOUNDARY.finditer(text)]
    starts = np.array([0, *ends], dtype=np.int64)
    return np.unique(starts[starts < max(len(text), 1)])


def unit_of_rows(text: str, token_starts: IntArray, cap: int = UNIT_CAP) -> IntArray:
    """Number the unit of every token, in order.

    Args:
        text: The body.
        token_starts: Character at which each token starts, `int64 [N]`, ascending.
        cap: Tokens in a unit at most.

    Returns:
        Unit number of each token, `int64 [N]`: from 0, without gaps, never falling.
    """
    if not len(token_starts):
        return np.zeros(0, dtype=np.int64)
    unit = np.searchsorted(unit_starts(text), token_starts, side="right")
    first = np.flatnonzero(np.diff(unit, prepend=-1))
    size = np.diff(np.append(first, len(unit)))
    pieces = -(-size // cap)
    width = np.repeat(-(-size // pieces), size)
    offset = np.arange(len(unit)) - np.repeat(first, size)
    new = (offset % width) == 0
    return np.asarray(np.cumsum(new) - 1, dtype=np.int64)
