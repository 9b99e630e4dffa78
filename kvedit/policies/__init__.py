"""Policies: what gives scores to rows and units. One file a policy, one line in `POLICIES`.

A policy never sees the budget; `kvedit.select` spends it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvedit.errors import UsageError
from kvedit.policies.bm25 import Bm25
from kvedit.policies.chance import Chance
from kvedit.policies.evidence import Evidence, Past, Policy
from kvedit.policies.sur import Sur, SurPlain, SurRows, SurWindow

POLICIES: dict[str, Callable[[], Policy]] = {
    "sur": Sur,
    "sur-plain": SurPlain,
    "tokens": SurRows,
    "window": SurWindow,
    "units-bm25": Bm25,
    "units-random": Chance,
}
DEFAULT_POLICY = "sur"

__all__ = ["DEFAULT_POLICY", "POLICIES", "Evidence", "Past", "Policy", "policy_named"]


def policy_named(name: str) -> Policy:
    """Make the policy of that name with its default settings.

    Raises:
        UsageError: There is none.
    """
    if name not in POLICIES:
        raise UsageError(f"There is no policy '{name}'.", f"Choose one of {', '.join(POLICIES)}.")
    return POLICIES[name]()
