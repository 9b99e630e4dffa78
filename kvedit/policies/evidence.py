"""What a policy sees, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvedit.cache import KVCache
from kvedit.model import Model
from kvedit.select import Rule


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a policy may look at. It never sees the budget.

    Attributes:
        model: The model; its frozen input embeddings cost no forward pass.
        cache: The shifted cache; a probe must leave it untouched.
        ids: Ids of all rows, `int64 [T]`.
        unit: Unit of each row, `int64 [T]`; -1 before the body.
        units: U, how many units there are.
        query_ids: Ids of the bare question, `int64 [Nq]`.
        suffix: The S rows that may be bought, `bool [T]`.
        seed: For policies that draw.
    """

    model: Model
    cache: KVCache
    ids: npt.NDArray[np.int64]
    unit: npt.NDArray[np.int64]
    units: int
    query_ids: npt.NDArray[np.int64]
    suffix: npt.NDArray[np.bool_]
    seed: int


@dataclass(frozen=True, slots=True)
class Scores:
    """How much each row and each unit matters to the question; larger is more.

    Attributes:
        rows: `float32 [T]`.
        units: `float32 [U]`.
    """

    rows: npt.NDArray[np.float32]
    units: npt.NDArray[np.float32]


class Policy(Protocol):
    """A frozen dataclass whose fields are its settings. One file a policy, one line in `POLICIES`."""

    @property
    def rule(self) -> Rule:
        """The support rule that its scores are made for."""

    def score(self, evidence: Evidence) -> Scores:
        """Score rows and units."""


def best_of_unit(rows: npt.NDArray[np.float32], evidence: Evidence) -> npt.NDArray[np.float32]:
    """Score each unit by its best row among those that may be bought. `float32 [U]`."""
    best = np.zeros(evidence.units, dtype=np.float32)
    inside = evidence.suffix & (evidence.unit >= 0)
    np.maximum.at(best, evidence.unit[inside], rows[inside])
    return best
