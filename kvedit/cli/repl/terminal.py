"""Read a line from a terminal, with editing, history, completion and a toolbar if it supports them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvedit.cli import output
from kvedit.cli.repl.line import is_open
from kvedit.cli.workspace import here
from kvedit.repair.options import Options

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

    from kvedit.cli.repl.background import Healer

_PROMPT, _CONTINUED = "kvedit> ", "   ...> "


class Abandoned(Exception):
    """Ctrl-C was pressed at the prompt; the message is the text typed so far."""


def line_reader(healer: Healer, *, history: bool) -> Callable[[], str]:
    """Return a line reader, which raises `Abandoned` on Ctrl-C and `EOFError` at the end of the input.

    Args:
        healer: Paused at each key press; its progress is shown in the toolbar.
        history: Remember lines for the next run.
    """
    from prompt_toolkit.utils import is_dumb_terminal

    return _ask_plainly if is_dumb_terminal() else _prompt(healer, _history() if history else None)


def _ask_plainly() -> str:
    """Read a line from a terminal that can only print."""
    try:
        text = input(_PROMPT)
        while is_open(text):
            text += "\n" + input(_CONTINUED)
    except EOFError:
        output.say("")  # so that the next output begins on a new line
        raise
    return text


def _prompt(healer: Healer, history: History | None) -> Callable[[], str]:
    """Return a line reader with editing, history, completion and a toolbar."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import ColorDepth
    from prompt_toolkit.output.defaults import create_output
    from prompt_toolkit.styles import Style

    from kvedit.cli.repl.completion import CommandCompleter

    keys = KeyBindings()
    plain = bool(os.environ.get("NO_COLOR"))

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _(event: Any) -> None:
        event.app.exit(exception=Abandoned(event.current_buffer.text), style="class:aborting")

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
        output=create_output(always_prefer_tty=True),  # stderr if stdout is redirected
    )
    prompt.app.key_processor.before_key_press += lambda _: healer.touched()
    return prompt.prompt


def _toolbar(prompt: PromptSession[str], healer: Healer) -> str:
    """Return session, tokens, stale share, budget and policy, as far as they fit the terminal."""
    from rich.cells import cell_len, set_cell_size

    settings, session = here.settings, here.held
    options, budget = Options(**settings.options), settings.options.get("budget")
    if session is None:
        parts = ["no session: load FILE"]
    else:
        share = 100 * healer.stale_share()
        parts = [
            session.name,
            f"{len(session.rows):,} tokens",
            f"stale {share:.1f}%",
            f"budget {'5%' if budget is None else budget.text}",
            options.policy,
        ]
    parts += ["conversation"] * options.conversation
    parts += ["heal off"] * (not settings.heal)
    parts += [f"healing stopped: {healer.problem}"] * (healer.problem is not None)
    parts = [output.one_line(part) for part in parts]
    width = prompt.app.output.get_size().columns - 1
    text = ""
    for part in parts:
        longer = f"{text} | {part}" if text else part
        if cell_len(longer) > width:
            break
        text = longer
    return text or set_cell_size(parts[0], width)


def _history() -> History | None:
    """Return the lines of earlier runs, from a file that only the user can read."""
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
            raise ValueError("it contains a zero byte")
    except (OSError, ValueError) as error:
        output.say(
            f"Warning: cannot use the history in {output.one_line(str(path))} "
            f"({output.one_line(str(error))}); lines of this run are not saved.\n"
            "Move the file away to start a new one."
        )
        return None
    return Lenient(path)
