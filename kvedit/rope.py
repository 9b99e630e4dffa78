"""Rotary position embedding: bring keys to their positions.

Keys are kept as they leave the projection, so a shift is one rotation from the raw key to
the new position and never adds up (RoFormer, arXiv 2104.09864; the shift is llama.cpp's
K-shift and PIE's positional integrity encoding, arXiv 2407.03157).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """The frequencies of a model whose RoPE does not depend on the sequence length.

    Attributes:
        inverse_frequencies: `float32 [R / 2]`, scaling (linear, llama3, yarn) included. The first
            R of a head's D dimensions turn; R is less than D in models with partial rotation.
        attention_scaling: Factor on cosine and sine (yarn).
    """

    inverse_frequencies: Tensor
    attention_scaling: float

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Give cosine and sine of `positions` `int64 [N]`, each `[N, R]` in `dtype`."""
        half = positions[:, None].float() * self.inverse_frequencies
        angle = torch.cat((half, half), dim=-1)
        cos, sin = angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling
        return cos.to(dtype), sin.to(dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotate queries or keys `[..., N, D]` by the angles of their rows.

    The two halves of the R dimensions that turn are the two parts of each complex number, as in
    the Llama code of transformers, whose every rounding this repeats: the result is bit for bit
    the same. The other dimensions stay as they are.

    Args:
        states: `[..., N, D]`, before RoPE.
        cos: `[N, R]`, with R up to D.
        sin: `[N, R]`.
        out: Where to put the result; not `states`.
    """
    turned = cos.shape[-1]
    half = turned // 2
    out = torch.empty_like(states) if out is None else out
    torch.mul(states[..., :turned], cos, out=out[..., :turned])
    out[..., :half] -= states[..., half:turned] * sin[:, :half]
    out[..., half:turned] += states[..., :half] * sin[:, half:]
    if turned < states.shape[-1]:
        out[..., turned:] = states[..., turned:]
    return out
