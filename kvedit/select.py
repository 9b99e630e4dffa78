"""Select: turn scores into the rows that a budget buys. The only room that spends the budget.

Rules:
    rows    the B best rows, wherever they stand
    window  the B adjacent rows with the largest sum
    units   whole units by rank; when the next does not fit, its best window of the width left
            (Semantic-Unit Refresh, Budgeted KV-Cache Repair, sections 3.2 and A.3)

Every rule returns exactly min(B, S) rows, sorted; ties go to the earlier row.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kvedit.errors import UsageError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
Rule = Literal["rows", "window", "units"]
RULES: tuple[Rule, ...] = get_args(Rule)

DEFAULT_POLICY = "sur-seam"
DEFAULT_SHARE = Fraction(5, 100)
DEFAULT_ROWS = 64
_FORMS = "Write a share such as 5%, a number of tokens such as 128t, 0, or full."


@dataclass(frozen=True, slots=True)
class Budget:
    """How many of the S rows may be refreshed.

    Attributes:
        share: Of S, rounded down to whole rows.
        rows: At least so many, whatever the share.
        text: As it was asked for.
    """

    share: Fraction
    rows: int
    text: str

    @classmethod
    def default(cls) -> Budget:
        """5 %, but at least 64 rows: on a short document that costs next to nothing."""
        return cls(DEFAULT_SHARE, DEFAULT_ROWS, f"default (5%, at least {DEFAULT_ROWS}t)")

    @classmethod
    def full(cls) -> Budget:
        """All rows: replay."""
        return cls(Fraction(1), 0, "full")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read `5%`, `128t`, `0` or `full`.

        Raises:
            UsageError: The text is none of these, or lies outside 0 to 100 %.
        """
        word = text.strip().lower()
        if word == "full":
            return cls.full()
        if word == "0":
            return cls(Fraction(0), 0, "0")
        if match := re.fullmatch(r"(-?\d{1,12}(?:\.\d{1,12})?)\s*%", word, re.ASCII):
            share = Fraction(match[1]) / 100
            if not 0 <= share <= 1:
                raise UsageError(f"The budget {text} lies outside 0% to 100%.", _FORMS)
            return cls(share, 0, f"{match[1]}%")
        if match := re.fullmatch(r"(\d{1,12})\s*t", word, re.ASCII):
            return cls(Fraction(0), int(match[1]), f"{match[1]}t")
        raise UsageError(f"'{text}' is not a budget.", _FORMS)

    def resolve(self, suffix_rows: int) -> int:
        """Give B for S rows: never more than S, and never more than was asked for."""
        return min(suffix_rows, max(math.floor(self.share * suffix_rows), self.rows))


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the budget that is spent before the rest, on rows of its own.

    Attributes:
        share: Of B, rounded up to whole rows; 0 to 1.
        rows: Score of each row for this part, `float32 [T]`; the best rows are taken.
    """

    share: float
    rows: FloatArray


@dataclass(frozen=True, slots=True)
class Scores:
    """How much each row and each unit matters to the question; larger is more.

    Attributes:
        rows: `float32 [T]`.
        units: `float32 [U]`.
        unit: Unit of each row, where the policy has units of its own, `int64 [T]`, -1 for none;
            else the units are the text's.
        first: What is spent first, if anything.
    """

    rows: FloatArray
    units: FloatArray
    unit: IntArray | None = None
    first: Share | None = None


def select(
    scores: Scores, unit: IntArray, stale: BoolArray, suffix: BoolArray, budget: int, rule: Rule
) -> IntArray:
    """Choose the support.

    Rows refreshed for an earlier question keep their state, so stale rows are bought first and
    budgets add up over questions; only what is left over goes to refreshed rows.

    Args:
        scores: Of rows and units.
        unit: Unit of each row, `int64 [T]`; -1 before the body.
        stale: Rows computed under another context, `bool [T]`.
        suffix: The S rows that may be bought, `bool [T]`; `stale` and those refreshed since.
        budget: B, at most S.
        rule: How scores become rows.

    Returns:
        The support, sorted `int64 [B]`.
    """
    chosen = np.zeros(len(suffix), dtype=bool)
    unit = unit if scores.unit is None else scores.unit
    if scores.first is not None:
        own = Scores(scores.first.rows, scores.units)
        _spend(own, unit, stale, suffix, chosen, math.ceil(scores.first.share * budget), "rows")
    _spend(scores, unit, stale, suffix, chosen, budget - int(chosen.sum()), rule)
    return np.flatnonzero(chosen)


def _spend(
    scores: Scores,
    unit: IntArray,
    stale: BoolArray,
    suffix: BoolArray,
    chosen: BoolArray,
    left: int,
    rule: Rule,
) -> None:
    """Mark `left` more rows in `chosen`."""
    for part in (stale & suffix, suffix & ~stale):
        candidates = np.flatnonzero(part & ~chosen)
        width = min(left, len(candidates))
        if width:
            chosen[_RULES[rule](scores.rows, scores.units, unit, candidates, width)] = True
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
    sums = np.round(total[width:] - total[:-width], 9)  # equal sums must tie, whatever came before
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


_RULES = {"rows": _rows, "window": _window, "units": _units}
