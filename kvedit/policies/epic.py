"""The first rows of every unit. Motivated by EPIC's LegoLink (arXiv 2410.15332).

In EPIC, chunks are encoded separately and each has an attention sink at its start. Here the rows were
encoded together, so only the choice of position is used. No system is reproduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvedit.names import Support
from kvedit.policies.evidence import Evidence, best_of_unit
from kvedit.policies.scores import Scores
from kvedit.policies.seam import seams_of


@dataclass(frozen=True, slots=True)
class Epic:
    """Rank rows by their offset within the unit, then by the unit's distance from the first seam.

    With m units that are long enough, the B best rows are the first B // m of each, plus one more row
    in each of the nearest units.
    """

    support: Support = "rows"
    reads_cache: ClassVar[bool] = False

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        rows = np.zeros(len(evidence.ids), dtype=np.float32)
        inside = np.flatnonzero(evidence.suffix & (evidence.unit >= 0))
        if len(inside):
            # Rows of a unit are adjacent; offsets count from its first eligible row.
            firsts = np.flatnonzero(np.diff(evidence.unit[inside], prepend=-1))
            sizes = np.diff(np.append(firsts, len(inside)))
            offset = np.arange(len(inside)) - np.repeat(firsts, sizes)
            distance = np.abs(np.repeat(inside[firsts], sizes) - seams_of(evidence)[0])
            order = np.lexsort((distance, offset))
            rows[inside[order]] = np.arange(len(inside), 0, -1)
        return Scores(rows, best_of_unit(rows, evidence))
