"""The deviation of one cache from another, and how much of it rounding alone can cause."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Relative deviation that rounding alone can cause, since other chunks mean other orders of summation."""


def deviation(cached: Tensor, clean: Tensor, total: int) -> tuple[tuple[float, ...], np.ndarray]:
    """Return the relative deviation of `[L, H, T, D]` tensors: per layer, and per layer and row.

    Args:
        cached: Keys or values of the cache to check, `[L, H, T or more, D]`.
        clean: The same of a clean prefill.
        total: T, the number of rows to compare.

    Returns:
        One number per layer, and `float32 [L, T]`.
    """
    layers: list[float] = []
    heat = np.zeros((len(cached), total), dtype=np.float32)
    for layer in range(len(cached)):  # one layer at a time: converting all would double the memory
        right = clean[layer, :, :total].float()
        gap = (cached[layer, :, :total].float() - right).square().sum(dim=(0, 2))
        norm = right.square().sum(dim=(0, 2))
        layers.append(float((gap.sum() / norm.sum().clamp_min(1e-30)).sqrt()))
        heat[layer] = (gap / norm.clamp_min(1e-30)).sqrt().cpu().numpy()
    return tuple(layers), heat
