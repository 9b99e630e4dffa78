"""The REPL: the commands of the shell, one a line, with session and model kept warm."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from kvedit.cli import render
from kvedit.cli.line import is_verb, run_line, words_of
from kvedit.cli.workspace import here
from kvedit.errors import KveditError, SessionError, UsageError
from kvedit.timing import clock

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

    from kvedit.cli.background import Healer

_TWICE_S = 1.0
_LATER_S = 0.05
_PROMPT, _CONTINUED = "kvedit> ", "   ...> "
_WELCOME = "kvedit: 'help' lists the commands, '?' begins a question, Ctrl-D leaves."


def run(*, history: bool = True) -> None:
    """Read and run lines until the end of the input.

    Args:
        history: Remember what is typed for the next run.

    Raises:
        typer.Exit: With the code of the first command that failed, where nobody watches.
    """
    if here.warm:
        raise UsageError("This is the REPL already.", "Ctrl-D leaves it.")
    here.warm = True
    try:
        watched = sys.stdin.isatty() and sys.stderr.isatty()
        code = _Repl(history).run() if watched else _read_plainly()
    finally:
        here.warm = False
    if code:
        raise typer.Exit(code)


def lines_of(text: str) -> list[str]:
    """Split an input into lines to run.

    A line break within quotation marks splits nothing; neither does one in a question, unless a
    command or another question follows.
    """
    found: list[str] = []
    held = ""
    for line in text.split("\n"):
        if not held and found and found[-1].lstrip().startswith("?") and not _begins(line):
            found[-1] += f" {line}"
            continue
        held = f"{held}\n{line}" if held else line
        if not is_open(held):
            found.append(held)
            held = ""
    return [*found, held] if held else found


def _begins(line: str) -> bool:
    """Whether a line after a question is a command, a question or a comment of its own."""
    words = line.split()
    return bool(words) and (words[0][0] in "?#" or words[0] == "kvedit" or is_verb(words[0]))


def is_open(text: str) -> bool:
    """Whether a quotation mark in the text is not closed yet."""
    try:
        words_of(text)
    except UsageError:
        return True
    return False


def _read_plainly() -> int:
    """Run the lines of an input that is no terminal; give the first exit code that is not 0."""
    code, held = 0, ""
    for line in chain(iter(sys.stdin.readline, ""), [None]):
        held += line or ""
        if line is not None and is_open(held):
            continue
        if held.strip() in ("exit", "quit"):
            break
        ended, held = run_line(held), ""
        code = code or ended
        if ended == 130:
            break
    return code


class _Abandoned(Exception):
    """Ctrl-C was pressed at the prompt; holds what stood there."""


class _Repl:
    """The loop at a terminal."""

    def __init__(self, history: bool) -> None:
        self._interrupted = -_TWICE_S
        self._opening = False  # the session, which is quick
        self._again = False  # whether the next SIGINT is one that was put off
        self._leave = False
        self._history = history

    def run(self) -> int:
        """Prompt and run until the user leaves."""
        before = signal.signal(signal.SIGINT, self._stop)
        try:
            render.say(_WELCOME)
            self._warm_up()
            return self._loop() or (130 if self._leave else 0)
        except KeyboardInterrupt:
            return 130
        finally:
            signal.signal(signal.SIGINT, before)

    def _loop(self) -> int:
        from prompt_toolkit.utils import is_dumb_terminal

        from kvedit.cli.background import Healer

        healer = Healer()
        ask: Callable[[], str] = _ask_plainly
        if not is_dumb_terminal():
            ask = _prompt(healer, _history() if self._history else None)
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
                        if code:  # what was pasted after it may have counted on it
                            break
        finally:
            healer.end()
        return 0

    def _read(self, ask: Callable[[], str]) -> str | None:
        """Give what was typed, nothing after Ctrl-C, `None` at the end of the input."""
        try:
            return ask()
        except _Abandoned as abandoned:
            self._note_interrupt()
            if str(abandoned):  # a line was cleared, and that is all
                return ""
        except KeyboardInterrupt:  # as a signal, which is noted already
            render.say("")
        except EOFError:
            return None
        if not self._leave:
            render.say("Ctrl-D leaves; so does Ctrl-C twice.")
        return ""

    def _warm_up(self) -> None:
        """Open the session and its model, if there is one."""
        with self._interruptible():
            try:
                self._opening = True
                session = here.session()
                self._opening = False
                here.ready(session)
            except SessionError as error:
                render.say(f"{error.fact}\n{error.remedy}")
            except KveditError as error:
                render.show_error(error, as_json=False)
            finally:
                self._opening = False

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Go on after Ctrl-C, unless it was the second within a second."""
        try:
            yield
        except KeyboardInterrupt:
            render.say("Interrupted; the session is intact.")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Take SIGINT. A library that was stopped while it is imported cannot be imported again."""
        if not self._again:
            self._note_interrupt()
        self._again = False
        if self._leave or not (self._opening or _is_importing(frame)):
            raise KeyboardInterrupt
        threading.Timer(_LATER_S, self._stop_later).start()

    def _stop_later(self) -> None:
        self._again = True
        signal.raise_signal(signal.SIGINT)

    def _note_interrupt(self) -> None:
        self._leave = self._leave or clock() - self._interrupted < _TWICE_S
        self._interrupted = clock()


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a frame or one that called it imports a module."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _ask_plainly() -> str:
    """Read a line where the terminal can do no more than print."""
    try:
        text = input(_PROMPT)
        while is_open(text):
            text += "\n" + input(_CONTINUED)
    except EOFError:
        render.say("")  # what comes next begins a line
        raise
    return text


def _prompt(healer: Healer, history: History | None) -> Callable[[], str]:
    """Give what reads a line with editing, history, completion and a toolbar."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import ColorDepth
    from prompt_toolkit.output.defaults import create_output
    from prompt_toolkit.styles import Style

    from kvedit.cli.completion import CommandCompleter

    keys = KeyBindings()
    plain = bool(os.environ.get("NO_COLOR"))

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _(event: Any) -> None:
        event.app.exit(exception=_Abandoned(event.current_buffer.text), style="class:aborting")

    @keys.add("enter", filter=Condition(lambda: is_open(prompt.default_buffer.text)))
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    prompt: PromptSession[str] = PromptSession(
        _PROMPT,
        history=history or InMemoryHistory(),
        completer=CommandCompleter(),
        complete_while_typing=False,
        enable_history_search=True,
        key_bindings=keys,
        prompt_continuation=_CONTINUED,
        bottom_toolbar=lambda: _toolbar(prompt, healer),
        refresh_interval=0.5,
        color_depth=ColorDepth.DEPTH_1_BIT if plain else None,
        style=Style.from_dict({"bottom-toolbar": "noreverse"}) if plain else None,
        output=create_output(always_prefer_tty=True),  # stderr, where stdout goes into a file
    )
    prompt.app.key_processor.before_key_press += lambda _: healer.touched()
    return prompt.prompt


