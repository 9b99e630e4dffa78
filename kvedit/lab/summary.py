"""The summary of a run: figures of each arm, differences of paired arms, and of two runs.

Counts are pooled as integers before any rounding. Log-probabilities are in nats, times in
seconds. An interval is `{"value", "low", "high"}`; see `kvedit.lab.statistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from kvedit.errors import UsageError
from kvedit.lab.statistics import (
    DRAWS,
    SCHEMA,
    SEED,
    Bootstrap,
    Estimate,
    FloatArray,
    Record,
    arm_names,
    transitions,
)

_MEANS = ("f1", "kl", "agreement", "rows", "refreshed", "runs", "gold_recall", "gold_precision")
# A policy is compared with those that have the same scores and another support, at the same budget.
_MATCHED = {"sur": ("tokens", "window")}


class Columns:
    """The figures of N cases and A arms as arrays.

    Args:
        records: Lines of `cases.jsonl`.
        names: Arms, in the order of the columns; the same name may come twice.
    """

    def __init__(self, records: Sequence[Record], names: Sequence[str]) -> None:
        self.arms = [[record["arms"][name] for name in names] for record in records]
        self.right = self.of("em") == 1
        self.harm = np.abs(self.of("logp_change"))
        self.seconds = self._array([[sum(arm["seconds"].values()) for arm in row] for row in self.arms])

    def of(self, field: str) -> FloatArray:
        """Return a figure, `float64 [N, A]`; NaN if a case has none."""
        return self._array([[arm[field] for arm in row] for row in self.arms])

    @cached_property
    def means(self) -> dict[str, FloatArray]:
        """Return the figures that are averaged."""
        return {name: self.of(name) for name in _MEANS}

    @cached_property
    def phases(self) -> dict[str, FloatArray]:
        """Return the seconds of each phase, `float64 [N, A]`; NaN if an arm has no such phase."""
        names = dict.fromkeys(name for row in self.arms for arm in row for name in arm["seconds"])
        return {
            name: self._array([[arm["seconds"].get(name) for arm in row] for row in self.arms])
            for name in names
        }

    def _array(self, values: list[list[Any]]) -> FloatArray:
        return np.array(values, dtype=np.float64).reshape(len(self.arms), -1)


def summarise(records: Sequence[Record]) -> Record:
    """Summarize a run.

    Args:
        records: Lines of `cases.jsonl`, every case with the same arms.

    Returns:
        The content of `summary.json`: `arms` over all cases; `datasets` and `places` with the same for
        each dataset and each position of edit or evidence, if there are several; and `exchanged`, if
        cases differ only in the evidence's side of the edit: for each tail and arm, before minus
        after, paired.

    Raises:
        KveditError: There are no records, or their arms differ.
    """
    names = arm_names(records)
    summary = {"schema_version": SCHEMA, "draws": DRAWS, "seed": SEED, **_table(records, names)}
    for split, part_of in (("datasets", lambda record: record["dataset"]), ("places", _place)):
        parts: dict[str, list[Record]] = {}
        for record in records:
            parts.setdefault(part_of(record), []).append(record)
        if len(parts) > 1:
            summary[split] = {part: _table(held, names) for part, held in sorted(parts.items())}
    if exchanged := _exchanged(records, names):
        summary["exchanged"] = exchanged
    return summary


def _place(record: Record) -> str:
    """Return the position of the edit or the evidence in a case; empty if its bench has none."""
    facts = record["facts"]
    if "side" in facts:
        return f"{facts['side']} the edit, {facts['tail']} tail"
    return str(facts.get("placement", ""))


def _exchanged(records: Sequence[Record], names: list[str]) -> dict[str, dict[str, Record]]:
    """Compare each case with evidence before the edit with its counterpart with evidence after it."""
    sides: dict[str, dict[tuple[str, str], dict[str, Record]]] = {}
    for record in records:
        if "side" in record["facts"]:
            twins = sides.setdefault(record["facts"]["tail"], {})
            twins.setdefault((record["dataset"], record["source"]), {})[record["facts"]["side"]] = record
    found = {}
    for tail, twins in sides.items():
        pairs = [pair for pair in twins.values() if len(pair) == 2]
        before, after = ([pair[side] for pair in pairs] for side in ("before", "after"))
        if pairs:
            compared = _compared(_bootstrap(before), Columns(before, names), Columns(after, names))
            found[tail] = dict(zip(names, compared, strict=True))
    return found


def compare(records_a: Sequence[Record], records_b: Sequence[Record]) -> Record:
    """Compare two runs, paired by case and arm.

    Args:
        records_a: Records of the first run.
        records_b: Records of the second run; differences are second minus first.

    Returns:
        `arms`: a comparison for each arm that both have; and the arms and cases that only one has.

    Raises:
        UsageError: The runs share no case or no arm.
        KveditError: A run has no cases, or cases with different arms.
    """
    arms_a, arms_b = arm_names(records_a), arm_names(records_b)
    a, b = ({record["case"]: record for record in records} for records in (records_a, records_b))
    cases, names = [case for case in a if case in b], [name for name in arms_a if name in arms_b]
    if not cases or not names:
        raise UsageError(
            f"The two runs have no {'arm' if cases else 'case'} in common.",
            "Compare runs of the same cases and arms.",
        )
    bootstrap = _bootstrap([a[case] for case in cases])
    columns_a, columns_b = (Columns([run[case] for case in cases], names) for run in (a, b))
    compared = _compared(bootstrap, columns_b, columns_a)
    return {
        "schema_version": SCHEMA,
        "cases": len(cases),
        "sources": bootstrap.sources,
        "cases_only_in_first": [case for case in a if case not in b],
        "cases_only_in_second": [case for case in b if case not in a],
        "arms_only_in_first": [name for name in arms_a if name not in arms_b],
        "arms_only_in_second": [name for name in arms_b if name not in arms_a],
        "arms": dict(zip(names, compared, strict=True)),
    }


def _table(records: Sequence[Record], names: list[str]) -> Record:
    bootstrap, columns = _bootstrap(records), Columns(records, names)
    figures = _intervals(bootstrap, columns, names)
    arms = {name: _arm(columns, at, figures) for at, name in enumerate(names)}
    for name, base, compared in _against(bootstrap, records, arms):
        arms[name]["against"][base] = compared
    return {"cases": len(records), "sources": bootstrap.sources, "arms": arms}


def _bootstrap(records: Sequence[Record]) -> Bootstrap:
    return Bootstrap([(record["dataset"], record["source"]) for record in records])


def _intervals(bootstrap: Bootstrap, columns: Columns, names: list[str]) -> dict[str, list[Estimate]]:
    """Estimate the figures that need other arms or an interval; each is a list over arms."""

    def arm(values: FloatArray, name: str) -> FloatArray:
        """Return one arm's column, repeated for every arm; NaN if the run does not have it."""
        one = values[:, [names.index(name)]] if name in names else np.array([[np.nan]])
        return np.broadcast_to(one, values.shape)

    margin = columns.of("margin")
    harm, shifted = arm(columns.harm, "shift"), arm(margin, "shift")
    return {
        "em": bootstrap.means(columns.right.astype(np.float64)),
        "logp_change": bootstrap.means(columns.harm),
        # 1 - sum|arm| / sum|shift|, and (arm - shift) / (clean - shift)
        "recovery": bootstrap.ratios(harm - columns.harm, harm),
        "margin_recovery": bootstrap.ratios(margin - shifted, arm(margin, "reprefill") - shifted),
        "latency_ratio": bootstrap.ratios(columns.seconds, arm(columns.seconds, "reprefill")),
    }


