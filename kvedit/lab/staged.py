"""A case as ids and rows: before the edit, after it, and where the evidence is. No forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvedit.cache.kv import KVCache
from kvedit.cache.rows import Piece, RowTable
from kvedit.lab.case import Case
from kvedit.model.model import Model
from kvedit.policies.evidence import Past
from kvedit.repair.pipeline import Repair
from kvedit.text.document import Document
from kvedit.text.units import unit_of_rows
from kvedit.timing import Timings
from kvedit.tokens.splice import Splice, Tokens

IntArray = npt.NDArray[np.int64]
DIRTY = "dirty"
"""Name of the segment with the rows of the text before the edit."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The rows of a case, as in a session right after the edit.

    Attributes:
        ids: Ids of head and edited text, `int64 [T]`.
        rows: The row table.
        unit: Unit of each row, `int64 [T]`; -1 in the head.
        past: The rows before the edit.
        gold: Rows of the suffix that contain evidence, `bool [T]`.
    """

    ids: IntArray
    rows: RowTable
    unit: IntArray
    past: Past
    gold: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, model: Model, case: Case) -> Staged:
        """Tokenize the text before and after the edit, and align the tokens."""
        head = np.array(model.layout(None).head_ids, dtype=np.int64)
        text = Document(case.text).apply(list(case.edits)).text
        old, new = model.tokenizer.encode_text(case.text), model.tokenizer.encode_text(text)
        old_ids = np.concatenate([head, old.ids])
        whole = RowTable.from_pieces([Piece(DIRTY, 0, len(old_ids))], len(old_ids))
        splice = Splice.align(old, new, list(case.edits), len(case.text))
        rows = whole.splice(splice, len(head), len(old))
        return cls(
            ids=np.concatenate([head, new.ids]),
            rows=rows,
            unit=np.concatenate([np.full(len(head), -1), unit_of_rows(text, new.starts)]),
            past=Past(lambda: old_ids, np.where(rows.missing, -1, rows.index)),
            gold=_rows_within(case.gold, new, len(head)) & rows.suffix,
        )

    def repair(
        self,
        model: Model,
        cache: KVCache,
        query_ids: IntArray,
        *,
        clean: KVCache | None = None,
        timings: Timings | None = None,
    ) -> Repair:
        """Return the pipeline for a question on a cache of these rows, as in `Session.ask`."""
        return Repair(
            model=model,
            cache=cache,
            ids=self.ids,
            rows=self.rows,
            unit=self.unit,
            query_ids=query_ids,
            past=lambda: self.past,
            clean=clean,
            timings=timings or Timings(),
        )


def _rows_within(spans: tuple[tuple[int, int], ...], tokens: Tokens, head: int) -> npt.NDArray[np.bool_]:
    """Mark the rows that touch one of the spans. `bool [T]`."""
    inside = np.zeros(len(tokens), dtype=bool)
    for start, stop in spans:
        inside |= (tokens.stops > start) & (tokens.starts < stop)
    return np.concatenate([np.zeros(head, dtype=bool), inside])
