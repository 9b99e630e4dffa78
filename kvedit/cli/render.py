"""What a person sees: messages and progress on stderr, answers and JSON on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from rich.status import Status
from rich.text import Text

from kvedit.errors import KveditError

if TYPE_CHECKING:
    from kvedit.reports import Answer, Change, Healed, Purge

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
    return plain_or_not(sys.stderr)


def plain_or_not(stream: TextIO) -> Console:
    """A console without any styles where NO_COLOR asks for none: bold is an escape code too."""
    return Console(
        file=stream,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


def say(text: str) -> None:
    """Print a line for the user on stderr; a terminal gets it wrapped between words."""
    screen = console()
    screen.print(text, soft_wrap=not screen.is_terminal)


def out(text: str, end: str = "\n") -> None:
    """Print on stdout what was asked for. A terminal sees control characters as marks."""
    if sys.stdout.isatty():
        text = visible(text)
    sys.stdout.write(text + end)
    sys.stdout.flush()


def visible(text: str) -> str:
    """Show control characters as marks, so that a text cannot steer the terminal."""
    return "".join(mark if (mark := _mark(char)) else char for char in text)


def _mark(char: str) -> str:
    """Give what stands for a character that would steer the terminal."""
    if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f"):
        return ""
    return chr(0x2400 + ord(char)) if char < " " else "\ufffd"


def out_bytes(data: bytes) -> None:
    """Write a document's bytes to stdout as they are; a terminal gets them as text."""
    if sys.stdout.isatty():
        out(data.decode("utf-8", errors="replace"), end="")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def out_diff(line: str) -> None:
    """Print a line of a difference on stdout, coloured on a terminal."""
    screen = plain_or_not(sys.stdout)
    if not screen.is_terminal:
        out(line)
        return
    style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
    screen.print(Text(visible(line), style=style or ""), soft_wrap=True)


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
    status = screen.status(text)
    with _shown(status, screen):
        yield status.update


@contextmanager
def repairing() -> Iterator[Callable[[str], None]]:
    """Show which phase of an answer goes on, until its text begins."""
    screen = console()
    if not screen.is_terminal:
        yield lambda phase: None
        return
    status = screen.status("shift")

    def on_phase(phase: str) -> None:
        if phase in ("decode", "save"):
            status.stop()
        else:
            status.update(PHASES[phase])

    with _shown(status, screen):
        yield on_phase


@contextmanager
def loading() -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """Show that a model is being loaded, and then how far its prefill is."""
    with ExitStack() as stack, working("Loading the model") as report:
        bar: list[Callable[[int, int], None]] = []

        def update(done: int, total: int) -> None:
            if not bar:
                bar.append(stack.enter_context(progressing("prefill")))
            bar[0](done, total)

        yield report, update


@contextmanager
def counting(noun: str) -> Iterator[Callable[[int], None]]:
    """Show how many there are so far, where the end is not known."""
    with working(f"0 {noun}") as say_it:
        yield lambda number: say_it(f"{number:,} {noun}") if console().is_terminal else None


@contextmanager
def progressing(label: str, unit: str = "tokens") -> Iterator[Callable[[int, int], None]]:
    """Show how far a long step is: done and in all, speed, time left."""
    screen = console()
    columns = (
        SpinnerColumn(),
        TextColumn(label),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
    with _shown(progress, screen):
        task = progress.add_task(label, total=None, speed="")

        def update(done: int, total: int) -> None:
            speed = progress.tasks[0].speed
            progress.update(
                task, completed=done, total=total, speed=f"{speed:,.0f} {unit}/s" if speed else ""
            )

        yield update


@contextmanager
def _shown(display: Status | Progress, screen: Console) -> Iterator[None]:
    """Show a display while the block runs. An interrupt within its start leaves nothing of it behind."""
    try:
        display.start()
        yield
    finally:
        try:
            display.stop()
        except IndexError:  # its start had not got as far as what the stop undoes
            screen.show_cursor(True)


def seconds(value: float) -> str:
    """Format a time: `12 ms`, `1.42 s`, `3 min 20 s`."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"
    if value < 120:
        return f"{value:.2f} s"
    return f"{int(value) // 60} min {int(value) % 60} s"


def change_text(change: Change) -> str:
    """Say what an edit did."""
    if not change.command:
        return "Nothing was changed."
    verb, removed, added = change.command.partition(" ")[0], change.removed_lines, change.added_lines
    more = f"{abs(change.token_change):,} {'more' if change.token_change > 0 else 'fewer'}"
    if verb in ("undo", "redo", "checkout"):
        what = (
            f"At revision {change.revision}: {count(change.lines, 'line')}, {count(change.tokens, 'token')}"
        )
    elif verb == "move":
        what = f"Moved {count(added, 'line')}"
    elif not added and removed:
        what = f"Deleted {count(removed, 'line')}, {count(abs(change.token_change), 'token')}"
    elif not removed:
        what = f"Inserted {count(added, 'line')}, {count(abs(change.token_change), 'token')}"
    else:
        what = f"Replaced {count(removed, 'line')} by {added:,}, tokens: {more}"
    missing = f"; to compute: {count(change.missing, 'row')}" if change.missing else ""
    left = f"A full replay would take about {seconds(change.replay_s)}."
    if not change.stale and not change.missing:
        return f"{what}. Every row is {'exact' if not change.suffix else 'fresh'}."
    return f"{what}.\nStale now: {count(change.stale, 'row')}{missing}. {left}"


def healed_text(healed: Healed) -> str:
    """Say what healing did."""
    done = f"Healed {count(healed.rows, 'row')} in {seconds(healed.seconds)}"
    if healed.frontier == healed.tokens:
        return f"{done}; all {healed.tokens:,} rows are exact."
    stop = "Interrupted. " if healed.finished == "interrupted" else ""
    return f"{stop}{done}; {healed.frontier:,} of {healed.tokens:,} rows are exact."


def purge_text(done: Purge) -> str:
    """Say what a purge did."""
    return (
        f"Computed {count(done.tokens, 'row')} anew in {seconds(done.seconds)} and dropped "
        f"{count(done.revisions, 'revision')}, {size(done.freed_bytes)}.\n"
        f"The session takes {size(done.size_bytes)}, and every row is exact."
    )


def count(number: int, noun: str) -> str:
    """Count things: `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def answer_json(answer: Answer, question: str) -> dict[str, Any]:
    """Give an answer as a record; docs/using.md lists the keys."""
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


def size(count: int) -> str:
    """Format bytes: `184.6 MB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
