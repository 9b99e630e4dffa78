"""kvedit: edit a long document in a local model's context, and ask again on a budget."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Answer": "kvedit.reports",
    "Budget": "kvedit.select",
    "Document": "kvedit.document",
    "Home": "kvedit.store",
    "LineRange": "kvedit.document",
    "KveditError": "kvedit.errors",
    "Model": "kvedit.model",
    "POLICIES": "kvedit.policies",
    "Session": "kvedit.session",
    "Timings": "kvedit.timing",
}
__all__ = ["__version__", *_PUBLIC]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Looked up on first use: importing kvedit loads no torch.
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvedit' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)
