"""Policies by name. Importing this module imports neither the policies nor torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvedit.errors import check_one_of

if TYPE_CHECKING:
    from kvedit.policies.evidence import Policy

POLICIES = {
    "sur": "kvedit.policies.sur:Sur",
    "sur-seam": "kvedit.policies.sur_seam:SurSeam",
    "sur-plain": "kvedit.policies.sur_plain:SurPlain",
    "tokens": "kvedit.policies.tokens:Tokens",
    "window": "kvedit.policies.window:Window",
    "units-bm25": "kvedit.policies.units_bm25:UnitsBm25",
    "units-random": "kvedit.policies.units_random:UnitsRandom",
    "editlocal": "kvedit.policies.editlocal:EditLocal",
    "epic": "kvedit.policies.epic:Epic",
    "structural": "kvedit.policies.structural:Structural",
    "cacheblend": "kvedit.policies.cacheblend:CacheBlend",
    "cachecraft": "kvedit.policies.cachecraft:CacheCraft",
    "infoflow": "kvedit.policies.infoflow:InfoFlow",
    "prophetkv": "kvedit.policies.prophetkv:ProphetKV",
    "qcfuse": "kvedit.policies.qcfuse:QcFuse",
    "snapkv": "kvedit.policies.snapkv:SnapKV",
    "neighbor": "kvedit.policies.neighbor:Neighbor",
    "recency": "kvedit.policies.recency:Recency",
    "oracle": "kvedit.policies.oracle:Oracle",
}
"""Module and class of each policy."""


def policy_class(name: str) -> type[Policy]:
    """Return the class of a policy.

    Raises:
        UsageError: No policy has that name.
    """
    check_one_of("policy", name, POLICIES)
    module, _, attribute = POLICIES[name].partition(":")
    policy: type[Policy] = getattr(import_module(module), attribute)
    return policy


def policy_named(name: str) -> Policy:
    """Return the policy of that name with its default settings; raises like `policy_class`."""
    return policy_class(name)()
