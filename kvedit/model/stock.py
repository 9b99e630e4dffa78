"""The comparison with the stock forward pass of transformers, which catches what no field says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvedit.rope import rotate

if TYPE_CHECKING:
    from kvedit.model import Model

ROWS = 24
_PAST = 8  # rows of the first of the two walks, so that the second one reads a cache


@dataclass(frozen=True, slots=True)
class Likeness:
    """How far kvedit's walk is from the stock forward pass, on a few ids.

    Attributes:
        forward: Largest difference of two logits, in standard deviations of the stock ones.
        far: The same, with the stock pass at the end of the context: RoPE knows distances alone,
            so a difference means that something else depends on the position.
        limit: What rounding may come to, for both.
        rotation: Largest difference of two rotated keys, in parts of the largest number in them.
        rotation_limit: Of it: none on a CPU, where a rotation is bit for bit the network's own.
    """

    forward: float
    far: float
    limit: float
    rotation: float
    rotation_limit: float


@torch.no_grad()
def compare(model: Model) -> Likeness:
    """Compare the walk of a model with its network's own forward pass.

    Raises:
        AttributeError, RuntimeError, TypeError, ValueError: The layers cannot be walked.
    """
    ids = torch.arange(ROWS, device=model.device) * 7 % model.network.config.vocab_size
    cache = model.new_cache(ROWS)
    model.walk(ids[:_PAST], slice(0, _PAST), cache)
    own = model.logits(model.walk(ids[_PAST:], slice(_PAST, ROWS), cache, outputs=ROWS - _PAST).hidden)
    raw, near = _with_keys(model, ids)
    place = torch.arange(ROWS, device=model.device) + max(0, model.context_length - ROWS)
    far = model.network(ids[None], position_ids=place[None], use_cache=False)
    return Likeness(
        forward=_distance(own, near.logits),
        far=_distance(own, far.logits),
        limit=0.02 if model.dtype == torch.float32 else 0.5,
        rotation=_rotation(model, raw, [layer.keys for layer in near.cache.layers]),
        rotation_limit=0.0 if model.device.type == "cpu" else 0.01,
    )


def _with_keys(model: Model, ids: Tensor) -> tuple[list[Tensor], Any]:
    """Take ids through the network; give each layer's keys before RoPE, and the output with its cache."""
    raw: list[Tensor] = []
    hooks = []
    for layer in model.network.model.layers:
        norm = getattr(layer.self_attn, "k_norm", None)
        last = layer.self_attn.k_proj if norm is None else norm
        hooks.append(last.register_forward_hook(lambda module, given, result: raw.append(result)))
    try:
        return raw, model.network(ids[None], use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()


def _distance(own: Tensor, logits: Tensor) -> float:
    stock = logits[0, _PAST:].float().to(own.device)
    return float((own - stock).abs().max()) / max(float(stock.std()), 1e-6)


def _rotation(model: Model, raw: list[Tensor], held: list[Tensor]) -> float:
    cos, sin = model.rope.angles(torch.arange(ROWS, device=model.device), model.dtype)
    worst = 0.0
    for states, stock in zip(raw, held, strict=True):
        keys = states.reshape(ROWS, model.heads, model.width).transpose(0, 1).to(model.device)
        gap = (rotate(keys, cos, sin) - stock[0].to(model.device)).abs().max()
        worst = max(worst, float(gap) / max(float(keys.abs().max()), 1e-30))
    return worst
