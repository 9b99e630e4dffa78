"""Completion in the REPL: commands, options, and values of options and arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from kvedit.cli import settings
from kvedit.cli.output import one_line
from kvedit.cli.repl.line import commands

_FILES = ("file", "output", "script", "jsonl")


class CommandCompleter(Completer):
    """Complete a line from the command tree that parses it."""

    def __init__(self) -> None:
        self._commands = commands()
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Yield the possible completions at the cursor."""
        before = document.text_before_cursor.lstrip()
        if before.startswith(("?", "#")):
            return
        words = _split(before)
        if words is None:  # within quotation marks
            return
        typed = "" if not words or before[-1:].isspace() else words.pop()
        written = _last_word(before, words) if typed else ""
        parameter = None
        for value in self._choices(words, typed):
            if isinstance(value, str):
                yield _completion(value, value, written)
            else:
                parameter = value
        if parameter is not None:
            for path in self._paths.get_completions(Document(typed, len(typed)), complete_event):
                yield _completion(typed + path.text, path.display_text, written)

    def _choices(self, words: list[str], typed: str) -> Iterable[Any]:
        """Yield matching words, or a parameter that takes a path."""
        if not words:
            yield from _starting([*self._commands, "set", "help", "exit"], typed)
            return
        if words[0] in ("set", "help"):
            yield from _starting(self._after_own_word(words), typed)
            return
        command, rest = self._commands.get(words[0]), words[1:]
        if command is not None and hasattr(command, "commands"):
            if not rest:
                yield from _starting(command.commands, typed)
                return
            command, rest = command.commands.get(rest[0]), rest[1:]
        if command is None:
            return
        options = {name: parameter for parameter in command.params for name in parameter.opts}
        last = options.get(rest[-1]) if rest else None
        if last is not None and not getattr(last, "is_flag", False):
            yield from self._values(command, last, typed)
        elif typed.startswith("-"):
            yield from _starting([name for name in options if name.startswith("--")], typed)
        else:
            for parameter in command.params:
                if parameter.param_type_name == "argument":
                    yield from self._values(command, parameter, typed)

    def _after_own_word(self, words: list[str]) -> Iterable[str]:
        if words[0] == "help":
            return self._commands if len(words) == 1 else ()
        if len(words) == 1:
            return settings.names()
        return settings.values(words[1]) if len(words) == 2 and words[1] in settings.names() else ()

    def _values(self, command: Any, parameter: Any, typed: str) -> Iterable[Any]:
        if parameter.name in _FILES:
            yield parameter
            return
        context = command.make_context(command.name, [], resilient_parsing=True)
        yield from (item.value for item in parameter.shell_complete(context, typed))


def _split(text: str) -> list[str] | None:
    try:
        return shlex.split(text)
    except ValueError:
        return None


def _last_word(text: str, before: list[str]) -> str:
    """Return the last word as typed, including quotation marks."""
    starts = [index for index in range(len(text)) if index == 0 or text[index - 1].isspace()]
    return text[next(start for start in starts if _split(text[:start]) == before) :].lstrip()


def _completion(word: str, shown: str, written: str) -> Completion:
    """Replace what is typed with a word, quoted if necessary."""
    quoted = word if _split(word) == [word] else shlex.quote(word)
    return Completion(quoted, start_position=-len(written), display=one_line(shown))


def _starting(names: Iterable[str], typed: str) -> Iterable[str]:
    return (name for name in names if name.startswith(typed))
