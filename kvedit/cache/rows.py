"""Where each row of the cache is stored, and its state: a piece table over segments.

Rows point into immutable segments, like the pieces in a text editor's piece table point into its
buffers. An edit creates a new table and touches no tensor. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kvedit.tokens.splice import Splice

IntArray = npt.NDArray[np.int64]
MISSING = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of adjacent rows: `length` rows from row `start` of `segment`, or missing rows.

    Attributes:
        segment: Name of the segment; `None` for missing rows.
        start: First row within the segment; 0 for missing rows.
        length: Rows in the run.
        refreshed: Recomputed since the last edit before them.
    """

    segment: str | None
    start: int
    length: int
    refreshed: bool = False


@dataclass(frozen=True, slots=True)
class RowTable:
    """All rows of a cache, as arrays with one entry per row.

    Attributes:
        segments: Names of the segments that the rows are stored in.
        segment: Index into `segments`, `int64 [T]`; `MISSING` where a row has no state.
        index: Row within the segment, `int64 [T]`.
        refreshed: Recomputed since the last edit before it, `bool [T]`.
        frontier: The rows before it are exact.
    """

    segments: tuple[str, ...]
    segment: IntArray
    index: IntArray
    refreshed: npt.NDArray[np.bool_]
    frontier: int

    @classmethod
    def from_pieces(cls, pieces: Sequence[Piece], frontier: int) -> RowTable:
        """Expand pieces into arrays."""
        code: dict[str, int] = {}
        for piece in pieces:
            if piece.segment is not None:
                code.setdefault(piece.segment, len(code))
        lengths = [piece.length for piece in pieces]
        codes = [MISSING if piece.segment is None else code[piece.segment] for piece in pieces]
        total = sum(lengths)
        within = np.arange(total) - np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
        starts = np.repeat(np.array([piece.start for piece in pieces], dtype=np.int64), lengths)
        flags = np.repeat(np.array([piece.refreshed for piece in pieces], dtype=bool), lengths)
        segment = np.repeat(np.array(codes, dtype=np.int64), lengths)
        return cls(tuple(code), segment, np.where(segment == MISSING, 0, starts + within), flags, frontier)

    def pieces(self) -> list[Piece]:
        """Return the fewest pieces that represent the arrays."""
        if not len(self):
            return []
        step = (np.diff(self.index) != 1) & (self.segment[1:] != MISSING)
        breaks = step | (np.diff(self.segment) != 0) | (self.refreshed[1:] != self.refreshed[:-1])
        firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        lengths = np.diff(np.append(firsts, len(self)))
        return [
            Piece(
                None if self.segment[at] == MISSING else self.segments[self.segment[at]],
                int(self.index[at]),
                int(length),
                bool(self.refreshed[at]),
            )
            for at, length in zip(firsts.tolist(), lengths.tolist(), strict=True)
        ]

    def placed(self, offset: int = 0) -> list[tuple[int, Piece]]:
        """Return each piece with its first row, counted from `offset`."""
        found: list[tuple[int, Piece]] = []
        for piece in self.pieces():
            found.append((offset, piece))
            offset += piece.length
        return found

    def __len__(self) -> int:
        return len(self.segment)

    @property
    def missing(self) -> npt.NDArray[np.bool_]:
        """Rows without a state, `bool [T]`."""
        return np.equal(self.segment, MISSING)

    @property
    def stale(self) -> npt.NDArray[np.bool_]:
        """Rows computed in a different context and not refreshed since, `bool [T]`."""
        return ~self.missing & ~self.refreshed & (np.arange(len(self)) >= self.frontier)

    @property
    def suffix(self) -> npt.NDArray[np.bool_]:
        """The S eligible rows: those from the frontier on that have a state. `bool [T]`."""
        return ~self.missing & (np.arange(len(self)) >= self.frontier)

    def first(self, count: int) -> RowTable:
        """Return the table of the first `count` rows."""
        return self.within(0, count)

    def within(self, start: int, stop: int) -> RowTable:
        """Return the table of the rows `[start, stop)`."""
        cut = slice(start, stop)
        frontier = min(max(self.frontier - start, 0), stop - start)
        return RowTable(self.segments, self.segment[cut], self.index[cut], self.refreshed[cut], frontier)

    def extended(self, count: int) -> RowTable:
        """Return the table with `count` missing rows appended."""
        none = np.zeros(count, dtype=np.int64)
        return replace(
            self,
            segment=np.concatenate([self.segment, none + MISSING]),
            index=np.concatenate([self.index, none]),
            refreshed=np.concatenate([self.refreshed, none.astype(bool)]),
        )

    def splice(self, splice: Splice, offset: int, body: int) -> RowTable:
        """Return the table after an edit of the body, which has `body` rows from row `offset` on.

        Rows after the body still follow it. They become stale unless the ids of the body are unchanged.
        """
        after = np.arange(offset + body, len(self))
        moved = np.where(splice.source < 0, -1, splice.source + offset)
        source = np.concatenate([np.arange(offset), moved, after])
        none = source < 0
        same = splice.unchanged == body == len(splice.source)
        first_changed = len(source) if same else offset + splice.unchanged
        refreshed = self.refreshed[source] & ~none & (np.arange(len(source)) < first_changed)
        return replace(
            self,
            segment=np.where(none, MISSING, self.segment[source]),
            index=np.where(none, 0, self.index[source]),
            refreshed=refreshed,
            frontier=min(self.frontier, first_changed),
        )

    def found_in(self, past: RowTable) -> IntArray:
        """Return for each row the row of `past` stored at the same place, `int64 [T]`; -1 if none is."""
        names = {name: code for code, name in enumerate(past.segments)}
        code = np.array([*(names.get(name, MISSING) for name in self.segments), MISSING])[self.segment]
        width = int(max(self.index.max(initial=0), past.index.max(initial=0))) + 1
        theirs, ours = past.segment * width + past.index, code * width + self.index
        theirs[past.missing] = -1
        order = np.argsort(theirs, kind="stable")
        at = np.minimum(np.searchsorted(theirs, ours, sorter=order), max(len(theirs) - 1, 0))
        if not len(theirs):
            return np.full(len(self), -1, dtype=np.int64)
        found = order[at]
        return np.where((code != MISSING) & (theirs[found] == ours), found, -1)

    def computed(self, rows: IntArray, segment: str) -> RowTable:
        """Return the table after `rows` (sorted) were recomputed into a segment, in that order.

        A row is exact when it was computed while all rows before it were exact or computed in
        the same pass, so the frontier advances over the run of computed rows that starts at it.
        """
        names = (*self.segments, segment)
        codes, index, refreshed = self.segment.copy(), self.index.copy(), self.refreshed.copy()
        codes[rows] = len(names) - 1
        index[rows] = np.arange(len(rows))
        refreshed[rows] = True
        frontier = frontier_after(self.frontier, rows)
        refreshed[:frontier] = False  # exact rows do not count as refreshed
        return RowTable(names, codes, index, refreshed, frontier)


def frontier_after(frontier: int, rows: IntArray) -> int:
    """Return the frontier after advancing over the run of sorted `rows` that starts at it."""
    ahead = rows[rows >= frontier]
    adjacent = ahead == frontier + np.arange(len(ahead))
    return frontier + int(np.cumprod(adjacent).sum())


def runs(rows: Sequence[int] | IntArray) -> Iterator[tuple[int, int]]:
    """Yield the runs of adjacent numbers in sorted `rows`, as half-open spans."""
    numbered = enumerate(int(row) for row in rows)
    for _, group in groupby(numbered, key=lambda item: item[1] - item[0]):
        adjacent = list(map(itemgetter(1), group))
        yield adjacent[0], adjacent[-1] + 1
