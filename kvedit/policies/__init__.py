"""Policies: what gives scores to rows and units. One file a policy, one line in `POLICIES`.

A policy never sees the budget; `kvedit.select` spends it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvedit.errors import UsageError
from kvedit.policies.bm25 import Bm25
from kvedit.policies.cacheblend import CacheBlend
from kvedit.policies.cachecraft import CacheCraft
from kvedit.policies.chance import Chance
from kvedit.policies.editlocal import EditLocal
from kvedit.policies.epic import Epic
from kvedit.policies.evidence import Evidence, Past, Policy
from kvedit.policies.infoflow import InfoFlow
from kvedit.policies.neighbor import Neighbor
from kvedit.policies.oracle import Oracle
from kvedit.policies.prophetkv import ProphetKV
from kvedit.policies.qcfuse import QcFuse
from kvedit.policies.recency import Recency
from kvedit.policies.snapkv import SnapKV
from kvedit.policies.structural import Structural
from kvedit.policies.sur import Sur, SurPlain, SurRows, SurWindow
from kvedit.policies.sur_seam import SurSeam

POLICIES: dict[str, Callable[[], Policy]] = {
    "sur": Sur,
    "sur-seam": SurSeam,
    "sur-plain": SurPlain,
    "tokens": SurRows,
    "window": SurWindow,
    "units-bm25": Bm25,
    "units-random": Chance,
    "editlocal": EditLocal,
    "epic": Epic,
    "structural": Structural,
    "cacheblend": CacheBlend,
    "cachecraft": CacheCraft,
    "infoflow": InfoFlow,
    "prophetkv": ProphetKV,
    "qcfuse": QcFuse,
    "snapkv": SnapKV,
    "neighbor": Neighbor,
    "recency": Recency,
    "oracle": Oracle,
}
PROBES = frozenset({"cacheblend", "infoflow", "prophetkv", "qcfuse", "snapkv", "neighbor", "oracle"})
"""Those that read the cache; rows without a state are computed before they look."""

__all__ = ["POLICIES", "PROBES", "Evidence", "Past", "Policy", "policy_named"]


def policy_named(name: str) -> Policy:
    """Make the policy of that name with its default settings.

    Raises:
        UsageError: There is none.
    """
    if name not in POLICIES:
        raise UsageError(f"There is no policy '{name}'.", f"Choose one of {', '.join(POLICIES)}.")
    return POLICIES[name]()
