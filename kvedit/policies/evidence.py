"""The input of a policy, and its interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from kvedit.cache.kv import KVCache
from kvedit.model.model import Model
from kvedit.names import Support
from kvedit.policies.scores import Scores

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Past:
    """The rows as they were when all of them were exact, before the edits.

    Attributes:
        read_ids: Returns their ids; a session tokenizes its past text for it, and few policies need them.
        source: The past row that each current row is, `int64 [T]`; -1 if the row was computed since,
            or has no state.
        find_ids: Returns the ids of some past rows if they are in memory, else `None`.
    """

    read_ids: Callable[[], IntArray]
    source: IntArray
    find_ids: Callable[[IntArray], IntArray | None] = lambda rows: None

    @property
    def ids(self) -> IntArray:
        """The ids of the past rows, `int64 [N]`."""
        return self.read_ids()

    def ids_of(self, rows: IntArray) -> IntArray:
        """Return the ids of some past rows, `int64 [n]`."""
        ids = self.find_ids(rows)
        return self.ids[rows] if ids is None else ids


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a policy may use. It never sees the budget.

    Attributes:
        model: The model; its frozen input embeddings need no forward pass.
        cache: The shifted cache, with capacity for the question after its rows; a probe must
            restore it.
        ids: Ids of all rows, `int64 [T]`.
        unit: Unit of each row, `int64 [T]`; -1 before the body.
        units: U, the number of units.
        query_ids: Ids of the bare question, `int64 [Nq]`.
        suffix: The S eligible rows, which can be selected, `bool [T]`.
        seed: For random policies.
        past: The rows before the edits; `None` if unknown.
        clean: The cache of a clean prefill, for diagnostics only; `None` outside of benches.
    """

    model: Model
    cache: KVCache
    ids: IntArray
    unit: IntArray
    units: int
    query_ids: IntArray
    suffix: npt.NDArray[np.bool_]
    seed: int
    past: Past | None = None
    clean: KVCache | None = None

    @property
    def seams(self) -> IntArray:
        """Rows of the suffix before which the text has changed since they were computed, sorted.

        A seam is where two rows that were neighbours when they were computed no longer are. Rows
        computed since then do not count as a gap.
        """
        if self.past is None:
            return np.zeros(0, dtype=np.int64)
        known = np.flatnonzero(self.past.source >= 0)
        before = np.concatenate([[-1], known[:-1]])
        past = np.concatenate([[-1], self.past.source[known[:-1]]])
        torn = (self.past.source[known] - past) != (known - before)
        # Between two rows that kept their distance, the rows may have been replaced.
        other = np.flatnonzero(self.past.source < 0)
        behind = np.searchsorted(known, other)
        other, behind = other[behind < len(known)], behind[behind < len(known)]
        old = self.past.source[known[behind]] - (known[behind] - other)
        if len(other):
            changed = (old < 0) | (self.past.ids_of(np.maximum(old, 0)) != self.ids[other])
            torn[behind[changed]] = True
        seams: IntArray = known[torn & self.suffix[known]]
        return seams


class Policy(Protocol):
    """A frozen dataclass whose fields are its settings. One file, and one line in `POLICIES`."""

    reads_cache: ClassVar[bool]
    """Whether it reads the shifted cache. If so, rows without a state are computed before it scores."""

    @property
    def support(self) -> Support:
        """The support that its scores are designed for."""

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""


def best_of_unit(rows: npt.NDArray[np.float32], evidence: Evidence) -> npt.NDArray[np.float32]:
    """Score each unit by its best eligible row. `float32 [U]`."""
    best = np.zeros(evidence.units, dtype=np.float32)
    inside = evidence.suffix & (evidence.unit >= 0)
    np.maximum.at(best, evidence.unit[inside], rows[inside])
    return best


def rows_of_units(evidence: Evidence) -> IntArray:
    """Return the rows of all units that have an eligible row. `int64 [N]`, sorted.

    The topic of a unit does not depend on which of its rows are exact already: if a sentence starts
    before the edit, only its end is eligible.
    """
    buyable = np.zeros(evidence.units, dtype=bool)
    buyable[evidence.unit[evidence.suffix & (evidence.unit >= 0)]] = True
    return np.flatnonzero((evidence.unit >= 0) & buyable[evidence.unit])
