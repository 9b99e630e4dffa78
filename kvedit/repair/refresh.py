"""Shift and refresh: bring rows to their positions, and recompute the chosen ones.

The only room that writes recomputed rows. The executors give the same result to rounding:

    packed    all rows through each layer together, one traversal for all runs (section 3.3)
    interval  one run of adjacent rows at a time through all layers (section A.1)
    direct    packed's special case of a single run, without index tensors (section 4.4)
    custom    packed with a compiled attention, experimental and never chosen by `auto` (section G.5)
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
    """Gather stored rows into the cache, each key rotated from its raw form to its position.

    A missing row is left as it is; it must be refreshed before anything reads it.

    Args:
        model: Gives the rotation.
        cache: Filled where a piece has a state.
        placed: Pieces, each with the row that it starts at.
        segments: Raw keys and values `[L, H, N, D]` by name of segment.

    Returns:
        Rows gathered.

    Raises:
        ValueError: A piece does not fit into the cache, or ends after its segment.
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
        # From another device all layers come in one copy, since each copy makes somebody wait.
        keys, values = (sent(part[:, :, source], cache.keys.device) for part in held)
        # Layer by layer, so that what is rotated is still at hand in the processor's cache.
        for layer in range(model.layers):
            rotate(keys[layer], cos, sin, out=cache.keys[layer, :, rows])
            cache.values[layer, :, rows] = values[layer]
        gathered += piece.length
    return gathered


def choose_executor(name: str, rows: IntArray) -> Executor:
    """Resolve `auto` (direct for one run, packed otherwise) and check `direct`.

    Raises:
        UsageError: `direct` was asked for, and the rows are no single run.
    """
    count = sum(1 for _ in runs(rows))
    if name == "auto":
        return "direct" if count == 1 else "packed"
    if name == "direct" and count > 1:
        raise UsageError(
            f"The direct executor takes one run of adjacent rows, and {count} runs were selected.",
            "Use --executor packed, or auto.",
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
    """Recompute `rows` through all layers against the mixed cache; give their raw states in parts.

    More than `PACK_ROWS` rows, or `CHUNK_ROWS` adjacent ones, go in several walks, ascending: a later
    row sees the fresh state of every earlier one in each layer either way, so the result is the same
    and memory bounded.

    Args:
        model: The model.
        cache: Changed at `rows`, in every layer.
        ids: Ids of all rows, `int64 [T]`.
        rows: Rows to recompute, sorted, `int64 [N]`.
        executor: How.
        on_layer: Called with the number of layers done, after each layer of each walk.
        on_query: Called with the rotated queries of each layer that attends; the last one does not.

    Raises:
        UsageError: `custom` cannot be compiled here.
    """
    attend = compiled if executor == "custom" else None
    for part in _parts(rows, executor):
        place = part if isinstance(part, slice) else torch.from_numpy(part)
        chosen = ids[part if isinstance(part, slice) else model.to_device(part)]
        # Given away, not held: the next part's states are made while nobody keeps these.
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
    """Compute all rows, in chunks of adjacent rows; give their raw states. A replay of everything."""
    rows = np.arange(len(ids), dtype=np.int64)
    return refresh_(model, cache, ids, rows, "direct", on_layer)
