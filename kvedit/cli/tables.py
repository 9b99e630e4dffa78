"""Tables that fit 80 columns: an answer's timings, a status, the log, a heat strip."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.table import Table

from kvedit.cli.output import PHASES, cell, console, count, one_line, out, plain_or_not, say, seconds, size

if TYPE_CHECKING:
    from kvedit.repair.reports import Answer, Explanation, Status, Verification
    from kvedit.session.check import Checked
    from kvedit.store.home import Overview
    from kvedit.store.records import Entry
    from kvedit.text.document import Document

_HEAT = " .:-=+*#%@"
"""From exact to a deviation as large as the states; readable without colour or Unicode."""
_HEAT_COLUMNS = 60
_HEAT_ROWS = 10


def show_answer(answer: Answer) -> None:
    """Print the timings and counts of an answer on stderr."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("phase")
    for heading in ("time", "tokens", "tokens/s"):
        table.add_column(heading, justify="right")
    for name, title in PHASES.items():
        phase = answer.timings.phases.get(name)
        if phase is not None:
            speed = phase.tokens_per_s
            table.add_row(
                title,
                seconds(phase.seconds),
                "" if phase.tokens is None else f"{phase.tokens:,}",
                "" if speed is None else f"{speed:,.0f}",
            )
    table.add_section()
    table.add_row("total", seconds(answer.timings.seconds()), style="bold")
    screen = console()
    screen.print(table)
    for line in _counts(answer):
        screen.print(line, soft_wrap=True)


def _counts(answer: Answer) -> list[str]:
    options = answer.options
    lines = [
        f"rows         {answer.missing:,} missing + {answer.refreshed:,} refreshed + "
        f"{answer.reused:,} reused = {answer.tokens:,}",
        f"budget       {options.budget.text} of {answer.suffix:,} = {answer.budget_rows:,} rows",
        f"support      {count(answer.runs, 'run')}, policy {options.policy}, executor {answer.executor}",
        f"first token  {seconds(answer.first_token_s)}",
    ]
    if answer.replay_s and answer.repair_s:
        lines.append(
            f"full replay  about {seconds(answer.replay_s)}, "
            f"{answer.replay_s / answer.repair_s:.1f} x shift, selection and refresh"
        )
    if answer.finish_reason == "interrupted":
        lines.append("The answer was interrupted.")
    elif answer.finish_reason == "length":
        lines.append("The answer was truncated at --max-new-tokens.")
    return lines


