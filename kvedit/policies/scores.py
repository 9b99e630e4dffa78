"""The result of a policy: scores of rows and units, as NumPy arrays. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the budget that is spent first, by separate row scores.

    Attributes:
        share: Fraction of B, 0 to 1; rounded up to whole rows.
        rows: Scores of the rows for this part, `float32 [T]`; the best rows are selected.
    """

    share: float
    rows: FloatArray


@dataclass(frozen=True, slots=True)
class Scores:
    """How much each row and each unit matters to the question; higher is better.

    Attributes:
        rows: `float32 [T]`.
        units: `float32 [U]`.
        unit: Unit of each row, `int64 [T]`, -1 for none, if the policy defines its own units;
            otherwise the units of the text apply.
        first: The part of the budget that is spent first, if any.
    """

    rows: FloatArray
    units: FloatArray
    unit: IntArray | None = None
    first: Share | None = None
