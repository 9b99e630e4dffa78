"""Attention from the question, in all layers. Motivated by ProphetKV (arXiv 2602.02579).

It uses the score: softmax over the context only, averaged over heads, question and layers. The full
paper was not available, so the formula follows an independent reproduction. No system is reproduced
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvedit.names import Support
from kvedit.policies.attention import mean_attention
from kvedit.policies.evidence import Evidence, best_of_unit
from kvedit.policies.scores import Scores


@dataclass(frozen=True, slots=True)
class ProphetKV:
    """Score rows by the question's mean attention within the context, over all layers."""

    support: Support = "rows"
    reads_cache: ClassVar[bool] = True

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        rows = mean_attention(evidence, range(evidence.model.layers), "context")
        return Scores(rows, best_of_unit(rows, evidence))
