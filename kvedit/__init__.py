"""kvedit: edit a long document in a local model's context, and ask again on a budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as below, for type checkers
    from kvedit.document import Document as Document
    from kvedit.document import LineRange as LineRange
    from kvedit.errors import ContextError as ContextError
    from kvedit.errors import KveditError as KveditError
    from kvedit.errors import LockedError as LockedError
    from kvedit.errors import ModelError as ModelError
    from kvedit.errors import SessionError as SessionError
    from kvedit.errors import UsageError as UsageError
    from kvedit.model import Model as Model
    from kvedit.policies import POLICIES as POLICIES
    from kvedit.reports import Answer as Answer
    from kvedit.reports import Change as Change
    from kvedit.reports import Explanation as Explanation
    from kvedit.reports import Healed as Healed
    from kvedit.reports import Purge as Purge
    from kvedit.reports import Status as Status
    from kvedit.reports import Token as Token
    from kvedit.reports import Verification as Verification
    from kvedit.select import Budget as Budget
    from kvedit.session import Session as Session
    from kvedit.store import Entry as Entry
    from kvedit.store import Home as Home
    from kvedit.timing import Timings as Timings

_PUBLIC = {
    "Answer": "kvedit.reports",
    "Budget": "kvedit.select",
    "Change": "kvedit.reports",
    "ContextError": "kvedit.errors",
    "Document": "kvedit.document",
    "Entry": "kvedit.store",
    "Explanation": "kvedit.reports",
    "Healed": "kvedit.reports",
    "Home": "kvedit.store",
    "KveditError": "kvedit.errors",
    "LineRange": "kvedit.document",
    "LockedError": "kvedit.errors",
    "Model": "kvedit.model",
    "ModelError": "kvedit.errors",
    "POLICIES": "kvedit.policies",
    "Purge": "kvedit.reports",
    "Session": "kvedit.session",
    "SessionError": "kvedit.errors",
    "Status": "kvedit.reports",
    "Timings": "kvedit.timing",
    "Token": "kvedit.reports",
    "UsageError": "kvedit.errors",
    "Verification": "kvedit.reports",
}
__all__ = ["__version__", *_PUBLIC]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    # Looked up on first use: importing kvedit loads no torch.
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvedit' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)
