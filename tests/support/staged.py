"""An edited text whose rows are in every state, as evidence for policies."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from kvedit.cache.rows import Piece, RowTable
from kvedit.model.model import Model
from kvedit.policies.evidence import Evidence, Past
from kvedit.repair.refresh import prefill_, refresh_, shift_
from kvedit.text.document import Document, Edit
from kvedit.text.units import unit_of_rows
from kvedit.tokens.splice import Splice

LINES = [
    "The fees are paid within thirty days of the invoice.",
    "The code for the amber-anchor is 4471.",
    "Notices are sent in writing, by post or e-mail.",
    "The customer may cancel at any time. The code for the desk is 9082.",
    "def total(items):",
    "    return sum(item.price for item in items)",
    "The code for the amber-anchor is 5309, and no other.",
    "alpha beta gamma delta epsilon zeta eta theta",
    "The invoice of the customer is sent by post.",
]
QUESTION = "What is the code for the amber-anchor?"


@cache
def staged(model: Model) -> tuple[Evidence, RowTable]:
    """A line deleted, a phrase replaced further on, and a few rows computed since."""
    text = "\n".join(LINES) + "\n"
    gone, said = text.index(LINES[1]), text.index("by post")
    edits = [Edit(gone, gone + len(LINES[1]) + 1), Edit(said, said + 7, "by hand and by ship")]
    head = np.array(model.layout(None).head_ids, dtype=np.int64)
    old = model.tokenizer.encode_text(text)
    edited = Document(text).apply(edits).text
    new = model.tokenizer.encode_text(edited)
    old_ids, ids = np.concatenate([head, old.ids]), np.concatenate([head, new.ids])
    splice = Splice.align(old, new, edits, len(text))
    whole = RowTable.from_pieces([Piece("all", 0, len(old_ids))], len(old_ids))
    rows = whole.splice(splice, len(head), len(old))
    states = [*prefill_(model, model.new_cache(len(old_ids)), model.to_device(old_ids))]
    keys, values = (torch.cat([getattr(part, name) for part in states], dim=2) for name in ("keys", "values"))
    query = model.tokenizer.encode_text(QUESTION).ids
    held, clean = (model.new_cache(len(ids) + len(query) + 3) for _ in range(2))
    shift_(model, held, rows.placed(), {"all": (keys, values)})
    first = int(np.argmax(rows.suffix))
    since = np.union1d(np.flatnonzero(rows.missing), [first, first + 1, first + 20])
    list(refresh_(model, held, model.to_device(ids), since, "packed"))
    list(prefill_(model, clean, model.to_device(ids)))
    # What stands behind the text is not the policy's either.
    noise = torch.Generator().manual_seed(1)
    for part in (held.keys, held.values):
        part[:, :, len(ids) :] = torch.randn(part[:, :, len(ids) :].shape, generator=noise)
    source = np.concatenate(
        [np.arange(len(head)), np.where(splice.source < 0, -1, splice.source + len(head))]
    )
    source[since] = -1
    suffix = rows.suffix
    rows = rows.computed(since, "since")
    unit = np.concatenate([np.full(len(head), -1), unit_of_rows(edited, new.starts)])
    evidence = Evidence(
        model=model,
        cache=held,
        ids=ids,
        unit=unit,
        units=int(unit[-1]) + 1,
        query_ids=query,
        suffix=suffix,
        seed=7,
        past=Past(lambda: old_ids, source),
        clean=clean,
    )
    return evidence, rows
