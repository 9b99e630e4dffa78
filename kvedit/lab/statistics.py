"""What a run's figures are worth: paired intervals, error transitions, and checks that fail loudly.

Intervals are percentile intervals of a bootstrap over source questions (Budgeted KV-Cache Repair,
section B.3): a drawn source brings all its placements and all its arms, so differences stay
paired. They are pointwise, without adjustment for many comparisons. The checks are those of
Appendix F.
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
        value: The figure; `None` where nothing was measured, or where it has no denominator.
        low: Lower end; `None` with fewer than two sources, or without a safe denominator.
        high: Upper end, the same.
    """

    value: float | None
    low: float | None = None
    high: float | None = None

    def record(self) -> dict[str, float | None]:
        """Give it as `summary.json` holds it."""
        return {"value": self.value, "low": self.low, "high": self.high}


class Bootstrap:
    """The same draws of sources for every figure of a table.

    Args:
        sources: Source of each case, N of them.
        draws: How many.
        seed: Of the generator; equal seeds give equal intervals.
    """

    def __init__(self, sources: Sequence[Hashable], draws: int = DRAWS, seed: int = SEED) -> None:
        number = {source: at for at, source in enumerate(dict.fromkeys(sources))}
        self.sources = len(number)
        self._source = np.array([number[source] for source in sources], dtype=np.int64)
        drawn = np.random.default_rng(seed).integers(self.sources, size=(draws, self.sources))
        drawn += np.arange(draws)[:, None] * self.sources
        counts = np.bincount(drawn.ravel(), minlength=draws * self.sources)
        self._times = counts.reshape(draws, self.sources).astype(np.float64)  # a source is in a draw

    def means(self, values: FloatArray) -> list[Estimate]:
        """Estimate the mean of each column of `[N, K]`; NaN is a case without the figure."""
        return self.ratios(values, np.ones_like(values))

    def ratios(self, top: FloatArray, bottom: FloatArray) -> list[Estimate]:
        """Estimate sum(top) / sum(bottom) of each column, `[N, K]` both.

        A case that is NaN in either is left out of both. There is no interval where that of the
        denominator reaches zero, as the ratio then has no bound.
        """
        known = ~(np.isnan(top) | np.isnan(bottom))
        sums = [self._by_source(np.where(known, part, 0.0)) for part in (top, bottom)]
        drawn = [self._times @ part for part in sums]
        columns = zip(*(part.sum(axis=0) for part in sums), *(part.T for part in drawn), strict=True)
        return [self._estimate(*column) for column in columns]

    def _by_source(self, values: FloatArray) -> FloatArray:
        """Add up the cases of each source, `[sources, K]`."""
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
    """Count what became of right and wrong answers (section B.3).

    Args:
        before: Which cases one arm answers right, `bool [N]`.
        after: Which cases the other does.

    Returns:
        Cases that are repaired (wrong, then right), regressed, both right and both wrong; they
        add up to N, and repaired minus regressed is the difference of right answers.
    """
    return {
        "repaired": int((~before & after).sum()),
        "regressed": int((before & ~after).sum()),
        "both_right": int((before & after).sum()),
        "both_wrong": int((~before & ~after).sum()),
    }


def arm_names(records: Sequence[Record]) -> list[str]:
    """Give the arms in the order of the first record.

    Raises:
        KveditError: There is no record, or a case has other arms than the first one.
    """
    if not records:
        raise KveditError("The run has no cases.", "Run it first, or ask for more cases.")
    names = list(records[0]["arms"])
    for record in records:
        _same_arms(record, names)
    return names


def check(records: Sequence[Record], config: Record) -> None:
    """Check a run as Appendix F does: coverage, exact allowances, denominators, whole numbers.

    Args:
        records: Lines of `cases.jsonl`.
        config: `config.json`; its `arms` are what every case must have.

    Raises:
        KveditError: A check does not hold; it names the first case that shows it.
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
                raise _wrong(record["case"], f"holds {value} at {where}")
    _check_denominators(records)


def allowance(budget: str, suffix: int) -> int:
    """Give B for S rows. Counted here once more, on purpose: it checks `Budget.resolve`."""
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
                f"has {arm[what]} {what} in {name}, and {arm['budget']} of {record['suffix']} is {due}",
            )


def _check_denominators(records: Sequence[Record]) -> None:
    """No case twice, and every source of a dataset with the same placements."""
    for name, times in Counter(record["case"] for record in records).items():
        if times > 1:
            raise _wrong(name, f"is there {times} times")
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
                    f"and others have {len(due)} ({', '.join(due)}).",
                    "Finish the run, so that every source has all its placements.",
                )


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    """Give all floating-point numbers below a record, each with its path."""
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
        "Do not report this run: take the line of the case out of cases.jsonl and run it again.",
    )
