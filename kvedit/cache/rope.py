"""Rotary position embedding: rotate keys to their positions.

Keys are stored as they leave the projection, so a shift is one rotation from the raw key to
the new position, and errors do not accumulate (RoFormer, arXiv 2104.09864; the shift is llama.cpp's
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
        inverse_frequencies: `float32 [R / 2]`, including scaling (linear, llama3, yarn). The first
            R of a head's D dimensions are rotated; R is less than D in models with partial RoPE.
        attention_scaling: Factor applied to cosine and sine (yarn).
    """

    inverse_frequencies: Tensor
    attention_scaling: float

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of positions `int64 [N]` for `rotate`, each `[N, R]` in `dtype`."""
        half = positions[:, None].float() * self.inverse_frequencies
        cos, sin = half.cos() * self.attention_scaling, half.sin() * self.attention_scaling
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotate queries or keys by the angles of their rows.

    The two halves of the R rotated dimensions are the real and imaginary parts of complex numbers,
    as in the Llama code of transformers. This repeats every rounding of that code, so the result is
    bit-identical. The other dimensions are unchanged.

    Args:
        states: `[..., D]`, before RoPE.
        cos: `[..., R]`, with R up to D; broadcast to the states.
        sin: `[..., R]`, negated in its first half.
        out: Tensor for the result; must not be `states`.
    """
    turned = cos.shape[-1]
    out = torch.empty_like(states) if out is None else out
    part = states[..., :turned]
    swapped = torch.roll(part, turned // 2, -1)
    torch.mul(part, cos, out=out[..., :turned]).add_(swapped.mul_(sin))
    if turned < states.shape[-1]:
        out[..., turned:] = states[..., turned:]
    return out
