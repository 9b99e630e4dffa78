"""The paper's relevance score as published (Budgeted KV-Cache Repair, sections 3.2 and A.3)."""

from __future__ import annotations

from dataclasses import dataclass

from kvedit.policies.sur import Sur


@dataclass(frozen=True, slots=True)
class SurPlain(Sur):
    """Score rows by the maximum cosine over the question's tokens, and units by their best row."""

    centred: bool = False
    weighted: bool = False
    total: bool = False