def _arm(columns: Columns, at: int, figures: dict[str, list[Estimate]]) -> Record:
    """Summarize one arm, without comparisons."""
    held = [row[at] for row in columns.arms]
    shown = [arm["stale_shown"] for arm in held if arm["stale_shown"] is not None]
    intervals = {name: estimates[at].record() for name, estimates in figures.items()}
    right = int(columns.right[:, at].sum())
    return {
        **{name: held[0][name] for name in ("policy", "support", "budget")},
        "cases": len(held),
        **intervals,
        "em": {"right": right, "cases": len(held), **intervals["em"]},
        "stale_shown": {"shown": sum(shown), "cases": len(shown)},
        "top1": sum(arm["top1"] for arm in held) / len(held),
        **{name: _known(np.nanmean, columns.means[name][:, at]) for name in _MEANS},
        "latency_s": float(np.median(columns.seconds[:, at])),
        "seconds": {
            name: middle
            for name, times in columns.phases.items()
            if (middle := _known(np.nanmedian, times[:, at])) is not None
        },
        "where": np.sum([arm["where"] for arm in held], axis=0).tolist(),
        "against": {},
    }


def _against(
    bootstrap: Bootstrap, records: Sequence[Record], arms: dict[str, Record]
) -> list[tuple[str, str, Record]]:
    """Compare every arm with `shift` and `reprefill`, and `sur` with its matched controls."""
    pairs = [
        (name, base)
        for name in arms
        for base in (
            "shift",
            "reprefill",
            *(f"{other}@{name.partition('@')[2]}" for other in _MATCHED.get(name.partition("@")[0], ())),
        )
        if base in arms and base != name
    ]
    if not pairs:
        return []
    ours, bases = (Columns(records, side) for side in zip(*pairs, strict=True))
    compared = _compared(bootstrap, ours, bases)
    return [(*pair, comparison) for pair, comparison in zip(pairs, compared, strict=True)]


def _compared(bootstrap: Bootstrap, ours: Columns, base: Columns) -> list[Record]:
    """Compare column by column: ours minus base, paired by case."""
    right = [side.right.astype(np.float64) for side in (ours, base)]
    estimates = {
        "em": bootstrap.means(right[0] - right[1]),
        **{name: bootstrap.means(ours.of(name) - base.of(name)) for name in ("f1", "kl", "agreement")},
        "logp_change": bootstrap.means(ours.harm - base.harm),
        "latency_ratio": bootstrap.ratios(ours.seconds, base.seconds),
    }
    return [
        {
            **{name: column[at].record() for name, column in estimates.items()},
            "transitions": transitions(base.right[:, at], ours.right[:, at]),
        }
        for at in range(ours.right.shape[1])
    ]


def _known(what: Callable[[FloatArray], Any], values: FloatArray) -> float | None:
    """Return the mean or median over the cases that have the figure; `None` if none has."""
    return None if np.isnan(values).all() else float(what(values))
