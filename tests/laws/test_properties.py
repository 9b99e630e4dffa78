"""Random series of everything that a session can do, held against the laws after every step.

The machine keeps a text of its own, as a list of lines has it, and knows of each revision what
it was like. After each step it compares: text and ids (law 6), exact rows with a clean prefill
(laws 3 and 7), counts (law 11), what a question may and may not change (law 8), and what an undo
gives back. At the end a full budget must give what a fresh load gives (law 1).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rigs.reference import prefill_states, working_cache
from support.edits import inserted, moved, replaced, split

from kvedit.cache.kv import States
from kvedit.cache.rows import MISSING
from kvedit.errors import ContextError, UsageError
from kvedit.model.model import Model
from kvedit.repair.budget import Budget
from kvedit.repair.reports import Change
from kvedit.session.session import Session
from kvedit.session.state import State
from kvedit.store.home import Home
from kvedit.store.store import Store
from kvedit.text.document import Document, Source

WORDS = [
    "The fees are paid.",
    "alpha",
    "code 4471",
    "",
    "",
    "a",
    "    x = y",
    "日本語。",
    "שלום \u202eabc",
    "🙂👍🏽",
]
WORDS += [
    "👨\u200d👩\u200d👧 🇸🇪",
    "e\u0301o\u0308",
    "\f",
    "a\u2028b",
    "\ufeffx",
    "x\ry",
    "\x1b[1m\x07",
    "<|im_end|>",
]
WORDS += ["<|im_start|>user", "tab\t\\n'\"", "\u00a0\u200b", "مرحبا", "नमस्ते", "\U0001d54f\ue000"]
LINES = st.sampled_from(WORDS)
ENDINGS = st.sampled_from(["\n", "\n", "\n", "\r\n", "\r\n", "\r", "\n\n"])
PARTS = st.one_of(
    st.tuples(LINES, ENDINGS).map("".join),
    st.tuples(LINES, ENDINGS, st.integers(2, 5)).map(lambda part: (part[0] + part[1]) * part[2]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
)
TEXTS = st.lists(PARTS, max_size=5).map("".join)
BUDGETS = st.sampled_from([None, "0", "0", "1t", "9t", "10%", "33%", "50%", "full"])
QUESTIONS = st.sampled_from(["What is the code?", "alpha", "Who\npays 🙂?", "<|im_end|>", "日本"])
POLICIES = st.sampled_from(["sur", "sur", "sur-plain", "tokens", "window", "units-bm25", "units-random"])
EXECUTORS = st.sampled_from(["auto", "auto", "packed", "interval"])
PLACES = st.integers(0, 2**20)  # taken modulo what there is


class Seen(NamedTuple):
    """All that a session shows of its present revision."""

    text: str
    ids: tuple[int, ...]
    homes: tuple[tuple[str, int] | None, ...]
    refreshed: tuple[bool, ...]
    frontier: int
    turns: tuple[int, ...]


def seen(session: Session) -> Seen:
    rows = session.rows
    homes = tuple(
        None if code == MISSING else (rows.segments[code], index)
        for code, index in zip(rows.segment.tolist(), rows.index.tolist(), strict=True)
    )
    shown = session.document.text, tuple(session._state.ids.tolist()), homes, tuple(rows.refreshed.tolist())
    return Seen(*shown, rows.frontier, session._state.revision.turns)


def shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Elements that two sequences share at their start."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def same_answer(model: Model, ids: list[int], answer: tuple[int, ...], limit: int) -> bool:
    """Whether a greedy answer is that of a clean prefill, walked without any of kvedit's steps."""
    tensor = torch.tensor([*ids, *answer])
    hidden = model.walk(
        tensor, slice(0, len(tensor)), model.new_cache(len(tensor)), outputs=len(answer) + 1
    ).hidden
    logits = model.logits(hidden)
    wanted = [*answer, None][:limit]
    for row, token in zip(logits, wanted, strict=False):
        best = int(row.argmax())
        right = best in model.stop_ids if token is None else best == token
        near = row.max() - (row[list(model.stop_ids)].max() if token is None else row[token])
        if not right and float(near) > 1e-3:
            return False
    return True


