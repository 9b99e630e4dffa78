"""Select: turn scores into B rows. The only module that spends the budget.

Supports:
    rows    the B best rows, wherever they stand
    window  the B adjacent rows with the largest sum
    units   whole units by rank; if the next does not fit, its best window of the remaining width
            (Semantic-Unit Refresh, Budgeted KV-Cache Repair, sections 3.2 and A.3)

Each support returns exactly min(B, S) rows, sorted; ties go to the earlier row. No torch.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvedit.policies.scores import FloatArray, IntArray, Scores

BoolArray = npt.NDArray[np.bool_]


def select(
    scores: Scores, unit: IntArray, stale: BoolArray, suffix: BoolArray, budget: int, support: str
) -> IntArray:
    """Select rows.

    Rows refreshed for an earlier question keep their state. So stale rows are selected first, and
    budgets add up over questions; only what is left of a budget goes to refreshed rows.

    Args:
        scores: Scores of rows and units.
        unit: Unit of each row, `int64 [T]`; -1 before the body.
        stale: Rows computed in a different context, `bool [T]`.
        suffix: The S eligible rows, `bool [T]`: stale rows and those refreshed since.
        budget: B, at most S.
        support: How scores become rows.

    Returns:
        The selected rows, sorted `int64 [B]`.
    """
    chosen = np.zeros(len(suffix), dtype=bool)
    unit = unit if scores.unit is None else scores.unit
    if scores.first is not None:
        own = Scores(scores.first.rows, scores.units)
        _spend(own, unit, stale, suffix, chosen, math.ceil(scores.first.share * budget), "rows")
    _spend(scores, unit, stale, suffix, chosen, budget - int(chosen.sum()), support)
    return np.flatnonzero(chosen)


def _spend(
    scores: Scores,
    unit: IntArray,
    stale: BoolArray,
    suffix: BoolArray,
    chosen: BoolArray,
    left: int,
    support: str,
) -> None:
    """Mark `left` more rows in `chosen`."""
    for part in (stale & suffix, suffix & ~stale):
        candidates = np.flatnonzero(part & ~chosen)
        width = min(left, len(candidates))
        if width:
            chosen[_SUPPORTS[support](scores.rows, scores.units, unit, candidates, width)] = True
            left -= width


def _rows(
    scores: FloatArray, unit_scores: FloatArray, unit: IntArray, candidates: IntArray, width: int
) -> IntArray:
    order = np.argsort(-scores[candidates], kind="stable")
    return candidates[order[:width]]


def _window(
    scores: FloatArray, unit_scores: FloatArray, unit: IntArray, candidates: IntArray, width: int
) -> IntArray:
    total = np.concatenate([[0.0], np.cumsum(scores[candidates], dtype=np.float64)])
    sums = np.round(total[width:] - total[:-width], 9)  # so that equal sums tie
    first = int(np.argmax(sums))
    return candidates[first : first + width]


def _units(
    scores: FloatArray, unit_scores: FloatArray, unit: IntArray, candidates: IntArray, width: int
) -> IntArray:
    firsts = np.flatnonzero(np.diff(unit[candidates], prepend=-2))
    stops = np.append(firsts[1:], len(candidates))
    order = np.argsort(-unit_scores[unit[candidates[firsts]]], kind="stable")
    sizes = (stops - firsts)[order]
    whole = int(np.searchsorted(np.cumsum(sizes), width, side="right"))
    chosen = [candidates[firsts[at] : stops[at]] for at in order[:whole]]
    left = width - int(sizes[:whole].sum())
    if left:
        at = order[whole]
        chosen.append(_window(scores, unit_scores, unit, candidates[firsts[at] : stops[at]], left))
    return np.concatenate(chosen)


_SUPPORTS = {"rows": _rows, "window": _window, "units": _units}
