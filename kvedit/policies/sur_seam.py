"""Semantic-Unit Refresh with a small part of the budget spent right behind the seams.

Two kinds of damage follow an edit: near (what the next lines now belong to) and far (evidence
that was computed beside its rival). `Sur` finds the far kind and cannot see the near one;
`EditLocal` is the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvedit.policies.evidence import Evidence
from kvedit.policies.scores import Scores, Share
from kvedit.policies.seam import nearness
from kvedit.policies.sur import Sur


@dataclass(frozen=True, slots=True)
class SurSeam(Sur):
    """`Sur`'s scores, with a share of the budget for the rows nearest behind the seams.

    Attributes:
        share: Of the budget, rounded up to whole rows; 0 to 1.
    """

    share: float = 0.15

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units, and what is spent first."""
        return replace(Sur.score(self, evidence), first=Share(self.share, nearness(evidence)))
