"""Text units: half-open spans that end at sentences, lines and paragraphs.

Semantic-Unit Refresh recomputes whole units, because a relevant token alone does not bring along
the neighbours that give it its meaning (Budgeted KV-Cache Repair, section 3.2). This module
handles characters only.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

UNIT_CAP = 64
"""Maximum number of tokens in a unit; a longer sentence is split into equal pieces."""

# A sentence ends at its full stop and closing quotes or brackets, before a space; scripts without
# spaces need none. A line end always ends a unit. White space after a sentence starts the next unit,
# because byte-level tokens include the space before a word.
_CLOSING = """"'”’»)\\]」』）〕】》〉"""
_BOUNDARY = re.compile(rf"(?<=[.!?؟۔।])[{_CLOSING}]*(?=[ \t])|[。！？｡]+[{_CLOSING}]*(?:\r?\n\s*)?|\n\s*")


def unit_starts(text: str) -> IntArray:
    """Return the character offset at which each unit of `text` starts. `int64 [U]`, the first is 0."""
    ends = [match.end() for match in _BOUNDARY.finditer(text)]
    starts = np.array([0, *ends], dtype=np.int64)
    return np.unique(starts[starts < max(len(text), 1)])


def unit_of_rows(text: str, token_starts: IntArray, cap: int = UNIT_CAP) -> IntArray:
    """Return the unit number of every token.

    Args:
        text: The body.
        token_starts: Character at which each token starts, `int64 [N]`, ascending.
        cap: Maximum number of tokens in a unit.

    Returns:
        Unit number of each token, `int64 [N]`: starting at 0, without gaps, non-decreasing.
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
