"""Seams, where the text was torn, and how close rows are to them. No model.

Shared by the policies that use positions rather than words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvedit.policies.evidence import Evidence

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


def seams_of(evidence: Evidence) -> IntArray:
    """Return the seams; if none is known, the first eligible row."""
    seams = evidence.seams
    return seams if len(seams) else np.flatnonzero(evidence.suffix)[:1]


def nearness(evidence: Evidence) -> FloatArray:
    """Score rows by closeness to the seam before them. `float32 [T]`.

    The score is T minus the distance to the last seam at or before the row, and 0 before the first
    seam. So the best rows are those right after the seams, taken from each seam in turn.
    """
    count, seams = len(evidence.ids), seams_of(evidence)
    rows = np.arange(count)
    if not len(seams):
        return np.zeros(count, dtype=np.float32)
    latest = np.searchsorted(seams, rows, side="right") - 1
    near = np.where(latest < 0, 0, count - (rows - seams[latest]))
    return near.astype(np.float32)


def origins(ids: IntArray, past_ids: IntArray, source: IntArray) -> IntArray:
    """Return the past row of each current row, including rows that were only recomputed.

    A row that was recomputed has lost its source. If its text existed before, it still has the same id
    and the same distance to the next or the previous row that has kept its source.

    Args:
        ids: Current ids, `int64 [T]`.
        past_ids: Past ids, `int64 [N]`.
        source: Past row of each current row, `int64 [T]`; -1 for none.

    Returns:
        Past rows, `int64 [T]`; -1 for new text. Past rows that do not occur in it were deleted.
    """
    found = source.copy()
    known = np.flatnonzero(source >= 0)
    free = np.ones(len(past_ids), dtype=bool)
    free[source[known]] = False
    for step in (0, -1):  # the next row with a source, then the previous one
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
