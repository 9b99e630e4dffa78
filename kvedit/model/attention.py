"""Attention for the walk: each row attends to every cached row up to itself.

A kind of attention is prepared once for the rows of a walk and then called in each layer:

    masked    any rows, in blocks under a mask
    adjacent  many adjacent rows on a CPU, without a mask
    compiled  experimental, with torch.compile; only used on request
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
"""Attend in one layer, given its index and rotated queries: `[Hq, N, D] -> [N, Hq * D]`."""
Attend = Callable[[KVCache, Tensor, float], Mix]
"""Prepare attention to a cache from sorted rows, `int64 [N]` on the host, with a factor on the scores."""

BLOCK_ROWS = 128
"""Most rows of a block, which reads keys only up to its last row."""
_PART_KEYS = 512
"""Fewest keys that a thread attends to; the kernel's block size."""
_WASTE = 8192
"""Masked pairs of query and key that a block may always have; about those of 128 adjacent rows."""


def choose(rows: slice | Tensor, count: int, device: torch.device) -> Attend:
    """Return the fastest kind of attention for `count` rows."""
    many = isinstance(rows, slice) and count > BLOCK_ROWS and device.type == "cpu"
    return adjacent if many else masked


def cut(rows: list[int]) -> list[tuple[int, int]]:
    """Divide sorted rows into blocks `[first, last)` that attend together.

    A block reads keys up to its last row for all of its rows. It ends before a row with which the masked
    pairs would exceed a quarter of the needed ones; a little waste costs less than another call.
    """
    blocks: list[tuple[int, int]] = []
    first, waste, needed = 0, 0, rows[0] + 1
    for index in range(1, len(rows)):
        waste += (index - first) * (rows[index] - rows[index - 1])
        needed += rows[index] + 1
        if index - first == BLOCK_ROWS or waste > max(_WASTE, needed // 4):
            blocks.append((first, index))
            first, waste, needed = index, 0, rows[index] + 1
    return [*blocks, (first, len(rows))]


def masked(cache: KVCache, positions: Tensor, scaling: float) -> Mix:
    """Attend in blocks, each reading keys up to its last row under a mask.

    The query heads of a group form a batch that shares the mask and views of the same keys, so keys are not
    copied.
    """
    rows = positions.tolist()
    blocks = [(first, last, rows[last - 1] + 1) for first, last in cut(rows)]
    if len(blocks) == 1:
        limit, heads = rows[-1] + 1, cache.keys.shape[1]
        on_cpu = cache.keys.device.type == "cpu"
        parts, step = share(limit, math.lcm(heads, torch.get_num_threads()) // heads if on_cpu else 1)
        if parts > 1 and rows[0] >= limit - step:
            return _shared(cache, positions, scaling, parts, step)
        return _folded(cache, positions, scaling)
    on_device = sent(positions, cache.keys.device)
    masks = [
        None if last - first == 1 else _mask(on_device[first:last], limit, cache.keys.dtype)
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
            block = functional.scaled_dot_product_attention(part, keys, values, attn_mask=mask, scale=scaling)
            mixed.append(block.transpose(0, 1).reshape(len(query), -1, width))
        return torch.cat(mixed, dim=1).transpose(0, 1).flatten(1)

    return mix


def _folded(cache: KVCache, positions: Tensor, scaling: float) -> Mix:
    """Attend in one block, with the query heads of a group as rows of one head, so that keys are read once.

    The mask is repeated for each query head of a group, which would take much memory for many blocks.
    """
    limit, heads = int(positions[-1]) + 1, cache.keys.shape[1]
    keys, values = (part[:, None, :, :limit].unbind() for part in (cache.keys, cache.values))
    mask: Tensor | None = None

    def mix(layer: int, query: Tensor) -> Tensor:
        nonlocal mask
        groups, width = len(query) // heads, query.shape[-1]
        if mask is None and len(positions) > 1:  # the number of groups follows from the query
            mask = _mask(sent(positions, query.device), limit, query.dtype).repeat(1, 1, groups, 1)
        part = query.reshape(1, heads, -1, width)
        mixed = functional.scaled_dot_product_attention(
            part, keys[layer], values[layer], attn_mask=mask, scale=scaling
        )
        return mixed.reshape(len(query), -1, width).transpose(0, 1).flatten(1)

    return mix


def share(limit: int, wanted: int) -> tuple[int, int]:
    """Divide `limit` keys into parts of equal length, which start at equal steps.

    Returns:
        The number of parts, at most `wanted`, and the step between their starts. A part is as long as the
        step or a few keys longer, so that the last one ends at the limit.
    """
    parts = max(min(wanted, limit // _PART_KEYS), 1)
    return parts, limit // parts


def _shared(cache: KVCache, positions: Tensor, scaling: float, parts: int, step: int) -> Mix:
    """Attend to parts of the keys in several threads, and combine the softmaxes by their log-sum-exps.

    A kernel that divides heads among threads leaves threads idle if there are few heads (Flash-Decoding,
    Dao et al., 2023). All rows attend to keys of every part.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    limit, heads = int(positions[-1]) + 1, cache.keys.shape[1]
    length = limit - (parts - 1) * step
    keys, values = (
        part[:, :, :limit].unfold(2, length, step).permute(0, 2, 1, 4, 3).unbind()
        for part in (cache.keys, cache.values)
    )
    mask: Tensor | None = None

    def mix(layer: int, query: Tensor) -> Tensor:
        nonlocal mask
        groups, width = len(query) // heads, query.shape[-1]
        if mask is None and (len(positions) > 1 or length > step):
            mask = _mask(positions, limit, query.dtype).unfold(3, length, step)[0, 0].transpose(0, 1)
            mask = mask.repeat(1, groups, 1)[:, None]
            mask[:-1, ..., step:] = float("-inf")  # these keys belong to the next part
        part = query.reshape(1, heads, -1, width).expand(parts, -1, -1, -1)
        mixed, sums = flash(part, keys[layer], values[layer], 0.0, False, attn_mask=mask, scale=scaling)
        combined: Tensor = (mixed * sums.softmax(0)[..., None]).sum(0).to(query.dtype)
        return combined.reshape(len(query), -1, width).transpose(0, 1).flatten(1)

    return mix


def _mask(rows: Tensor, limit: int, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to scores, `[1, 1, N, limit]`: 0 or minus infinity."""
    unseen = torch.arange(limit, device=rows.device) > rows[:, None]
    mask = torch.zeros(unseen.shape, dtype=dtype, device=rows.device)
    return mask.masked_fill_(unseen, float("-inf"))[None, None]


def adjacent(cache: KVCache, positions: Tensor, scaling: float) -> Mix:
    """Attend from many adjacent rows without a mask, on a CPU.

    The rows attend to all keys before the first of them, and causally to one another. The two softmaxes are
    combined by their log-sum-exps (FlashAttention, arXiv 2205.14135, section 3.1), which the kernel returns
    but its public wrapper drops. Without a mask to read, prefill is as fast as a plain forward pass.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    start, count = int(positions[0]), len(positions)

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


def compiled(cache: KVCache, positions: Tensor, scaling: float) -> Mix:
    """Attend with a compiled kernel, the experimental executor of section G.5 of the paper.

    On a GPU this is FlexAttention (arXiv 2412.05496) over all rows. On a CPU it is plain masked attention in
    the blocks of `masked`, because FlexAttention's C++ does not compile there for every shape (torch 2.13).

    Raises:
        UsageError: On the first call, if it cannot be compiled, for example without a C++ compiler.
    """
    on_cuda = cache.keys.device.type == "cuda"
    return _flex(cache, positions, scaling) if on_cuda else _plain(cache, positions, scaling)


def _flex(cache: KVCache, positions: Tensor, scaling: float) -> Mix:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    limit = int(positions[-1]) + 1
    rows = sent(positions, cache.keys.device)

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= rows[row]

    visible = create_block_mask(sees, None, None, len(positions), limit, device=rows.device.type)

    def mix(layer: int, query: Tensor) -> Tensor:
        keys, values = cache.keys[None, layer, :, :limit], cache.values[None, layer, :, :limit]
        mixed = _run(
            flex_attention,
            query[None], keys, values, block_mask=visible, scale=scaling, enable_gqa=True,
        )  # fmt: skip
        return mixed[0].transpose(0, 1).flatten(1)

    return mix


def _plain(cache: KVCache, positions: Tensor, scaling: float) -> Mix:
    rows = positions.tolist()
    blocks = [(first, last, rows[last - 1] + 1) for first, last in cut(rows)]
    on_device = sent(positions, cache.keys.device)

    def mix(layer: int, query: Tensor) -> Tensor:
        heads, width = cache.keys.shape[1], query.shape[-1]
        mixed = []
        for first, last, limit in blocks:
            folded = query[:, first:last].reshape(heads, -1, width)
            seen = on_device[first:last].repeat(len(query) // heads)
            keys, values = cache.keys[layer, :, :limit], cache.values[layer, :, :limit]
            mixed.append(_run(_softmax, folded, keys, values, seen, scaling).view(len(query), -1, width))
        return torch.cat(mixed, dim=1).transpose(0, 1).flatten(1)

    return mix


def _softmax(query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, scaling: float) -> Tensor:
    """Compute masked attention, `[H, N, D] -> [H, N, D]`; query i attends up to key `rows[i]`."""
    score = (query @ keys.transpose(1, 2)).float() * scaling
    unseen = torch.arange(keys.shape[1], device=keys.device) > rows[:, None]
    return torch.softmax(score.masked_fill(unseen, float("-inf")), dim=-1).to(values.dtype) @ values


@once
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)


def _run(function: Callable[..., Tensor], *args: Any, **more: Any) -> Tensor:
    """Compile and run a function; raise `UsageError` if it cannot be compiled."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        with warnings.catch_warnings():  # importing the compiler's modules emits warnings
            warnings.simplefilter("ignore")
            return _compiled(function)(*args, **more)
    except TorchDynamoException as error:
        reason = str(error).split("\n\n")[0].split("\n")[0]
        raise UsageError(
            f"The custom executor cannot be compiled on this machine ({reason}).",
            "Install a C++ compiler such as g++, or use --executor packed.",
        ) from error
