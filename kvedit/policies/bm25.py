"""BM25 over the same units: lexical relevance, the control of section C.2.

Terms are token ids and documents are units (Robertson and Zaragoza, 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvedit.policies.evidence import Evidence
from kvedit.select import Rule, Scores


@dataclass(frozen=True, slots=True)
class Bm25:
    """Score units by Okapi BM25 and rows by the rarity of the query id that they repeat.

    Attributes:
        k1: How soon a repeated term stops counting.
        b: How much a long unit is discounted.
    """

    k1: float = 1.2
    b: float = 0.75
    rule: Rule = "units"

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        inside = evidence.suffix & (evidence.unit >= 0)
        length = np.bincount(evidence.unit[inside], minlength=evidence.units)
        held = max(int((length > 0).sum()), 1)
        norm = self.k1 * (1 - self.b + self.b * length / max(float(length.sum()) / held, 1.0))
        units = np.zeros(evidence.units)
        rows = np.zeros(len(evidence.ids), dtype=np.float32)
        for token in np.unique(evidence.query_ids):
            hit = inside & (evidence.ids == token)
            count = np.bincount(evidence.unit[hit], minlength=evidence.units)
            holding = int((count > 0).sum())
            rarity = np.log(1 + (held - holding + 0.5) / (holding + 0.5))
            units += rarity * count * (self.k1 + 1) / (count + norm + 1e-9)
            rows[hit] += rarity
        return Scores(rows, units.astype(np.float32))
