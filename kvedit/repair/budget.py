"""Budget: how many rows may be refreshed. No torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from kvedit.errors import UsageError

DEFAULT_SHARE = Fraction(5, 100)
DEFAULT_ROWS = 64
_FORMS = "Write a share such as 5%, a number of tokens such as 128t, 0, or full."


@dataclass(frozen=True, slots=True)
class Budget:
    """How many of the S eligible rows to refresh.

    Attributes:
        share: Fraction of S, rounded down to whole rows.
        rows: Minimum number of rows, if the share gives fewer.
        text: The budget as the user wrote it.
    """

    share: Fraction
    rows: int
    text: str

    @classmethod
    def default(cls) -> Budget:
        """Return 5 %, but at least 64 rows: on a short document that costs next to nothing."""
        return cls(DEFAULT_SHARE, DEFAULT_ROWS, f"default (5%, at least {DEFAULT_ROWS}t)")

    @classmethod
    def full(cls) -> Budget:
        """Return a budget for all rows, a replay."""
        return cls(Fraction(1), 0, "full")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read `5%`, `128t`, `0` or `full`.

        Raises:
            UsageError: The text is not one of these forms, or is outside 0 to 100 %.
        """
        word = text.strip().lower()
        if word == "full":
            return cls.full()
        if word == "0":
            return cls(Fraction(0), 0, "0")
        if match := re.fullmatch(r"(-?\d{1,12}(?:\.\d{1,12})?)\s*%", word, re.ASCII):
            share = Fraction(match[1]) / 100
            if not 0 <= share <= 1:
                raise UsageError(f"The budget {text} is outside 0% to 100%.", _FORMS)
            return cls(share, 0, f"{match[1]}%")
        if match := re.fullmatch(r"(\d{1,12})\s*t", word, re.ASCII):
            return cls(Fraction(0), int(match[1]), f"{match[1]}t")
        raise UsageError(f"'{text}' is not a budget.", _FORMS)

    def resolve(self, suffix_rows: int) -> int:
        """Return B for S rows; never more than S."""
        return min(suffix_rows, max(math.floor(self.share * suffix_rows), self.rows))
