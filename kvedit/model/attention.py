"""Attention of the walk: each row looks at every cached row up to itself.

A kind of attention is prepared for the rows of a walk once and then called in each layer:

    masked    blocks of rows under a mask; for any rows
    adjacent  many adjacent rows without a mask, on a CPU
    compiled  experimental, from torch.compile; never chosen by itself
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache as once
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvedit.cache.kv import KVCache, sent
from kvedit.errors import UsageError

Mix = Callable[[int, Tensor], Tensor]
"""Attend in one layer, by index, with rotated queries: `[Hq, N, D] -> [N, Hq * D]`."""
Attend = Callable[[KVCache, Tensor, float], Mix]
"""Prepare attention to a cache for rows, sorted `int64 [N]` on the host, with the factor on the scores."""

BLOCK_ROWS = 128
"""Rows that attend together at most; a block reads keys only up to its last row."""
_PART_KEYS = 512
"""Keys at least that a thread attends to; the kernel takes so many at once."""
_WASTE = 8192
"""Pairs of query and key that a block may read for nothing: what 128 adjacent rows do."""


def choose(rows: slice | Tensor, count: int, device: torch.device) -> Attend:
    """Give the kind that is fastest for rows."""
    many = isinstance(rows, slice) and count > BLOCK_ROWS and device.type == "cpu"
    return adjacent if many else masked


def cut(rows: list[int]) -> list[tuple[int, int]]:
    """Cut sorted rows into blocks `[first, last)` that attend together.

    A block reads keys up to its last row for all of its rows. It ends before a row that would
    make it read more than a quarter as much in vain as it needs; a little waste costs less
    than another call.
    """
    blocks: list[tuple[int, int]] = []
    first, waste, needed = 0, 0, rows[0] + 1
    for at in range(1, len(rows)):
        waste += (at - first) * (rows[at] - rows[at - 1])
        needed += rows[at] + 1
        if at - first == BLOCK_ROWS or waste > max(_WASTE, needed // 4):
            blocks.append((first, at))
            first, waste, needed = at, 0, rows[at] + 1
    return [*blocks, (first, len(rows))]


def masked(cache: KVCache, place: Tensor, scaling: float) -> Mix:
    """Attend in blocks, each reading keys up to its last row under a mask.

    The query heads of a group share their keys, which are not copied: the members of a group are a batch of
    views of the same keys, and share the mask.
    """
    rows = place.tolist()
    blocks = [(first, last, rows[last - 1] + 1) for first, last in cut(rows)]
    if len(blocks) == 1:
        limit, heads = rows[-1] + 1, cache.keys.shape[1]
        on_cpu = cache.keys.device.type == "cpu"
        parts, step = share(limit, math.lcm(heads, torch.get_num_threads()) // heads if on_cpu else 1)
        if parts > 1 and rows[0] >= limit - step:
            return _shared(cache, place, scaling, parts, step)
        return _folded(cache, place, scaling)
    there = sent(place, cache.keys.device)
    masks = [
        None if last - first == 1 else _mask(there[first:last], limit, cache.keys.dtype)
        for first, last, limit in blocks
    ]

    def mix(layer: int, query: Tensor) -> Tensor:
        heads, width = cache.keys.shape[1], query.shape[-1]
        groups = len(query) // heads
        mixed = []
        for (first, last, limit), mask in zip(blocks, masks, strict=True):
            part = query[:, first:last].view(heads, groups, -1, width).transpose(0, 1)
            keys, values = (
                each[layer, :, :limit].expand(groups, -1, -1, -1) for each in (cache.keys, cache.values)
            )
            found = functional.scaled_dot_product_attention(part, keys, values, attn_mask=mask, scale=scaling)
            mixed.append(found.transpose(0, 1).reshape(len(query), -1, width))
        return torch.cat(mixed, dim=1).transpose(0, 1).flatten(1)

    return mix


def _folded(cache: KVCache, place: Tensor, scaling: float) -> Mix:
    """Attend in one block; the members of a group are rows of one head, so that keys are read once.

    Each member has a mask of its own, which would take much memory for many blocks.
    """
    limit, heads = int(place[-1]) + 1, cache.keys.shape[1]
    keys, values = (part[:, None, :, :limit].unbind() for part in (cache.keys, cache.values))
    mask: Tensor | None = None

    def mix(layer: int, query: Tensor) -> Tensor:
        nonlocal mask
        groups, width = len(query) // heads, query.shape[-1]
        if mask is None and len(place) > 1:  # only now are the groups known
            mask = _mask(sent(place, query.device), limit, query.dtype).repeat(1, 1, groups, 1)
        part = query.reshape(1, heads, -1, width)
        mixed = functional.scaled_dot_product_attention(
            part, keys[layer], values[layer], attn_mask=mask, scale=scaling
        )
        return mixed.reshape(len(query), -1, width).transpose(0, 1).flatten(1)

    return mix


def share(limit: int, wanted: int) -> tuple[int, int]:
    """Cut the keys of rows into parts of one length, which begin at equal steps.

    Returns:
        How many parts, and the step between their beginnings. A part is as long as the step, or a few keys
        longer, so that the last one ends at the limit.
    """
    parts = max(min(wanted, limit // _PART_KEYS), 1)
    return parts, limit // parts


def _shared(cache: KVCache, place: Tensor, scaling: float, parts: int, step: int) -> Mix:
    """Attend in parts of the keys, which threads share, and join the softmaxes by their log-sum-exps.

    A kernel that gives each thread some of the heads leaves threads idle where heads are few (Flash-Decoding,
    Dao and others, 2023). All rows see keys of every part.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    limit, heads = int(place[-1]) + 1, cache.keys.shape[1]
    length = limit - (parts - 1) * step
    keys, values = (
        part[:, :, :limit].unfold(2, length, step).permute(0, 2, 1, 4, 3).unbind()
        for part in (cache.keys, cache.values)
    )
    mask: Tensor | None = None

    def mix(layer: int, query: Tensor) -> Tensor:
        nonlocal mask
        groups, width = len(query) // heads, query.shape[-1]
        if mask is None and (len(place) > 1 or length > step):
            mask = _mask(place, limit, query.dtype).unfold(3, length, step)[0, 0].transpose(0, 1)
            mask = mask.repeat(1, groups, 1)[:, None]
            mask[:-1, ..., step:] = float("-inf")  # the next part begins with them
        part = query.reshape(1, heads, -1, width).expand(parts, -1, -1, -1)
        mixed, sums = flash(part, keys[layer], values[layer], 0.0, False, attn_mask=mask, scale=scaling)
        whole: Tensor = (mixed * sums.softmax(0)[..., None]).sum(0).to(query.dtype)
        return whole.reshape(len(query), -1, width).transpose(0, 1).flatten(1)

    return mix


