"""Pooled attention from the question. Motivated by SnapKV (arXiv 2404.14469).

SnapKV evicts, and watches the last rows of the prompt; here the question is the window, and the
pooled score, averaged over layers, says what to refresh. No system is reproduced.
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
        kernel: Rows that are averaged around each, odd; beyond the ends there is no attention.
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
