"""A session: load a document, edit it, repair its cache, ask. The order of steps, no mathematics.

Loads no torch until something is computed.
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
from kvedit.session.parts import source_document
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
"""Called with rows done and rows in all."""
Lines = str | int | LineRange
"""Lines as `40-60`, as one number, or as a `LineRange`."""
Rows = Budget | str
"""Rows to refresh, as `5%`, `128t`, `0` or `full`, or as a `Budget`."""


class Session:
    """A document in a model's cache, with its past. Every verb of the command line is a method.

    A method that writes takes the session's lock and first reads what another process has
    changed meanwhile; it raises `LockedError` where another process is writing.
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
        """The folder of the session's files; its name is the session's."""
        return self._state.store.folder

    @property
    def name(self) -> str:
        """The session's name."""
        return self._state.store.name

    @property
    def manifest(self) -> Manifest:
        """What was fixed at load, and the number of the present revision."""
        return self._state.manifest

    @property
    def document(self) -> Document:
        """The present text."""
        return self._state.document

    @property
    def rows(self) -> RowTable:
        """Where each row lives and its state: of head, document and conversation."""
        return self._state.rows

    @property
    def model(self) -> Model:
        """The model that computed the rows; opened when it is first needed.

        Raises:
            ModelError: It is unavailable.
            SessionError: The model there now is a different one.
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
            model: An open model, or the name of one to open; the one used at load if `None`.
            report: Called with what is being done to find the model.

        Raises:
            ModelError: It is unavailable.
            SessionError: It is a different model; names the part that differs.
        """
        if model is None or isinstance(model, str):
            model = self._state.find_model(model, report)
        self._state.use_model(model)

    def update(self) -> None:
        """Read what another process has changed."""
        self._state.update()

    @classmethod
    def open(cls, name: str | None = None, *, home: Path | None = None) -> Session:
        """Open a session, without its model.

        Args:
            name: The session's; the current one if not given.
            home: Folder of the sessions; `KVEDIT_HOME` or `.kvedit` if not given.

        Raises:
            SessionError: It is missing or damaged.
        """
        place = _home(home)
        return cls(State(place.current() if name is None else place.store(name)))

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

        Until the last step a session of that name stays as it was.

        Args:
            document: A document, or the path of a file.
            model: Alias, folder, `.gguf` file or hub id; or a model that is open already.
            name: Of the session.
            home: Folder of the sessions; `KVEDIT_HOME` or `.kvedit` if not given.
            system: System text of the prompt.
            device: `auto`, `cpu`, `cuda` or `mps`.
            dtype: `auto`, `float32`, `bfloat16` or `float16`.
            force: Replace a session of that name.
            timings: Gets the phases `load`, `prefill` and `save`.
            progress: Called with rows done and rows in all.
            report: Gets what is being done to find the model.

        Raises:
            UsageError: The file is no text, or there is a session of that name.
            ModelError: The model cannot be had or is not supported.
            ContextError: The document is longer than the model's context.
            KveditError: Its cache does not fit into memory, or the disk is full.
            LockedError: Another process is changing a session of that name.
        """
        document = document if isinstance(document, Document) else Document.read(document)
        place, timings = _home(home), timings or Timings()
        place.new_store(name, force)  # a name that is taken is refused before torch is imported
        with timings.measure("load"):
            from kvedit.session.load import load

        state = load(document, model, name, place, system, device, dtype, force, timings, progress, report)
        return cls(state)

    def delete(self, *ranges: Lines) -> Change:
        """Delete lines; every range counts the lines before the command. Nothing is computed.

        Raises:
            UsageError: A range lies outside the document, or there is none.
        """
        if not ranges:
            raise UsageError("No lines were named.", "Give --lines A-B, for example --lines 40-60.")
        found = [_lines(part) for part in ranges]
        command = "delete " + " ".join(f"--lines {part}" for part in found)
        return self._change(lambda document: document.deletions(found), command)

    def insert(self, text: str, *, after: int, exact: bool = False) -> Change:
        """Insert lines after line `after`; 0 is the top. They are missing until something needs them.

        Args:
            text: The lines; they get the document's line endings, the last one too.
            after: Line that stays before them.
            exact: Take the characters as they are, with no line ending of their own.

        Raises:
            UsageError: There is no such line, or no text.
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
        """Put other lines in the place of some; see `insert`.

        Raises:
            UsageError: The range lies outside the document.
        """
        part = _lines(lines)
        command = f"replace --lines {part} {_text(text, exact)}"
        return self._change(lambda document: edits.replacement(document, part, text, exact=exact), command)

    def move(self, lines: Lines, *, after: int) -> Change:
        """Move lines to stand after line `after`. Their rows keep their states, and are stale.

        Raises:
            UsageError: The range or the line lies outside the document, or the one in the other.
        """
        part = _lines(lines)
        command = f"move --lines {part} --after {after}"
        return self._change(lambda document: edits.movement(document, part, after), command)

    def rewrite(self, text: str, command: str = "edit") -> Change:
        """Make the document read `text`, by the difference of their lines."""
        return self._change(lambda document: edits.difference(document.text, text), command)

    def sync(self) -> Change:
        """Take over what has changed in the file that the session was loaded from.

        Raises:
            UsageError: There is no such file, or it is no text.
        """
        return self.rewrite(self.source_document().text, "sync")

    def source_document(self) -> Document:
        """Read the file that the session was loaded from, as it is now; raises as `sync` does."""
        return source_document(self.manifest, self.document.source.named)

    def undo(self, count: int = 1) -> Change:
        """Undo edits: restore the text and its rows; nothing is recomputed.

        Raises:
            UsageError: There are fewer edits than that.
        """
        command = f"undo {count}" if count > 1 else "undo"
        return self._travel(command, lambda state: history.undo(state, count))

    def redo(self, count: int = 1) -> Change:
        """Make edits again that were undone; raises as `undo` does."""
        command = f"redo {count}" if count > 1 else "redo"
        return self._travel(command, lambda state: history.redo(state, count))

    def checkout(self, revision: int) -> Change:
        """Make any revision of the log the present one.

        Raises:
            UsageError: No revision has that number.
        """
        return self._travel(f"checkout {revision}", lambda state: history.checkout(state, revision))

    def log(self, *, everything: bool = False) -> list[Entry]:
        """Return the revisions that led to the present one, latest first; or all revisions."""
        return history.log(self._state, everything=everything)

    def script(self) -> str:
        """Give the commands that rebuild the present session from its document."""
        past = self.log()[::-1]
        texts = (self._state.journal.revision(entry.number).text for entry in past)
        return script(self._state.manifest, past, texts)

    def export(self) -> bytes:
        """Give the text as it is now, with encoding, line endings and byte order mark as they came."""
        return self.document.encode()

    def text_of(self, revision: int) -> str:
        """Return the text at a revision; raises `UsageError` when no revision has that number."""
        return history.text_of(self._state, revision)

    def forget(self) -> int:
        """Drop the conversation from the context; give its tokens. Earlier revisions still hold it."""
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

        The document, its ids and its exact rows stay as they are. The rows of question and answer
        enter the store only in a conversation. An interrupt while it answers ends the answer.

        Args:
            question: The user's words.
            options: How to answer; the defaults if `None`.
            timings: Where to put the phases, if some were measured before.
            on_text: Called with the answer's text as it comes.
            on_phase: Called with the name of each phase as it begins.
            **fields: Fields of `Options`, in place of those of `options`.

        Raises:
            UsageError: An option is not valid.
            ContextError: Document, question and answer do not fit the context.
            KveditError: The cache does not fit into memory.
            SessionError: A segment is damaged, or the model is another one.
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

        Rows are kept when the last token was taken, and then the `Answer` is in `answer`. From the
        first token to the last the session's lock is held; `close` ends before, and keeps none.
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

        An interrupt stops it, and what was computed until then is kept.

        Args:
            budget: How many, of the rows that are not exact; all of them if not given.
            progress: Called with rows done and rows to do.
        """
        from kvedit.session.heal import heal

        return heal(self._state, _budget(budget, Budget.full()), progress)

    def healing(self) -> Healing:
        """Return a heal that computes a piece whenever its `step` is called, and keeps when told to."""
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
            question: Compare the answers to it too.
            budget: Rows to refresh for the question before comparing; none if not given.
            policy: What chooses them.
            max_new_tokens: Ids in either answer at most.
            conversation: See the conversation.
            progress: Called with rows of the clean prefill done and rows in all.

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
        """Prefill the present text from nothing, and drop all that the session held before.

        Afterwards no file of the session holds anything of an older text, of a question or of an
        answer; the conversation is dropped too.

        Args:
            progress: Called with rows done and rows in all.
        """
        from kvedit.session.load import purge

        return purge(self._state, progress)

    def compact(self) -> int:
        """Remove files that no revision reaches; return the bytes freed."""
        state = self._state
        with state.writing("compact"):
            return state.store.sweep(state.manifest, state.journal)

    def check(self, progress: Progress = lambda done, total: None) -> Checked:
        """Verify every segment and every revision.

        Args:
            progress: Called with steps done and steps in all.
        """
        from kvedit.session.check import check

        return check(self._state, progress)

    def status(self) -> Status:
        """Return what the session holds, in counts."""
        return facts.status(self._state)

    def _change(self, plan: Callable[[Document], Sequence[Edit]], command: str) -> Change:
        """Plan edits on the document as it is now, and make them."""
        with self._state.writing(command.partition(" ")[0]):
            before, planned = facts.Before(self._state), tuple(plan(self.document))
            if planned:
                self._state.edit(planned, command)
            return before.change(command if planned else "", planned)

    def _travel(self, command: str, move: Callable[[State], None]) -> Change:
        """Make another revision the present one, and report the difference."""
        with self._state.writing(command.partition(" ")[0]):
            before = facts.Before(self._state)
            move(self._state)
            return before.change(command)


def _home(folder: Path | None) -> Home:
    return Home.default() if folder is None else Home(folder)


def _lines(part: Lines) -> LineRange:
    return part if isinstance(part, LineRange) else LineRange.parse(str(part))


def _options(options: Options | None, changes: dict[str, Any]) -> Options:
    return Options(**changes) if options is None else replace(options, **changes)


def _budget(rows: Rows | None, default: Budget) -> Budget:
    return Budget.parse(rows) if isinstance(rows, str) else default if rows is None else rows


def _text(text: str, exact: bool) -> str:
    """Write a text as the argument that gives it; the log cuts it short."""
    quoted = shlex.quote(edits.escape(text))
    return f"--exact -- {quoted}" if exact else f"-- {quoted}" if text.startswith("-") else quoted
