"""Token ids with their character spans, and how the ids of an edited text align with the old ones.

After an edit the whole text is tokenized again, so its ids are always those of tokenizing the
current text. A splice records which old rows can be kept. Rows are matched by position,
never by content search, so repeated lines cannot be confused. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvedit.text.document import Edit, kept_spans

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of a text, and the characters of each token.

    Attributes:
        ids: Token ids, `int64 [N]`.
        starts: First character of each token, `int64 [N]`.
        stops: Character after each token, `int64 [N]`.
    """

    ids: IntArray
    starts: IntArray
    stops: IntArray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Splice:
    """Where each new token comes from.

    Attributes:
        source: Old index of each new token, `int64 [N]`; -1 if it has none.
        unchanged: Number of leading tokens whose old and new ids are equal.
    """

    source: IntArray
    unchanged: int

    @classmethod
    def align(cls, old: Tokens, new: Tokens, edits: Sequence[Edit], length: int) -> Splice:
        """Align the tokens of a text with those of the edited text.

        Args:
            old: Tokens of the text before.
            new: Tokens of the text after.
            edits: Sorted, disjoint edits that turn the old text into the new one.
            length: Characters in the text before.
        """
        source = np.full(len(new), -1, dtype=np.int64)
        for old_start, new_start, size in kept_spans(edits, length):  # moved spans too
            _match_span(old, new, source, old_start, new_start, size)
        shared = min(len(old), len(new))
        differs = np.flatnonzero(old.ids[:shared] != new.ids[:shared])
        unchanged = int(differs[0]) if len(differs) else shared
        # A state depends only on the ids up to it, so rows with equal leading ids are the same rows,
        # whatever the edit was. This also keeps as many exact rows as possible.
        source[source < unchanged] = -1  # no row is used twice
        source[:unchanged] = np.arange(unchanged)
        return cls(source, unchanged)


def _match_span(
    old: Tokens, new: Tokens, source: IntArray, old_start: int, new_start: int, size: int
) -> None:
    """Match, in `source`, the tokens that lie within one surviving span of characters."""
    old_rows = _rows_within(old, old_start, size)
    new_rows = _rows_within(new, new_start, size)
    # Tokens that share one character (its bytes are split between them) also share its span.
    # Numbering them keeps the triples (start, stop, number) unique.
    old_parts = _parts(old, old_rows, old_start)
    new_parts = _parts(new, new_rows, new_start)
    spread = np.concatenate([old_parts, new_parts], axis=1).max(axis=1, initial=0) + 1
    old_keys = np.ravel_multi_index(tuple(old_parts), tuple(spread))
    new_keys = np.ravel_multi_index(tuple(new_parts), tuple(spread))
    _, old_at, new_at = np.intersect1d(old_keys, new_keys, assume_unique=True, return_indices=True)
    found_old, found_new = old_rows[old_at], new_rows[new_at]
    same = old.ids[found_old] == new.ids[found_new]
    source[found_new[same]] = found_old[same]


def _rows_within(tokens: Tokens, start: int, size: int) -> IntArray:
    inside = (tokens.starts >= start) & (tokens.stops <= start + size)
    return np.flatnonzero(inside).astype(np.int64)


def _parts(tokens: Tokens, rows: IntArray, start: int) -> IntArray:
    """Return start (relative to `start`), width, and number among tokens with the same span. `[3, N]`."""
    first, width = tokens.starts[rows] - start, tokens.stops[rows] - tokens.starts[rows]
    again = (np.diff(first, prepend=-1) == 0) & (np.diff(width, prepend=-1) == 0)
    number = np.arange(len(rows))
    place = number - np.maximum.accumulate(np.where(again, 0, number)) if len(rows) else number
    return np.stack([first, width, place]).astype(np.int64)
