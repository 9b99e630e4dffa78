"""Attention, staleness and closure over inputs, greedily. Motivated by a public vLLM fork's selector.

A recomputed row needs recomputed inputs, so a block counts less while the blocks before it are stale.
We know of no paper with the fork's formula. The attention is that of `qcfuse`; no system is
reproduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvedit.names import Support
from kvedit.policies.attention import blocks, layer_at, mean_attention, sums
from kvedit.policies.evidence import Evidence
from kvedit.policies.scores import Scores

FloatArray = npt.NDArray[np.float32]

_NEAR, _FALL, _FAR = 0.06, -1.25, 0.0085
"""Assumed attention between blocks at distance d: `_NEAR * d ** _FALL + _FAR`."""
_SINK = 0.554
"""Assumed attention to block 0, whatever the distance."""
_STALE = -1 / 3
"""Staleness falls with the block's number: `(1 + b) ** _STALE`."""
_CLOSURE = 0.1


@dataclass(frozen=True, slots=True)
class Neighbor:
    """Rank blocks in the order of a greedy selection that starts with the first block.

    Attributes:
        depth: The layer whose attention is read, as a fraction of the depth.
        block: Rows per block, counted from the first eligible row.
    """

    depth: float = 0.5
    block: int = 16
    support: Support = "units"
    reads_cache: ClassVar[bool] = True

    def score(self, evidence: Evidence) -> Scores:
        """Score rows by attention, and the policy's own units by their order of selection."""
        layer = layer_at(self.depth, evidence.model.layers)
        rows = mean_attention(evidence, [layer], "all")
        unit = blocks(evidence, self.block)
        return Scores(rows, _turns(sums(rows, unit, evidence)), unit)


def _turns(attention: FloatArray) -> FloatArray:
    """Select one block after another by the largest gain; the first scores n, the last 1. `float32 [n]`.

    Given the blocks selected so far, the gain of b is
    `attention * staleness * (c + got) / (c + total)`, where got and total are the assumed attention of b to
    the selected, and to all, earlier blocks.
    """
    count = len(attention)
    turns = np.zeros(count, dtype=np.float32)
    distance = np.arange(1, count + 1, dtype=np.float64)
    kernel = _NEAR * distance**_FALL + _FAR
    total = np.concatenate([[0.0, 0.0], np.cumsum(kernel)])[:count]
    total[1:] += _SINK
    gain = attention * distance**_STALE / (_CLOSURE + total)
    got, best = np.zeros(count), 0
    for turn in range(count, 0, -1):
        turns[best] = turn
        got[best + 1 :] += kernel[: count - best - 1] if best else _SINK
        best = int(np.argmax(np.where(turns > 0, -1, gain * (_CLOSURE + got))))
    return turns
