"""A run as one HTML file: tables and charts, without scripts, fonts or external resources."""

from __future__ import annotations

from collections.abc import Sequence

from kvedit.lab import plots
from kvedit.lab.page import (
    NONE,
    Pair,
    Table,
    interval,
    milliseconds,
    number,
    page,
    percent,
    signed,
    small,
    span,
)
from kvedit.lab.plots import ENDS
from kvedit.lab.statistics import Record

_DIFFERENCES = ["arm", "minus", "exact match", "repaired", "regressed", "|Δ log p|", "F1", "latency ÷"]


def html(config: Record, records: Sequence[Record], summary: Record) -> str:
    """Write the report.

    Args:
        config: `config.json`.
        records: Lines of `cases.jsonl`; unused.
        summary: Result of `summarise`.
    """
    bench = str(config["bench"])
    model = config.get("model", {})
    facts = [str(model[key]) for key in ("name", "dtype", "device") if model.get(key)]
    facts.insert(0, f"{summary['cases']} cases from {summary['sources']} sources")
    arms: dict[str, Record] = summary["arms"]
    parts = [
        _headline(arms),
        *plots.by_budget(arms),
        *plots.by_latency(arms),
        Pair([each for each in (plots.transitions(arms), plots.where(arms)) if each]),
        _matched(arms),
        _split("Datasets", summary.get("datasets", {})),
        _split("Places", summary.get("places", {})),
        _exchanged(summary.get("exchanged", {})),
        _details(arms),
        _paired(arms),
    ]
    return page(f"kvedit bench {bench}", facts, parts, config)


def _headline(arms: dict[str, Record]) -> Table:
    heads = ["arm", "exact match", "old shown", "|Δ log p|", "recovery", "rows", "latency", "÷ re-prefill"]
    rows = [
        [
            name,
            _em(arm),
            _of(arm["stale_shown"]["shown"], arm["stale_shown"]["cases"]),
            number(arm["logp_change"]["value"]) + interval(arm["logp_change"]),
            percent(arm["recovery"]["value"]) + interval(arm["recovery"], percent),
            number(arm["refreshed"], 1),
            f"{number(arm['latency_s'] * 1000, 0)} ms",
            number(arm["latency_ratio"]["value"], 2) + interval(arm["latency_ratio"], small),
        ]
        for name, arm in arms.items()
    ]
    note = (
        "Old: the answer before the edit. Small figures are 95 % intervals of a bootstrap over sources, "
        "pointwise. |Δ log p|: mean change of the right answer's log-probability against a clean prefill, "
        "in nats. Recovery: the part of Shift's change that is gone. Rows: mean number refreshed. Latency: "
        "median from the edit to the last token of the answer, and its mean as a part of a re-prefill's."
    )
    return Table("Arms", note, heads, rows)


def _matched(arms: dict[str, Record]) -> Table | None:
    rows = [
        _difference(name, base, held)
        for name, arm in arms.items()
        for base, held in arm["against"].items()
        if base not in ENDS
    ]
    note = "The same scores and budget, other supports. Differences are the first arm minus the second."
    return Table("Matched controls", note, _DIFFERENCES, rows) if rows else None


def _paired(arms: dict[str, Record]) -> Table | None:
    rows = [
        _difference(name, base, held)
        for name, arm in arms.items()
        for base, held in arm["against"].items()
        if base in ENDS
    ]
    note = "Differences are the first arm minus the second, paired by case."
    return Table("Against Shift and Re-prefill", note, _DIFFERENCES, rows, folded=True) if rows else None


def _difference(name: str, base: str, held: Record) -> list[str]:
    points = held["em"]
    return [
        name,
        base,
        f"{signed(100 * points['value'], 1)} points" + interval(points, percent),
        str(held["transitions"]["repaired"]),
        str(held["transitions"]["regressed"]),
        signed(held["logp_change"]["value"]) + interval(held["logp_change"]),
        signed(held["f1"]["value"]) + interval(held["f1"]),
        number(held["latency_ratio"]["value"], 2) + interval(held["latency_ratio"], small),
    ]


def _split(title: str, parts: dict[str, Record]) -> Table | None:
    """Show exact match, change of log p and recovery of each arm, for each part."""
    rows = [
        [
            part,
            name,
            _em(arm),
            number(arm["logp_change"]["value"]) + interval(arm["logp_change"]),
            percent(arm["recovery"]["value"]) + interval(arm["recovery"], percent),
        ]
        for part, held in parts.items()
        for name, arm in held["arms"].items()
    ]
    heads = ["", "arm", "exact match", "|Δ log p|", "recovery"]
    return Table(title, "Each with its own cases and intervals.", heads, rows) if rows else None


def _exchanged(tails: dict[str, dict[str, Record]]) -> Table | None:
    """Show the effect of the evidence's side of the edit, all else equal."""
    rows = [
        [
            tail,
            name,
            signed(arm["em"]["value"]) + interval(arm["em"]),
            signed(arm["logp_change"]["value"]) + interval(arm["logp_change"]),
        ]
        for tail, arms in tails.items()
        for name, arm in arms.items()
    ]
    note = "The same passages with the evidence before the edit, minus after it; paired (Appendix D)."
    return Table("Exchanged", note, ["tail", "arm", "exact match", "|Δ log p|"], rows) if rows else None


