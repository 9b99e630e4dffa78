"""What a policy sees, and what it gives back."""

from __future__ import annotations

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
        ids: Their ids, `int64 [N]`.
        source: For each present row the past row that it is, `int64 [T]`; -1 for a row that was
            computed since, or has no state.
    """

    ids: IntArray
    source: IntArray


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a policy may look at. It never sees the budget.

    Attributes:
        model: The model; its frozen input embeddings cost no forward pass.
        cache: The shifted cache, with room for the question behind its rows; a probe must leave
            it untouched.
        ids: Ids of all rows, `int64 [T]`.
        unit: Unit of each row, `int64 [T]`; -1 before the body.
        units: U, how many units there are.
        query_ids: Ids of the bare question, `int64 [Nq]`.
        suffix: The S rows that may be bought, `bool [T]`.
        seed: For policies that draw.
        past: Before the edits; `None` where that is not known.
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

        A seam stands where two rows that were neighbours no longer are; rows that were
        computed since do not count as a gap.
        """
        if self.past is None:
            return np.zeros(0, dtype=np.int64)
        known = np.flatnonzero(self.past.source >= 0)
        before = np.concatenate([[-1], known[:-1]])
        past = np.concatenate([[-1], self.past.source[known[:-1]]])
        torn = (self.past.source[known] - past) != (known - before)
        # Between two rows that kept their distance there may be others in place of the old ones.
        other = np.flatnonzero(self.past.source < 0)
        behind = np.searchsorted(known, other)
        other, behind = other[behind < len(known)], behind[behind < len(known)]
        old = self.past.source[known[behind]] - (known[behind] - other)
        changed = (old < 0) | (self.past.ids[np.maximum(old, 0)] != self.ids[other])
        torn[behind[changed]] = True
        seams: IntArray = known[torn & self.suffix[known]]
        return seams


class Policy(Protocol):
    """A frozen dataclass whose fields are its settings. One file, one line in `POLICIES`."""

    reads_cache: ClassVar[bool]
    """Whether it reads the shifted cache; rows without a state are then computed before it scores."""

    @property
    def support(self) -> Support:
        """The support that its scores are made for."""

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""


def best_of_unit(rows: npt.NDArray[np.float32], evidence: Evidence) -> npt.NDArray[np.float32]:
    """Score each unit by its best row among those that may be bought. `float32 [U]`."""
    best = np.zeros(evidence.units, dtype=np.float32)
    inside = evidence.suffix & (evidence.unit >= 0)
    np.maximum.at(best, evidence.unit[inside], rows[inside])
    return best


def rows_of_units(evidence: Evidence) -> IntArray:
    """Return the rows of all units of which a row may be bought. `int64 [N]`, sorted.

    What a unit is about does not hang on which of its rows are exact already: of a sentence
    whose beginning stands before the edit, only the end may be bought.
    """
    buyable = np.zeros(evidence.units, dtype=bool)
    buyable[evidence.unit[evidence.suffix & (evidence.unit >= 0)]] = True
    return np.flatnonzero((evidence.unit >= 0) & buyable[evidence.unit])
