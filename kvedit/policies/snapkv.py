"""Pooled attention from the question. Motivated by SnapKV (arXiv 2404.14469).

SnapKV evicts rows, and observes the last rows of the prompt. Here the question is the observation
window, and the pooled score, averaged over layers, decides what to refresh. No system is reproduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from kvedit.names import Support
from kvedit.policies.attention import mean_attention
from kvedit.policies.evidence import Evidence, best_of_unit
from kvedit.policies.scores import Scores


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Score rows by the question's mean attention to them and their neighbours.

    Attributes:
        kernel: Number of neighbouring rows to average, odd; beyond the ends attention counts as 0.
    """

    kernel: int = 5
    support: Support = "rows"
    reads_cache: ClassVar[bool] = True

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        attention = mean_attention(evidence, range(evidence.model.layers), "all")
        # Averages over heads and layers commute with the pooling.
        alone = torch.from_numpy(attention)[None]
        rows = functional.avg_pool1d(alone, self.kernel, stride=1, padding=self.kernel // 2)[0].numpy()
        return Scores(rows, best_of_unit(rows, evidence))
