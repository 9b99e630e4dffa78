"""The rows right after the edit. Motivated by EditLocal (arXiv 2609.17983): position only, no signal.

Only the choice of position is used; no system is reproduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvedit.names import Support
from kvedit.policies.evidence import Evidence, best_of_unit
from kvedit.policies.scores import Scores
from kvedit.policies.seam import nearness


@dataclass(frozen=True, slots=True)
class EditLocal:
    """Score rows by closeness to the seam before them; with several seams, in turn."""

    support: Support = "rows"
    reads_cache: ClassVar[bool] = False

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        rows = nearness(evidence)
        return Scores(rows, best_of_unit(rows, evidence))
