"""Statistics of a run: paired intervals, error transitions, and consistency checks.

Intervals are percentile intervals of a bootstrap over source questions (Budgeted KV-Cache Repair,
section B.3): a drawn source includes all its placements and arms, so differences stay paired. They
are pointwise, without correction for multiple comparisons. The checks are those of Appendix F.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from kvedit.errors import KveditError

Record = dict[str, Any]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

SCHEMA = 1
DRAWS = 10_000
SEED = 0
LEVEL = (2.5, 97.5)  # percentiles


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval.

    Attributes:
        value: The figure; `None` if nothing was measured, or the denominator is 0.
        low: Lower end; `None` with fewer than two sources, or if the denominator may be 0.
        high: Upper end, likewise.
    """

    value: float | None
    low: float | None = None
    high: float | None = None

    def record(self) -> dict[str, float | None]:
        """Return it as in `summary.json`."""
        return {"value": self.value, "low": self.low, "high": self.high}


class Bootstrap:
    """Bootstrap draws of sources, shared by all figures of a table.

    Args:
        sources: Source of each of the N cases.
        draws: Number of draws.
        seed: Random seed; equal seeds give equal intervals.
    """

    def __init__(self, sources: Sequence[Hashable], draws: int = DRAWS, seed: int = SEED) -> None:
        number = {source: at for at, source in enumerate(dict.fromkeys(sources))}
        self.sources = len(number)
        self._source = np.array([number[source] for source in sources], dtype=np.int64)
        drawn = np.random.default_rng(seed).integers(self.sources, size=(draws, self.sources))
        drawn += np.arange(draws)[:, None] * self.sources
        counts = np.bincount(drawn.ravel(), minlength=draws * self.sources)
        self._times = counts.reshape(draws, self.sources).astype(np.float64)  # of each source in a draw

    def means(self, values: FloatArray) -> list[Estimate]:
        """Estimate the mean of each column of `[N, K]`; NaN marks a case without the figure."""
        return self.ratios(values, np.ones_like(values))

    def ratios(self, top: FloatArray, bottom: FloatArray) -> list[Estimate]:
        """Estimate sum(top) / sum(bottom) of each column, `[N, K]` both.

        A case that is NaN in either is left out of both. If the interval of the denominator includes
        zero, there is no interval, as the ratio is then unbounded.
        """
        known = ~(np.isnan(top) | np.isnan(bottom))
        sums = [self._by_source(np.where(known, part, 0.0)) for part in (top, bottom)]
        drawn = [self._times @ part for part in sums]
        columns = zip(*(part.sum(axis=0) for part in sums), *(part.T for part in drawn), strict=True)
        return [self._estimate(*column) for column in columns]

    def _by_source(self, values: FloatArray) -> FloatArray:
        """Sum over the cases of each source, `[sources, K]`."""
        sums = np.zeros((self.sources, values.shape[1]))
        np.add.at(sums, self._source, values)
        return sums

    def _estimate(self, top: float, bottom: float, tops: FloatArray, bottoms: FloatArray) -> Estimate:
        if bottom == 0:
            return Estimate(None)
        value = float(top / bottom)
        least, most = np.percentile(bottoms, LEVEL)
        if self.sources < 2 or least <= 0 <= most:
            return Estimate(value)
        some = bottoms != 0
        low, high = np.percentile(tops[some] / bottoms[some], LEVEL)
        return Estimate(value, float(low), float(high))


def transitions(before: BoolArray, after: BoolArray) -> dict[str, int]:
    """Count transitions of right and wrong answers between two arms (section B.3).

    Args:
        before: Which cases one arm answers right, `bool [N]`.
        after: Which cases the other arm answers right, `bool [N]`.

    Returns:
        Cases that are repaired (wrong, then right), regressed, both right and both wrong; they
        add up to N, and repaired minus regressed is the difference in right answers.
    """
    return {
        "repaired": int((~before & after).sum()),
        "regressed": int((before & ~after).sum()),
        "both_right": int((before & after).sum()),
        "both_wrong": int((~before & ~after).sum()),
    }


def arm_names(records: Sequence[Record]) -> list[str]:
    """Return the arms in the order of the first record.

    Raises:
        KveditError: There is no record, or the arms of a case differ from those of the first.
    """
    if not records:
        raise KveditError("The run has no cases.", "Run it first, or with more cases.")
    names = list(records[0]["arms"])
    for record in records:
        _same_arms(record, names)
    return names


def check(records: Sequence[Record], config: Record) -> None:
    """Check a run as in Appendix F: coverage, exact allowances, denominators, whole numbers.

    Args:
        records: Lines of `cases.jsonl`.
        config: `config.json`; its `arms` are what every case must have.

    Raises:
        KveditError: A check fails; names the first case.
    """
    arm_names(records)
    for record in records:
        if record["schema_version"] != SCHEMA:
            raise _wrong(record["case"], f"has schema version {record['schema_version']}, not {SCHEMA}")
        _same_arms(record, config["arms"])
        for name, arm in record["arms"].items():
            _check_allowance(record, name, arm)
        for where, value in _numbers(record, ""):
            if not math.isfinite(value):
                raise _wrong(record["case"], f"has {value} at {where}")
    _check_denominators(records)


def allowance(budget: str, suffix: int) -> int:
    """Return B for S rows. Deliberately computed independently, as a check of `Budget.resolve`."""
    if budget == "full":
        return suffix
    if budget.endswith("t"):
        return min(suffix, int(budget[:-1]))
    return min(suffix, math.floor(Fraction(budget.removesuffix("%")) * suffix / 100))


def _same_arms(record: Record, names: Sequence[str]) -> None:
    without, beside = sorted(set(names) - set(record["arms"])), sorted(set(record["arms"]) - set(names))
    if without:
        raise _wrong(record["case"], f"lacks {', '.join(without)}")
    if beside:
        raise _wrong(record["case"], f"has {', '.join(beside)}, which the run or its first case does not")


def _check_allowance(record: Record, name: str, arm: Record) -> None:
    if arm["budget"] is None:
        return
    due = allowance(arm["budget"], record["suffix"])
    for what in ("rows", "refreshed"):
        if arm[what] != due:
            raise _wrong(
                record["case"],
                f"has {arm[what]} {what} in {name}, but {arm['budget']} of {record['suffix']} is {due}",
            )


def _check_denominators(records: Sequence[Record]) -> None:
    """Check that no case is repeated, and that all sources of a dataset have the same placements."""
    for name, times in Counter(record["case"] for record in records).items():
        if times > 1:
            raise _wrong(name, f"occurs {times} times")
    placements: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        placement = str(record["facts"].get("placement"))
        placements[record["dataset"]][record["source"]].append(placement)
    for dataset, sources in placements.items():
        due = max((sorted(held) for held in sources.values()), key=len)
        for source, held in sources.items():
            if sorted(held) != due:
                raise KveditError(
                    f"Source {source} of {dataset} has {len(held)} cases ({', '.join(sorted(held))}), "
                    f"but others have {len(due)} ({', '.join(due)}).",
                    "Finish the run, so that every source has all its placements.",
                )


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    """Yield all floating-point numbers in a record, each with its path."""
    if isinstance(value, float):
        yield where, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for at, part in enumerate(value):
            yield from _numbers(part, f"{where}[{at}]")


def _wrong(case: str, what: str) -> KveditError:
    return KveditError(
        f"Case {case} {what}.",
        "Do not report this run. Remove the case's line from cases.jsonl and run it again.",
    )
