"""The REPL: the same commands as in the shell, one per line, with session and model kept warm."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import FrameType

import typer

from kvedit.cli import output
from kvedit.cli.repl.line import is_open, lines_of, run_line
from kvedit.cli.repl.terminal import Abandoned, line_reader
from kvedit.cli.workspace import here
from kvedit.errors import KveditError, SessionError, UsageError
from kvedit.timing import clock

_TWICE_S = 1.0
_LATER_S = 0.05
_WELCOME = "kvedit: 'help' lists the commands, '?' begins a question, Ctrl-D leaves."


def run(*, history: bool = True) -> None:
    """Read and run lines until the end of the input.

    Args:
        history: Remember typed lines for the next run.

    Raises:
        typer.Exit: With the code of the first failed command, if the input is not a terminal.
    """
    if here.warm:
        raise UsageError("The REPL is already open.", "Press Ctrl-D to leave it.")
    here.warm = True
    try:
        interactive = sys.stdin.isatty() and sys.stderr.isatty()
        code = _Repl(history).run() if interactive else _read_plainly()
    finally:
        here.warm = False
    if code:
        raise typer.Exit(code)


def _read_plainly() -> int:
    """Run lines from an input that is not a terminal; return the first nonzero exit code."""
    code, pending = 0, ""
    for line in chain(iter(sys.stdin.readline, ""), [None]):
        pending += line or ""
        if line is not None and is_open(pending):
            continue
        if pending.strip() in ("exit", "quit"):
            break
        status, pending = run_line(pending), ""
        code = code or status
        if status == 130:
            break
    return code


class _Repl:
    """The loop of an interactive REPL."""

    def __init__(self, history: bool) -> None:
        self._interrupted = -_TWICE_S
        self._opening = False  # while opening the session, which is quick
        self._inside = False  # whether Ctrl-C may interrupt now
        self._put_off = False  # whether a SIGINT is delayed
        self._again = False  # whether the next SIGINT is the delayed one
        self._leave = False
        self._history = history

    def run(self) -> int:
        """Prompt and run until the user leaves."""
        before = signal.signal(signal.SIGINT, self._stop)
        try:
            output.say(_WELCOME)
            self._warm_up()
            return self._loop() or (130 if self._leave else 0)
        except KeyboardInterrupt:
            return 130
        finally:
            signal.signal(signal.SIGINT, before)

    def _loop(self) -> int:
        from kvedit.cli.repl.background import Healer

        healer = Healer()
        ask = line_reader(healer, history=self._history)
        try:
            while not self._leave:
                with self._interruptible():
                    text = self._read(ask)
                    if text is None:
                        return 0
                    for line in lines_of(text):
                        if line.strip() in ("exit", "quit"):
                            return 0
                        with healer.paused():
                            code = run_line(line)
                        if code:  # pasted lines after it may depend on it
                            break
        finally:
            healer.end()
        return 0

    def _read(self, ask: Callable[[], str]) -> str | None:
        """Return what was typed, an empty line after Ctrl-C, or `None` at the end of the input."""
        self._put_off = False  # what it would have interrupted has finished
        try:
            return ask()
        except Abandoned as abandoned:
            self._note_interrupt()
            if str(abandoned):  # Ctrl-C only cleared the line
                return ""
        except KeyboardInterrupt:  # a signal, already noted
            output.say("")
        except EOFError:
            return None
        if not self._leave:
            output.say("Press Ctrl-D to leave, or Ctrl-C twice.")
        return ""

    def _warm_up(self) -> None:
        """Open the current session, if any, and its model."""
        with self._interruptible():
            try:
                self._opening = True
                session = here.session()
                self._opening = False
                here.ready(session)
            except SessionError as error:
                output.say(f"{output.one_line(error.fact)}\n{output.one_line(error.remedy)}")
            except KveditError as error:
                output.show_error(error, as_json=False)
            finally:
                self._opening = False

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Continue after Ctrl-C, unless it is pressed twice within a second."""
        try:
            self._inside = True
            yield
        except KeyboardInterrupt:
            self._inside = False
            output.say("Interrupted; the session is intact.")
        finally:
            self._inside = False

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT; delay it during imports, since an interrupted import cannot be repeated."""
        if not self._again:
            self._note_interrupt()
        self._again = False
        if self._leave or (self._inside and not self._opening and not _is_importing(frame)):
            raise KeyboardInterrupt
        self._put_off = True
        threading.Timer(_LATER_S, self._stop_later).start()

    def _stop_later(self) -> None:
        if self._put_off:
            self._put_off, self._again = False, True
            signal.raise_signal(signal.SIGINT)

    def _note_interrupt(self) -> None:
        self._leave = self._leave or clock() - self._interrupted < _TWICE_S
        self._interrupted = clock()


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a frame or one of its callers is importing a module."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