def _details(arms: dict[str, Record]) -> Table:
    phases = list(dict.fromkeys(phase for arm in arms.values() for phase in arm["seconds"]))
    heads = [
        "arm",
        "F1",
        "margin recovery",
        "KL",
        "top-1",
        "agreement",
        "runs",
        "gold recall",
        "gold precision",
    ]
    rows = [
        [
            name,
            number(arm["f1"]),
            percent(arm["margin_recovery"]["value"]) + interval(arm["margin_recovery"], percent),
            number(arm["kl"], 4),
            percent(arm["top1"]),
            percent(arm["agreement"]),
            number(arm["runs"], 1),
            percent(arm["gold_recall"]),
            percent(arm["gold_precision"]),
            *(milliseconds(arm["seconds"].get(phase)) for phase in phases),
        ]
        for name, arm in arms.items()
    ]
    note = (
        "Means over cases; phases are medians in ms. Margin: mean log-probability of the right answer's "
        "tokens minus that of the old one's. KL: from the clean prefill, in nats, and top-1: the same best "
        "token, both at the first answer token. Agreement: part of the clean greedy answer that is "
        "repeated. Runs: adjacent pieces. Gold: refreshed rows that lie in the evidence, by recall and "
        "precision."
    )
    return Table("More figures", note, [*heads, *(f"{phase}, ms" for phase in phases)], rows, folded=True)


def _em(arm: Record) -> str:
    held = arm["em"]
    return f"{_of(held['right'], held['cases'])} · {percent(held['value'])}" + interval(held, percent)


def _of(count: int, cases: int) -> str:
    return f"{count}/{cases}" if cases else "–"


def executor_html(config: Record, records: Sequence[Record], summary: Record) -> str:
    """Return the report of the executor bench: times by shape, and ratios to packed."""
    shapes: list[Record] = summary["shapes"]
    names = list(dict.fromkeys(name for shape in shapes for name in shape["refresh_s"]))
    others = list(dict.fromkeys(name for shape in shapes for name in shape["refresh_over_packed"]))
    rows = [
        [
            f"{shape['context']:,}",
            shape["budget"],
            f"{shape['rows']:,}",
            f"{shape['runs']:,}",
            *(milliseconds(_middle(shape["refresh_s"], name)) for name in names),
            *(_times(shape["refresh_over_packed"].get(name)) for name in others),
            *(percent(shape[f"{name}_share"]) for name in ("token_layers", "pairs")),
        ]
        for shape in shapes
    ]
    heads = ["context", "budget", "rows", "runs"]
    heads += [f"{name}, ms" for name in names] + [f"{name} ÷ packed" for name in others]
    heads += ["token-layers, of replay's", "query-key pairs, of replay's"]
    note = (
        "Refresh of as many rows in ever more runs: medians over rounds, ratios within a round with "
        "the smallest and largest. The paper reports up to 16.1 × over interval for Qwen3-8B on one H100."
    )
    return page(
        "kvedit bench executor", [], [Table("Executors", note, heads, rows), *plots.ratios(shapes)], config
    )


def _middle(times: Record, name: str) -> float | None:
    return times[name]["median"] if name in times else None


def _times(ratio: Record | None) -> str:
    if ratio is None:
        return NONE
    return f"{small(ratio['median'])} ×" + span(small(ratio["min"]), small(ratio["max"]))


def numerics_html(config: Record, records: Sequence[Record], summary: Record) -> str:
    """Return the report of the numerics bench."""
    heads = ["path", "cases", "largest logit gap", "argmax differs", "answers differ", "first difference"]
    rows = [
        [
            path["name"],
            str(path["cases"]),
            f"{path['logit_max']:.2e}",
            percent(path["argmax_disagreement"]),
            percent(path["sequence_disagreement"]),
            NONE if path["first_difference"] is None else str(path["first_difference"]),
        ]
        for path in summary["paths"]
    ]
    note = "The same replay along other execution paths, against the first path (Appendix E)."
    return page("kvedit bench numerics", [], [Table("Paths", note, heads, rows)], config)


def evidence_html(config: Record, records: Sequence[Record], summary: Record) -> str:
    """Return the report of the evidence bench."""
    sets: dict[str, Record] = summary["datasets"]
    arms = list(dict.fromkeys(arm for part in sets.values() for arm in part["arms"]))
    rows = [[arm, *(_share(part["arms"].get(arm)) for part in sets.values())] for arm in arms]
    note = "Mean share of the selected rows that lie in a supporting passage, with 95 % intervals."
    heads = ["arm", *(f"{name} ({part['cases']})" for name, part in sets.items())]
    return page("kvedit bench evidence", [], [Table("Evidence", note, heads, rows)], config)


def _share(estimate: Record | None) -> str:
    return NONE if estimate is None else number(estimate["value"], 2) + interval(estimate)
