"""Sessions: load a document, edit it, repair its cache, ask.

Imports no torch until something is computed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvedit.cache.rows import RowTable
from kvedit.errors import UsageError
from kvedit.names import DEFAULT_MODEL, DEFAULT_POLICY
from kvedit.repair.budget import Budget
from kvedit.repair.options import Options
from kvedit.repair.reports import Answer, Change, Explanation, Healed, Purge, Status, Token, Verification
from kvedit.session import facts, history
from kvedit.session.reading import source_document
from kvedit.session.script import script
from kvedit.session.state import State
from kvedit.store.home import Home
from kvedit.store.records import Entry, Manifest
from kvedit.text import edits
from kvedit.text.document import Document, Edit, LineRange
from kvedit.timing import Timings

if TYPE_CHECKING:
    from kvedit.model.model import Model
    from kvedit.session.asking import Answering
    from kvedit.session.check import Checked
    from kvedit.session.heal import Healing

Progress = Callable[[int, int], None]
"""Called with the number of rows or steps done and the total."""
Lines = str | int | LineRange
"""Lines: `40-60`, a single number, or a `LineRange`."""
Rows = Budget | str
"""How many rows to refresh: `5%`, `128t`, `0`, `full`, or a `Budget`."""


class Session:
    """A document in a model's cache, with its history. Each command is a method.

    A method that writes takes the session's lock and first reads what another process has changed;
    it raises `LockedError` if another process is writing.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def __repr__(self) -> str:
        rows = self.rows
        return (
            f"<Session {self.name!r}: {self.document.line_count:,} lines, {len(rows):,} tokens, "
            f"{int(rows.stale.sum()):,} stale, {int(rows.missing.sum()):,} missing>"
        )

    @property
    def folder(self) -> Path:
        """The folder of the session's files, named after the session."""
        return self._state.store.folder

    @property
    def name(self) -> str:
        """The session's name."""
        return self._state.store.name

    @property
    def manifest(self) -> Manifest:
        """What was fixed at load, and the number of the current revision."""
        return self._state.manifest

    @property
    def document(self) -> Document:
        """The current text."""
        return self._state.document

    @property
    def rows(self) -> RowTable:
        """Where each row of head, document and conversation is stored, and its state."""
        return self._state.rows

    @property
    def model(self) -> Model:
        """The model that computed the rows, opened on first use.

        Raises:
            ModelError: The model is unavailable.
            SessionError: The model available now is a different one.
        """
        return self._state.model

    @property
    def has_model(self) -> bool:
        """Whether the model is open."""
        return self._state.has_model

    def use_model(
        self, model: Model | str | None = None, report: Callable[[str], None] = lambda text: None
    ) -> None:
        """Set the model that computed the session's rows.

        Args:
            model: An open model, or the name of one to open. If `None`, the one used at load.
            report: Called with each step of finding the model.

        Raises:
            ModelError: The model is unavailable.
            SessionError: It is a different model. Names the part that differs.
        """
        if model is None or isinstance(model, str):
            model = self._state.find_model(model, report)
        self._state.use_model(model)

    def update(self) -> None:
        """Reload the session if another process has changed it."""
        self._state.update()

    @classmethod
    def open(cls, name: str | None = None, *, home: Path | None = None) -> Session:
        """Open a session, without its model.

        Args:
            name: The session's name; the current session if `None`.
            home: Folder of the sessions; `KVEDIT_HOME` or `.kvedit` if `None`.

        Raises:
            SessionError: The session is missing or damaged.
        """
        sessions = _home(home)
        return cls(State(sessions.current() if name is None else sessions.store(name)))

    @classmethod
    def load(
        cls,
        document: Document | str | Path,
        *,
        model: Model | str = DEFAULT_MODEL,
        name: str = "document",
        home: Path | None = None,
        system: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        force: bool = False,
        timings: Timings | None = None,
        progress: Progress = lambda done, total: None,
        report: Callable[[str], None] = lambda text: None,
    ) -> Session:
        """Prefill a document into a new session, which becomes the current one.

        With `force`, the old session is replaced only in the last step.

        Args:
            document: A document, or the path of a file.
            model: Alias, folder, `.gguf` file or hub id; or an open model.
            name: Name of the session.
            home: Folder of the sessions; `KVEDIT_HOME` or `.kvedit` if `None`.
            system: System text of the prompt.
            device: `auto`, `cpu`, `cuda` or `mps`.
            dtype: `auto`, `float32`, `bfloat16` or `float16`.
            force: Replace an existing session of that name.
            timings: Records the phases `load`, `prefill` and `save`.
            progress: Called with the number of rows done and the total.
            report: Called with each step of finding the model.

        Raises:
            UsageError: The file is not text, or the name is taken.
            ModelError: The model is unavailable or not supported.
            ContextError: The document is longer than the model's context.
            KveditError: The cache does not fit into memory, or the disk is full.
            LockedError: Another process is writing a session of that name.
        """
        document = document if isinstance(document, Document) else Document.read(document)
        sessions, timings = _home(home), timings or Timings()
        sessions.new_store(name, force)  # refuse a taken name before importing torch
        with timings.measure("load"):
            from kvedit.session.load import load

        state = load(document, model, name, sessions, system, device, dtype, force, timings, progress, report)
        return cls(state)

    def delete(self, *ranges: Lines) -> Change:
        """Delete lines; each range counts lines as they were before the command. Nothing is computed.

        Raises:
            UsageError: A range lies outside the document, or none is given.
        """
        if not ranges:
            raise UsageError("No lines given.", "Use --lines A-B, for example --lines 40-60.")
        parsed = [_lines(part) for part in ranges]
        command = "delete " + " ".join(f"--lines {part}" for part in parsed)
        return self._change(lambda document: document.deletions(parsed), command)

    def insert(self, text: str, *, after: int, exact: bool = False) -> Change:
        """Insert lines after line `after`; 0 is the top. Their rows are computed when first needed.

        Args:
            text: The lines. Each gets the document's line ending, including the last.
            after: Number of the line before them.
            exact: Use the characters as they are; add no line ending.

        Raises:
            UsageError: The line does not exist, or the text is empty.
        """
        command = f"insert --after {after} {_text(text, exact)}"
        return self._change(lambda document: edits.insertion(document, after, text, exact=exact), command)

    def append(self, text: str, *, exact: bool = False) -> Change:
        """Insert lines after the last one; see `insert`."""
        return self._change(
            lambda document: edits.insertion(document, document.line_count, text, exact=exact),
            f"append {_text(text, exact)}",
        )

    def replace(self, lines: Lines, text: str, *, exact: bool = False) -> Change:
        """Replace lines with new text; see `insert`.

        Raises:
            UsageError: The range lies outside the document.
        """
        chosen = _lines(lines)
        command = f"replace --lines {chosen} {_text(text, exact)}"
        return self._change(lambda document: edits.replacement(document, chosen, text, exact=exact), command)

    def move(self, lines: Lines, *, after: int) -> Change:
        """Move lines to follow line `after`. Their rows are kept, but become stale.

        Raises:
            UsageError: The range or the line lies outside the document, or the line lies in the range.
        """
        chosen = _lines(lines)
        command = f"move --lines {chosen} --after {after}"
        return self._change(lambda document: edits.movement(document, chosen, after), command)

    def rewrite(self, text: str, command: str = "edit") -> Change:
        """Replace the whole text, editing only the lines that differ."""
        return self._change(lambda document: edits.difference(document.text, text), command)

    def sync(self) -> Change:
        """Apply what has changed in the file that the session was loaded from.

        Raises:
            UsageError: The file is missing or not text.
        """
        return self.rewrite(self.source_document().text, "sync")

    def source_document(self) -> Document:
        """Read the file that the session was loaded from; raises the same errors as `sync`."""
        return source_document(self.manifest, self.document.source.named)

    def undo(self, count: int = 1) -> Change:
        """Undo edits: restore the text and its rows; nothing is recomputed.

        Raises:
            UsageError: Fewer edits can be undone.
        """
        command = f"undo {count}" if count > 1 else "undo"
        return self._travel(command, lambda state: history.undo(state, count))

    def redo(self, count: int = 1) -> Change:
        """Redo undone edits; raises the same errors as `undo`."""
        command = f"redo {count}" if count > 1 else "redo"
        return self._travel(command, lambda state: history.redo(state, count))

    def checkout(self, revision: int) -> Change:
        """Make any revision of the log the current one.

        Raises:
            UsageError: No revision has that number.
        """
        return self._travel(f"checkout {revision}", lambda state: history.checkout(state, revision))

    def log(self, *, everything: bool = False) -> list[Entry]:
        """Return the revisions that led to the current one, or all revisions; latest first."""
        return history.log(self._state, everything=everything)

    def script(self) -> str:
        """Return the commands that rebuild the session from its document."""
        past = self.log()[::-1]
        texts = (self._state.journal.revision(entry.number).text for entry in past)
        return script(self._state.manifest, past, texts)

    def export(self) -> bytes:
        """Return the current text with the original encoding, line endings and byte order mark."""
        return self.document.encode()

    def text_of(self, revision: int) -> str:
        """Return the text of a revision; raises `UsageError` if it does not exist."""
        return history.text_of(self._state, revision)

    def forget(self) -> int:
        """Drop the conversation and return its length in tokens. Earlier revisions still hold it."""
        with self._state.writing("forget"):
            dropped = len(self._state.revision.turns)
            if dropped:
                self._state.commit("forget", self.rows.first(self._state.document_rows), turns=())
            return dropped

    def ask(
        self,
        question: str,
        options: Options | None = None,
        *,
        timings: Timings | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        on_phase: Callable[[str], None] = lambda name: None,
        **fields: Any,
    ) -> Answer:
        """Repair the cache on a budget and answer.

        The document, its ids and its exact rows stay unchanged. Rows of question and answer are
        stored only in a conversation. An interrupt during the answer ends it.

        Args:
            question: The question.
            options: How to answer; the defaults if `None`.
            timings: Records the phases, after any measured before.
            on_text: Called with each piece of the answer as it is decoded.
            on_phase: Called with the name of each phase as it begins.
            **fields: Fields of `Options` that override those of `options`.

        Raises:
            UsageError: An option is not valid.
            ContextError: Document, question and answer do not fit the context.
            KveditError: The cache does not fit into memory.
            SessionError: A segment is damaged, or the model is a different one.
        """
        answering = self.stream(question, options, timings=timings, on_phase=on_phase, **fields)
        for token in answering:
            try:
                on_text(token.text)
            except KeyboardInterrupt:
                answering.interrupt()
        return answering.answer

    def stream(
        self,
        question: str,
        options: Options | None = None,
        *,
        timings: Timings | None = None,
        on_phase: Callable[[str], None] = lambda name: None,
        **fields: Any,
    ) -> Answering:
        """Answer as `ask` does, token by token.

        After the last token, rows are kept and `answer` holds the `Answer`. The session's lock is held
        from the first token to the last. `close` ends early and keeps nothing.
        """
        from kvedit.session.asking import Answering, Asking

        chosen = _options(options, fields)

        def tokens() -> Generator[Token, None, Answer]:
            with self._state.writing("ask") if chosen.keep else nullcontext():
                asking = Asking(self._state, chosen, timings or Timings(), on_phase)
                return (yield from asking.tokens(question))

        return Answering(tokens())

    def explain(self, question: str, options: Options | None = None, **fields: Any) -> Explanation:
        """Return which rows `ask` would refresh, and why, without computing them."""
        from kvedit.session.asking import Asking

        return Asking(self._state, _options(options, fields), Timings(), lambda name: None).explain(question)

    def heal(self, *, budget: Rows | None = None, progress: Progress = lambda done, total: None) -> Healed:
        """Recompute rows from the frontier onward, so that they become exact.

        An interrupt stops it; rows computed so far are kept.

        Args:
            budget: How many of the inexact rows to recompute; all if `None`.
            progress: Called with the number of rows done and the total.
        """
        from kvedit.session.heal import heal

        return heal(self._state, _budget(budget, Budget.full()), progress)

    def healing(self) -> Healing:
        """Return a healing to drive step by step."""
        from kvedit.session.heal import Healing

        return Healing(self._state)

    def verify(
        self,
        question: str | None = None,
        *,
        budget: Rows | None = None,
        policy: str = DEFAULT_POLICY,
        max_new_tokens: int = 64,
        conversation: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> Verification:
        """Compare the working cache with a clean prefill. Nothing is kept.

        Args:
            question: Also compare the answers to it.
            budget: Rows to refresh for the question before comparing; none if `None`.
            policy: The policy that selects them.
            max_new_tokens: Maximum number of tokens per answer.
            conversation: Include the conversation.
            progress: Called with the number of rows prefilled and the total.

        Raises:
            ContextError: The question does not fit the context.
            KveditError: The two caches do not fit into memory.
        """
        from kvedit.session.verify import verify

        options = Options(
            budget=_budget(budget, Budget.parse("0")),
            policy=policy,
            max_new_tokens=max_new_tokens,
            conversation=conversation or question is None,
        )
        return verify(self._state, question, options, max_new_tokens, progress)

    def purge(self, *, progress: Progress = lambda done, total: None) -> Purge:
        """Prefill the current text from scratch and drop everything else in the session.

        Afterwards no file of the session holds any older text, question, answer or conversation.
        """
        from kvedit.session.load import purge

        return purge(self._state, progress)

    def compact(self) -> int:
        """Remove files that no revision uses; return the bytes freed."""
        state = self._state
        with state.writing("compact"):
            return state.store.sweep(state.manifest, state.journal)

    def check(self, progress: Progress = lambda done, total: None) -> Checked:
        """Verify every segment and every revision."""
        from kvedit.session.check import check

        return check(self._state, progress)

    def status(self) -> Status:
        """Return the session's counts: lines, tokens, rows by state, edits, bytes."""
        return facts.status(self._state)

    def _change(self, plan: Callable[[Document], Sequence[Edit]], command: str) -> Change:
        """Plan edits of the current document and apply them."""
        with self._state.writing(command.partition(" ")[0]):
            before, planned = facts.Before(self._state), tuple(plan(self.document))
            if planned:
                self._state.edit(planned, command)
            return before.change(command if planned else "", planned)

    def _travel(self, command: str, move: Callable[[State], None]) -> Change:
        """Make another revision the current one and report the difference."""
        with self._state.writing(command.partition(" ")[0]):
            before = facts.Before(self._state)
            move(self._state)
            return before.change(command)


def _home(folder: Path | None) -> Home:
    return Home.default() if folder is None else Home(folder)


def _lines(lines: Lines) -> LineRange:
    return lines if isinstance(lines, LineRange) else LineRange.parse(str(lines))


def _options(options: Options | None, changes: dict[str, Any]) -> Options:
    return Options(**changes) if options is None else replace(options, **changes)


def _budget(rows: Rows | None, default: Budget) -> Budget:
    return Budget.parse(rows) if isinstance(rows, str) else default if rows is None else rows


def _text(text: str, exact: bool) -> str:
    """Quote a text as command-line arguments; `log` truncates it."""
    quoted = shlex.quote(edits.escape(text))
    return f"--exact -- {quoted}" if exact else f"-- {quoted}" if text.startswith("-") else quoted
