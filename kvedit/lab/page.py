"""The parts of a report: style sheet, tables, charts with legends, and number formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any

from kvedit.lab.charts import MINUS, STYLES, key

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d9dee4;
  --quiet: #6b7480; --right: #b5bfca; --wrong: #e3e7ec; --cell: #eef1f4;
  --c0: #1f66d1; --c1: #c75b00; --c2: #0b7f63; --c3: #c02f3c; --c4: #7547c9; --c5: #00799c; --c6: #8a6500; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e6e9ed; --soft: #9aa4af;
  --line: #333a42; --quiet: #9aa4af; --right: #56616d; --wrong: #2b3138; --cell: #22272d;
  --c0: #6ea8ff; --c1: #ff9d4d; --c2: #3ecfa6; --c3: #ff7a83; --c4: #b899ff; --c5: #4cc9ef; --c6: #e0b33c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 20px 16px 48px; max-width: 1040px; background: var(--page);
  color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2, summary { font-size: 1.1rem; font-weight: 600; margin: 28px 0 4px; }
summary { cursor: pointer; }
p { margin: 4px 0 10px; color: var(--soft); max-width: 78ch; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 7px; text-align: right; white-space: nowrap; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; font-weight: 600; color: var(--soft); white-space: normal; }
th:first-child { position: sticky; left: 0; background: var(--page); text-align: left; font-weight: 600; }
td small { display: block; color: var(--soft); }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 350px), 1fr)); gap: 0 32px; }
figure { margin: 28px 0 0; max-width: 560px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 6px; }
ul { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0 0; padding: 0; list-style: none;
  font-size: .85rem; }
li { display: flex; align-items: center; gap: 6px; overflow-wrap: anywhere; }
svg.chart { display: block; width: 100%; height: auto; }
svg.key { width: 28px; height: 16px; flex: none; }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg text.tick, svg text.label { fill: var(--soft); }
svg text.over { fill: var(--page); } svg text.over.right, svg text.over.wrong { fill: var(--ink); }
.grid { stroke: var(--line); } .axis { stroke: var(--quiet); }
.level { stroke: var(--quiet); stroke-width: 1.5; stroke-dasharray: 5 4; }
.line { stroke-width: 1.8; } .whisker { stroke-width: 1.2; opacity: .75; }
.mark { stroke: var(--page); stroke-width: 1; } .hollow { fill: var(--page); stroke: currentColor; }
.quiet { color: var(--quiet); } .right { color: var(--right); } .wrong { color: var(--wrong); }
.line { stroke: currentColor; } .mark:not(.hollow), .fill { fill: currentColor; }
.cell { fill: var(--cell); } .heat { fill: var(--c0); }
""" + " ".join(f".c{at} {{ color: var(--c{at}); }}" for at in range(STYLES))

NONE = "\N{EN DASH}"


def page(title: str, facts: Iterable[str], parts: Iterable[str], config: dict[str, Any]) -> str:
    """Return the whole file; `parts` are HTML, everything else is escaped."""
    rows = [[escape(name), escape(value)] for name, value in _flat(config, "")]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}\n</style>\n</head>\n<body>",
            f"<h1>{escape(title)}</h1>\n<p>{escape(' · '.join(facts))}</p>",
            *(part for part in parts if part),
            table("What was asked for", "config.json", ["option", "value"], rows, folded=True, style="facts"),
            "</body>\n</html>\n",
        ]
    )


def table(
    title: str,
    note: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    folded: bool = False,
    style: str = "figures",
) -> str:
    """Return a table with a heading; cells are HTML, everything else is escaped.

    Args:
        title: Heading.
        note: Explanation for the reader.
        heads: Column headings.
        rows: Cells; the first of each row is its heading.
        folded: Show only the heading until it is clicked.
        style: CSS class of the table.
    """
    head = "".join(f"<th scope='col'>{escape(text)}</th>" for text in heads)
    body = "".join(
        f"<tr><th scope='row'>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>\n"
        for first, *rest in rows
    )
    held = (
        f"<p>{escape(note)}</p>\n<div class='scroll'><table class='{style}'><thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody></table></div>"
    )
    if folded:
        return f"<details><summary>{escape(title)}</summary>\n{held}\n</details>"
    return f"<section><h2>{escape(title)}</h2>\n{held}\n</section>"


def figure(title: str, drawn: str, marks: Sequence[tuple[int | str, str]]) -> str:
    """Return a chart with its legend.

    Args:
        title: Title above the chart.
        drawn: SVG of the chart.
        marks: Style or class, and name, of each entry of the legend.
    """
    legend = "".join(f"<li>{key(style)}{escape(name)}</li>" for style, name in marks)
    return f"<figure><figcaption>{escape(title)}</figcaption>\n{drawn}\n<ul>{legend}</ul></figure>"


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
    """Format a share as a percentage."""
    return NONE if value is None else f"{number(100 * value, 1)} %"


def milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds, without the unit."""
    return NONE if seconds is None else number(seconds * 1000, 1)


def interval(estimate: dict[str, Any], write: Callable[[float], str] = number) -> str:
    """Format an interval on its own line of a cell; empty if there is none."""
    if estimate["low"] is None:
        return ""
    low, high = (write(estimate[end]).removesuffix(" %") for end in ("low", "high"))
    return f"<small>[{low}, {high}]</small>"


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a config, each with its path."""
    if isinstance(value, dict):
        for one, part in value.items():
            yield from _flat(part, f"{name}.{one}" if name else one)
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
