"""Charts as inline SVG: lines with intervals, points, stacked bars, strips. No scripts, no fonts.

A chart is 480 units wide, so that its text stays legible on a phone. Colours are classes (`c0` to
`c6`, `quiet`), which the page's style sheet defines for light and dark mode. Every series also has
its own mark, so colour is never the only distinction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

MINUS = "\N{MINUS SIGN}"
WIDTH, HEIGHT = 480, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 54
STYLES = 7
"""How many series can be distinguished."""
# Corners of the marks, relative to their centre; style 0 and the quiet style are circles.
_CORNERS: dict[int, list[tuple[float, float]]] = {
    1: [(-4.5, -4.5), (4.5, -4.5), (4.5, 4.5), (-4.5, 4.5)],
    2: [(0, -6), (6, 0), (0, 6), (-6, 0)],
    3: [(0, -5.5), (5.5, 4.5), (-5.5, 4.5)],
    4: [(0, 5.5), (5.5, -4.5), (-5.5, -4.5)],
    5: [(-6, 2), (-6, -2), (6, -2), (6, 2)],
    6: [(0, -6.5), (2, -2), (6.5, 0), (2, 2), (0, 6.5), (-2, 2), (-6.5, 0), (-2, -2)],
}
_LETTER = 8.0  # approximate maximum width of a letter of a label, in units


@dataclass(frozen=True, slots=True)
class Point:
    """A measured point.

    Attributes:
        x: Position; an index for a chart with categories.
        y: The value.
        low: Lower end of its interval, if any.
        high: Upper end.
        hint: Tooltip.
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind.

    Attributes:
        name: For the legend.
        style: 0 to `STYLES` - 1; -1, -2, ... for series shown in grey for comparison.
        points: From left to right.
    """

    name: str
    style: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: label, range and ticks.

    Attributes:
        label: Label, with the unit.
        low: Value at its start.
        high: Value at its end.
        ticks: Values and labels.
        logarithmic: Whether equal steps are equal ratios.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def place(self, value: float, start: float, stop: float) -> float:
        """Map a value to units between `start` and `stop`; values beyond an end are clamped."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return start + (value - low) / (high - low) * (stop - start)


