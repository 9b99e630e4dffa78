"""Undo, redo, checkout and the log: text and rows go back to what they were, at no compute."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rigs.reference import load_session, prefill_states, working_cache

from kvedit.errors import UsageError
from kvedit.model.model import Model
from kvedit.repair.budget import Budget
from kvedit.repair.reports import Change
from kvedit.session.session import Session
from kvedit.session.state import State

NAMES = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()
TEXT = "".join(f"{number}. The {name} code is {number * 37}.\n" for number, name in enumerate(NAMES, 1))
QUESTION = "What is the delta code?"


class Seen(NamedTuple):
    """All that a session shows of its present revision."""

    text: str
    ids: list[int]
    homes: list[tuple[str, int] | None]
    refreshed: list[bool]
    frontier: int
    turns: tuple[int, ...]


def seen(session: Session) -> Seen:
    rows = session.rows
    homes = [
        None if code < 0 else (rows.segments[code], index)
        for code, index in zip(rows.segment.tolist(), rows.index.tolist(), strict=True)
    ]
    refreshed = rows.refreshed.tolist()
    return Seen(
        session.document.text,
        session._state.ids.tolist(),
        homes,
        refreshed,
        rows.frontier,
        session._state.revision.turns,
    )


def again(session: Session) -> Session:
    """The session as another process sees it."""
    other = Session(State(session._state.store))
    other.use_model(session.model)
    return other


def segments(session: Session) -> set[str]:
    return {path.name for path in (session._state.store.folder / "segments").iterdir()}


def ask(session: Session, budget: str = "20%", **more: Any) -> tuple[int, ...]:
    return session.ask(QUESTION, budget=Budget.parse(budget), max_new_tokens=4, **more).ids


@pytest.fixture
def session(llama: Model, home: Path) -> Session:
    return load_session(home, llama, TEXT)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch, llama: Model) -> None:
    """From here on nothing may be computed."""

    def walk(*args: object, **more: object) -> None:
        raise AssertionError("a row was computed")

    monkeypatch.setattr(llama, "walk", walk)


EDITS = {
    "delete": lambda session: session.delete("2-3"),
    "insert": lambda session: session.insert("One line.\nAnother.", after=4),
    "append": lambda session: session.append("The last line."),
    "replace": lambda session: session.replace("5", "Another line."),
    "move": lambda session: session.move("8-9", after=2),
    "rewrite": lambda session: session.rewrite(TEXT.replace("code", "number")),
    "delete all": lambda session: session.delete("1-"),
}


@pytest.mark.parametrize("name", EDITS)
def test_undo_and_redo_restore_text_and_rows(session, idle, name):
    before = seen(session)
    EDITS[name](session)
    after, files = seen(session), segments(session)
    assert after != before
    for _ in range(2):
        undone = session.undo()
        assert seen(session) == seen(again(session)) == before
        assert undone.command == "undo"
        assert (undone.lines, undone.tokens) == (10, len(before.ids))
        assert session.status().undone == 1
        redone = session.redo()
        assert seen(session) == seen(again(session)) == after
        assert redone.command == "redo"
        assert session.status().undone == 0
    assert segments(session) == files
    assert undone.written_bytes < 2_000  # the manifest


def test_an_undo_reports_the_edit_the_other_way_round(session):
    done = session.replace("3-4", "One.\nTwo.\nThree.")
    undone, redone = session.undo(), session.redo()

    def counts(change: Change) -> tuple[int, int, int]:
        return change.removed_lines, change.added_lines, change.token_change

    removed, added, tokens = counts(done)
    assert (removed, added) == (2, 3)
    assert counts(undone) == (added, removed, -tokens)
    assert counts(redone) == counts(done)


def test_several_edits_are_undone_at_once_or_one_by_one(session, idle):
    past = [seen(session)]
    for edit in EDITS.values():
        edit(session)
        past.append(seen(session))
    count = len(EDITS)
    assert session.undo(3).command == "undo 3"
    assert seen(session) == past[-4]
    session.undo()
    assert seen(session) == past[-5]
    session.redo(4)
    assert seen(session) == past[-1]
    session.undo(count)
    assert (seen(session), session.status().undone) == (past[0], count)
    for number in range(1, count + 1):
        session.redo()
        assert seen(session) == past[number]


@pytest.mark.parametrize(
    ("verb", "count", "fact"),
    [
        ("undo", 3, "Only 2 edits can be undone"),
        ("undo", 99, "Only 2 edits can be undone"),
        ("redo", 2, "Only 1 edit can be redone"),
        ("undo", 0, "must be at least 1"),
        ("redo", -1, "must be at least 1"),
    ],
)
def test_too_many_undo_or_redo_steps_change_nothing(session, verb, count, fact):
    for number in ("1", "2", "3"):
        session.delete(number)
    session.undo()
    before, manifest = seen(session), (session._state.store.folder / "session.json").read_bytes()
    with pytest.raises(UsageError, match=fact) as caught:
        getattr(session, verb)(count)
    assert caught.value.exit_code == 2
    assert seen(session) == seen(again(session)) == before
    assert (session._state.store.folder / "session.json").read_bytes() == manifest
    session.undo(2)
    assert session.document.text == TEXT


def test_a_fresh_load_has_nothing_to_undo_or_redo(session):
    for verb in ("undo", "redo"):
        with pytest.raises(UsageError, match=f"nothing to {verb}"):
            getattr(session, verb)()


def test_an_edit_after_an_undo_leaves_nothing_to_redo(session):
    session.delete("2")
    session.delete("3")
    session.undo(2)
    assert session.status().undone == 2
    session.append("Another way.")
    assert session.status().undone == 0
    with pytest.raises(UsageError, match="nothing to redo"):
        session.redo()
    session.undo()
    assert session.document.text == TEXT
    session.redo()
    assert session.document.text == TEXT + "Another way.\n"


def test_an_edit_without_a_change_is_not_recorded(session):
    session.delete("2")
    session.undo()
    revisions = len(session._state.journal)
    change = session.replace("3", session.document.lines(2, 3)[0])
    assert (change.command, change.removed_lines, change.added_lines) == ("", 0, 0)
    assert (len(session._state.journal), session.status().undone) == (revisions, 1)
    session.redo()
    assert session.document.line_count == 9


def test_a_question_after_undo_does_not_prevent_redo(session):
    session.delete("2")
    deleted = seen(session)
    session.undo()
    ask(session)
    assert session.status().undone == 1
    session.redo()
    assert seen(session) == deleted
    ask(session, "full")
    asked = seen(session)
    assert asked.frontier == len(asked.ids)
    session.undo()
    assert session.document.text == TEXT
    session.redo()
    assert seen(session) == asked  # the edit with what the question repaired, not as it was at first


@pytest.mark.parametrize("budget", ["0", "30t", "full"])
def test_undo_returns_to_the_most_healed_revision(session, idle, monkeypatch, budget):
    session.delete("2")
    monkeypatch.undo()
    ask(session)
    session.heal(budget=Budget.parse(budget))
    healed = seen(session)
    session.delete("5")
    session.undo()
    assert seen(session) == seen(again(session)) == healed
    check_exact(session)


def test_rows_healed_after_undo_stay_exact_after_redo(session):
    session.delete("2")
    session.append("One more.")
    session.undo()
    session.heal()  # of the text with line 2 gone, after the second edit was taken back
    healed = seen(session)
    assert healed.frontier == len(healed.ids)
    session.redo()
    session.undo()
    assert seen(session) == healed


def test_rows_that_were_exact_before_an_edit_are_exact_again(session):
    session.heal()
    before = seen(session)
    assert before.frontier == len(before.ids)
    session.replace("1", "Other words.")
    ask(session, "40%")
    session.move("9", after=1)
    session.heal(budget=Budget.parse("20t"))
    session.undo(2)
    assert seen(session) == before
    check_exact(session)


def check_exact(session: Session) -> None:
    frontier, cache = session.rows.frontier, working_cache(session)
    clean = prefill_states(session.model, session._state.ids)
    torch.testing.assert_close(
        cache.values[:, :, :frontier], clean.values[:, :, :frontier], atol=1e-4, rtol=1e-4
    )


def test_undo_does_not_stop_at_a_question(session):
    session.delete("2")
    ask(session, "10t")
    ask(session, "10t")
    session.delete("4")
    session.undo()
    assert session.document.line_count == 9
    session.undo()
    assert session.document.text == TEXT


def test_a_checkout_restores_any_revision_and_edits_continue(session, idle):
    past = [seen(session)]
    for edit in list(EDITS.values())[:4]:
        edit(session)
        past.append(seen(session))
    files = segments(session)
    for number in (2, 0, 4, 1):
        change = session.checkout(number)
        assert (change.command, change.revision) == (f"checkout {number}", number)
        assert seen(session) == seen(again(session)) == past[number]
    session.append("Off again.")
    branch = seen(session)
    assert [entry.number for entry in session.log()] == [5, 1, 0]
    assert [entry.number for entry in session.log(everything=True)] == [5, 4, 3, 2, 1, 0]
    session.undo()
    assert seen(session) == past[1]
    session.redo()
    assert seen(session) == branch
    session.checkout(4)
    assert session.document.text == past[4].text
    session.undo()
    assert seen(session) == past[3]
    assert segments(session) == files


def test_a_checkout_leaves_nothing_to_redo(session):
    session.delete("2")
    session.undo()
    session.checkout(0)
    with pytest.raises(UsageError, match="nothing to redo"):
        session.redo()


@pytest.mark.parametrize("number", [-1, 2, 10**9])
def test_a_checkout_of_an_unknown_revision_is_refused(session, number):
    session.delete("2")
    before = seen(session)
    for look in (session.checkout, session.text_of):
        with pytest.raises(UsageError, match=f"no revision {number}; the log has 0 to 1") as caught:
            look(number)
        assert caught.value.exit_code == 2
    assert seen(session) == seen(again(session)) == before


def test_the_log_says_what_was_done_latest_first(session):
    session.delete("2", "4-5")
    ask(session, "50%")
    session.insert("New.", after=1)
    session.heal(budget=Budget.parse("16t"))
    session.undo()
    session.append("Other.")
    log = session.log()
    assert [entry.command.split()[0] for entry in log] == ["append", "ask", "delete", "load"]
    assert log[-2].command == "delete --lines 2 --lines 4-5"
    assert [entry.edits for entry in log] == [2, 1, 1, 0]
    for entry, before in pairwise(log):
        assert entry.parent == before.number
        assert entry.created >= before.created
    whole = session.log(everything=True)
    assert [entry.number for entry in whole] == list(reversed(range(len(session._state.journal))))
    assert {entry.command.split()[0] for entry in whole} >= {"insert", "heal"}
    for entry in whole:
        session.checkout(entry.number)
        rows = session.rows
        counts = (len(rows), int(rows.stale.sum()), int(rows.missing.sum()), rows.frontier)
        assert counts == (entry.tokens, entry.stale, entry.missing, entry.frontier)
        assert session.document.line_count == entry.lines
        assert session.text_of(entry.number) == session.document.text


def test_an_edit_by_another_process_is_undone_here_too(session):
    other = again(session)
    other.delete("2")
    session.delete("2")
    assert session.document.line_count == 8
    other.undo()
    assert other.document.line_count == 9
    session.undo()
    assert session.document.text == TEXT


def test_a_failed_write_undoes_nothing(session, monkeypatch):
    session.delete("2")
    before = seen(session)
    monkeypatch.setattr(type(session._state.store), "write_manifest", lambda *args: 1 / 0)
    for move in (session.undo, lambda: session.checkout(0), lambda: session.delete("1")):
        with pytest.raises(ZeroDivisionError):
            move()
        assert seen(session) == before
    monkeypatch.undo()
    session.delete("1")
    session.undo(2)
    assert session.document.text == TEXT


# --- conversations ----------------------------------------------------------------------------


def test_undo_restores_the_conversation(session):
    ask(session, conversation=True)
    spoken = seen(session)
    session.delete("2")
    assert session._state.revision.turns == spoken.turns
    session.forget()
    session.undo()
    assert seen(session) == spoken


def test_a_forgotten_conversation_is_not_restored_by_undo(session):
    ask(session, conversation=True)
    session.heal()
    session.forget()
    before = seen(session)
    session.delete("2")
    session.undo()
    assert session._state.revision.turns == ()
    assert seen(session) == before


def test_undo_restores_the_later_of_two_conversations(session):
    ask(session, conversation=True)
    session.heal()
    longer = session._state.revision.turns
    session.forget()
    session.ask("Who?", max_new_tokens=1, conversation=True)
    shorter = session._state.revision.turns
    assert 0 < len(shorter) < len(longer)
    session.heal()
    healed = seen(session)
    session.delete("2")
    session.undo()
    assert seen(session) == healed
    assert session._state.revision.turns == shorter


def test_redo_restores_the_later_conversation(session):
    session.delete("2")
    ask(session, conversation=True)
    after = seen(session)
    session.undo()
    assert session._state.revision.turns == ()
    session.redo()
    assert seen(session) == after
    assert np.array_equal(session._state.ids[-len(after.turns) :], after.turns)
