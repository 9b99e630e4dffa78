"""What a policy returns: scores of rows and units, in NumPy arrays. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the budget that is spent before the rest, on rows of its own.

    Attributes:
        share: Of B, rounded up to whole rows; 0 to 1.
        rows: Score of each row for this part, `float32 [T]`; the best rows are taken.
    """

    share: float
    rows: FloatArray


@dataclass(frozen=True, slots=True)
class Scores:
    """How much each row and each unit matters to the question; larger is more.

    Attributes:
        rows: `float32 [T]`.
        units: `float32 [U]`.
        unit: Unit of each row, where the policy has units of its own, `int64 [T]`, -1 for none;
            else the units are the text's.
        first: What is spent first, if anything.
    """

    rows: FloatArray
    units: FloatArray
    unit: IntArray | None = None
    first: Share | None = None