def linear(label: str, values: Sequence[float], *, percent: bool = False) -> Axis:
    """Return an axis with about four to eight round ticks around the values."""
    low, high = min(values), max(values)
    room = high - low or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(room))
    step = next(size * part for part in (0.2, 0.25, 0.5, 1, 2) if room / (size * part) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    scale, unit = (100, " %") if percent else (1, "")
    digits = max(0, -math.floor(math.log10(step * scale) + 1e-9))
    digits += 0 if math.isclose(step * scale, round(step * scale, digits)) else 1
    ticks = [
        (at * step, f"{at * step * scale:,.{digits}f}{unit}".replace("-", MINUS))
        for at in range(first, last + 1)
    ]
    return Axis(label, first * step, last * step, ticks)


def logarithmic(label: str, values: Sequence[float]) -> Axis:
    """Return an axis with ticks at 1, 2 and 5 times powers of ten; values must be positive."""
    low, high = min(values), max(values)
    steps = [
        part * 10.0**power
        for power in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        for part in (1, 2, 5)
    ]
    start = max((step for step in steps if step <= low), default=steps[0])
    stop = min((step for step in steps if step >= high and step > start), default=steps[-1])
    held = [step for step in steps if start <= step <= stop]
    shown = held if len(held) <= 8 else [step for step in held if f"{step:e}"[0] == "1"]
    return Axis(label, start, stop, [(step, f"{step:,g}") for step in shown], logarithmic=True)


def categories(label: str, names: Sequence[str]) -> Axis:
    """Return an axis of evenly spaced names."""
    return Axis(label, -0.5, max(len(names), 1) - 0.5, list(enumerate(names)))


def plot(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    spread: bool = False,
    level: float | None = None,
) -> str:
    """Draw series with a line through their points.

    Args:
        title: Text for screen readers.
        series: In drawing order.
        x: Horizontal axis.
        y: Vertical axis; points beyond its ends are drawn hollow at the end.
        spread: Offset series slightly, so that intervals at the same x do not overlap.
        level: Value at which to draw a dashed horizontal line.
    """
    parts = _frame(x, y)
    if level is not None:
        height = y.place(level, HEIGHT - BOTTOM, TOP)
        parts.append(
            f'<line class="level" x1="{LEFT}" y1="{height:.1f}" x2="{WIDTH - RIGHT}" y2="{height:.1f}"/>'
        )
    step = (WIDTH - LEFT - RIGHT) / (x.high - x.low)
    apart = min(7.0, 0.6 * step / max(len(series), 1)) if spread else 0.0
    for at, one in enumerate(series):
        aside = (at - (len(series) - 1) / 2) * apart if one.style >= 0 else 0.0
        parts += _series(one, x, y, aside)
    return _svg(title, HEIGHT, parts)


def bars(title: str, rows: Sequence[tuple[str, Sequence[int]]], kinds: Sequence[tuple[str, str]]) -> str:
    """Draw a stacked bar for each name.

    Args:
        title: Text for screen readers.
        rows: Names, each with a count for every kind.
        kinds: Name and class of each part.
    """
    left, step, parts = _margin([name for name, _ in rows]), 24, list[str]()
    for at, (name, counts) in enumerate(rows):
        top, total, before = at * step, max(sum(counts), 1), 0
        parts.append(_label(name, left, top + 16))
        for (kind, style), count in zip(kinds, counts, strict=True):
            start, width = (round((WIDTH - left) * part / total, 2) for part in (before, count))
            before += count
            if count:
                hint = _hint(f"{name}: {count} of {total} {kind}")
                parts.append(
                    f'<rect class="{style}" x="{left + start:g}" y="{top + 2}" width="{width:g}" height="19">'
                    f"{hint}</rect>"
                )
            if width > 10 + _LETTER * len(str(count)):
                parts.append(_text(str(count), left + start + width / 2, top + 16, "middle", f"over {style}"))
    return _svg(title, len(rows) * step, parts)


def strips(title: str, rows: Sequence[tuple[str, Sequence[float]]], most: float) -> str:
    """Draw a strip of cells for each name, from its shares; the share `most` has full colour."""
    left, step, parts = _margin([name for name, _ in rows]), 24, list[str]()
    for at, (name, shares) in enumerate(rows):
        top = at * step
        parts.append(_label(name, left, top + 16))
        cell = (WIDTH - left) / len(shares)
        for tenth, share in enumerate(shares):
            hint = _hint(f"{name}: {share:.1%} of its rows in part {tenth + 1} of {len(shares)}")
            parts.append(
                f'<rect class="cell" x="{left + tenth * cell:.2f}" y="{top + 2}" width="{cell - 1:.2f}" '
                f'height="19"/><rect class="heat" x="{left + tenth * cell:.2f}" y="{top + 2}" '
                f'width="{cell - 1:.2f}" height="19" opacity="{share / most:.3f}">{hint}</rect>'
            )
    foot = len(rows) * step + 18
    parts += [_text("edit", left, foot, "start"), _text("end of text", WIDTH, foot, "end")]
    return _svg(title, foot + 8, parts)


def key(style: int | str) -> str:
    """Draw the mark of a series, or a box or line of a class, for a legend."""
    if style == "level":
        drawn = '<line class="level" x1="0" y1="8" x2="28" y2="8"/>'
    elif isinstance(style, str):
        drawn = f'<rect class="{style}" x="6" y="1" width="16" height="14"/>'
    else:
        line = f'<line class="{_colour(style)} line" x1="0" y1="8" x2="28" y2="8"/>' if style >= 0 else ""
        drawn = line + _mark(style, 14, 8)
    return f'<svg class="key" viewBox="0 0 28 16" aria-hidden="true">{drawn}</svg>'


def _frame(x: Axis, y: Axis) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value, text in y.ticks:
        height = y.place(value, bottom, TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{height:.1f}" x2="{right}" y2="{height:.1f}"/>')
        parts.append(_text(text, LEFT - 7, height + 5, "end"))
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    for value, text in x.ticks:
        across = x.place(value, LEFT, right)
        parts.append(
            f'<line class="axis" x1="{across:.1f}" y1="{bottom}" x2="{across:.1f}" y2="{bottom + 4}"/>'
        )
        last = across + len(text) * _LETTER / 2 > WIDTH
        parts.append(_text(text, WIDTH if last else across, bottom + 19, "end" if last else "middle"))
    parts.append(_text(x.label, (LEFT + right) / 2, HEIGHT - 12, "middle", "label"))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text class="label" text-anchor="middle" transform="translate(13 {middle:g}) rotate(-90)">'
        f"{escape(y.label)}</text>"
    )
    return parts


def _series(one: Series, x: Axis, y: Axis, aside: float) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    at = [(x.place(part.x, LEFT, right) + aside, y.place(part.y, bottom, TOP)) for part in one.points]
    style, parts = f"{_colour(one.style)} line", list[str]()
    for (x1, y1), (x2, y2) in pairwise(at):
        parts.append(f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    for (across, height), part in zip(at, one.points, strict=True):
        if part.low is not None and part.high is not None:
            low, high = (y.place(end, bottom, TOP) for end in (part.low, part.high))
            parts.append(
                f'<line class="{style} whisker" x1="{across:.1f}" y1="{low:.1f}" '
                f'x2="{across:.1f}" y2="{high:.1f}"/>'
            )
        beyond = not y.low <= part.y <= y.high
        parts.append(f"<g>{_mark(one.style, across, height, hollow=beyond)}{_hint(part.hint)}</g>")
    return parts


def _mark(style: int, x: float, y: float, *, hollow: bool = False) -> str:
    """Draw a mark about 10 units wide."""
    kind = f"{_colour(style)} mark{' hollow' if hollow else ''}"
    corners = _CORNERS.get(style if style >= 0 else -1 - style)
    if corners is None:
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    points = " ".join(f"{x + right:.1f},{y + down:.1f}" for right, down in corners)
    return f'<polygon class="{kind}" points="{points}"/>'


def _colour(style: int) -> str:
    return "quiet" if style < 0 else f"c{style % STYLES}"


def _margin(names: Sequence[str]) -> int:
    """Return a margin for the longest name, at most half of the chart."""
    return min(WIDTH // 2, int(14 + _LETTER * max((len(name) for name in names), default=0)))


def _label(name: str, left: int, y: float) -> str:
    most = int((left - 10) / _LETTER)
    short = name if len(name) <= most else f"{name[: most - 1]}…"
    return f'<text x="{left - 8}" y="{y:g}" text-anchor="end">{escape(short)}{_hint(name)}</text>'


def _text(text: str, x: float, y: float, anchor: str, style: str = "tick") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