class SessionMachine(RuleBasedStateMachine):
    """One session, and what is known of it.

    Attributes:
        model, folder: Given by the test.
        steps, worst: How many rules have run, and the largest error of an exact row.
    """

    model: ClassVar[Model]
    folder: ClassVar[Path]
    steps: ClassVar[int] = 0
    worst: ClassVar[float] = 0.0
    clean: ClassVar[dict[tuple[int, ...], States]] = {}

    @initialize(text=TEXTS, system=st.sampled_from([None, "Be brief."]))
    def load(self, text: str, system: str | None) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.source = self.folder / "a.txt"
        self.home = self.folder / "home"
        document = Document(text, Source(str(self.source)))
        self.session = Session.load(document, model=self.model, home=self.home, system=system)
        self.head = len(self.session._state.manifest.head_ids)
        self.text, self.turns = text, ()
        self.others: list[tuple[Session, Seen]] = []
        self.written = 0
        self.watch()
        self.begin()

    def begin(self) -> None:
        """A session without a past."""
        self.state, self.undone = 0, []
        self.parents: dict[int, int | None] = {0: None}  # of each text, by the number of its edit
        self.states: dict[int, int] = {}  # of each revision
        self.past: dict[int, Seen] = {}
        self.note()

    def watch(self) -> None:
        """Count the rows that enter the store."""
        store = self.session._state.store
        write = Store.write_segment

        def counting(states: States, ids: np.ndarray) -> str:
            self.written += len(ids)
            return write(store, states, ids)

        store.write_segment = counting  # type: ignore[method-assign]

    def note(self) -> None:
        """Remember the present revision."""
        number = self.session._state.revision.entry.number
        self.now = seen(self.session)
        assert self.past.setdefault(number, self.now) == self.now, "a revision never changes"
        assert self.states.setdefault(number, self.state) == self.state

    def segments(self) -> dict[str, int]:
        """Names of the segments on the disk, and their sizes."""
        folder = self.session._state.store.folder / "segments"
        return {path.name: path.stat().st_size for path in folder.iterdir()}

    @property
    def count(self) -> int:
        return len(split(self.text))

    def line(self, place: int) -> int:
        return place % self.count + 1

    def encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self.session._state.tokenizer.encode_text(text).ids.tolist())

    # --- edits --------------------------------------------------------------------------------

    def edit(self, expected: str, act: Callable[[], Change]) -> None:
        """Make an edit, which leads to a text; nothing is computed, and states only move."""
        type(self).steps += 1
        before, files, revisions = self.now, self.segments(), len(self.session._state.journal)
        body = self.encoded(expected)
        shortest = len(self.session._state.prompt.question_ids(self.session._state.tokenizer, "")) + 1
        try:
            change = act()
        except ContextError:
            assert self.head + len(body) + len(self.turns) + shortest > self.model.context_length
            assert seen(self.session) == before
            return
        assert change.written_bytes < 100_000
        assert self.segments() == files
        if not change.command:
            assert expected == self.text
            assert (seen(self.session), len(self.session._state.journal)) == (before, revisions)
            return
        self.parents[revisions] = self.state
        self.text, self.state, self.undone = expected, revisions, []
        self.note()
        now = self.now
        assert change.revision == revisions
        assert (change.tokens, change.token_change) == (len(now.ids), len(now.ids) - len(before.ids))
        assert (change.lines, change.missing) == (self.count, now.homes.count(None))
        # Exact rows stay where they are as long as their text stands, and no row gets a state
        # that is not its own.
        old = before.ids[self.head : len(before.ids) - len(self.turns)]
        same = len(now.ids) if old == body else self.head + shared(old, body)
        assert now.frontier == min(before.frontier, same)
        assert now.homes[: now.frontier] == before.homes[: now.frontier]
        assert now.refreshed == (*before.refreshed[:same], *[False] * (len(now.ids) - same))
        held = [home for home in now.homes if home is not None]
        assert len(held) == len(set(held))
        assert set(held) <= set(before.homes)

    @precondition(lambda self: self.count)
    @rule(first=PLACES, size=st.integers(1, 4), other=st.none() | PLACES)
    def delete(self, first: int, size: int, other: int | None) -> None:
        first = self.line(first)
        last = min(first + size - 1, self.count)
        gone, ranges = set(range(first, last + 1)), [f"{first}-{last}"]
        if other is not None:
            gone.add(self.line(other))
            ranges.append(str(self.line(other)))
        kept = [line for number, line in enumerate(split(self.text), 1) if number not in gone]
        self.edit("".join(kept), lambda: self.session.delete(*ranges))

    @precondition(lambda self: self.count > 3)
    @rule()
    def delete_all(self) -> None:
        self.edit("", lambda: self.session.delete("1-"))

    @rule(after=PLACES, text=TEXTS, exact=st.booleans())
    def insert(self, after: int, text: str, exact: bool) -> None:
        after %= self.count + 1
        exact = exact and bool(text)
        expected = inserted(self.text, after, text, exact)
        self.edit(expected, lambda: self.session.insert(text, after=after, exact=exact))

    @rule(text=TEXTS)
    def append(self, text: str) -> None:
        expected = inserted(self.text, self.count, text, False)
        self.edit(expected, lambda: self.session.append(text))

    @precondition(lambda self: self.count)
    @rule(first=PLACES, size=st.integers(1, 3), text=TEXTS, exact=st.booleans())
    def replace(self, first: int, size: int, text: str, exact: bool) -> None:
        first = self.line(first)
        last = min(first + size - 1, self.count)
        expected = replaced(self.text, first, last, text, exact)
        self.edit(expected, lambda: self.session.replace(f"{first}-{last}", text, exact=exact))

    @precondition(lambda self: self.count)
    @rule(first=PLACES, size=st.integers(1, 3), after=PLACES)
    def move(self, first: int, size: int, after: int) -> None:
        first, after = self.line(first), after % (self.count + 1)
        last = min(first + size - 1, self.count)
        last = first if first <= after < last else last
        expected = moved(self.text, first, last, after)
        self.edit(expected, lambda: self.session.move(f"{first}-{last}", after=after))

    @rule(text=TEXTS)
    def rewrite(self, text: str) -> None:
        self.edit(text, lambda: self.session.rewrite(text))

    @precondition(lambda self: self.count)
    @rule(place=PLACES, other=PLACES, text=TEXTS)
    def sync(self, place: int, other: int, text: str) -> None:
        lines = split(self.text)
        lines[self.line(place) - 1] = text
        lines.insert(other % (len(lines) + 1), "alpha\n")
        data = "".join(lines).encode()
        self.source.write_bytes(data)
        expected = data.removeprefix(b"\xef\xbb\xbf").decode()  # what the first mark is for
        if expected:
            self.edit(expected, self.session.sync)
        else:
            self.refused(self.session.sync)

    @precondition(lambda self: self.count)
    @rule(place=PLACES)
    def another_process_deletes(self, place: int) -> None:
        line = self.line(place)
        lines = split(self.text)
        other = Session(State(self.session._state.store))

        def act() -> Change:
            change = other.delete(str(line))
            self.session.update()
            return change

        self.edit("".join([*lines[: line - 1], *lines[line:]]), act)

    # --- the past -----------------------------------------------------------------------------

    def travel(self, state: int, undone: list[int], act: Callable[[], Change]) -> None:
        """Go to another text: to the best of its revisions, as it was."""
        type(self).steps += 1
        files = self.segments()
        act()
        self.state, self.undone = state, undone
        number = self.session._state.revision.entry.number
        assert self.states[number] == state
        assert seen(self.session) == self.past[number]
        assert self.segments() == files, "nothing is computed"
        ours = [self.past[other] for other in self.states if self.states[other] == state]
        latest = self.past[max(other for other in self.states if self.states[other] == state)]
        best = max(other.frontier for other in ours if other.turns == latest.turns)
        self.text, self.turns = latest.text, latest.turns
        self.note()
        assert (self.now.frontier, self.now.turns) == (best, latest.turns)
        assert self.session.status().undone == len(undone)

    @rule(steps=st.integers(1, 3))
    def undo(self, steps: int) -> None:
        state, undone = self.state, list(self.undone)
        for _ in range(steps):
            parent = self.parents[state]
            if parent is None:
                self.refused(lambda: self.session.undo(steps))
                return
            undone.append(state)
            state = parent
        self.travel(state, undone, lambda: self.session.undo(steps))

    @rule(steps=st.integers(1, 3))
    def redo(self, steps: int) -> None:
        if steps > len(self.undone):
            self.refused(lambda: self.session.redo(steps))
            return
        undone = self.undone[: len(self.undone) - steps]
        self.travel(self.undone[-steps], undone, lambda: self.session.redo(steps))

    @rule(place=PLACES)
    def checkout(self, place: int) -> None:
        type(self).steps += 1
        number, files = place % len(self.past), self.segments()
        self.session.checkout(number)
        self.state, self.undone = self.states[number], []
        self.text, self.turns = self.past[number].text, self.past[number].turns
        assert self.session._state.revision.entry.number == number
        assert self.segments() == files
        self.note()

    def refused(self, act: Callable[[], object]) -> None:
        try:
            act()
        except UsageError:
            assert seen(self.session) == self.now
        else:
            raise AssertionError("it was not refused")

    # --- repairs and questions ----------------------------------------------------------------

    @rule(
        question=QUESTIONS,
        budget=BUDGETS,
        policy=POLICIES,
        executor=EXECUTORS,
        limit=st.integers(1, 4),
        mode=st.sampled_from(["alone", "alone", "drop", "chat", "chat"]),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
    )
    def ask(
        self,
        question: str,
        budget: str | None,
        policy: str,
        executor: str,
        limit: int,
        mode: str,
        temperature: float,
    ) -> None:
        type(self).steps += 1
        session, before, files, self.written = self.session, self.now, self.segments(), 0
        chat, revisions = mode == "chat", len(session._state.journal)
        rows = session.rows if chat else session.rows.first(session._state.document_rows)
        total, suffix, missing = len(rows), int(rows.suffix.sum()), int(rows.missing.sum())
        spelled = session._state.prompt.question_ids(
            session._state.tokenizer, question, next_turn=bool(chat and self.turns)
        )
        chosen = None if budget is None else Budget.parse(budget)
        options: dict[str, Any] = {"policy": policy, "executor": executor, "temperature": temperature}
        try:
            answer = session.ask(
                question,
                budget=chosen,
                max_new_tokens=limit,
                keep=mode != "drop",
                conversation=chat,
                seed=7,
                **options,
            )
        except ContextError:
            assert total + len(spelled) + limit > self.model.context_length
            assert (seen(session), self.segments()) == (before, files)
            return
        wanted = (chosen or Budget.default()).resolve(suffix)
        assert (answer.budget_rows, answer.refreshed, answer.missing) == (wanted, wanted, missing)
        assert answer.missing + answer.refreshed + answer.reused == answer.tokens == total
        assert len(answer.ids) == limit or answer.finish_reason == "stop"
        if wanted == suffix and temperature == 0:  # all that was not exact is computed
            assert same_answer(self.model, [*before.ids[:total], *spelled.tolist()], answer.ids, limit)
        new = self.written
        if mode == "drop" or not (chat or wanted or missing):
            assert not answer.kept
            assert (seen(session), len(session._state.journal), new) == (before, revisions, 0)
            return
        assert answer.kept
        followed = len(answer.ids) - (answer.finish_reason == "length")
        assert new == wanted + missing + (len(spelled) + followed if chat else 0)
        if chat:
            self.turns = (*self.turns, *spelled.tolist(), *answer.ids)
        self.note()
        now = self.now
        assert now.text == before.text
        assert now.ids == (*before.ids, *self.turns[len(before.turns) :])
        assert now.frontier >= before.frontier
        assert now.homes[: before.frontier] == before.homes[: before.frontier]
        assert len(session._state.journal) == revisions + 1
        assert now.homes[:total].count(None) == 0
        if wanted == suffix:
            full = total + (len(spelled) + followed if chat else 0)
            assert now.frontier == full or not chat

    @rule(budget=st.sampled_from([None, "0", "1t", "7t", "40t", "10%", "60%", "full"]))
    def heal(self, budget: str | None) -> None:
        type(self).steps += 1
        before, self.written = self.now, 0
        left = len(before.ids) - before.frontier
        goal = left if budget is None else Budget.parse(budget).resolve(left)
        healed = self.session.heal(budget=None if budget is None else Budget.parse(budget))
        self.note()
        assert healed.rows == goal == self.written
        assert healed.frontier == self.now.frontier == before.frontier + goal
        assert self.now.ids == before.ids
        assert self.now.homes[: before.frontier] == before.homes[: before.frontier]
        assert self.now.homes[self.now.frontier :] == before.homes[self.now.frontier :]

    @precondition(lambda self: self.turns)
    @rule()
    def forget(self) -> None:
        type(self).steps += 1
        before = self.now
        assert self.session.forget() == len(self.turns)
        self.turns = ()
        self.note()
        total = len(before.ids) - len(before.turns)
        assert self.now.ids == before.ids[:total]
        assert self.now.homes == before.homes[:total]
        assert self.now.frontier == min(before.frontier, total)

    @rule(budget=BUDGETS.filter(bool), chat=st.booleans(), policy=POLICIES)
    def explain_and_verify(self, budget: str, chat: bool, policy: str) -> None:
        type(self).steps += 1
        files, chosen = self.segments(), Budget.parse(budget)
        told = self.session.explain("What code?", budget=chosen, conversation=chat, policy=policy)
        assert sum(unit.chosen for unit in told.units) == told.budget_rows == chosen.resolve(told.suffix)
        assert len(told.lines) == self.count
        found = self.session.verify(
            "alpha", budget=chosen, max_new_tokens=2, conversation=chat, policy=policy
        )
        assert found.exact_deviation <= 1e-3
        assert found.computed == told.budget_rows + told.missing
        if chosen.resolve(told.suffix) == told.suffix:
            assert found.exact
            assert found.comparison is not None
            assert found.comparison.kl < 1e-6
        assert (seen(self.session), self.segments()) == (self.now, files)

    # --- files --------------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        type(self).steps += 1
        self.session = Session(State(self.session._state.store))
        self.session.use_model(self.model)
        self.watch()

    @precondition(lambda self: len(self.others) < 3)
    @rule(go_on_in_copy=st.booleans())
    def copy(self, go_on_in_copy: bool) -> None:
        type(self).steps += 1
        target = Home(self.home).store(f"copy-{len(self.others)}")
        Home(self.session._state.store.folder.parent).copy(self.session.name, target.name)
        twin = Session(State(target))
        twin.use_model(self.model)
        assert seen(twin) == self.now
        if go_on_in_copy:
            twin, self.session = self.session, twin
            self.watch()
        self.others.append((twin, self.now))

    @rule()
    def compact(self) -> None:
        assert self.session.compact() == 0  # whatever is there is of some revision

    @rule(really=st.integers(0, 4))
    def purge(self, really: int) -> None:
        if really:  # it ends the past, so it is not to come often
            return
        type(self).steps += 1
        self.session.purge()
        self.turns = ()
        self.begin()
        assert self.now.frontier == len(self.now.ids)
        assert len(self.segments()) <= 1
        assert len(self.session._state.journal) == 1

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def text_and_ids_are_those_of_the_present(self) -> None:
        session = self.session
        assert session.document.text == self.text
        assert session.document.lines(0, session.document.line_count) == [
            line.removesuffix("\n").removesuffix("\r") for line in split(self.text)
        ]
        assert tuple(session._state.ids.tolist()) == (
            *session._state.manifest.head_ids,
            *self.encoded(self.text),
            *self.turns,
        )
        assert seen(session) == self.now
        assert session._state.manifest.undone == tuple(self.undone)

    @invariant()
    def the_warm_cache_holds_what_it_says(self) -> None:
        session = self.session
        session._state.read_segments()
        session._state.working.reserve(len(session.rows))
        differs = session._state.working.differing(session.rows)
        rows = np.setdiff1d(np.flatnonzero(~session.rows.missing), differs)
        fresh, warm = working_cache(session), session._state.working.cache
        for left, right in ((warm.keys, fresh.keys), (warm.values, fresh.values)):
            torch.testing.assert_close(left[:, :, rows], right[:, :, rows], atol=1e-6, rtol=1e-6)

    @invariant()
    def counts_add_up(self) -> None:
        status, entry = self.session.status(), self.session._state.revision.entry
        assert (
            status.exact + status.refreshed + status.stale + status.missing
            == status.tokens
            == len(self.now.ids)
        )
        assert status.suffix == status.refreshed + status.stale
        assert status.conversation == len(self.turns)
        assert (entry.tokens, entry.stale, entry.missing) == (status.tokens, status.stale, status.missing)
        assert (entry.frontier, entry.lines, entry.state) == (status.frontier, status.lines, self.state)
        assert None not in self.now.homes[: self.now.frontier]
        assert not any(self.now.refreshed[: self.now.frontier])
        assert not any(
            flag for flag, home in zip(self.now.refreshed, self.now.homes, strict=True) if home is None
        )

    @invariant()
    def exact_rows_are_those_of_a_clean_prefill(self) -> None:
        session, frontier = self.session, self.now.frontier
        session._state.read_segments()  # which compares the ids of all rows
        if not frontier:
            return
        ids = self.now.ids[:frontier]
        if ids not in self.clean:
            if len(self.clean) > 50:
                self.clean.clear()
            self.clean[ids] = prefill_states(self.model, np.array(ids))
        clean, row = self.clean[ids], 0
        for piece in session.rows.first(frontier).pieces():
            source, rows = slice(piece.start, piece.start + piece.length), slice(row, row + piece.length)
            for held, right in zip(
                session._state.segments.states[piece.segment], (clean.keys, clean.values), strict=True
            ):
                error = float((held[:, :, source] - right[:, :, rows]).abs().max())
                type(self).worst = max(self.worst, error)
                torch.testing.assert_close(held[:, :, source], right[:, :, rows], atol=1e-4, rtol=1e-4)
            row += piece.length

    def teardown(self) -> None:
        if not hasattr(self, "session"):
            return
        for other, before in self.others:
            other.update()
            assert seen(other) == before, "an edit of a copy touches the copy alone"
            assert other.check().findings == ()
        session = self.session
        assert session.check().findings == ()
        last = max(self.past)
        for number in (0, last // 2, last):
            assert session.text_of(number) == self.past[number].text
        self.end_as_a_fresh_load()

    def end_as_a_fresh_load(self) -> None:
        """Laws 1 and 7, however many edits came before: by a full budget, or by healing."""
        session = self.session
        with suppress(ContextError):  # a conversation may have filled it
            session.forget()
            if len(self.past) % 2:
                session.heal()
                budget = "0"
            else:
                budget = "full"
            answer = session.ask("What is the code?", budget=Budget.parse(budget), max_new_tokens=3)
            total = len(session.rows)
            assert session.rows.frontier == total
            system = session._state.manifest.system
            fresh = Session.load(
                Document(self.text), model=self.model, home=self.home / "fresh", system=system
            )
            assert np.array_equal(fresh._state.ids, session._state.ids)
            repaired, clean = working_cache(session), working_cache(fresh)
            for left, right in ((repaired.keys, clean.keys), (repaired.values, clean.values)):
                torch.testing.assert_close(left[:, :, :total], right[:, :, :total], atol=1e-4, rtol=1e-4)
            spelled = session._state.prompt.question_ids(
                session._state.tokenizer, "What is the code?"
            ).tolist()
            other = fresh.ask("What is the code?", budget=Budget.parse("0"), max_new_tokens=3)
            near = same_answer(self.model, [*session._state.ids.tolist(), *spelled], answer.ids, 3)
            assert answer.ids == other.ids or near


def run_machine(model: Model, folder: Path, **more: Any) -> type[SessionMachine]:
    """Run the machine; gives what it counted."""

    class Machine(SessionMachine):
        clean: ClassVar[dict[tuple[int, ...], States]] = {}

    Machine.model, Machine.folder = model, folder
    run_state_machine_as_test(
        Machine,
        settings=settings(
            **{
                "deadline": None,
                "database": None,
                "suppress_health_check": list(HealthCheck),
                "print_blob": False,
                **more,
            }
        ),
    )
    return Machine


def test_whatever_is_done_to_a_session_the_laws_hold(llama: Model, tmp_path: Path) -> None:
    done = run_machine(llama, tmp_path / "run", derandomize=True, max_examples=25, stateful_step_count=25)
    assert done.steps > 200
    assert 0 < done.worst < 1e-4
