"""Errors shown to the user, each with one sentence of fact and one of remedy.

    KveditError            exit 1   the command failed (also: the disk is full)
    |- UsageError          exit 2   a bad range, budget, name or option
    |- SessionError        exit 3   not found, damaged, or a different model
    |  `- LockedError      exit 3   another process holds the session
    |- ModelError          exit 4   the model is unavailable or not supported
    `- ContextError        exit 5   the text does not fit the model's context

Any other exception that escapes is a bug. Only `kvedit.cli.command` prints these errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class KveditError(Exception):
    """Base class of all errors shown to the user.

    Args:
        fact: What is wrong, in one sentence.
        remedy: What to do about it, in one sentence.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "failed"

    def __init__(self, fact: str, remedy: str) -> None:
        super().__init__(f"{fact} {remedy}")
        self.fact = fact
        self.remedy = remedy


class UsageError(KveditError):
    """An argument of the command is invalid (range, budget, name, option)."""

    exit_code = 2
    kind = "usage"


def check_one_of(what: str, value: str, choices: Iterable[str]) -> None:
    """Raise `UsageError`, which calls `value` an unknown `what`, if it is not one of the choices."""
    names = list(choices)
    if value not in names:
        raise UsageError(f"Unknown {what} '{value}'.", f"Choose one of {', '.join(names)}.")


class SessionError(KveditError):
    """The session is missing, damaged, or was created with a different model."""

    exit_code = 3
    kind = "session"


class LockedError(SessionError):
    """Another process is changing this session right now."""

    kind = "locked"


class ModelError(KveditError):
    """The model is unavailable or not supported."""

    exit_code = 4
    kind = "model"


class ContextError(KveditError):
    """The document, question and answer do not fit the model's context."""

    exit_code = 5
    kind = "context"
