"""Progress on stderr: spinners and bars, or plain lines without a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

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

from kvedit.cli.output import PHASES, cell, console, is_watched, one_line, say


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner whose text the block can change; without a terminal, print each text as a line."""
    if not is_watched(sys.stderr):
        yield lambda message: say(f"{one_line(message)} ...")
        return
    screen = console()
    status = screen.status(cell(text))
    with _shown(status, screen):
        yield lambda message: status.update(cell(message))


@contextmanager
def repairing() -> Iterator[Callable[[str], None]]:
    """Show the current phase of an answer until its text begins."""
    if not is_watched(sys.stderr):
        yield lambda phase: None
        return
    screen = console()
    status = screen.status(cell("shift"))

    def on_phase(phase: str) -> None:
        if phase in ("decode", "save"):
            status.stop()
        else:
            status.update(cell(PHASES[phase]))

    with _shown(status, screen):
        yield on_phase


@contextmanager
def loading() -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """Show that a model is loading, then the progress of its prefill."""
    with ExitStack() as stack, working("Loading the model") as report:
        bar: list[Callable[[int, int], None]] = []

        def update(done: int, total: int) -> None:
            if not bar:
                bar.append(stack.enter_context(progressing("prefill")))
            bar[0](done, total)

        yield report, update


@contextmanager
def counting(noun: str) -> Iterator[Callable[[int], None]]:
    """Show a running count when the total is unknown."""
    with working(f"0 {noun}") as say_it:
        yield lambda number: say_it(f"{number:,} {noun}") if is_watched(sys.stderr) else None


@contextmanager
def progressing(label: str, unit: str = "tokens") -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a long step: done, total, speed, time left."""
    screen = console()
    columns = (
        SpinnerColumn(),
        TextColumn(label, markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn(f"{{task.completed}}/{{task.total}} {unit}", markup=False),
        TextColumn("{task.fields[speed]}", markup=False),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=screen, transient=True, disable=not is_watched(sys.stderr))
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
    """Show a display while the block runs; remove it even if its start is interrupted."""
    try:
        display.start()
        yield
    finally:
        try:
            display.stop()
        except IndexError:  # it was interrupted before it had fully started
            screen.show_cursor(True)
