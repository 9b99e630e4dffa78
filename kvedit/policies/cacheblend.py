"""Values that deviate early. Motivated by CacheBlend's high-KV-deviation tokens (arXiv 2405.16444).

The input of layer 0 depends only on ids and positions, so after a shift its keys and values are
exact. One walk through it therefore gives the exact keys and values of layer 1, and the true
deviation there. Only the first check is used, not the gradual filtering; no system is reproduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvedit.model.model import CHUNK_ROWS
from kvedit.names import Support
from kvedit.policies.evidence import Evidence, best_of_unit
from kvedit.policies.scores import Scores


@dataclass(frozen=True, slots=True)
class CacheBlend:
    """Score rows by the squared deviation of their values at layer index 1."""

    support: Support = "rows"
    reads_cache: ClassVar[bool] = True

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units; restores what the walk overwrites."""
        model, cache, count = evidence.model, evidence.cache, len(evidence.ids)
        rows = np.zeros(count, dtype=np.float32)
        if not evidence.suffix.any():
            return Scores(rows, best_of_unit(rows, evidence))
        depth, first = min(2, model.layers), _first_open(evidence)
        walked = np.s_[:depth, :, first:count]
        kept = cache.keys[walked].clone(), cache.values[walked].clone(), cache.length
        try:
            for start in range(first, count, CHUNK_ROWS):
                part = slice(start, min(start + CHUNK_ROWS, count))
                ids = model.to_device(evidence.ids[part])
                fresh = model.walk(ids, part, cache, outputs=0, layers=depth).states.values[-1]
                stale = kept[1][-1, :, start - first : part.stop - first]
                deviation = (fresh.float() - stale.float()).square().sum(dim=(0, 2))
                rows[part] = deviation.cpu().numpy()
        finally:
            cache.keys[walked], cache.values[walked], cache.length = kept
        rows[~evidence.suffix] = 0
        return Scores(rows, best_of_unit(rows, evidence))


def _first_open(evidence: Evidence) -> int:
    """Return the first row that is eligible or may lack a state; layer 0 needs all of them."""
    opened = evidence.suffix.copy()
    if evidence.past is not None:
        opened |= evidence.past.source < 0
    return int(np.argmax(opened))
