"""The command line, whole: importing a room of commands adds them to the app."""

from __future__ import annotations

from kvedit.cli.commands import (
    bench,
    doctor,
    documents,
    edits,
    history,
    measure,
    models,
    questions,
    scripts,
    sessions,
)
from kvedit.cli.options import app

__all__ = [
    "app",
    "bench",
    "doctor",
    "documents",
    "edits",
    "history",
    "measure",
    "models",
    "questions",
    "scripts",
    "sessions",
]
