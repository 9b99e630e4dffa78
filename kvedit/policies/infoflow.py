"""Attention from the question, in a band of late layers. Motivated by InfoFlow KV (arXiv 2603.05353).

It uses the method `norm`: the L2 norm, over the question's rows, of the attention to a row, averaged
over heads. The probe runs over the shifted cache, whose positions are correct. The reordering of
chunks does not apply here, and no system is reproduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvedit.names import Support
from kvedit.policies.evidence import Evidence, best_of_unit
from kvedit.policies.probe import probe
from kvedit.policies.scores import Scores


@dataclass(frozen=True, slots=True)
class InfoFlow:
    """Score rows by the norm of the question's attention to them.

    Attributes:
        start: First layer of the band, as a fraction of the depth, rounded.
        stop: Its last layer, likewise. The paper's script uses layers 22 to 25 of 32.
    """

    start: float = 0.69
    stop: float = 0.78
    support: Support = "rows"
    reads_cache: ClassVar[bool] = True

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        deepest = evidence.model.layers - 1
        first, last = (min(round(share * (deepest + 1)), deepest) for share in (self.start, self.stop))
        total = torch.zeros(len(evidence.ids), device=evidence.model.device)

        def see(layer: int, attention: Tensor) -> None:
            total.add_(attention.mean(dim=0).norm(dim=0))

        probe(evidence, range(first, last + 1), "all", see)
        rows = (total / (last - first + 1)).cpu().numpy()
        return Scores(rows, best_of_unit(rows, evidence))
