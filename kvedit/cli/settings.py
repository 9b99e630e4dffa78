"""The settings of a process: defaults for a question's options, and whether the REPL heals.

Each field of `Options` whose spelling names a setting has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from kvedit.errors import UsageError, check_one_of
from kvedit.repair.options import Options, as_word, spelling

_DEFAULT = "default"
_SWITCH = ("on", "off")
_HEAL = "heal"
_OLD_NAMES = {"chat": "conversation"}  # accepted from older scripts, shown nowhere


def _fields() -> dict[str, Field[Any]]:
    """Return the fields of `Options` that have a setting, by the setting's name."""
    return {name: each for each in fields(Options) if (name := spelling(each).setting) is not None}


def names() -> tuple[str, ...]:
    """Return the names of all settings."""
    return (*_fields(), _HEAL)


def current_name(name: str) -> str:
    """Return a setting's name, given that or an old one; raises `UsageError` if it is unknown."""
    name = _OLD_NAMES.get(name, name)
    if name not in names():
        raise UsageError(f"Unknown setting '{name}'.", f"Settings: {', '.join(names())}.")
    return name


def values(name: str) -> Sequence[str]:
    """Return the values to suggest for a setting; raises as `current_name` does."""
    each = _fields().get(current_name(name))
    if each is None or isinstance(each.default, bool):
        return _SWITCH
    return (*(spelling(each).choices or spelling(each).examples), _DEFAULT)


def takes(name: str) -> str:
    """Describe a setting's values, for help and errors; raises as `current_name` does."""
    *most, last = values(name)
    return f"{', '.join(most)} or {last}"


@dataclass(slots=True)
class Settings:
    """What `set` changes.

    Attributes:
        options: Values that replace defaults of `Options`.
        heal: Whether the REPL heals while it waits for input.
    """

    options: dict[str, Any] = field(default_factory=dict)
    heal: bool = True

    def set(self, name: str, word: str) -> None:
        """Change a setting.

        Args:
            name: The setting.
            word: Its value as typed; `default` restores the default.

        Raises:
            UsageError: The setting is unknown, or the value is not valid.
        """
        name = current_name(name)
        each = _fields().get(name)
        if each is None or isinstance(each.default, bool):
            check_one_of(name, word, _SWITCH)
            if each is None:
                self.heal = word == "on"
            else:
                self.options[each.name] = word == "on"
        elif word == _DEFAULT:
            self.options.pop(each.name, None)
        else:
            value = spelling(each).parse(word)
            Options(**{each.name: value})  # raises if it is invalid
            self.options[each.name] = value

    def record(self) -> dict[str, str]:
        """Return all settings as words, by the field's name."""
        return {name.replace("-", "_"): self.word(name) for name in names()}

    def word(self, name: str) -> str:
        """Return the value of a setting as `set` reads it; raises as `current_name` does."""
        each = _fields().get(current_name(name))
        if each is None:
            return "on" if self.heal else "off"
        if isinstance(each.default, bool):
            return "on" if self.options.get(each.name, each.default) else "off"
        if each.name in self.options:
            return as_word(self.options[each.name])
        return each.default if isinstance(each.default, str) else _DEFAULT
