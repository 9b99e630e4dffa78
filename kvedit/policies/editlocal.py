"""The rows right behind the edit. Motivated by EditLocal (arXiv 2609.17983): place alone, no signal.

It transfers the place into kvedit's refresh and reproduces no system.
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
    """Score rows by their nearness behind a seam; several seams grow in turn."""

    support: Support = "rows"
    reads_cache: ClassVar[bool] = False

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        rows = nearness(evidence)
        return Scores(rows, best_of_unit(rows, evidence))
