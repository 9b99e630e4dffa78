"""Semantic-Unit Refresh: relevance from the model's frozen input embeddings, without a forward pass.

The paper ranks whole text units by their highest token scores, where a token's score is its
embedding's similarity to the question's tokens (sections 3.2 and A.3). With the
maximum cosine, as published, that cannot find evidence: "the" and "is" match exactly almost
everywhere, so nearly every unit ties. `Sur` keeps the frozen embeddings and the units, and changes the score:

    centred   the vocabulary's mean embedding is subtracted before normalizing, so that unrelated
              tokens have similarities near 0 instead of all being similar
    weighted  a question token counts by the square of its rarity among the units, as in TF-IDF,
              where both question and text carry the weight
    total     a unit sums, over the question's tokens, its best match of each (late
              interaction), so that matching the whole question beats repeating one word
    near      a unit adds a quarter of its neighbours' scores, since evidence tends to be adjacent

`SurPlain` is the paper's score. `Tokens` and `Window` use `Sur`'s scores with the other supports; they
are the matched controls of section A.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from kvedit.names import Support
from kvedit.policies.evidence import Evidence, best_of_unit, rows_of_units
from kvedit.policies.scores import Scores

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sur:
    """Embedding relevance with whole units.

    Attributes:
        centred: Subtract the mean embedding of the vocabulary.
        weighted: Weight question tokens by their rarity among the units.
        total: Sum a unit's best match for each question token; otherwise use its best row.
        near: Weight of the two neighbours' scores that a unit adds to its own; only with `total`.
        support: How scores become selected rows: `rows`, `window` or `units`.
    """

    centred: bool = True
    weighted: bool = True
    total: bool = True
    near: float = 0.25
    support: Support = "units"
    reads_cache: ClassVar[bool] = False

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        inside = rows_of_units(evidence)
        rows = np.zeros(len(evidence.ids), dtype=np.float32)
        units = np.zeros(evidence.units, dtype=np.float32)
        query = np.unique(evidence.query_ids)
        if not len(inside) or not len(query):
            return Scores(rows, units)
        match = self._match(evidence, evidence.ids[inside], query)
        # Rows of a unit are adjacent, so its best match is a reduction over one run.
        firsts = np.flatnonzero(np.diff(evidence.unit[inside], prepend=-1))
        best = np.maximum.reduceat(match, firsts, axis=0)
        weight = np.ones(len(query), dtype=np.float32)
        if self.weighted:
            holding = np.maximum(best.sum(axis=0), 0.5)
            weight = np.square(np.log1p(len(best) / holding)).astype(np.float32)
        rows[inside] = (match * weight).max(axis=1)
        if self.total:
            own = best @ weight
            beside = np.pad(own, 1)
            units[evidence.unit[inside[firsts]]] = own + self.near * (beside[:-2] + beside[2:])
            return Scores(rows, units)
        return Scores(rows, best_of_unit(rows, evidence))

    def _match(self, evidence: Evidence, ids: IntArray, query: IntArray) -> FloatArray:
        """Return the squared positive cosine (centred) or cosine of rows and query tokens. `[N, Q]`."""
        model = evidence.model
        distinct, back = np.unique(ids, return_inverse=True)
        both = model.to_device(np.concatenate([distinct, query]))
        vectors = model.embed(both).float()
        if self.centred:
            vectors = vectors - model.mean_embedding
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
        cosine = vectors[: len(distinct)] @ vectors[len(distinct) :].T
        match = cosine.clamp(min=0).square() if self.centred else cosine
        matched: FloatArray = match.cpu().numpy()[back]
        return matched
