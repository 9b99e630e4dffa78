"""The working cache of a session, kept in memory: only rows that differ are gathered again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvedit.cache.rows import MISSING, Piece, RowTable, runs
from kvedit.model.model import Model
from kvedit.repair.refresh import shift_

IntArray = npt.NDArray[np.int64]
_SPARE_ROWS = 64  # spare capacity, so that a few more tokens need no copy


class WorkingCache:
    """Rotated keys and values, and which stored row each cache row holds.

    Args:
        model: Provides sizes and rotation.

    Attributes:
        cache: The keys and values.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.cache = model.new_cache(0)
        self._codes: dict[str, int] = {}
        self._segment: IntArray = np.zeros(0, dtype=np.int64)
        self._index: IntArray = np.zeros(0, dtype=np.int64)

    def wanting(self, capacity: int) -> int:
        """Return the bytes that `reserve` would allocate before it frees the old cache."""
        return self._model.cache_bytes(self._grown(capacity)) if capacity > self.cache.capacity else 0

    def reserve(self, capacity: int) -> None:
        """Grow the cache to at least `capacity` rows."""
        held = self.cache.capacity
        if capacity <= held:
            return
        grown = self._model.new_cache(self._grown(capacity))
        grown.keys[:, :, :held] = self.cache.keys
        grown.values[:, :, :held] = self.cache.values
        more = np.full(grown.capacity - held, MISSING)
        self.cache = grown
        self._segment = np.concatenate([self._segment, more])
        self._index = np.concatenate([self._index, more])

    def _grown(self, capacity: int) -> int:
        return min(capacity + _SPARE_ROWS, max(capacity, self._model.context_length))

    def differing(self, rows: RowTable) -> IntArray:
        """Return the rows whose stored state is not in the cache. `int64 [N]`, sorted."""
        segment, index = self._coded(rows)
        total = len(rows)
        differs = (segment != self._segment[:total]) | (index != self._index[:total])
        return np.flatnonzero(differs & ~rows.missing)

    def gather_(self, rows: RowTable, wanted: IntArray, segments: Mapping[str, tuple[Tensor, Tensor]]) -> int:
        """Gather rows of a table into the cache; return how many.

        Args:
            rows: The table; must fit in the cache.
            wanted: The rows to gather, sorted; all have a state.
            segments: Raw keys and values by segment name.
        """
        placed: list[tuple[int, Piece]] = []
        for start, stop in runs(wanted):
            placed += rows.within(start, stop).placed(start)
        self.forget(wanted)  # marked as empty until all rows are gathered
        gathered = shift_(self._model, self.cache, placed, segments)
        self.settle(rows, wanted)
        self.cache.length = len(rows)
        return gathered

    def forget(self, rows: IntArray) -> None:
        """Mark rows as not holding any stored state."""
        self._segment[rows] = MISSING

    def settle(self, rows: RowTable, place: IntArray) -> None:
        """Record that rows hold the states named by the table."""
        segment, index = self._coded(rows)
        self._segment[place], self._index[place] = segment[place], index[place]

    def _coded(self, rows: RowTable) -> tuple[IntArray, IntArray]:
        codes = [self._codes.setdefault(name, len(self._codes)) for name in rows.segments]
        return np.array([*codes, MISSING], dtype=np.int64)[rows.segment], rows.index
