"""The errors that a user can meet, each with one sentence of fact and one of remedy.

    KveditError            exit 1   the command failed (also: the disk is full)
    |- UsageError          exit 2   a bad range, budget, name or option
    |- SessionError        exit 3   no session, damaged, other model
    |  `- LockedError      exit 3   another process holds the session
    |- ModelError          exit 4   the model is unavailable, or is not supported
    `- ContextError        exit 5   the text does not fit the model's context

Anything else that escapes is a bug. `kvedit.cli.command` is the one place that prints them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class KveditError(Exception):
    """The root of every error that is meant for the user.

    Args:
        fact: What is wrong, one sentence.
        remedy: What to do about it, one sentence.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "failed"

    def __init__(self, fact: str, remedy: str) -> None:
        super().__init__(f"{fact} {remedy}")
        self.fact = fact
        self.remedy = remedy


class UsageError(KveditError):
    """The command was asked for something that has no meaning (range, budget, name)."""

    exit_code = 2
    kind = "usage"


def check_one_of(what: str, value: str, choices: Iterable[str]) -> None:
    """Raise `UsageError` if `value`, which is a `what`, is none of the choices."""
    known = list(choices)
    if value not in known:
        raise UsageError(f"Unknown {what} '{value}'.", f"Choose one of {', '.join(known)}.")


class SessionError(KveditError):
    """The session is missing, damaged, or belongs to another model."""

    exit_code = 3
    kind = "session"


class LockedError(SessionError):
    """Another process is changing this session right now."""

    kind = "locked"


class ModelError(KveditError):
    """The model is unavailable, or its architecture is not supported."""

    exit_code = 4
    kind = "model"


class ContextError(KveditError):
    """The document, question and answer do not fit the model's context."""

    exit_code = 5
    kind = "context"
