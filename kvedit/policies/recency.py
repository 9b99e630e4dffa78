"""The last rows. Motivated by the suffix arm of Models Take Notes at Prefill (arXiv 2606.17107)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvedit.names import Support
from kvedit.policies.evidence import Evidence, best_of_unit
from kvedit.policies.scores import Scores


@dataclass(frozen=True, slots=True)
class Recency:
    """Score rows by position: the later, the higher."""

    support: Support = "rows"
    reads_cache: ClassVar[bool] = False

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        rows = np.arange(len(evidence.ids), dtype=np.float32)
        return Scores(rows, best_of_unit(rows, evidence))
