"""The segments that a session has read: raw keys and values, checked against the session's ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvedit.cache.rows import Piece, RowTable
from kvedit.errors import SessionError
from kvedit.store.files import damaged
from kvedit.store.store import Store

if TYPE_CHECKING:
    from torch import Tensor

    from kvedit.model.model import Model
    from kvedit.repair.working import WorkingCache

IntArray = npt.NDArray[np.int64]
_GATHER_ROWS = 256  # a short piece, and few pages of files at once


class Segments:
    """Segments by name, read from the store when they are first needed.

    Args:
        store: Where their files are.

    Attributes:
        states: Raw keys and values `[L, H, N, D]` of each segment that was read.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.states: dict[str, tuple[Tensor, Tensor]] = {}
        self._ids: dict[str, npt.NDArray[np.int32]] = {}

    def read(
        self, rows: RowTable, ids: IntArray, dtype: str, model: Model | None, limit: int | None = None
    ) -> bool:
        """Read and verify the segments that `rows` live in, drop all others; return whether all are read.

        Args:
            rows: The table of the T rows.
            ids: Their token ids, `int64 [T]`.
            dtype: The model's dtype.
            model: The model, if it is open; then sizes are checked too.
            limit: How many segments may be read now; all if `None`.

        Raises:
            SessionError: One is missing or damaged, or holds other tokens than the document.
        """
        for name in set(self.states) - set(rows.segments):
            del self.states[name], self._ids[name]
        row = 0
        for piece in rows.pieces():
            if piece.segment is not None:
                if piece.segment not in self.states:
                    if limit == 0:
                        return False
                    limit = None if limit is None else limit - 1
                    self._read(piece.segment, dtype, model)
                self._check_ids(piece, ids[row : row + piece.length])
            row += piece.length
        return True

    def check_sizes(self, model: Model) -> None:
        """Raise `SessionError` if a segment that was read has other sizes than the model."""
        for name, (keys, _) in self.states.items():
            layers, heads, _, width = keys.shape
            if (layers, heads, width) != (model.layers, model.heads, model.width):
                raise damaged(f"segment {name}", "has other sizes than the model")

    def gather(self, working: WorkingCache, rows: RowTable, wanted: IntArray) -> Iterator[int]:
        """Bring rows into a working cache, some at a time; yield how many each time.

        Args:
            working: Has room for all rows of the table.
            rows: A table of rows in the segments that were read.
            wanted: Which of its rows, sorted; none of them is missing.
        """
        from kvedit.store.tensorfile import release

        for first in range(0, len(wanted), _GATHER_ROWS):
            yield working.gather_(rows, wanted[first : first + _GATHER_ROWS], self.states)
            for keys, _ in self.states.values():
                release(keys)  # a cache that is gathered from all its segments would be in memory twice
        working.cache.length = len(rows)

    def clear(self) -> None:
        """Drop all segments, which closes their files; they are read again when needed."""
        self.states.clear()
        self._ids.clear()

    def _read(self, name: str, dtype: str, model: Model | None) -> None:
        tensors = self._store.read_segment(name)
        if str(tensors["keys"].dtype) != f"torch.{dtype}":
            raise damaged(f"segment {name}", "has another dtype than the model")
        self.states[name] = (tensors["keys"], tensors["values"])
        self._ids[name] = tensors["ids"].numpy()
        if model is not None:
            self.check_sizes(model)

    def _check_ids(self, piece: Piece, ids: IntArray) -> None:
        held = self._ids[str(piece.segment)][piece.start : piece.start + piece.length]
        if not np.array_equal(held, ids):
            raise SessionError(
                f"The session is damaged: segment {piece.segment} holds the wrong tokens.",
                "Load the document again with `kvedit load FILE --force`.",
            )
