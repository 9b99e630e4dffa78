"""Load: prefill a document into a session, chunk by chunk, each chunk a segment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvedit.cache import States
from kvedit.document import Edit, Source
from kvedit.errors import SessionError
from kvedit.model import CHUNK_ROWS, Model
from kvedit.prompt import check_context
from kvedit.refresh import prefill_
from kvedit.rows import MISSING, RowTable
from kvedit.store import Manifest, ModelRecord, Revision, Store, splice_text
from kvedit.timing import Timings, now, waiter

IntArray = npt.NDArray[np.int64]


def prefill_document(
    store: Store,
    text: str,
    source: Source,
    model: Model,
    model_record: ModelRecord,
    system: str | None,
    timings: Timings,
    progress: Callable[[int, int], None],
) -> Manifest:
    """Prefill a document; see `Session.load`. What a failed load wrote is removed again."""
    model.check()
    prompt = model.layout(system)
    body = model.tokenizer.encode_text(text)
    ids = np.concatenate([np.array(prompt.head_ids, dtype=np.int64), body.ids])
    shortest = len(prompt.question_ids(model.tokenizer, "")) + 1
    check_context(len(ids), shortest, "the shortest question", model.context_length)
    _remove_orphans(store)
    try:
        timings.synchronize = waiter(model.device.type)
        rows = _prefill(store, model, ids, timings, progress)
        pieces = splice_text((), [Edit(0, 0, text)], [store.write_text(text)])
        revision = Revision(0, None, now(), "load", 0, pieces, tuple(rows.pieces()), rows.frontier)
        manifest = Manifest(
            created=revision.created,
            source=source.path,
            encoding=source.encoding,
            bom=source.bom,
            model=model_record,
            tokenizer=store.write_tokenizer(model.tokenizer.serialized),
            head_ids=prompt.head_ids,
            before_question=prompt.before_question,
            after_question=prompt.after_question,
            prefill_tokens_per_s=len(ids) / timings.seconds("prefill"),
            revision=store.write_revision(revision),
        )
        store.write_manifest(manifest)
        store.sweep(manifest)
        return manifest
    except BaseException:
        _remove_orphans(store)
        raise


def _prefill(
    store: Store, model: Model, ids: IntArray, timings: Timings, progress: Callable[[int, int], None]
) -> RowTable:
    count = len(ids)
    none = np.zeros(count, dtype=np.int64)
    rows = RowTable((), none + MISSING, none, none.astype(bool), 0)
    cache = model.new_cache(count)

    def on_layer(layer: int) -> None:
        chunk = min(CHUNK_ROWS, count - rows.frontier)
        progress(rows.frontier + chunk * layer // model.layers, count)

    chunks = prefill_(model, cache, model.to_device(ids), on_layer)
    while rows.frontier < count:
        before = rows.frontier
        # The disk's time is not the prefill's: its speed is what later estimates stand on.
        with timings.measure("prefill"):
            states = next(chunks)
        with timings.measure("save"):
            rows = keep_states(store, rows, states, ids)
        timings.add("prefill", 0.0, rows.frontier - before)
        progress(rows.frontier, count)
    return rows


def keep_states(store: Store, rows: RowTable, states: States, ids: IntArray) -> RowTable:
    """Write states as a segment and point their rows at it."""
    place = states.rows.cpu().numpy()
    return rows.computed(place, store.write_segment(states, ids[place]))


def _remove_orphans(store: Store) -> None:
    """Remove what a killed or failed command left behind.

    The files of a session that cannot be read stay: until a load replaces it, another kvedit,
    or a person, may still make something of them.
    """
    with contextlib.suppress(SessionError):
        store.sweep(store.read_manifest() if store.exists() else None)
