"""What a report is made of: tables, figures with a legend, and how numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvedit.lab.charts import MINUS, STYLES, key

NONE = "\N{EN DASH}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table under a heading.

    Attributes:
        title: Heading.
        note: What the reader must know.
        heads: Of the columns.
        rows: The first cell of each is its head.
        folded: Show the heading only, until it is clicked.
        style: Class of the table.
    """

    title: str
    note: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    style: str = "figures"


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart under a title.

    Attributes:
        title: Above it.
        drawn: SVG.
        legend: The mark and the name of each entry.
    """

    title: str
    drawn: Markup
    legend: Sequence[tuple[Markup, str]]

    @classmethod
    def of(cls, title: str, drawn: str, marks: Sequence[tuple[int | str, str]]) -> Figure:
        """Make a figure of a chart; `marks` are style or class, and name, of each entry of the legend."""
        return cls(title, Markup(drawn), [(Markup(key(style)), name) for style, name in marks])


@dataclass(frozen=True, slots=True)
class Pair:
    """Figures side by side."""

    figures: Sequence[Figure]


Part = Table | Figure | Pair


def page(title: str, facts: Sequence[str], parts: Sequence[Part | None], config: dict[str, Any]) -> str:
    """Write the whole file: `parts`, and a table of the options. Text that is not `Markup` is escaped."""
    environment = Environment(
        loader=PackageLoader("kvedit", "lab"), autoescape=True, undefined=StrictUndefined
    )
    rows = list(_flat(config, ""))
    asked = Table("What was asked for", "config.json", ["option", "value"], rows, folded=True, style="facts")
    return environment.get_template("report.html").render(
        title=title, facts=facts, parts=[*filter(None, parts), asked], styles=STYLES
    )


def number(value: float | None, digits: int = 3) -> str:
    """Format a number, with commas between thousands."""
    return NONE if value is None else f"{value:,.{digits}f}".replace("-", MINUS)


def small(value: float | None) -> str:
    """Format a number with two decimals."""
    return number(value, 2)


def signed(value: float | None, digits: int = 3) -> str:
    """Format a difference with its sign."""
    return NONE if value is None else f"{value:+,.{digits}f}".replace("-", MINUS)


def percent(value: float | None) -> str:
    """Write a share."""
    return NONE if value is None else f"{number(100 * value, 1)} %"


def milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds, without the unit."""
    return NONE if seconds is None else number(seconds * 1000, 1)


def interval(estimate: dict[str, Any], write: Callable[[float], str] = number) -> Markup:
    """Format an interval on its own line of a cell; empty if there is none."""
    if estimate["low"] is None:
        return Markup()
    return span(*(write(estimate[end]).removesuffix(" %") for end in ("low", "high")))


def span(low: str, high: str) -> Markup:
    """Write two ends on a line of its own in a cell."""
    return Markup("<small>[{}, {}]</small>").format(low, high)


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a config, each with its path."""
    if isinstance(value, dict):
        for one, part in value.items():
            yield from _flat(part, f"{name}.{one}" if name else one)
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
