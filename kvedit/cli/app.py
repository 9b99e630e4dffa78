"""The command line, whole: importing a room of commands adds them to the app."""

from __future__ import annotations

from kvedit.cli import bench, doctor, documents, edits, history, measure, models, questions, scripts, sessions
from kvedit.cli.base import app

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
