"""Edit a long document that a local model has read, and ask about it again on a budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as below, for type checkers
    from kvedit.checkpoint.opening import open_model as open_model
    from kvedit.errors import ContextError as ContextError
    from kvedit.errors import KveditError as KveditError
    from kvedit.errors import LockedError as LockedError
    from kvedit.errors import ModelError as ModelError
    from kvedit.errors import SessionError as SessionError
    from kvedit.errors import UsageError as UsageError
    from kvedit.model.model import Model as Model
    from kvedit.policies.registry import POLICIES as POLICIES
    from kvedit.repair.budget import Budget as Budget
    from kvedit.repair.reports import Answer as Answer
    from kvedit.repair.reports import Change as Change
    from kvedit.repair.reports import Explanation as Explanation
    from kvedit.repair.reports import Healed as Healed
    from kvedit.repair.reports import Purge as Purge
    from kvedit.repair.reports import Status as Status
    from kvedit.repair.reports import Token as Token
    from kvedit.repair.reports import Verification as Verification
    from kvedit.session.session import Session as Session
    from kvedit.store.home import Home as Home
    from kvedit.store.records import Entry as Entry
    from kvedit.text.document import Document as Document
    from kvedit.text.document import LineRange as LineRange
    from kvedit.timing import Timings as Timings

_PUBLIC = {
    "Answer": "kvedit.repair.reports",
    "Budget": "kvedit.repair.budget",
    "Change": "kvedit.repair.reports",
    "ContextError": "kvedit.errors",
    "Document": "kvedit.text.document",
    "Entry": "kvedit.store.records",
    "Explanation": "kvedit.repair.reports",
    "Healed": "kvedit.repair.reports",
    "Home": "kvedit.store.home",
    "KveditError": "kvedit.errors",
    "LineRange": "kvedit.text.document",
    "LockedError": "kvedit.errors",
    "Model": "kvedit.model.model",
    "ModelError": "kvedit.errors",
    "POLICIES": "kvedit.policies.registry",
    "Purge": "kvedit.repair.reports",
    "Session": "kvedit.session.session",
    "SessionError": "kvedit.errors",
    "Status": "kvedit.repair.reports",
    "Timings": "kvedit.timing",
    "Token": "kvedit.repair.reports",
    "UsageError": "kvedit.errors",
    "Verification": "kvedit.repair.reports",
    "open_model": "kvedit.checkpoint.opening",
}
__all__ = ["__version__", *_PUBLIC]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    # Names are imported on first use, so that `import kvedit` does not load torch.
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvedit' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)
