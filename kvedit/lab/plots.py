"""The charts of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvedit.lab import charts
from kvedit.lab.charts import Axis, Point, Series
from kvedit.lab.page import Figure, Pair, percent
from kvedit.lab.statistics import Record

T = TypeVar("T")
ENDS = {"shift": "Shift", "replay": "Replay", "reprefill": "Re-prefill", "erratum": "Erratum"}
_BOUNDS = {"0": "Shift", "full": "Replay"}  # at these budgets all policies are equal
_KINDS = [
    ("repaired", "c0 fill"),
    ("both right", "right fill"),
    ("both wrong", "wrong fill"),
    ("regressed", "c3 fill"),
]
_LOWEST = -1.0  # lower recoveries are drawn at the edge


def by_budget(arms: dict[str, Record]) -> Iterator[Pair]:
    """Draw exact match and recovery against the budget."""
    rows = {arm["budget"]: arm["refreshed"] for arm in arms.values() if arm["budget"]}
    order = sorted(rows, key=lambda budget: (budget != "0", budget == "full", rows[budget]))
    names = [_BOUNDS.get(budget, budget) for budget in order]
    x = charts.categories("Budget: part of the rows behind the edit, not to scale", names)
    places = {name: float(order.index(arm["budget"])) for name, arm in arms.items() if arm["budget"]}
    return _pairs(arms, "budget", x, places, ("shift", "replay"))


def by_latency(arms: dict[str, Record]) -> Iterator[Pair]:
    """Draw exact match and recovery against the latency."""
    places = {name: arm["latency_s"] * 1000 for name, arm in arms.items()}
    x = charts.logarithmic("Median latency after the edit, ms (log scale)", list(places.values()))
    return _pairs(arms, "latency", x, places, tuple(ENDS))


def _pairs(
    arms: dict[str, Record], by: str, x: Axis, places: dict[str, float], ends: Sequence[str]
) -> Iterator[Pair]:
    """Draw pairs of charts, as many as it takes to tell the policies apart; each shows the ends too."""
    axes = _quality_axes(arms)
    for part, lines in _panels(arms):
        pair: list[Figure] = []
        for field, title in (("em", f"Exact match by {by}"), ("recovery", f"Recovery by {by}")):
            held = [(ENDS[end], -1 - at, [end]) for at, end in enumerate(ends) if end in arms]
            held += [(name, style, of) for style, (name, of) in enumerate(lines)]
            series = [Series(name, style, _points(arms, of, field, places)) for name, style, of in held]
            clean = arms.get("reprefill", {}).get(field, {}).get("value")
            level = None if "reprefill" in ends else clean
            drawn = charts.plot(title, series, x, axes[field], spread=by == "budget", level=level)
            marks: list[tuple[int | str, str]] = [(one.style, one.name) for one in series]
            marks += [] if level is None else [("level", "Re-prefill")]
            pair.append(Figure.of(title + part, drawn, marks))
        yield Pair(pair)


def _panels(arms: dict[str, Record]) -> Iterator[tuple[str, Sequence[tuple[str, list[str]]]]]:
    """Yield the policies with their arms, as many at a time as a chart can distinguish."""
    lines: dict[str, list[str]] = {}
    for name, arm in arms.items():
        if arm["policy"]:
            lines.setdefault(name.partition("@")[0], []).append(name)
    return _parts(list(lines.items()))


def _parts(every: Sequence[T]) -> Iterator[tuple[str, Sequence[T]]]:
    """Yield as many items at a time as a chart can distinguish, each with a suffix for the title."""
    count = max(1, -(-len(every) // charts.STYLES))
    for at in range(count):
        part = f" ({at + 1} of {count})" if count > 1 else ""
        yield part, every[at * charts.STYLES : (at + 1) * charts.STYLES]


def _quality_axes(arms: dict[str, Record]) -> dict[str, Axis]:
    def ends(field: str) -> list[float]:
        found = [arm[field][end] for arm in arms.values() for end in ("value", "low", "high")]
        return [max(value, _LOWEST) for value in found if value is not None] or [0.0, 1.0]

    return {
        "em": charts.linear("Exact match", ends("em"), percent=True),
        "recovery": charts.linear("Recovery", [*ends("recovery"), 0.0, 1.0], percent=True),
    }


def _points(
    arms: dict[str, Record], names: Sequence[str], field: str, places: dict[str, float]
) -> list[Point]:
    """Return a point for each arm that has the figure, from left to right."""
    found = []
    for name in sorted(names, key=places.__getitem__):
        held = arms[name][field]
        if held["value"] is not None:
            ends = "" if held["low"] is None else f" [{percent(held['low'])}, {percent(held['high'])}]"
            hint = f"{name}: {percent(held['value'])}{ends}, {1000 * arms[name]['latency_s']:,.0f} ms"
            found.append(Point(places[name], held["value"], held["low"], held["high"], hint))
    return found


def transitions(arms: dict[str, Record]) -> Figure | None:
    """Draw the transitions from the right and wrong answers of `shift`, one bar per arm."""
    rows = [
        (name, [arm["against"]["shift"]["transitions"][kind.replace(" ", "_")] for kind, _ in _KINDS])
        for name, arm in arms.items()
        if "shift" in arm["against"]
    ]
    if not rows:
        return None
    drawn = charts.bars("Transitions against Shift", rows, _KINDS)
    marks: list[tuple[int | str, str]] = [(style, kind) for kind, style in _KINDS]
    return Figure.of("What became of the answers that Shift gives, in cases", drawn, marks)


def where(arms: dict[str, Record]) -> Figure | None:
    """Draw the positions of the refreshed rows, one strip per arm that selects any."""
    rows = [
        (name, [count / sum(arm["where"]) for count in arm["where"]])
        for name, arm in arms.items()
        if arm["policy"] and sum(arm["where"])
    ]
    if not rows:
        return None
    most = max(max(shares) for _, shares in rows)
    drawn = charts.strips("Where the refreshed rows fell", rows, most)
    marks: list[tuple[int | str, str]] = [("cell", "none"), ("heat", f"{percent(most)} of an arm's rows")]
    return Figure.of("Where the refreshed rows fell, by tenth of the rows behind the edit", drawn, marks)


def ratios(shapes: Sequence[Record]) -> list[Figure]:
    """Draw the time of `interval` relative to `packed` by runs, one line per context and budget."""
    lines: dict[str, list[tuple[int, Record]]] = {}
    for shape in shapes:
        if ratio := shape["refresh_over_packed"].get("interval"):
            name = f"{shape['context']:,} tokens, {shape['rows']:,} rows"
            lines.setdefault(name, []).append((shape["runs"], ratio))
    if not lines:
        return []
    every = [pair for line in lines.values() for pair in line]
    counts = sorted({runs for runs, _ in every})
    x = charts.categories("Runs, of as many rows in all", [f"{count:,}" for count in counts])
    y = charts.linear("interval ÷ packed, ×", [0.0, *(ratio["max"] for _, ratio in every)])
    drawn = []
    for part, names in _parts(list(lines)):
        series = [
            Series(name, style, [_ratio(name, counts.index(runs), ratio) for runs, ratio in lines[name]])
            for style, name in enumerate(names)
        ]
        marks: list[tuple[int | str, str]] = [(one.style, one.name) for one in series]
        title = f"Speed-up of packed by runs{part}"
        drawn.append(
            Figure.of(title, charts.plot(title, series, x, y, level=1.0), [*marks, ("level", "interval")])
        )
    return drawn


def _ratio(name: str, at: int, ratio: Record) -> Point:
    return Point(at, ratio["median"], ratio["min"], ratio["max"], f"{name}: {ratio['median']:.2f} ×")
