"""The first rows of every unit. Motivated by EPIC's LegoLink (arXiv 2410.15332).

There, chunks are encoded apart and each has a sink at its start; here the rows were encoded
together, so what is transferred is the place only. No system is reproduced.
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
    """Rank rows by their place within the unit, then by the unit's distance to the first seam.

    With m units that are long enough, the B best rows are the first B // m of each, and the rest
    goes to the nearest units, one row each.
    """

    support: Support = "rows"
    reads_cache: ClassVar[bool] = False

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        rows = np.zeros(len(evidence.ids), dtype=np.float32)
        inside = np.flatnonzero(evidence.suffix & (evidence.unit >= 0))
        if len(inside):
            # A unit's rows are adjacent, and it starts with the first of them that may be bought.
            firsts = np.flatnonzero(np.diff(evidence.unit[inside], prepend=-1))
            sizes = np.diff(np.append(firsts, len(inside)))
            offset = np.arange(len(inside)) - np.repeat(firsts, sizes)
            distance = np.abs(np.repeat(inside[firsts], sizes) - seams_of(evidence)[0])
            order = np.lexsort((distance, offset))
            rows[inside[order]] = np.arange(len(inside), 0, -1)
        return Scores(rows, best_of_unit(rows, evidence))
