"""The probe: run the question over the shifted cache, observe its attention, restore the cache."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

import torch
from torch import Tensor

from kvedit.policies.evidence import Evidence

Keys = Literal["all", "context"]


def probe(
    evidence: Evidence, layers: Collection[int], keys: Keys, see: Callable[[int, Tensor], None]
) -> None:
    """Walk the bare question after the rows, up to the deepest of `layers`.

    Args:
        evidence: Provides question and cache; cache rows after the text are restored afterwards.
        layers: Indices of the layers whose attention is needed.
        keys: What the softmax covers: `all` rows and, causally, the question; or only the
            `context`, without the question's own keys.
        see: Called with each layer and its attention to the T rows, `float32 [Hq, Nq, T]`.

    Raises:
        ValueError: The question does not fit in the cache.
    """
    model, cache = evidence.model, evidence.cache
    start, count = len(evidence.ids), len(evidence.query_ids)
    stop = start + count
    if stop > cache.capacity:
        raise ValueError(f"the cache has {cache.capacity} rows and the probe needs {stop}")
    if not count:
        return
    visible = torch.ones((count, count), dtype=torch.bool, device=model.device).tril()

    def watch(layer: int, query: Tensor) -> None:
        if layer not in layers:
            return
        folded = query.float().reshape(model.heads, model.groups * count, -1)
        score = folded @ cache.keys[layer, :, :stop].float().transpose(1, 2) * model.scaling
        score = score.view(model.heads * model.groups, count, -1)
        if keys == "context":
            score = score[..., :start]
        else:
            score[..., start:].masked_fill_(~visible, float("-inf"))
        see(layer, torch.softmax(score, dim=-1)[..., :start])

    kept = cache.keys[:, :, start:stop].clone(), cache.values[:, :, start:stop].clone(), cache.length
    try:
        ids, rows = model.to_device(evidence.query_ids), slice(start, stop)
        model.walk(ids, rows, cache, outputs=count, layers=max(layers) + 1, on_query=watch)
    finally:
        cache.keys[:, :, start:stop], cache.values[:, :, start:stop], cache.length = kept
