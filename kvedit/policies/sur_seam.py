"""Semantic-Unit Refresh with a small part of the budget spent right after the seams.

An edit causes two kinds of damage: near (what the next lines now belong to) and far (evidence that
was computed with a competing statement in view). `Sur` finds far damage but not near damage;
`EditLocal` is the opposite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvedit.policies.evidence import Evidence
from kvedit.policies.scores import Scores, Share
from kvedit.policies.seam import nearness
from kvedit.policies.sur import Sur


@dataclass(frozen=True, slots=True)
class SurSeam(Sur):
    """`Sur`'s scores, with a share of the budget for the rows right after the seams.

    Attributes:
        share: Fraction of the budget, 0 to 1; rounded up to whole rows.
    """

    share: float = 0.15

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units, and the share that is spent first."""
        return replace(Sur.score(self, evidence), first=Share(self.share, nearness(evidence)))
