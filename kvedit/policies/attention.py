"""The attention that rows get from the question, as the policies that ask for it share it."""

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
    """Average attention to each row over `layers`, heads and the question's rows. `float32 [T]`."""
    total = torch.zeros(len(evidence.ids), device=evidence.model.device)

    def see(layer: int, attention: Tensor) -> None:
        total.add_(attention.mean(dim=(0, 1)))

    probe(evidence, layers, keys, see)
    mean: FloatArray = (total / len(layers)).cpu().numpy()
    return mean


def layer_at(depth: float, layers: int) -> int:
    """Return the layer at a share of the depth: 0 is the first, 1 the last."""
    return min(int(depth * layers), layers - 1)


def blocks(evidence: Evidence, width: int) -> IntArray:
    """Cut rows into blocks of `width` from the first row that may be bought; -1 before it. `int64 [T]`."""
    rows = np.arange(len(evidence.suffix))
    first = np.flatnonzero(np.append(evidence.suffix, True))[0]
    numbered: IntArray = np.maximum((rows - first) // width, -1)
    return numbered


def sums(rows: FloatArray, unit: IntArray, evidence: Evidence) -> FloatArray:
    """Add up, for each unit, its rows that may be bought. `float32 [U]`, U as `unit` has it."""
    inside = evidence.suffix & (unit >= 0)
    total = np.bincount(unit[inside], weights=rows[inside], minlength=int(unit.max(initial=-1)) + 1)
    return total.astype(np.float32)
