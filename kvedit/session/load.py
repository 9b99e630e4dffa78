"""Load and purge: prefill a document into a session, one segment per chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvedit.cache.memory import check_memory, trim
from kvedit.cache.rows import MISSING, RowTable
from kvedit.checkpoint.opening import open_model
from kvedit.checkpoint.resolve import resolve
from kvedit.errors import SessionError
from kvedit.model.model import CHUNK_ROWS, Model
from kvedit.repair.refresh import prefill_
from kvedit.repair.reports import Purge
from kvedit.session.reading import join_ids
from kvedit.session.state import State
from kvedit.store.home import Home
from kvedit.store.journal import Journal
from kvedit.store.records import Entry, JournalRecord, Manifest, ModelRecord, Revision
from kvedit.store.store import Store
from kvedit.text.document import Document
from kvedit.timing import Timings, clock, now, waiter
from kvedit.tokens.prompt import check_context, encode_body

IntArray = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Called with the number of rows done and the total."""


def load(
    document: Document,
    model: Model | str,
    name: str,
    home: Home,
    system: str | None,
    device: str,
    dtype: str,
    force: bool,
    timings: Timings,
    progress: Progress,
    report: Callable[[str], None],
) -> State:
    """Prefill a document into a new session; see `Session.load`."""
    with timings.measure("load"):
        if isinstance(model, Model):
            model_name, directory = str(model.directory), model.directory
        else:
            directory, model_name = resolve(model, report), model
            model = open_model(directory, device=device, dtype=dtype)
    directory = directory.resolve()
    record = ModelRecord(
        name=str(directory) if Path(model_name).resolve() == directory else model_name,
        directory=str(directory),
        dtype=model.dtype_name,
        device=device,
        context_length=model.context_length,
        parts=model.parts,
    )
    store = home.store(name)
    with store.lock("load", now(), new=True):
        home.new_store(name, force)
        _prefill_document(store, document, model, record, system, timings, progress)
        home.keep_out_of_version_control()
        state = State(store)
    state.use_model(model)
    return state


def purge(state: State, progress: Progress) -> Purge:
    """Prefill the current text from scratch and drop everything else; see `Session.purge`."""
    start, store = clock(), state.store
    with state.writing("purge"):
        before, revisions = store.size_bytes(), len(state.journal)
        model, written = state.model, store.written_bytes
        state.segments.clear()  # their files are mapped, and Windows cannot remove a mapped file
        _prefill_again(store, state.manifest, state.document, model, progress)
        state.reload()
        state.read_segments()
        size, written = store.size_bytes(), store.written_bytes - written
        return Purge(len(state.rows), revisions, max(0, before + written - size), size, clock() - start)


def _prefill_document(
    store: Store,
    document: Document,
    model: Model,
    record: ModelRecord,
    system: str | None,
    timings: Timings,
    progress: Progress,
) -> None:
    """Prefill a document into `store`; if that fails, remove what was written."""
    prompt = model.layout(system)
    body = encode_body(model.tokenizer, document.text, model.context_length)
    ids = join_ids(prompt.head_ids, body.ids)
    shortest = len(prompt.question_ids(model.tokenizer, "")) + 1
    check_context(len(ids), shortest, "the shortest question", model.context_length)
    _check_memory(model, len(ids))
    _remove_orphans(store)
    try:
        rows = _prefill(store, model, ids, timings, progress)
        created = now()
        manifest = Manifest(
            created=created,
            used=Home(store.folder.parent).next_use(),
            source=document.source.path,
            encoding=document.source.encoding,
            bom=document.source.bom,
            system=system,
            model=record,
            tokenizer=store.write_tokenizer(model.tokenizer.serialized),
            head_ids=prompt.head_ids,
            before_question=prompt.before_question,
            after_question=prompt.after_question,
            before_next=prompt.before_next,
            prefill_tokens_per_s=len(ids) / timings.seconds("prefill"),
            journal=JournalRecord("", 0, ""),
            revision=0,
            undone=(),
        )
        _begin(store, manifest, document, rows, "load")
    except BaseException:
        _remove_orphans(store)
        raise


def _prefill_again(
    store: Store, manifest: Manifest, document: Document, model: Model, progress: Progress
) -> None:
    """Prefill the current text into a session without history."""
    timings = Timings()
    ids = join_ids(manifest.head_ids, model.tokenizer.encode_text(document.text).ids)
    _check_memory(model, len(ids))
    try:
        rows = _prefill(store, model, ids, timings, progress)
        speed = len(ids) / timings.seconds("prefill")
        fresh = replace(manifest, prefill_tokens_per_s=speed, revision=0, undone=())
        _begin(store, fresh, document, rows, "purge")
    except BaseException:
        _remove_orphans(store)
        raise


def _begin(store: Store, manifest: Manifest, document: Document, rows: RowTable, command: str) -> None:
    """Write the first revision of a new journal, publish it, and remove everything older."""
    entry = Entry(
        number=0,
        parent=None,
        state=0,
        created=now(),
        command=command,
        edits=0,
        changes=(),
        lines=document.line_count,
        tokens=len(rows),
        stale=0,
        missing=0,
        frontier=rows.frontier,
    )
    journal = Journal(store.folder, None)
    store.append(journal, Revision(entry, document.text, tuple(rows.pieces())))
    manifest = replace(manifest, journal=journal.record)
    store.write_manifest(manifest)
    store.sweep(manifest, journal)


def _check_memory(model: Model, count: int) -> None:
    """Raise `KveditError`, before anything is computed, if the cache would not fit into memory."""
    needed = model.cache_bytes(count) + model.walk_bytes(min(count, CHUNK_ROWS))
    check_memory(f"A document of {count:,} tokens", needed, model.device)


def _prefill(store: Store, model: Model, ids: IntArray, timings: Timings, progress: Progress) -> RowTable:
    """Compute and save all rows; a chunk is written while the next one is computed."""
    timings.synchronize = waiter(model.device.type)
    count = len(ids)
    zeros = np.zeros(count, dtype=np.int64)
    rows = RowTable((), zeros + MISSING, zeros, zeros.astype(bool), 0)
    trim()  # release what encoding used
    cache = model.new_cache(count)
    done = 0

    def on_layer(layer: int) -> None:
        chunk = min(CHUNK_ROWS, count - done)
        progress(done + chunk * layer // model.layers, count)

    chunks = prefill_(model, cache, model.to_device(ids), on_layer)
    with ThreadPoolExecutor(1) as disk:
        written: Future[str] | None = None
        row_ids = zeros[:0]
        while done < count or written is not None:
            states = None
            if done < count:
                with timings.measure("prefill"):
                    states = next(chunks)
            with timings.measure("save"):
                if written is not None:
                    rows, written = rows.computed(row_ids, written.result()), None
            if states is not None:
                row_ids = states.rows.numpy()
                written = disk.submit(store.write_segment, states, ids[row_ids])
                done += len(row_ids)
                timings.add("prefill", 0.0, len(row_ids))
                progress(done, count)
            trim()
    return rows


def _remove_orphans(store: Store) -> None:
    """Remove what a killed or failed command left behind.

    The files of an unreadable session stay until a load replaces it: another version of kvedit, or
    a person, may be able to recover them.
    """
    with contextlib.suppress(SessionError):
        if store.exists():
            store.sweep(*store.read())
        else:
            store.sweep(None, None)