def _mask(rows: Tensor, limit: int, dtype: torch.dtype) -> Tensor:
    """What is added to scores, `[1, 1, N, limit]`."""
    unseen = torch.arange(limit, device=rows.device) > rows[:, None]
    mask = torch.zeros(unseen.shape, dtype=dtype, device=rows.device)
    return mask.masked_fill_(unseen, float("-inf"))[None, None]


def adjacent(cache: KVCache, place: Tensor, scaling: float) -> Mix:
    """Attend from many adjacent rows without a mask; on a CPU only.

    The rows see all keys before the first of them, and one another causally. The two softmaxes
    are joined by their log-sum-exps (FlashAttention, arXiv 2205.14135, section 3.1), which the
    kernel gives but its public wrapper drops. Reading no mask is what makes prefill as fast as a
    plain forward.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    start, count = int(place[0]), len(place)

    def mix(layer: int, query: Tensor) -> Tensor:
        heads, _, width = query.shape
        keys, values = (part[layer, :, : start + count] for part in (cache.keys, cache.values))
        groups = heads // len(keys)
        own_keys, own_values = (part[None, :, start:].repeat_interleave(groups, 1) for part in (keys, values))
        mixed, own_sum = flash(query[None], own_keys, own_values, 0.0, True, scale=scaling)
        if start:
            folded = query.reshape(1, len(keys), -1, width)
            past, past_sum = flash(
                folded, keys[None, :, :start], values[None, :, :start], 0.0, False, scale=scaling
            )
            past = past.reshape(mixed.shape)
            weight = torch.sigmoid(own_sum - past_sum.reshape(own_sum.shape))[..., None].to(past.dtype)
            mixed = torch.lerp(past, mixed, weight)
        joined: Tensor = mixed[0].transpose(0, 1).flatten(1)
        return joined

    return mix


def compiled(cache: KVCache, place: Tensor, scaling: float) -> Mix:
    """Attend with a compiled kernel: the experimental executor of section G.5.

    On a GPU it is FlexAttention (arXiv 2412.05496) over all rows. On a CPU it is plain masked
    attention, in the blocks of `masked`: FlexAttention's C++ does not compile there for every
    shape (torch 2.13).

    Raises:
        UsageError: When it is called and cannot be compiled, as without a C++ compiler.
    """
    on_cuda = cache.keys.device.type == "cuda"
    return _flex(cache, place, scaling) if on_cuda else _plain(cache, place, scaling)


def _flex(cache: KVCache, place: Tensor, scaling: float) -> Mix:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    limit = int(place[-1]) + 1
    there = sent(place, cache.keys.device)

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= there[row]

    visible = create_block_mask(sees, None, None, len(place), limit, device=there.device.type)

    def mix(layer: int, query: Tensor) -> Tensor:
        keys, values = cache.keys[None, layer, :, :limit], cache.values[None, layer, :, :limit]
        mixed = _run(
            flex_attention,
            query[None], keys, values, block_mask=visible, scale=scaling, enable_gqa=True,
        )  # fmt: skip
        return mixed[0].transpose(0, 1).flatten(1)

    return mix


def _plain(cache: KVCache, place: Tensor, scaling: float) -> Mix:
    rows = place.tolist()
    blocks = [(first, last, rows[last - 1] + 1) for first, last in cut(rows)]
    there = sent(place, cache.keys.device)

    def mix(layer: int, query: Tensor) -> Tensor:
        heads, width = cache.keys.shape[1], query.shape[-1]
        mixed = []
        for first, last, limit in blocks:
            folded = query[:, first:last].reshape(heads, -1, width)
            seen = there[first:last].repeat(len(query) // heads)
            keys, values = cache.keys[layer, :, :limit], cache.values[layer, :, :limit]
            mixed.append(_run(_softmax, folded, keys, values, seen, scaling).view(len(query), -1, width))
        return torch.cat(mixed, dim=1).transpose(0, 1).flatten(1)

    return mix


def _softmax(query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, scaling: float) -> Tensor:
    """Attention as it is written, `[H, N, D] -> [H, N, D]`, row i of N up to key `rows[i]`."""
    score = (query @ keys.transpose(1, 2)).float() * scaling
    unseen = torch.arange(keys.shape[1], device=keys.device) > rows[:, None]
    return torch.softmax(score.masked_fill(unseen, float("-inf")), dim=-1).to(values.dtype) @ values


@once
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)


def _run(function: Callable[..., Tensor], *args: Any, **more: Any) -> Tensor:
    """Run a function compiled, or say in one sentence why it cannot be."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        with warnings.catch_warnings():  # the compiler's own modules warn when they are imported
            warnings.simplefilter("ignore")
            return _compiled(function)(*args, **more)
    except TorchDynamoException as error:
        said = str(error).split("\n\n")[0].split("\n")[0]
        raise UsageError(
            f"The custom executor cannot be compiled here ({said}).",
            "Install a C++ compiler such as g++, or use --executor packed.",
        ) from error
