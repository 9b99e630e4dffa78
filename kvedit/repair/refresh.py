"""Shift and refresh: rotate rows to their positions, and recompute the selected ones.

The only module that writes recomputed rows. The executors give the same result up to rounding:

    packed    all rows through each layer together, one traversal for all runs (section 3.3)
    interval  one run of adjacent rows at a time through all layers (section A.1)
    direct    the special case of a single run, without index tensors (section 4.4)
    custom    packed, with a compiled attention kernel; experimental, never chosen by `auto` (section G.5)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit.cache.kv import KVCache, States, sent
from kvedit.cache.rope import rotate
from kvedit.cache.rows import Piece, runs
from kvedit.errors import UsageError, check_one_of
from kvedit.model.attention import compiled
from kvedit.model.model import CHUNK_ROWS, PACK_ROWS, Model
from kvedit.names import EXECUTOR_NAMES, Executor

IntArray = npt.NDArray[np.int64]
OnLayer = Callable[[int], None]
OnQuery = Callable[[int, Tensor], None]


def shift_(
    model: Model,
    cache: KVCache,
    placed: Iterable[tuple[int, Piece]],
    segments: Mapping[str, tuple[Tensor, Tensor]],
) -> int:
    """Gather stored rows into the cache, and rotate each raw key to its position.

    Missing rows are not written; they must be refreshed before anything reads them.

    Args:
        model: Provides the rotation.
        cache: Written where a piece has a state.
        placed: Pieces, each with its first row in the cache.
        segments: Raw keys and values, each `[L, H, N, D]`, by segment name.

    Returns:
        Number of rows gathered.

    Raises:
        ValueError: A piece does not fit in the cache, or extends beyond its segment.
    """
    gathered = 0
    for row, piece in placed:
        if piece.segment is None:
            continue
        rows, source = slice(row, row + piece.length), slice(piece.start, piece.start + piece.length)
        cos, sin = model.rope.angles(torch.arange(rows.start, rows.stop, device=model.device), model.dtype)
        held = segments[piece.segment]
        cache.check_rows(row, rows.stop - 1)
        if source.stop > held[0].shape[2]:
            raise ValueError(f"rows to {source.stop} of a segment of {held[0].shape[2]} rows")
        # Copy all layers from another device at once, since every copy has a latency.
        keys, values = (sent(part[:, :, source], cache.keys.device) for part in held)
        # Layer by layer, so that the data stays in the processor's cache.
        for layer in range(model.layers):
            rotate(keys[layer], cos, sin, out=cache.keys[layer, :, rows])
            cache.values[layer, :, rows] = values[layer]
        gathered += piece.length
    return gathered


def choose_executor(name: str, rows: IntArray) -> Executor:
    """Resolve `auto` (direct for one run, packed otherwise) and check `direct`.

    Raises:
        UsageError: `direct` is given, and the rows are not a single run; or the name is unknown.
    """
    count = sum(1 for _ in runs(rows))
    if name == "auto":
        return "direct" if count == 1 else "packed"
    if name == "direct" and count > 1:
        raise UsageError(
            f"The direct executor needs one run of adjacent rows, but {count} runs were selected.",
            "Use --executor packed or auto.",
        )
    check_one_of("executor", name, EXECUTOR_NAMES)
    return name  # type: ignore[return-value]


def refresh_(
    model: Model,
    cache: KVCache,
    ids: Tensor,
    rows: IntArray,
    executor: Executor,
    on_layer: OnLayer = lambda layer: None,
    on_query: OnQuery = lambda layer, query: None,
) -> Iterator[States]:
    """Recompute `rows` through all layers against the mixed cache; yield their raw states in parts.

    More than `PACK_ROWS` rows, or `CHUNK_ROWS` adjacent ones, take several ascending walks, which
    bounds memory. Either way a later row sees the fresh state of every earlier one in each layer, so
    the result is the same.

    Args:
        model: The model.
        cache: Changed at `rows`, in every layer.
        ids: Ids of all rows, `int64 [T]`.
        rows: Rows to recompute, sorted, `int64 [N]`.
        executor: How to recompute them.
        on_layer: Called after each layer of each walk, with the number of layers done.
        on_query: Called with each layer and its rotated queries; not for the last, which does not attend.

    Raises:
        UsageError: `custom` cannot be compiled here.
    """
    attend = compiled if executor == "custom" else None
    for part in _parts(rows, executor):
        place = part if isinstance(part, slice) else torch.from_numpy(part)
        chosen = ids[part if isinstance(part, slice) else model.to_device(part)]
        # Do not keep a reference: the next part is computed while the caller may have freed this one.
        yield model.walk(
            chosen, place, cache, outputs=0, attend=attend, on_layer=on_layer, on_query=on_query
        ).states


def _parts(rows: IntArray, executor: Executor) -> Iterator[slice | IntArray]:
    if executor in ("packed", "custom"):
        for first in range(0, len(rows), PACK_ROWS):
            yield rows[first : first + PACK_ROWS]
    else:
        for start, stop in runs(rows):
            for first in range(start, stop, CHUNK_ROWS):
                yield slice(first, min(first + CHUNK_ROWS, stop))


def prefill_(
    model: Model, cache: KVCache, ids: Tensor, on_layer: OnLayer = lambda layer: None
) -> Iterator[States]:
    """Compute all rows in chunks of adjacent rows, and yield their raw states."""
    rows = np.arange(len(ids), dtype=np.int64)
    return refresh_(model, cache, ids, rows, "direct", on_layer)
