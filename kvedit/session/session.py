"""A session: load a document, edit it, repair its cache, ask. The order of steps, no mathematics.

Loads no torch until something is computed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvedit.errors import UsageError
from kvedit.names import DEFAULT_MODEL, DEFAULT_POLICY
from kvedit.repair.budget import Budget
from kvedit.repair.options import Options
from kvedit.repair.reports import Answer, Change, Explanation, Healed, Purge, Status, Token, Verification
from kvedit.session.script import script
from kvedit.session.state import KEEP_ROWS, State
from kvedit.store.files import damaged
from kvedit.store.home import Home
from kvedit.store.records import Entry, ModelRecord
from kvedit.text import edits
from kvedit.text.document import Document, Edit, LineRange
from kvedit.timing import Timings, clock, now

if TYPE_CHECKING:
    from kvedit.model.model import Model
    from kvedit.session.asking import Answering

_PIECE_S = 0.5  # what a piece of healing takes: how soon it can be interrupted
Progress = Callable[[int, int], None]
"""Called with rows done and rows in all."""
Lines = str | int | LineRange
"""Lines as `40-60`, as one number, or as a `LineRange`."""
Rows = Budget | str
"""Rows to refresh, as `5%`, `128t`, `0` or `full`, or as a `Budget`."""


class Session(State):
    """A document in a model's cache, with its past. Every verb of the command line is a method.

    A method that writes takes the session's lock and first reads what another process has
    changed meanwhile; it raises `LockedError` where another process is writing.
    """

    @classmethod
    def open(cls, name: str | None = None, *, home: Path | None = None) -> Session:
        """Open a session, without its model.

        Args:
            name: The session's; the current one if not given.
            home: Folder of the sessions; `KVEDIT_HOME` or `.kvedit` if not given.

        Raises:
            SessionError: It is missing or damaged.
        """
        place = Home.default() if home is None else Home(home)
        return cls(place.current() if name is None else place.store(name))

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
        place = Home.default() if home is None else Home(home)
        store, timings = place.store(name), timings or Timings()

        def check_new() -> None:
            if store.exists() and not force:
                raise UsageError(
                    f"There is a session '{store.name}' already.",
                    "Give --force to replace it, or --session NAME for another name.",
                )

        check_new()
        start = clock()
        from kvedit.checkpoint.opening import open_model
        from kvedit.checkpoint.resolve import resolve
        from kvedit.model.model import Model
        from kvedit.session.load import prefill_document

        if isinstance(model, Model):
            called, directory = str(model.directory), model.directory
        else:
            directory, called = resolve(model, report), model
            model = open_model(directory, device=device, dtype=dtype)
        timings.add("load", clock() - start)
        directory = directory.resolve()
        record = ModelRecord(
            name=str(directory) if Path(called).resolve() == directory else called,
            directory=str(directory),
            dtype=model.dtype_name,
            device=device,
            context_length=model.context_length,
            parts=model.parts,
        )
        with store.lock("load", now(), new=True):
            check_new()
            prefill_document(store, document, model, record, system, timings, progress)
            place.keep_out_of_version_control()
            session = cls(store)
        session.use_model(model)
        return session

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
        path = self.manifest.source
        if path == "-":
            raise UsageError(
                "The session was loaded from standard input, not from a file.",
                "Use `kvedit edit`, or load a file.",
            )
        if os.path.exists(path) and not os.path.isfile(path):
            # The path may be a stranger's: a pipe keeps one waiting, and some devices never end.
            raise UsageError(f"{path} is no plain file.", "Load the document from a file.")
        return Document.read(path, self.document.source.named)

    def undo(self, count: int = 1) -> Change:
        """Take back edits: the text and the rows are again as they were. Nothing is computed.

        Raises:
            UsageError: There are not so many edits.
        """
        return self._travel("undo", count)

    def redo(self, count: int = 1) -> Change:
        """Make edits again that were taken back; raises as `undo` does."""
        return self._travel("redo", count)

    def checkout(self, revision: int) -> Change:
        """Make any revision of the log the present one.

        Raises:
            UsageError: There is none of that number.
        """
        with self.writing("checkout"):
            self._check_revision(revision)
            before = self._measures()
            self.go_to(revision, ())
            return self._report(f"checkout {revision}", before, ())

    def log(self, *, everything: bool = False) -> list[Entry]:
        """Give the revisions that led to the present one, the latest first; or all there are."""
        if everything:
            return [self.journal.entry(number) for number in reversed(range(len(self.journal)))]
        found: list[Entry] = []
        at: int | None = self.revision.entry.number
        while at is not None:
            found.append(self.journal.entry(at))
            at = found[-1].parent
        return found

    def script(self) -> str:
        """Give the commands that rebuild the present session from its document."""
        past = self.log()[::-1]
        texts = (self.journal.revision(entry.number).text for entry in past)
        return script(self.manifest, past, texts)

    def export(self) -> bytes:
        """Give the text as it is now, with encoding, line endings and byte order mark as they came."""
        return self.document.encode()

    def text_of(self, revision: int) -> str:
        """Give the text at a revision; raises `UsageError` when there is none of that number."""
        self._check_revision(revision)
        return self.journal.revision(revision).text

    def forget(self) -> int:
        """Drop the conversation from the context; give its tokens. Earlier revisions still hold it."""
        with self.writing("forget"):
            dropped = len(self.revision.turns)
            if dropped:
                self.commit("forget", self.rows.first(self.document_rows), turns=())
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
            with self.writing("ask") if chosen.keep else nullcontext():
                asking = Asking(self, chosen, timings or Timings(), on_phase)
                return (yield from asking.tokens(question))

        return Answering(tokens())

    def explain(self, question: str, options: Options | None = None, **fields: Any) -> Explanation:
        """Return which rows `ask` would refresh, and why, without computing them."""
        from kvedit.session.asking import Asking

        return Asking(self, _options(options, fields), Timings(), lambda name: None).explain(question)

    def heal(self, *, budget: Rows | None = None, progress: Progress = lambda done, total: None) -> Healed:
        """Recompute rows from the frontier onward, so that they become exact.

        An interrupt stops it, and what was computed until then is kept.

        Args:
            budget: How many, of the rows that are not exact; all of them if not given.
            progress: Called with rows done and rows to do.
        """
        from kvedit.session.heal import Healing

        start, finished = clock(), "done"
        with self.writing("heal"):
            healing = Healing(self)
            first = healing.frontier
            goal = _budget(budget, Budget.full()).resolve(healing.left)
            try:
                while healing.frontier - first < goal:
                    done = healing.frontier - first
                    healing.step(min(goal - done, KEEP_ROWS - healing.unkept), _PIECE_S)
                    progress(healing.frontier - first, goal)
                    if healing.unkept >= KEEP_ROWS:
                        healing.keep()
            except KeyboardInterrupt:
                finished = "interrupted"
            healing.keep()
            if finished == "done" and healing.left:
                finished = "budget"
            return Healed(
                healing.frontier - first, healing.frontier, len(self.rows), clock() - start, finished
            )

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
        return verify(self, question, options, max_new_tokens, progress)

    def purge(self, *, progress: Progress = lambda done, total: None) -> Purge:
        """Prefill the present text from nothing, and drop all that the session held before.

        Afterwards no file of the session holds anything of an older text, of a question or of an
        answer; the conversation is dropped too.

        Args:
            progress: Called with rows done and rows in all.
        """
        from kvedit.session.load import prefill_again

        start = clock()
        with self.writing("purge"):
            before, revisions = self.store.size_bytes(), len(self.journal)
            model, written = self.model, self.store.written_bytes
            self.forget_segments()  # they are mapped, and Windows removes no file that is
            prefill_again(self.store, self.manifest, self.document, model, Timings(), progress)
            self._read()
            self.read_segments()
            size, written = self.store.size_bytes(), self.store.written_bytes - written
            return Purge(len(self.rows), revisions, max(0, before + written - size), size, clock() - start)

    def status(self) -> Status:
        """Say what the session holds."""
        rows, kept = self.rows, self.manifest
        stale, missing, suffix = (int(part.sum()) for part in (rows.stale, rows.missing, rows.suffix))
        return Status(
            name=self.store.name,
            model=kept.model.name,
            dtype=kept.model.dtype,
            context_length=kept.model.context_length,
            source=kept.source,
            lines=self.document.line_count,
            tokens=len(rows),
            conversation=len(self.revision.turns),
            suffix=suffix,
            frontier=rows.frontier,
            exact=rows.frontier,
            refreshed=suffix - stale,
            stale=stale,
            missing=missing,
            size_bytes=self.store.size_bytes(),
            edits=self.revision.entry.edits,
            undone=len(kept.undone),
            revision=self.revision.entry.number,
            created=kept.created,
        )

    def _check_revision(self, number: int) -> None:
        if not 0 <= number < len(self.journal):
            raise UsageError(
                f"There is no revision {number}; the log has 0 to {len(self.journal) - 1}.",
                "Run `kvedit log --all` to see them.",
            )

    def _change(self, plan: Callable[[Document], Sequence[Edit]], command: str) -> Change:
        """Plan edits on the document as it is now, and make them."""
        with self.writing(command.partition(" ")[0]):
            before, planned = self._measures(), tuple(plan(self.document))
            if planned:
                self.edit(planned, command)
            return self._report(command if planned else "", before, planned)

    def _travel(self, verb: str, count: int) -> Change:
        """Undo or redo edits: go to the best revision of another text."""
        if count < 1:
            raise UsageError(f"{count} edits cannot be taken.", f"Run `kvedit {verb} 1`, or more.")
        with self.writing(verb):
            before = self._measures()
            undone, state = list(self.manifest.undone), self.revision.entry.state
            for step in range(count):
                parent = self.journal.entry(state).parent
                if (parent is None) if verb == "undo" else (not undone):
                    there = f"only {step}" if step else "nothing"
                    raise UsageError(
                        f"There is {there} to {verb}.", "Run `kvedit log` to see the edits of the session."
                    )
                if verb == "redo":
                    state = undone.pop()
                elif parent is not None:
                    undone.append(state)
                    state = self.journal.entry(parent).state
            self.go_to(self._best(state), tuple(undone))
            return self._report(f"{verb} {count}" if count > 1 else verb, before, ())

    def _best(self, state: int) -> int:
        """Give the revision of a text with the most exact rows, the latest of several.

        Only of those with the conversation that the text was left with: what was forgotten stays so.
        """
        entries = [self.journal.entry(number) for number in range(state, len(self.journal))]
        entries = [entry for entry in entries if entry.state == state]
        if not entries:
            raise damaged(f"revision {state}", "is of another text than it says")
        turns = self.journal.revision(entries[-1].number).turns
        for entry in sorted(entries, key=lambda entry: (entry.frontier, entry.number), reverse=True):
            if entry.tokens == entries[-1].tokens and self.journal.revision(entry.number).turns == turns:
                return entry.number
        return entries[-1].number

    def _measures(self) -> tuple[Document, int, int]:
        return self.document, len(self.rows), self.store.written_bytes

    def _report(self, command: str, before: tuple[Document, int, int], changes: Sequence[Edit]) -> Change:
        document, tokens, written = before
        if not changes:  # of an undo: what a difference would say
            changes = edits.difference(document.text, self.document.text)
        removed, added = edits.line_counts(document, self.document, changes)
        return Change(
            command=command,
            revision=self.revision.entry.number,
            removed_lines=removed,
            added_lines=added,
            token_change=len(self.rows) - tokens,
            lines=self.document.line_count,
            tokens=len(self.rows),
            missing=int(self.rows.missing.sum()),
            stale=int(self.rows.stale.sum()),
            suffix=int(self.rows.suffix.sum()),
            replay_s=self.replay_s,
            written_bytes=self.store.written_bytes - written,
        )


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
