"""A line of the REPL or of a script: the same commands and parser as in the shell."""

from __future__ import annotations

import difflib
import shlex
from typing import Any

from typer.main import get_command

from kvedit.cli import output, settings
from kvedit.cli.command import Reply, app, give, report
from kvedit.cli.workspace import here
from kvedit.errors import KveditError, UsageError


def commands() -> dict[str, Any]:
    """Return the app's commands by their first word."""
    return dict(get_command(app).commands)  # type: ignore[attr-defined]


def words_of(line: str) -> list[str]:
    """Split a line into words as a shell does; text after a `?` is one literal question.

    Blank lines and comments, which begin with `#`, have no words.

    Raises:
        UsageError: A quotation mark is not closed.
    """
    line = line.strip()
    if not line or line.startswith("#"):
        return []
    if line.startswith("?"):
        return ["ask", "--", line[1:].strip()]
    try:
        words = shlex.split(line)
    except ValueError:
        raise UsageError(
            "A quotation mark in this line is not closed.",
            "Close it. A question that begins with '?' needs no quotation marks.",
        ) from None
    return words[1:] if words[0] == "kvedit" and len(words) > 1 else words


def lines_of(text: str) -> list[str]:
    """Split an input into lines to run.

    Line breaks within quotation marks do not split; nor do those in a question, unless a command or
    another question follows.
    """
    complete: list[str] = []
    pending = ""
    for line in text.split("\n"):
        if not pending and complete and complete[-1].lstrip().startswith("?") and not _begins(line):
            complete[-1] += f" {line}"
            continue
        pending = f"{pending}\n{line}" if pending else line
        if not is_open(pending):
            complete.append(pending)
            pending = ""
    return [*complete, pending] if pending else complete


def _begins(line: str) -> bool:
    """Whether a line after a question is a command, another question or a comment."""
    words = line.split()
    return bool(words) and (words[0][0] in "?#" or words[0] == "kvedit" or is_verb(words[0]))


def is_open(text: str) -> bool:
    """Whether the text contains an unclosed quotation mark."""
    try:
        words_of(text)
    except UsageError:
        return True
    return False


def run_line(line: str) -> int:
    """Run one line and return its exit code; print errors as in the shell."""
    here.record = here.failure = None
    try:
        words = words_of(line)
        if not words:
            return 0
        if words[0] == "set":
            _set(words[1:])
            return 0
        check_verb(words[0])
        if words == ["help", "set"]:
            output.say("\n".join(f"set {name} VALUE: {settings.takes(name)}" for name in settings.names()))
            return 0
        if words[0] == "help":
            words = [*words[1:], "--help"]
        if here.quiet and not {"-h", "--help", "--version"}.isdisjoint(words):
            return 0  # Typer prints these on stdout, where the JSON of a replay goes
    except KveditError as error:
        report(error, here.as_json)
        return error.exit_code
    try:
        app(args=words, prog_name="kvedit")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def is_verb(word: str) -> bool:
    """Whether a line can begin with a word."""
    return word in (*_verbs(), "-h", "--help", "--version")


def _verbs() -> list[str]:
    return [*commands(), "set", "help", "exit", "quit"]


def check_verb(word: str) -> None:
    """Raise `UsageError` with a suggestion if a command is unknown."""
    if is_verb(word):
        return
    near = difflib.get_close_matches(word, _verbs(), n=1, cutoff=0.5)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    raise UsageError(
        f"Unknown command '{word}'.", f"{hint}Begin a question with '?'; 'help' lists the commands."
    )


def _set(words: list[str]) -> None:
    """Change a setting of this process, or show one or all."""
    if len(words) == 2:
        here.settings.set(*words)
    elif len(words) > 2:
        raise UsageError(f"'set {words[0]}' needs one value.", f"Use {settings.takes(words[0])}.")
    # Version 1 had `chat` instead of `conversation`.
    record = {"schema_version": 2, **here.settings.record()}
    chosen = [settings.current_name(name) for name in words[:1]] or settings.names()
    shown = "\n".join(f"{name} {here.settings.word(name)}" for name in chosen)
    give(Reply(record, lambda: output.say(shown)), here.as_json)
