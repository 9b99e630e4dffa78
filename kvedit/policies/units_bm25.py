"""BM25 over the same units: lexical relevance, the control of section C.2.

Terms are token ids and documents are units (Robertson and Zaragoza, 2009). The units are scored
by the library bm25s (arXiv 2407.03618).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvedit.names import Support
from kvedit.policies.evidence import Evidence, rows_of_units
from kvedit.policies.scores import Scores


@dataclass(frozen=True, slots=True)
class UnitsBm25:
    """Score units by Okapi BM25, and rows by the rarity of the query id that they contain.

    Attributes:
        k1: How quickly a repeated term stops counting.
        b: How much a long unit is discounted.
    """

    k1: float = 1.2
    b: float = 0.75
    support: Support = "units"
    reads_cache: ClassVar[bool] = False

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        import bm25s  # here, so that other policies need not import it

        rows = np.zeros(len(evidence.ids), dtype=np.float32)
        units = np.zeros(evidence.units, dtype=np.float32)
        inside = rows_of_units(evidence)
        vocabulary, terms = np.unique(evidence.ids[inside], return_inverse=True)
        asked = np.flatnonzero(np.isin(vocabulary, evidence.query_ids))
        if not len(asked):
            return Scores(rows, units)
        firsts = np.flatnonzero(np.diff(evidence.unit[inside], prepend=-1))
        documents = [part.tolist() for part in np.split(terms, firsts[1:])]
        index = bm25s.BM25(k1=self.k1, b=self.b, method="atire", idf_method="lucene")
        names = {int(token): at for at, token in enumerate(vocabulary)}
        index.index((documents, names), create_empty_token=False, show_progress=False)
        units[evidence.unit[inside[firsts]]] = index.get_scores_from_ids(asked.tolist())
        for term in asked:
            hit = inside[terms == term]
            holding = len(np.unique(evidence.unit[hit]))
            rows[hit] = np.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
        return Scores(rows, units)
