"""Dependence on the deleted text. Motivated by Cache-Craft (arXiv 2502.15734).

No other policy here measures how much a row attended to exactly the deleted rows. The paper records
attention in all layers during the first prefill. kvedit does not, so layer 0 serves as a proxy: ids
and past positions determine its attention. For each unit, the paper's cache fix overhead (CFO)
determines how much of it to recompute. No system is reproduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit.cache.kv import KVCache
from kvedit.model.model import CHUNK_ROWS, Model
from kvedit.names import Support
from kvedit.policies.evidence import Evidence
from kvedit.policies.scores import Scores
from kvedit.policies.seam import origins

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_BLOCK_ROWS = 128
"""Maximum number of rows whose attention is in memory at once."""


@dataclass(frozen=True, slots=True)
class CacheCraft:
    """Assign each unit a share of the budget, for the rows that read most of the deleted text.

    With c a unit, c' another chunk of the past before it, and A the layer-0 attention:

        a = sum over c' of A(c, c') / (|c| |c'|)    b = A(c, c) / |c|^2    CCI = sigmoid(a / b)
        CFO = CCI * A(c, deleted) / A(c, all before c)    share: CFO * |c|

    Rows score share / (rank within the unit), D'Hondt's method, so that the B best rows keep those
    proportions for every B. Units score CFO. Without a past all scores are 0.
    """

    support: Support = "rows"
    reads_cache: ClassVar[bool] = False

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""
        rows = np.zeros(len(evidence.ids), dtype=np.float32)
        units = np.zeros(evidence.units, dtype=np.float32)
        past = evidence.past
        if past is None:
            return Scores(rows, units)
        origin = origins(evidence.ids, past.ids, past.source)
        chunk, gone = _chunks(evidence, origin, len(past.ids))
        # A row computed since the edit has not read the deleted text.
        held = np.flatnonzero(evidence.suffix & (evidence.unit >= 0) & (past.source >= 0))
        if not len(held) or not gone.any():
            return Scores(rows, units)
        read = _read(evidence.model, past.ids, past.source[held], chunk, gone)
        unit = evidence.unit[held]
        size = np.bincount(unit, minlength=evidence.units)
        from_gone, own, other, spread = (np.bincount(unit, part, evidence.units) for part in read)
        tiny, some = 1e-30, np.maximum(size, 1)
        ratio = (spread / some) / np.maximum(own / some**2, tiny)
        overhead = from_gone / np.maximum(other, tiny) / (1 + np.exp(-ratio))
        order = np.lexsort((-read[0], unit))
        firsts = np.cumsum(size) - size
        rank = np.arange(len(held)) - firsts[unit[order]] + 1
        rows[held[order]] = (overhead * size)[unit[order]] / rank
        return Scores(rows, overhead.astype(np.float32))


def _chunks(evidence: Evidence, origin: IntArray, count: int) -> tuple[IntArray, BoolArray]:
    """Return the chunk of each past row, `int64 [N]`, and which rows were deleted, `bool [N]`.

    Each unit is a chunk (a unit that contains an edit is two: its eligible rows and the others), and
    so is each run of deleted rows.
    """
    kept = origin >= 0
    gone = np.ones(count, dtype=bool)
    gone[origin[kept]] = False
    chunk = np.cumsum(np.diff(gone, prepend=False)) + 2 * (evidence.units + 1)
    chunk[origin[kept]] = (2 * (evidence.unit + 1) + evidence.suffix)[kept]
    return chunk, gone


def _read(
    model: Model, ids: IntArray, wanted: IntArray, chunk: IntArray, gone: BoolArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Measure what given past rows attended to at layer 0, averaged over heads.

    Args:
        model: The model.
        ids: Past ids, `int64 [N]`.
        wanted: The past rows, `int64 [n]`.
        chunk: Chunk of each past row, `int64 [N]`.
        gone: The deleted rows, `bool [N]`.

    Returns:
        Attention to the deleted rows, to the row's own chunk, to others, and to others with each
        row weighted by 1 / (rows of its chunk); each `float64 [n]`.
    """
    cache = KVCache(1, model.heads, len(ids), model.width, dtype=model.dtype, device=model.device)
    sizes = np.bincount(chunk)[chunk]
    lost, weight = (torch.from_numpy(part).float().to(model.device) for part in (gone, 1 / sizes))
    label = model.to_device(chunk)
    asked = np.zeros(len(ids), dtype=bool)
    asked[wanted] = True
    first = int(wanted.min())
    measured = np.zeros((4, len(ids)))

    def watch(stop: int, layer: int, query: Tensor) -> None:
        start = stop - query.shape[1]
        keys = cache.keys[0, :, :stop].float().transpose(1, 2)
        for begin in range(start, stop, _BLOCK_ROWS):
            rows = begin + np.flatnonzero(asked[begin : min(begin + _BLOCK_ROWS, stop)])
            if not len(rows):
                continue
            place = model.to_device(rows)
            folded = query[:, place - start].float().reshape(model.heads, -1, model.width)
            score = (folded @ keys * model.scaling).view(-1, len(rows), stop)
            score.masked_fill_(torch.arange(stop, device=model.device) > place[:, None], float("-inf"))
            attention = torch.softmax(score, dim=-1).mean(dim=0)
            own = label[place, None] == label[:stop]
            other = attention.masked_fill(own, 0)
            parts = (attention @ lost[:stop], (attention * own).sum(1), other.sum(1), other @ weight[:stop])
            measured[:, rows] = torch.stack(parts).cpu().numpy()

    for begin in range(0, len(ids), CHUNK_ROWS):
        part = slice(begin, min(begin + CHUNK_ROWS, len(ids)))
        outputs = min(part.stop - part.start, max(part.stop - first, 0))  # earlier rows are not needed
        see = partial(watch, part.stop)
        model.walk(model.to_device(ids[part]), part, cache, outputs=outputs, layers=1, on_query=see)
    found = measured[:, wanted]
    return found[0], found[1], found[2], found[3]
