"""Where the text was torn, and how near behind that a row stands. No model.

Shared by the policies that look at places rather than at words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvedit.policies.evidence import Evidence

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


def seams_of(evidence: Evidence) -> IntArray:
    """Return the seams; where none is known, the first row that may be bought stands for them."""
    seams = evidence.seams
    return seams if len(seams) else np.flatnonzero(evidence.suffix)[:1]


def nearness(evidence: Evidence) -> FloatArray:
    """Score rows by how near they stand behind a seam. `float32 [T]`.

    T minus the distance to the latest seam at or before the row, and 0 before the first one: the
    best rows are those right behind the seams, which grow in turn.
    """
    count, seams = len(evidence.ids), seams_of(evidence)
    rows = np.arange(count)
    if not len(seams):
        return np.zeros(count, dtype=np.float32)
    latest = np.searchsorted(seams, rows, side="right") - 1
    near = np.where(latest < 0, 0, count - (rows - seams[latest]))
    return near.astype(np.float32)


def origins(ids: IntArray, past_ids: IntArray, source: IntArray) -> IntArray:
    """Find the past row of each present row, also of those that were only recomputed.

    A row that was computed since has lost its source, but if its text was there before, it still
    has its id and its distance to the next row, or the last one, that has kept its own.

    Args:
        ids: State ids, `int64 [T]`.
        past_ids: Past ids, `int64 [N]`.
        source: Past row of each present row, `int64 [T]`; -1 for none.

    Returns:
        Past rows, `int64 [T]`; -1 for new text. Past rows that are not in it were deleted.
    """
    found = source.copy()
    known = np.flatnonzero(source >= 0)
    free = np.ones(len(past_ids), dtype=bool)
    free[source[known]] = False
    for step in (0, -1):  # the next known row, the last one
        lost = np.flatnonzero(found < 0)
        at = np.searchsorted(known, lost) + step
        lost, at = lost[(at >= 0) & (at < len(known))], at[(at >= 0) & (at < len(known))]
        old = lost + (source[known[at]] - known[at])
        inside = (old >= 0) & (old < len(past_ids))
        lost, old = lost[inside], old[inside]
        same = free[old] & (past_ids[old] == ids[lost])
        found[lost[same]] = old[same]
        free[old[same]] = False
    return found
