"""Present the results of `scaling.py`: tables, a section of docs/performance.md, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvedit.lab import charts

Record = dict[str, Any]
Shown = tuple[str, list[str], list[list[str]]]
"""A table: title, headings and rows."""
BEGIN, END = "<!-- scaling: begin -->", "<!-- scaling: end -->"
FIGURES = {
    "seconds": ("Seconds", 1.0),
    "memory_bytes": ("Memory above that of a tiny document, MB", 1e6),
    "written_bytes": ("Written, MB", 1e6),
}
"""Title of each figure, and the divisor for its unit."""


def tables(record: Record) -> Iterable[Shown]:
    """Yield the tables for the terminal and the page."""
    lengths = [f"{length:,}" for length in record["lengths"]]
    for figure, (title, unit) in FIGURES.items():
        rows = []
        for verb, held in record["verbs"].items():
            values = [short(value / unit) for value in held[figure]["values"]]
            fitted, known = held[figure]["exponent"], held[figure]["expected"]
            rows.append([verb, *values, "-" if fitted is None else f"{fitted:z.2f}", between(known)])
        yield title, ["tokens", *lengths, "exponent", "expected"], rows
    past = record["past"]
    counts = [f"{sample['revisions']:,}" for sample in past["samples"]]
    rows = [
        [name, *(short(value) for value in values)]
        for name, values in {
            "`kvedit status`, s": middles(past, "status_s"),
            "opening, ms": middles(past, "open_s", 1000),
            "one more edit, ms": middles(past, "edit_s", 1000),
            "its bytes": [sample["edit_bytes"] for sample in past["samples"]],
            "edits so far, ms each": [scaled(sample["edits_mean_s"], 1000) for sample in past["samples"]],
            "their bytes each": [sample["edits_mean_bytes"] for sample in past["samples"]],
        }.items()
    ]
    yield f"A past, {past['tokens']:,} tokens", ["revisions", *counts], rows


def middles(past: Record, name: str, unit: float = 1) -> list[float]:
    return [unit * statistics.median(sample[name]) for sample in past["samples"]]


def scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else unit * value


def short(value: float | None) -> str:
    """Format a value with three digits, or as an integer from 100 on."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def between(ends: Sequence[float] | None) -> str:
    """Format an expected exponent or range of exponents."""
    return "-" if ends is None else "-".join(dict.fromkeys(f"{round(end, 2):g}" for end in ends))


def show(record: Record) -> None:
    """Print the tables; they fit 80 columns."""
    console = Console()
    for title, headings, rows in tables(record):
        table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
        for heading in headings:
            table.add_column(heading, justify="right" if table.columns else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def write(folder: Path, record: Record) -> None:
    """Replace the tables in the page, and write the plot to the same folder."""
    page = folder / "performance.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{section(record)}\n{END}{after}", encoding="utf-8")
    (folder / "scaling.svg").write_text(plot(record), encoding="utf-8")


def section(record: Record) -> str:
    """Return the tables as Markdown, with the machine and the plot."""
    machine = record["machine"]
    libraries = ", ".join(f"{name} {machine[name]}" for name in ("kvedit", "torch", "python"))
    parts = [
        f"`{record['model']}`; {machine['processor']}, threads: {machine['threads']}; {libraries}; "
        f"medians of up to {record['rounds']} rounds.",
        "![Seconds against tokens of the document, both on log scales](scaling.svg)",
    ]
    for title, headings, rows in tables(record):
        head, *body = (f"| {' | '.join(line)} |" for line in [headings, *rows])
        parts += [f"**{title}**", "\n".join([head, f"|---{'|---:' * (len(headings) - 1)}|", *body])]
    return "\n\n".join(parts)


_COLOURS = ("#1f66d1", "#c75b00", "#0b7f63", "#c02f3c", "#7547c9")
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24; } text.tick, text.label { fill: #59636e; }
.grid { stroke: #d9dee4; } .axis { stroke: #6b7480; } .line { stroke-width: 1.8; } .mark { stroke: #fff; }
""" + "\n".join(
    f".c{at}.line {{ stroke: {colour}; }} .c{at}.mark {{ fill: {colour}; }}"
    for at, colour in enumerate(_COLOURS)
)


def plot(record: Record) -> str:
    """Draw the seconds of each verb against tokens, on log scales, as an SVG file."""
    lines = {
        verb: list(
            zip([sample["tokens"] for sample in held["samples"]], held["seconds"]["values"], strict=True)
        )
        for verb, held in record["verbs"].items()
    }
    every = [point for points in lines.values() for point in points]
    x = charts.logarithmic("Document, tokens (log scale)", [tokens for tokens, _ in every])
    y = charts.logarithmic("Time, s (log scale)", [seconds for _, seconds in every])
    series = [
        charts.Series(
            verb, style, [charts.Point(*point, hint=f"{verb}: {short(point[1])} s") for point in points]
        )
        for style, (verb, points) in enumerate(lines.items())
    ]
    title = "How the time of each verb grows with the document"
    parts = [placed(charts.plot(title, series, x, y), 0, 0, charts.WIDTH, charts.HEIGHT)]
    for at, one in enumerate(series):
        across, top = 24 + 230 * (at % 2), charts.HEIGHT + 8 + 22 * (at // 2)
        slope = record["verbs"][one.name]["seconds"]["exponent"]
        name = one.name if slope is None else f"{one.name}: exponent {slope:z.2f}"
        parts += [placed(charts.key(one.style), across, top, 28, 16)]
        parts += [f'<text x="{across + 36}" y="{top + 13}">{name}</text>']
    height = charts.HEIGHT + 18 + 22 * -(-len(series) // 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {charts.WIDTH} {height}" '
        f'width="{charts.WIDTH}" height="{height}">\n<style>{_STYLE}\n</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def placed(drawn: str, x: int, y: int, width: int, height: int) -> str:
    """Position an SVG inside another one."""
    return drawn.replace("<svg ", f'<svg x="{x}" y="{y}" width="{width}" height="{height}" ', 1)
