"""Attention from the question in one layer, by blocks. Motivated by QCFuse (2604.08585, 2606.05875).

It uses the ranking of blocks at one critical layer. In QCFuse the layer is profiled and the question
sees anchors of each chunk. Here the layer is a setting, and the question sees the shifted cache. No
system is reproduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvedit.names import Support
from kvedit.policies.attention import blocks, layer_at, mean_attention, sums
from kvedit.policies.evidence import Evidence
from kvedit.policies.scores import Scores


@dataclass(frozen=True, slots=True)
class QcFuse:
    """Score blocks of adjacent rows by the sum of the question's attention to them.

    Attributes:
        depth: The critical layer, as a fraction of the depth.
        block: Rows per block, counted from the first eligible row.
    """

    depth: float = 0.5
    block: int = 16
    support: Support = "units"
    reads_cache: ClassVar[bool] = True

    def score(self, evidence: Evidence) -> Scores:
        """Score rows, and the policy's own units."""
        layer = layer_at(self.depth, evidence.model.layers)
        rows = mean_attention(evidence, [layer], "all")
        unit = blocks(evidence, self.block)
        return Scores(rows, sums(rows, unit, evidence), unit)
