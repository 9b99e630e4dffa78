"""Random units: grouping without ranking, the control of section A.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvedit.names import Support
from kvedit.policies.evidence import Evidence
from kvedit.policies.scores import Scores


@dataclass(frozen=True, slots=True)
class UnitsRandom:
    """Score units by seeded random numbers."""

    support: Support = "units"
    reads_cache: ClassVar[bool] = False

    def score(self, evidence: Evidence) -> Scores:
        """Score each unit at random; all rows tie, so a window starts where its unit starts."""
        drawn = np.random.default_rng(evidence.seed).random(evidence.units)
        return Scores(np.zeros(len(evidence.ids), dtype=np.float32), drawn.astype(np.float32))
