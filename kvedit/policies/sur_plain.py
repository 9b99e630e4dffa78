"""The paper's relevance rule as it reads (Budgeted KV-Cache Repair, sections 3.2 and A.3)."""

from __future__ import annotations

from dataclasses import dataclass

from kvedit.policies.sur import Sur


@dataclass(frozen=True, slots=True)
class SurPlain(Sur):
    """Maximum cosine over the question's tokens; a unit scores as its best row."""

    centred: bool = False
    weighted: bool = False
    total: bool = False
