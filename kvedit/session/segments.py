"""The segments a session has read: raw keys and values, checked against the session's ids."""

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
_GATHER_ROWS = 256  # a short step, and few resident file pages


class Segments:
    """Segments by name, read from the store when first needed.

    Args:
        store: Holds their files.

    Attributes:
        states: Raw keys and values `[L, H, N, D]` of each segment read so far.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.states: dict[str, tuple[Tensor, Tensor]] = {}
        self._ids: dict[str, npt.NDArray[np.int32]] = {}

    def read(
        self, rows: RowTable, ids: IntArray, dtype: str, model: Model | None, limit: int | None = None
    ) -> bool:
        """Read and verify the segments of `rows`, and drop all others; return whether all are read.

        Args:
            rows: The table of the T rows.
            ids: Their token ids, `int64 [T]`.
            dtype: The model's dtype.
            model: The model, if it is open; sizes are then checked too.
            limit: How many segments to read now; all if `None`.

        Raises:
            SessionError: A segment is missing or damaged, or its tokens are not the document's.
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

    def find_ids(self, table: RowTable, rows: IntArray) -> IntArray | None:
        """Return the ids of some rows of a table, `int64 [n]`; `None` unless their segments were read."""
        names = [table.segments[code] if code >= 0 else "" for code in table.segment[rows]]
        if not self._ids.keys() >= set(names):
            return None
        return np.array(
            [self._ids[name][i] for name, i in zip(names, table.index[rows], strict=True)], np.int64
        )

    def check_sizes(self, model: Model) -> None:
        """Raise `SessionError` if the sizes of a segment do not match the model."""
        for name in self.states:
            self._check_sizes(name, model)

    def gather(self, working: WorkingCache, rows: RowTable, wanted: IntArray) -> Iterator[int]:
        """Copy rows into a working cache in batches; yield the number of rows in each batch.

        Args:
            working: Has capacity for all rows of the table.
            rows: A table of rows in the segments read so far.
            wanted: Which of its rows to copy, sorted; none may be missing.
        """
        from kvedit.store.tensorfile import release

        for first in range(0, len(wanted), _GATHER_ROWS):
            yield working.gather_(rows, wanted[first : first + _GATHER_ROWS], self.states)
            for keys, _ in self.states.values():
                release(keys)  # else the whole cache would be in memory twice
        working.cache.length = len(rows)

    def clear(self) -> None:
        """Drop all segments and close their files; they are read again when needed."""
        self.states.clear()
        self._ids.clear()

    def _read(self, name: str, dtype: str, model: Model | None) -> None:
        tensors = self._store.read_segment(name)
        if str(tensors["keys"].dtype) != f"torch.{dtype}":
            raise damaged(f"segment {name}", "does not match the model's dtype")
        self.states[name] = (tensors["keys"], tensors["values"])
        self._ids[name] = tensors["ids"].numpy()
        if model is not None:
            self._check_sizes(name, model)

    def _check_sizes(self, name: str, model: Model) -> None:
        layers, heads, _, width = self.states[name][0].shape
        if (layers, heads, width) != (model.layers, model.heads, model.width):
            raise damaged(f"segment {name}", "does not match the model's sizes")

    def _check_ids(self, piece: Piece, ids: IntArray) -> None:
        stored = self._ids[str(piece.segment)][piece.start : piece.start + piece.length]
        if not np.array_equal(stored, ids):
            raise SessionError(
                f"The session is damaged: segment {piece.segment} holds the wrong tokens.",
                "Load the document again with `kvedit load FILE --force`.",
            )