def _toolbar(prompt: PromptSession[str], healer: Healer) -> str:
    """Session, tokens, stale share, budget and policy, as many as the terminal is wide for."""
    from rich.cells import cell_len, set_cell_size

    settings, session = here.settings, here.held
    if session is None:
        parts = ["no session: load FILE"]
    else:
        share = 100 * healer.stale_share()
        parts = [
            session.store.name,
            f"{len(session.rows):,} tokens",
            f"stale {share:.1f}%",
            f"budget {settings.budget or '5%'}",
            settings.policy,
        ]
    parts += ["chat"] * settings.chat
    parts += ["heal off"] * (not settings.heal)
    parts += [f"healing stopped: {healer.problem}"] * (healer.problem is not None)
    width = prompt.app.output.get_size().columns - 1
    text = ""
    for part in parts:
        longer = f"{text} | {part}" if text else part
        if cell_len(longer) > width:
            break
        text = longer
    return text or set_cell_size(parts[0], width)


def _history() -> History | None:
    """The lines of earlier runs, in a file that only the user can read."""
    import platformdirs
    from prompt_toolkit.history import FileHistory

    class Lenient(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk must not end the REPL
                super().store_string(string)

    path = Path(platformdirs.user_state_dir("kvedit")) / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        data = path.read_bytes()
        data.decode("utf-8")
        if b"\0" in data:
            raise ValueError("it holds a zero byte")
    except (OSError, ValueError) as error:
        render.say(
            f"Warning: the history in {path} cannot be used ({error}); this run's is not remembered.\n"
            "Move the file away to begin a new one."
        )
        return None
    return Lenient(path)
