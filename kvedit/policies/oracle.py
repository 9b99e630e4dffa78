"""Deviation of each row from a clean prefill: a diagnostic, for benches only.

Row-wise change of keys and values, as in Models Take Notes at Prefill (arXiv 2606.17107), but
normalized per layer, since deep layers would dominate otherwise. It is not an upper bound: the rows
that deviate most are not those whose recomputation helps most (arXiv 2609.17983).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from kvedit.errors import UsageError
from kvedit.names import Support
from kvedit.policies.evidence import Evidence, best_of_unit
from kvedit.policies.scores import Scores


@dataclass(frozen=True, slots=True)
class Oracle:
    """Score rows by their deviation from the clean cache, in layers from index 1.

    Layer 0 is left out: it depends only on ids and positions, so a shift makes it exact.
    """

    support: Support = "rows"
    reads_cache: ClassVar[bool] = True

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units.

        Raises:
            UsageError: There is no clean cache.
        """
        clean, count = evidence.clean, len(evidence.ids)
        if clean is None:
            raise UsageError(
                "The policy oracle needs a clean prefill, which is available only in a bench.",
                "Use it in a bench, or choose another policy.",
            )
        total = torch.zeros(count, device=evidence.cache.keys.device)
        for layer in range(1, evidence.model.layers):
            for right, held in (
                (clean.keys, evidence.cache.keys),
                (clean.values, evidence.cache.values),
            ):
                exact = right[layer, :, :count].float()
                off = (exact - held[layer, :, :count].float()).square().sum(dim=(0, 2))
                usual = exact.square().sum(dim=(0, 2)).mean()
                total += (off / usual.clamp(min=1e-12)).sqrt()
        rows = (total / max(evidence.model.layers - 1, 1)).cpu().numpy()
        rows[~evidence.suffix] = 0
        return Scores(rows.astype(np.float32), best_of_unit(rows, evidence))