def show_status(status: Status) -> None:
    """Print a session's status on stdout."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    total = max(status.tokens, 1)
    shares = ", ".join(
        f"{number:,} {name} ({100 * number / total:.1f}%)"
        for name, number in (
            ("exact", status.exact),
            ("refreshed", status.refreshed),
            ("stale", status.stale),
            ("missing", status.missing),
        )
        if number
    )
    rows = [
        ("session", status.name),
        ("model", f"{status.model}, {status.dtype}"),
        ("document", f"{count(status.lines, 'line')}"),
        ("tokens", f"{status.tokens:,} of {status.context_length:,}"),
        ("rows", shares),
        ("frontier", f"{status.frontier:,}; S = {status.suffix:,} after it"),
        ("on disk", size(status.size_bytes)),
        ("edits", f"{status.edits:,} since load, {status.created[:19]}Z"),
    ]
    if status.conversation:
        rows.append(("conversation", f"{count(status.conversation, 'token')} after the document"))
    if status.undone:
        rows.append(("undone", f"{count(status.undone, 'edit')} to redo"))
    for name, value in rows:
        table.add_row(name, cell(value))
    plain_or_not(sys.stdout).print(table)


def show_log(entries: Sequence[Entry], present: int) -> None:
    """Print revisions on stdout; mark the current one."""
    screen = plain_or_not(sys.stdout)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("no.", justify="right")
    table.add_column("when (UTC)", no_wrap=True)
    for heading in ("lines", "tokens", "stale"):
        table.add_column(heading, justify="right")
    table.add_column("what", no_wrap=True, overflow="ellipsis", max_width=max(8, screen.width - 56))
    for entry in entries:
        counts = (f"{number:,}" for number in (entry.lines, entry.tokens, entry.stale))
        when = entry.created[:19].replace("T", " ")
        here = "*" if entry.number == present else ""
        table.add_row(here, str(entry.number), when, *counts, cell(entry.command))
    screen.print(table)


def show_sessions(found: Sequence[Overview]) -> None:
    """Print a list of sessions on stdout; mark the current one."""
    if not found:
        say("There are no sessions here. Load a document: `kvedit load FILE`.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    screen = plain_or_not(sys.stdout)
    table.add_column("session", overflow="ellipsis", no_wrap=True, max_width=max(8, screen.width - 56))
    for heading in ("lines", "tokens", "stale", "on disk"):
        table.add_column(heading, justify="right")
    table.add_column("loaded (UTC)")
    for item in found:
        here = "*" if item.current else ""
        if item.damage:
            table.add_row(here, cell(item.name), "damaged", "", "", size(item.size_bytes), "")
            continue
        stale = f"{100 * (item.stale + item.missing) / max(item.tokens, 1):.1f}%"
        counts = (f"{item.lines:,}", f"{item.tokens:,}", stale, size(item.size_bytes))
        table.add_row(here, cell(item.name), *counts, item.created[:16].replace("T", " "))
    screen.print(table)
    for item in found:
        if item.damage:
            say(one_line(f"{item.name}: {item.damage}"))


def show_check(checked: Checked, size_bytes: int) -> None:
    """Print the result of checking a session."""
    for finding in checked.findings:
        out(one_line(finding))
    if checked.findings:
        say("Load the document again with `kvedit load FILE --force`, or go back with `kvedit checkout`.")
        return
    say(
        f"No problems found: {count(checked.revisions, 'revision')}, "
        f"{count(checked.segments, 'segment')}, {size(size_bytes)}."
    )


def show_explanation(found: Explanation, document: Document) -> None:
    """Print the selected lines on stdout, and scores and cost on stderr."""
    width, skipped = len(str(document.line_count)), False
    for number, (share, text) in enumerate(
        zip(found.lines, document.lines(0, document.line_count), strict=True), start=1
    ):
        near = any(found.lines[max(0, number - 2) : number + 1])
        if near:
            mark = ">" if share > 0.999 else "+" if share else " "
            out(f"{mark} {number:>{width}}  {text}")
        elif not skipped:
            out(f"  {'':>{width}}  ...")
        skipped = not near
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("score", "rows", "lines"):
        table.add_column(heading, justify="right")
    screen = console()
    table.add_column("unit", no_wrap=True, overflow="ellipsis", max_width=max(8, screen.width - 30))
    for unit in found.units[:12]:
        lines = "conversation" if not unit.first_line else str(unit.first_line)
        if unit.last_line > unit.first_line:
            lines += f"-{unit.last_line}"
        spelled = " ".join(unit.text.split())
        table.add_row(f"{unit.score:.3f}", f"{unit.chosen}/{unit.tokens}", lines, cell(spelled))
    screen.print(table)
    if len(found.units) > 12:
        screen.print(f"and {count(len(found.units) - 12, 'unit')} more")
    for line in (
        f"budget       {found.budget} of {found.suffix:,} = {found.budget_rows:,} rows",
        f"policy       {found.policy}",
        f"to compute   {found.missing:,} missing + {found.budget_rows:,} chosen, {count(found.runs, 'run')}",
        f"cost         about {seconds(found.refresh_s)}; a full replay about {seconds(found.replay_s)}",
    ):
        screen.print(line, soft_wrap=True)


def heat_columns(heat: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Shrink `[L, T]` to at most 10 x 60 cells, each the mean of the values it covers."""
    layers = np.array_split(heat, min(_HEAT_ROWS, len(heat)))
    strip = np.stack([part.mean(axis=0) for part in layers])
    columns = np.array_split(strip, max(1, min(_HEAT_COLUMNS, strip.shape[1])), axis=1)
    return np.stack([part.mean(axis=1) if part.size else np.zeros(len(strip)) for part in columns], axis=1)


def show_verification(found: Verification) -> None:
    """Print how far the cache is from a clean one, with a heat strip, on stdout."""
    layers, strip = len(found.keys), heat_columns(found.heat)
    bounds = np.linspace(0, layers, len(strip) + 1).astype(int)
    out("layers  relative deviation by position, from the first row to the last")
    for number, row in enumerate(strip):
        first, last = bounds[number], max(bounds[number], bounds[number + 1] - 1)
        name = str(first) if first == last else f"{first}-{last}"
        out(f"{name:>6}  |{''.join(_glyph(value, found.tolerance) for value in row)}|")
    out(f"        '{_HEAT[0]}' is rounding, '{_HEAT[-1]}' as large as the states themselves")
    out("")
    for name, values in (("keys", found.keys), ("values", found.values)):
        worst = int(np.argmax(values))
        out(f"{name:<12} mean {np.mean(values):.2e}, largest {values[worst]:.2e} in layer {worst}")
    state = "exact" if found.exact else "not exact"
    out(f"rows         {found.frontier:,} of {found.tokens:,} before the frontier; the cache is {state}")
    if found.exact_deviation > found.tolerance:
        out(f"             and rows that should be exact deviate by {found.exact_deviation:.2e}")
    if found.computed:
        out(f"             {count(found.computed, 'row')} computed for this check")
    if (comparison := found.comparison) is not None:
        out(f"first token  KL(clean || this) {comparison.kl:.4f} nats")
        out(f"top-1        {100 * comparison.agreement:.0f}% of the clean answer's tokens")
        if comparison.differs_gap is not None:
            lead = f"where it leads the next best by {comparison.differs_gap:.2g} nats"
            out(f"             the first other one is token {comparison.differs_at}, {lead}")
        out(f"nearest tie  {comparison.tie_gap:.2g} nats")
        out(f"clean        {comparison.clean_answer.strip()}")
        out(f"this         {comparison.answer.strip()}")


def _glyph(value: float, tolerance: float) -> str:
    """Return a denser mark for a larger deviation, on a square-root scale."""
    if value <= tolerance:
        return _HEAT[0]
    return _HEAT[1 + min(len(_HEAT) - 2, int(min(float(value), 1.0) ** 0.5 * (len(_HEAT) - 1)))]
