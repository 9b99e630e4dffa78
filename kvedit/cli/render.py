"""What a person sees: messages and tables on stderr, answers and JSON on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kvedit.errors import KveditError

if TYPE_CHECKING:
    from kvedit.reports import Answer, Removal, Status

PHASES = {
    "load": "load",
    "selection": "selection",
    "shift": "shift",
    "refresh": "refresh",
    "question": "question prefill",
    "decode": "decode",
    "save": "save",
}


def console() -> Console:
    """A console on stderr; made anew, so that it sees the stream and the variables of now."""
    return _plain_or_not(sys.stderr)


def _plain_or_not(stream: TextIO) -> Console:
    """A console without any styles where NO_COLOR asks for none: bold is an escape code too."""
    return Console(
        file=stream,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


def say(text: str) -> None:
    """Print a line for the user on stderr."""
    console().print(text, soft_wrap=True)


def out(text: str, end: str = "\n") -> None:
    """Print on stdout what was asked for. A terminal sees control characters as marks."""
    if sys.stdout.isatty():
        text = "".join(mark if (mark := _mark(char)) else char for char in text)
    sys.stdout.write(text + end)
    sys.stdout.flush()


def _mark(char: str) -> str:
    """Give what stands for a character that would steer the terminal."""
    if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f"):
        return ""
    return chr(0x2400 + ord(char)) if char < " " else "\ufffd"


def out_json(record: dict[str, Any]) -> None:
    """Print one JSON object on stdout, in ASCII."""
    sys.stdout.write(json.dumps({"schema_version": 1, **record}) + "\n")
    sys.stdout.flush()


def show_error(error: KveditError, *, as_json: bool) -> None:
    """Print fact and remedy on stderr; as JSON on stdout too, where that was asked for."""
    if as_json:
        parts = {"kind": error.kind, "fact": error.fact, "remedy": error.remedy, "exit_code": error.exit_code}
        out_json({"error": parts})
    say(f"Error: {error.fact}\n{error.remedy}")


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show that something goes on; the block may change the text. A line each where no terminal is."""
    screen = console()
    if not screen.is_terminal:
        yield lambda doing: screen.print(f"{doing} ...", soft_wrap=True)
        return
    with screen.status(text) as status:
        yield status.update


@contextmanager
def repairing() -> Iterator[Callable[[str], None]]:
    """Show which phase of an answer goes on, until its text begins."""
    screen = console()
    if not screen.is_terminal:
        yield lambda phase: None
        return
    status = screen.status("shift")
    status.start()

    def on_phase(phase: str) -> None:
        if phase in ("decode", "save"):
            status.stop()
        else:
            status.update(PHASES[phase])

    try:
        yield on_phase
    finally:
        status.stop()


@contextmanager
def prefilling() -> Iterator[Callable[[int, int], None]]:
    """Show a prefill's progress: rows, tokens a second, time left."""
    screen = console()
    columns = (
        SpinnerColumn(),
        TextColumn("prefill"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.completed}/{task.total} tokens"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("prefill", total=None, speed="")

        def update(done: int, total: int) -> None:
            speed = progress.tasks[0].speed
            progress.update(
                task, completed=done, total=total, speed=f"{speed:,.0f} tokens/s" if speed else ""
            )

        yield update


def seconds(value: float) -> str:
    """Format a time: `12 ms`, `1.42 s`, `3 min 20 s`."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"
    if value < 120:
        return f"{value:.2f} s"
    return f"{int(value) // 60} min {int(value) % 60} s"


def removal_text(removal: Removal) -> str:
    """Say what a deletion did."""
    seam = f"; to compute at seams: {_count(removal.missing, 'row')}" if removal.missing else ""
    return (
        f"Deleted {_count(removal.lines, 'line')}, {_count(removal.tokens, 'token')}.\n"
        f"Stale now: {_count(removal.stale, 'row')}{seam}. "
        f"A full replay would take about {seconds(removal.replay_s)}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show_answer(answer: Answer) -> None:
    """Print the timing breakdown of an answer, and its counts, on stderr."""
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
    lines = [
        f"rows         {answer.missing:,} missing + {answer.refreshed:,} refreshed + "
        f"{answer.reused:,} reused = {answer.tokens:,}",
        f"budget       {answer.budget} of {answer.suffix:,} = {answer.budget_rows:,} rows",
        f"support      {_count(answer.runs, 'run')}, policy {answer.policy}, executor {answer.executor}",
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
        lines.append("The answer was cut at --max-new-tokens.")
    return lines


def answer_json(answer: Answer, question: str) -> dict[str, Any]:
    """Give an answer as a record; docs/cli.md lists the keys."""
    phases = {
        name: {"seconds": phase.seconds, "tokens": phase.tokens, "tokens_per_s": phase.tokens_per_s}
        for name in PHASES
        if (phase := answer.timings.phases.get(name)) is not None
    }
    return {
        "question": question,
        "answer": answer.text,
        "answer_ids": list(answer.ids),
        "finish_reason": answer.finish_reason,
        "policy": answer.policy,
        "executor": answer.executor,
        "seed": answer.seed,
        "temperature": answer.temperature,
        "budget": {"asked": answer.budget, "rows": answer.budget_rows, "suffix_rows": answer.suffix},
        "rows": {
            "missing": answer.missing,
            "refreshed": answer.refreshed,
            "reused": answer.reused,
            "total": answer.tokens,
        },
        "runs": answer.runs,
        "kept": answer.kept,
        "timings": phases,
        "total_s": answer.timings.seconds(),
        "first_token_s": answer.first_token_s,
        "repair_s": answer.repair_s,
        "replay_estimate_s": answer.replay_s,
        "replay_ratio": answer.replay_s / answer.repair_s if answer.repair_s else None,
    }


def show_status(status: Status) -> None:
    """Print what a session holds, on stdout."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    total = max(status.tokens, 1)
    shares = ", ".join(
        f"{count:,} {name} ({100 * count / total:.1f}%)"
        for name, count in (
            ("exact", status.exact),
            ("refreshed", status.refreshed),
            ("stale", status.stale),
            ("missing", status.missing),
        )
        if count
    )
    rows = (
        ("session", status.name),
        ("model", f"{status.model}, {status.dtype}"),
        ("document", f"{_count(status.lines, 'line')}"),
        ("tokens", f"{status.tokens:,} of {status.context_length:,}"),
        ("rows", shares),
        ("frontier", f"{status.frontier:,}; S = {status.suffix:,} after it"),
        ("on disk", size(status.size_bytes)),
        ("edits", f"{status.edits:,} since load, {status.created[:19]}Z"),
    )
    for name, value in rows:
        table.add_row(name, value)
    _plain_or_not(sys.stdout).print(table)


def status_json(status: Status) -> dict[str, Any]:
    """Give a status as a record."""
    return asdict(status)


def size(count: int) -> str:
    """Format bytes: `184.6 MB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
