"""The question's attention to rows, shared by the policies that use it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit.policies.evidence import Evidence
from kvedit.policies.probe import Keys, probe

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


def mean_attention(evidence: Evidence, layers: Sequence[int], keys: Keys) -> FloatArray:
    """Return the attention to each row, averaged over layers, heads and question rows. `float32 [T]`."""
    total = torch.zeros(len(evidence.ids), device=evidence.model.device)

    def see(layer: int, attention: Tensor) -> None:
        total.add_(attention.mean(dim=(0, 1)))

    probe(evidence, layers, keys, see)
    mean: FloatArray = (total / len(layers)).cpu().numpy()
    return mean


def layer_at(depth: float, layers: int) -> int:
    """Return the layer at a fraction of the depth: 0 is the first, 1 the last."""
    return min(int(depth * layers), layers - 1)


def blocks(evidence: Evidence, width: int) -> IntArray:
    """Number blocks of `width` rows from the first eligible row; -1 before it. `int64 [T]`."""
    rows = np.arange(len(evidence.suffix))
    first = np.flatnonzero(np.append(evidence.suffix, True))[0]
    numbered: IntArray = np.maximum((rows - first) // width, -1)
    return numbered


def sums(rows: FloatArray, unit: IntArray, evidence: Evidence) -> FloatArray:
    """Return for each unit the sum over its eligible rows. `float32 [U]`, with the U units of `unit`."""
    inside = evidence.suffix & (unit >= 0)
    total = np.bincount(unit[inside], weights=rows[inside], minlength=int(unit.max(initial=-1)) + 1)
    return total.astype(np.float32)
