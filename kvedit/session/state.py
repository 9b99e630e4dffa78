"""The state of a session, on disk and in memory. Imports no torch until something is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvedit.cache.rows import RowTable
from kvedit.errors import SessionError
from kvedit.session import reading
from kvedit.session.segments import Segments
from kvedit.store.files import damaged
from kvedit.store.journal import Journal
from kvedit.store.records import Entry, Manifest, Revision
from kvedit.store.store import Store
from kvedit.text.document import Document, Edit, Source
from kvedit.text.units import UNIT_CAP, unit_of_rows
from kvedit.timing import now
from kvedit.tokens.prompt import Prompt, check_context, encode_body
from kvedit.tokens.splice import Splice, Tokens

if TYPE_CHECKING:
    from kvedit.cache.kv import States
    from kvedit.model.model import Model
    from kvedit.repair.working import WorkingCache

IntArray = npt.NDArray[np.int64]


class State:
    """The current state of a session: a document in a model's cache.

    Attributes:
        store: The session's files.
        manifest: What was fixed at load, and the number of the current revision.
        journal: All revisions.
        revision: The current revision.
        document: The current text.
        tokenizer: The tokenizer that encoded it.
        tokens: Its tokens.
        rows: Where each row of head, document and conversation is stored.
        segments: The segments read so far.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.segments = Segments(store)
        self._model: Model | None = None
        self._working: WorkingCache | None = None
        self._body_units: tuple[Tokens, IntArray] | None = None
        self._past: tuple[tuple[str, int], tuple[Callable[[], IntArray], RowTable]] | None = None
        self.reload()

    def reload(self) -> None:
        """Read manifest, journal, tokenizer and current revision from disk."""
        manifest, journal = self.store.read()
        self.tokenizer = reading.tokenizer_of(self.store.read_tokenizer(manifest.tokenizer))
        if self.tokenizer.fingerprint != manifest.model.parts["tokenizer"]:
            raise damaged("the tokenizer", "does not match the model")
        if self._model is not None and manifest.model.differs_from(self._model.parts):
            self._model = self._working = None  # another process has loaded another model
        self._show(manifest, journal, journal.revision(manifest.revision))

    def _show(self, manifest: Manifest, journal: Journal, revision: Revision) -> None:
        document = Document(revision.text, Source(manifest.source, manifest.encoding, manifest.bom))
        tokens = self.tokenizer.encode_text(document.text)
        rows = reading.unrolled(revision, len(manifest.head_ids) + len(tokens) + len(revision.turns))
        self.manifest, self.journal, self.revision = manifest, journal, revision
        self.document, self.tokens, self.rows = document, tokens, rows

    @property
    def ids(self) -> IntArray:
        """Ids of all rows: head, document and conversation. `int64 [T]`."""
        ids = reading.join_ids(self.manifest.head_ids, self.tokens.ids, self.revision.turns)
        reading.check_ids(ids, self._vocabulary)
        return ids

    def ids_reader(self, number: int) -> Callable[[], IntArray]:
        """Return a function that reads the ids of all rows of a revision, `int64 [N]`."""
        # It refers neither to the state nor to the model, which would stay in memory with it.
        return partial(
            reading.read_ids, self.journal, number, self.tokenizer, self.manifest.head_ids, self._vocabulary
        )

    @property
    def _vocabulary(self) -> int | None:
        return None if self._model is None else self._model.vocabulary

    @property
    def units(self) -> IntArray:
        """Unit of each row, `int64 [T]`: -1 for the head; a conversation is split into equal pieces.

        Cached for each text, because every question needs it.
        """
        if self._body_units is None or self._body_units[0] is not self.tokens:
            self._body_units = self.tokens, unit_of_rows(self.document.text, self.tokens.starts)
        body = self._body_units[1]
        conversation = len(self.rows) - self.document_rows
        after = int(body.max(initial=-1)) + 1 + np.arange(conversation) // UNIT_CAP
        return np.concatenate([np.full(len(self.manifest.head_ids), -1), body, after])

    def exact_past(self) -> tuple[Callable[[], IntArray], RowTable] | None:
        """Return a function for the ids of the last earlier revision with exact rows only, and its rows."""
        entry = self.revision.entry
        while entry.parent is not None:
            entry = self.journal.entry(entry.parent)
            if entry.frontier == entry.tokens:
                key = (self.manifest.journal.name, entry.number)
                if self._past is None or self._past[0] != key:
                    rows = reading.unrolled(self.journal.revision(entry.number), entry.tokens)
                    self._past = key, (cache(self.ids_reader(entry.number)), rows)
                return self._past[1]
        return None

    @property
    def document_rows(self) -> int:
        """Rows of head and document, without the conversation."""
        return len(self.manifest.head_ids) + len(self.tokens)

    @property
    def prompt(self) -> Prompt:
        """The layout that was fixed at load."""
        fixed = self.manifest
        return Prompt(fixed.head_ids, fixed.before_question, fixed.after_question, fixed.before_next)

    @property
    def replay_s(self) -> float:
        """Estimated time to recompute every row from the frontier onward."""
        return (len(self.rows) - self.rows.frontier) / self.manifest.prefill_tokens_per_s

    @property
    def model(self) -> Model:
        """The model that computed the rows, opened on first use; raises as `Session.model` does."""
        if self._model is None:
            self.use_model(self.find_model())
        assert self._model is not None
        return self._model

    @property
    def has_model(self) -> bool:
        """Whether the model is open."""
        return self._model is not None

    @property
    def working(self) -> WorkingCache:
        """The working cache, created on first use."""
        if self._working is None:
            from kvedit.repair.working import WorkingCache

            self._working = WorkingCache(self.model)
        return self._working

    def find_model(self, name: str | None = None, report: Callable[[str], None] = lambda text: None) -> Model:
        """Open the model used at load, or the one named; raises the same errors as `model`."""
        return reading.open_recorded_model(self.manifest.model, name, report)

    def use_model(self, model: Model) -> None:
        """Set the model that computed the session's rows.

        Raises:
            SessionError: It is a different model. Names the part that differs.
        """
        if model is self._model:
            return
        reading.check_same_model(self.manifest.model, model)
        reading.check_ids(self.manifest.head_ids, model.vocabulary)
        self.segments.check_sizes(model)
        self._model, self._working = model, None

    @contextmanager
    def writing(self, command: str) -> Iterator[None]:
        """Hold the session's lock, after reading what is on disk now.

        Raises:
            LockedError: Another process is writing the session.
        """
        with self.store.lock(command, now()):
            self.update()
            yield

    def update(self) -> None:
        """Reload if another process has changed the session."""
        if self.store.read_manifest() != self.manifest:
            self.reload()

    def read_segments(self, limit: int | None = None) -> bool:
        """Read and verify the segments of the current rows; return whether all are read.

        Args:
            limit: How many to read now; all if `None`.

        Raises:
            SessionError: A segment is missing or damaged, or its tokens are not the document's.
        """
        return self.segments.read(self.rows, self.ids, self.manifest.model.dtype, self._model, limit)

    def edit(self, edits: Sequence[Edit], command: str) -> Splice:
        """Change the text; nothing is computed. The caller holds the lock.

        Raises:
            ContextError: The text does not fit the model's context.
        """
        document = self.document.apply(edits)
        context = self.manifest.model.context_length
        tokens = encode_body(self.tokenizer, document.text, context)
        head, turns = len(self.manifest.head_ids), self.revision.turns
        shortest = len(self.prompt.question_ids(self.tokenizer, "")) + 1
        total = head + len(tokens) + len(turns)
        if total > len(self.rows):  # an edit that shortens a full context is allowed
            check_context(total, shortest, "the shortest question", context)
        splice = Splice.align(self.tokens, tokens, edits, len(self.document.text))
        rows = self.rows.splice(splice, head, len(self.tokens))
        self.commit(command, rows, document=document, tokens=tokens, changes=tuple(edits))
        return splice

    def commit(
        self,
        command: str,
        rows: RowTable,
        *,
        document: Document | None = None,
        tokens: Tokens | None = None,
        changes: tuple[Edit, ...] = (),
        turns: tuple[int, ...] | None = None,
    ) -> None:
        """Write a revision after the current one and make it current."""
        document = self.document if document is None else document
        tokens = self.tokens if tokens is None else tokens  # may be empty, hence false
        before, number = self.revision.entry, len(self.journal)
        entry = Entry(
            number=number,
            parent=before.number,
            state=number if changes else before.state,
            created=now(),
            command=command,
            edits=before.edits + bool(changes),
            changes=tuple(replace(edit, origin=None) for edit in changes),
            lines=document.line_count,
            tokens=len(rows),
            stale=int(rows.stale.sum()),
            missing=int(rows.missing.sum()),
            frontier=rows.frontier,
        )
        pieces = tuple(rows.pieces())
        revision = Revision(entry, document.text, pieces, self.revision.turns if turns is None else turns)
        try:
            self.store.append(self.journal, revision)
            self._publish(number, () if changes else self.manifest.undone)
        except BaseException:
            # What was written does not count; drop it from memory too.
            with suppress(SessionError):  # report the first error
                self.journal = Journal(self.store.folder, self.manifest.journal)
            raise
        # Rebuilt from its pieces, the table names only segments that it uses.
        self.rows = RowTable.from_pieces(pieces, rows.frontier)
        self.revision, self.document, self.tokens = revision, document, tokens

    def go_to(self, number: int, undone: tuple[int, ...]) -> None:
        """Make an earlier or later revision the current one. The caller holds the lock."""
        before = self.manifest, self.journal, self.revision
        self._show(self.manifest, self.journal, self.journal.revision(number))  # raises if it is damaged
        try:
            self._publish(number, undone)
        except BaseException:
            self._show(*before)
            raise

    def _publish(self, number: int, undone: tuple[int, ...]) -> None:
        manifest = structs.replace(self.manifest, revision=number, undone=undone, journal=self.journal.record)
        self.store.write_manifest(manifest)
        self.manifest = manifest

    def keep(self, parts: Sequence[States], command: str, turns: tuple[int, ...] | None = None) -> None:
        """Keep recomputed rows in a new revision of the same text. The caller holds the lock.

        Args:
            parts: Raw states with ascending rows, in the order they were computed.
            command: The command that computed them.
            turns: The conversation's ids, if it continued; the new rows follow the current ones.
        """
        ids, rows = self.ids, self.rows
        if turns is not None:
            grown = turns[len(self.revision.turns) :]
            ids = np.concatenate([ids, np.array(grown, dtype=np.int64)])
            rows = rows.extended(len(grown))
        for states in parts:
            row_ids = states.rows.cpu().numpy()
            rows = rows.computed(row_ids, self.store.write_segment(states, ids[row_ids]))
        self.commit(command, rows, turns=turns)
