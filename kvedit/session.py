"""A session: load a document, edit it, repair its cache, ask. The order of steps, no mathematics.

Loads no torch until something is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvedit.document import Document, Edit, LineRange, Source
from kvedit.errors import SessionError, UsageError
from kvedit.prompt import Prompt
from kvedit.reports import Answer, Removal, Status
from kvedit.rows import RowTable
from kvedit.select import Budget
from kvedit.store import Manifest, ModelRecord, Revision, Store, splice_text
from kvedit.timing import Timings, now
from kvedit.tokenizer import Tokenizer
from kvedit.tokens import Splice, Tokens

if TYPE_CHECKING:
    from torch import Tensor

    from kvedit.cache import States
    from kvedit.model import Model

IntArray = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Called with rows done and rows in all."""


class Session:
    """A document in a model's cache.

    Attributes:
        store: Its files.
        manifest: What was fixed at load.
        revision: The present state.
        document: The present text.
        tokenizer: The tokenizer that encoded it.
        tokens: Its tokens.
        rows: Where each row lives.
        model: The model, once it is at hand.
        segments: Raw keys and values `[L, H, N, D]` by segment, once read.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest
        self.tokenizer = Tokenizer(store.read_tokenizer(manifest.tokenizer))
        self.revision = store.read_revision(manifest.revision)
        self.document = Document(store.read_text(self.revision.text))
        self.tokens: Tokens = self.tokenizer.encode_text(self.document.text)
        self.rows = RowTable.from_pieces(self.revision.rows, self.revision.frontier)
        expected = len(manifest.head_ids) + len(self.tokens)
        if len(self.rows) != expected:
            raise SessionError(
                f"The session is damaged: it has {len(self.rows)} rows for {expected} tokens.",
                "Load the document again with `kvedit load FILE --force`.",
            )
        self.model: Model | None = None
        self.segments: dict[str, tuple[Tensor, Tensor]] = {}
        self._segment_ids: dict[str, npt.NDArray[np.int32]] = {}

    @property
    def ids(self) -> IntArray:
        """Ids of all rows: head and document. `int64 [T]`."""
        return np.concatenate([np.array(self.manifest.head_ids, dtype=np.int64), self.tokens.ids])

    @property
    def prompt(self) -> Prompt:
        """The layout that was fixed at load."""
        kept = self.manifest
        return Prompt(kept.head_ids, kept.before_question, kept.after_question)

    @property
    def replay_s(self) -> float:
        """Estimated time of recomputing every row from the frontier on."""
        return (len(self.rows) - self.rows.frontier) / self.manifest.prefill_tokens_per_s

    @classmethod
    def open(cls, store: Store) -> Session:
        """Open a session without its model; raises `SessionError` when it is missing or damaged."""
        return cls(store, store.read_manifest())

    @classmethod
    def load(
        cls,
        store: Store,
        text: str,
        source: Source,
        model: Model,
        model_record: ModelRecord,
        *,
        system: str | None = None,
        timings: Timings | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Session:
        """Prefill a document into a new session, in place of the one in `store` if there is one.

        The caller holds the store's lock. Until the last step the old session stays as it was.

        Raises:
            ModelError: The model's own forward pass differs from kvedit's.
            ContextError: The document is longer than the model's context.
        """
        from kvedit.load import prefill_document

        manifest = prefill_document(
            store, text, source, model, model_record, system, timings or Timings(), progress
        )
        session = cls(store, manifest)
        session.model = model
        return session

    def delete(self, ranges: Sequence[LineRange]) -> Removal:
        """Delete lines; every range counts the lines before the command. Nothing is computed.

        The caller holds the store's lock.

        Raises:
            UsageError: A range lies outside the document.
        """
        if not ranges:
            raise UsageError("No lines were named.", "Give --lines A-B, for example --lines 40-60.")
        edits = self.document.deletions(ranges)
        removed = sum(self.document.text.count("\n", edit.start, edit.stop) for edit in edits)
        if edits[-1].stop == len(self.document.text) and not self.document.text.endswith("\n"):
            removed += 1
        before, written = len(self.tokens), self.store.written_bytes
        command = "delete " + " ".join(f"--lines {lines}" for lines in ranges)
        self._edit(edits, command)
        return Removal(
            lines=removed,
            tokens=before - len(self.tokens),
            missing=int(self.rows.missing.sum()),
            stale=int(self.rows.stale.sum()),
            suffix=int(self.rows.suffix.sum()),
            replay_s=self.replay_s,
            written_bytes=self.store.written_bytes - written,
        )

    def _edit(self, edits: list[Edit], command: str) -> None:
        document = self.document.apply(edits)
        tokens = self.tokenizer.encode_text(document.text)
        splice = Splice.align(self.tokens, tokens, edits, len(self.document.text))
        rows = self.rows.splice(splice, len(self.manifest.head_ids))
        inserted = [self.store.write_text(edit.text) if edit.text else "" for edit in edits]
        text = splice_text(self.revision.text, edits, inserted)
        revision = replace(self.revision, command=command, edits=self.revision.edits + 1, text=text)
        self._commit(revision, rows)
        self.document, self.tokens = document, tokens

    def _commit(self, revision: Revision, rows: RowTable) -> None:
        """Write a revision after the present one, and make it the present one."""
        revision = replace(
            revision,
            number=self.revision.number + 1,
            parent=self.manifest.revision,
            created=now(),
            rows=tuple(rows.pieces()),
            frontier=rows.frontier,
        )
        manifest = replace(self.manifest, revision=self.store.write_revision(revision))
        self.store.write_manifest(manifest)
        self.manifest, self.revision, self.rows = manifest, revision, rows

    def status(self) -> Status:
        """Say what the session holds."""
        rows = self.rows
        stale, missing, suffix = (int(part.sum()) for part in (rows.stale, rows.missing, rows.suffix))
        return Status(
            name=self.store.name,
            model=self.manifest.model.name,
            dtype=self.manifest.model.dtype,
            context_length=self.manifest.model.context_length,
            lines=self.document.line_count,
            tokens=len(rows),
            suffix=suffix,
            frontier=rows.frontier,
            exact=rows.frontier,
            refreshed=suffix - stale,
            stale=stale,
            missing=missing,
            size_bytes=self.store.size_bytes(),
            edits=self.revision.edits,
            created=self.manifest.created,
        )

    def use_model(self, model: Model) -> None:
        """Give the session the model that computed its rows.

        Raises:
            SessionError: It is another model; names the part that differs.
        """
        for part, recorded in self.manifest.model.parts.items():
            if model.parts.get(part) != recorded:
                raise SessionError(
                    f"The session was computed by another model: the {part.replace('_', ' ')} differs.",
                    f"Use the model '{self.manifest.model.name}' as it was, or load the document "
                    "again with `kvedit load FILE --force`.",
                )
        self.model = model

    def read_segments(self) -> None:
        """Read and verify the segments that the present rows live in.

        Raises:
            SessionError: One is missing or damaged, or holds other tokens than the document.
        """
        ids = self.ids
        row = 0
        for piece in self.rows.pieces():
            if piece.segment is not None:
                if piece.segment not in self.segments:
                    tensors = self.store.read_segment(piece.segment)
                    self.segments[piece.segment] = (tensors["keys"], tensors["values"])
                    self._segment_ids[piece.segment] = tensors["ids"].numpy()
                held = self._segment_ids[piece.segment][piece.start : piece.start + piece.length]
                if not np.array_equal(held, ids[row : row + piece.length]):
                    raise SessionError(
                        f"The session is damaged: segment {piece.segment} holds the wrong tokens.",
                        "Load the document again with `kvedit load FILE --force`.",
                    )
            row += piece.length

    def ask(
        self,
        question: str,
        *,
        budget: Budget | None = None,
        policy: str = "sur",
        executor: str = "auto",
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        keep: bool = True,
        timings: Timings | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        on_phase: Callable[[str], None] = lambda name: None,
    ) -> Answer:
        """Repair the cache on a budget and answer. Needs `use_model` before.

        The document, its ids and its exact rows stay as they are; the question's and the
        answer's rows never enter the store. With `keep` the caller holds the store's lock.

        Args:
            question: The user's words.
            budget: How many rows may be refreshed; 5 %, but at least 64, if not given.
            policy: Name in `kvedit.policies.POLICIES`.
            executor: `auto`, `packed`, `interval` or `direct`.
            max_new_tokens: Ids in the answer at most; what is left of the context, up to
                256, if not given.
            temperature: 0 takes the likeliest id.
            seed: For sampling and for policies that draw.
            keep: Keep refreshed rows in the session.
            timings: Where to put the phases, if some were measured before.
            on_text: Gets the answer's text as it comes.
            on_phase: Gets the name of each phase as it begins.

        Raises:
            UsageError: A policy, an executor or a number that has no meaning.
            ContextError: Document, question and answer do not fit the context.
            SessionError: A segment is damaged.
        """
        from kvedit.ask import Asking

        asking = Asking(self, timings or Timings(), on_phase)
        return asking.run(
            question,
            budget or Budget.default(),
            policy,
            executor,
            max_new_tokens,
            temperature,
            seed,
            keep,
            on_text,
        )

    def keep(self, parts: list[States]) -> None:
        """Keep recomputed rows, in a revision of the same text."""
        from kvedit.load import keep_states

        rows = self.rows
        for states in _merged(parts):
            rows = keep_states(self.store, rows, states, self.ids)
        self._commit(replace(self.revision, command="ask"), rows)


def _merged(parts: list[States]) -> list[States]:
    """Join small parts, so that many short runs do not become many small segments."""
    from kvedit.cache import States
    from kvedit.model import CHUNK_ROWS

    groups: list[list[States]] = []
    size = CHUNK_ROWS
    for part in parts:
        if size + len(part.rows) > CHUNK_ROWS:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += len(part.rows)
    return [States.concatenate(group) for group in groups]
