"""Asking: interrupts in each phase, sampling, empty documents, limits, and what is reported."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from rigs.reference import load_session

from kvedit.errors import ContextError, SessionError
from kvedit.model.model import Model
from kvedit.repair.budget import Budget
from kvedit.session.session import Session
from kvedit.text.document import LineRange
from kvedit.text.units import unit_of_rows
from kvedit.tokens.tokenizer import Tokenizer

TEXT = "".join(f"{number}. The code of item {number} is {number * 37 % 1000}.\n" for number in range(1, 31))
QUESTION = "What is the code of item 7?"


@pytest.fixture
def session(llama: Model, home: Path) -> Session:
    session = load_session(home, llama, TEXT)
    session.delete(LineRange(3, 4))
    return session


@pytest.mark.parametrize("phase", ["shift", "selection", "refresh", "question"])
def test_an_interrupt_before_the_answer_changes_nothing(session: Session, phase: str) -> None:
    before = session._state.store.read_manifest()

    def interrupt(name: str) -> None:
        if name == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.ask(QUESTION, on_phase=interrupt)
    assert session._state.store.read_manifest() == before
    assert session.ask(QUESTION, max_new_tokens=3).kept  # and the session goes on


def test_an_interrupted_answer_keeps_its_text_and_rows(session: Session) -> None:
    said: list[str] = []

    def interrupt(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            raise KeyboardInterrupt

    answer = session.ask(QUESTION, on_text=interrupt, max_new_tokens=50)
    assert answer.finish_reason == "interrupted"
    assert answer.text.startswith("".join(said))
    assert len(answer.ids) < 50
    assert answer.kept
    assert session.status().refreshed + session.status().exact > answer.tokens - answer.suffix


def test_the_same_seed_draws_the_same_answer(session: Session) -> None:
    drawn = [
        session.ask(QUESTION, temperature=1.0, seed=seed, max_new_tokens=12, keep=False).ids
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_unedited_document_needs_no_repair(llama: Model, home: Path) -> None:
    session = load_session(home, llama, TEXT)
    answer = session.ask(QUESTION, budget=Budget.full(), max_new_tokens=2)
    assert (answer.missing, answer.refreshed, answer.runs, answer.kept) == (0, 0, 0, False)
    assert answer.executor == "none"


def test_a_document_without_lines_can_still_be_asked(session: Session) -> None:
    session.delete(LineRange(1, None))
    assert session.document.text == ""
    answer = session.ask(QUESTION, max_new_tokens=2)
    assert answer.tokens == len(session._state.manifest.head_ids)


def test_the_last_line_gone_leaves_nothing_to_refresh(session: Session) -> None:
    session.ask(QUESTION, budget=Budget.full(), max_new_tokens=1)
    last = session.document.line_count
    removal = session.delete(LineRange(last, last))
    assert removal.suffix == 0
    assert session.ask(QUESTION, max_new_tokens=2).refreshed == 0


def test_a_text_or_answer_over_the_context_is_refused(llama: Model, home: Path) -> None:
    with pytest.raises(ContextError, match="context has 1024") as refused:
        load_session(home, llama, TEXT * 9)
    assert refused.value.exit_code == 5
    session = load_session(home, llama, TEXT)
    with pytest.raises(ContextError, match="context has 1024"):
        session.ask(QUESTION, max_new_tokens=1000)


def test_an_answer_without_a_limit_uses_the_remaining_context(llama: Model, home: Path) -> None:
    session = load_session(home, llama, "alpha " * 290)
    llama_stops, llama.stop_ids = llama.stop_ids, frozenset()
    try:
        answer = session.ask(QUESTION)
    finally:
        llama.stop_ids = llama_stops
    question = len(session._state.prompt.question_ids(session._state.tokenizer, QUESTION))
    assert len(answer.ids) == min(256, 1024 - answer.tokens - question)
    assert answer.finish_reason == "length"


def test_another_model_is_refused_by_the_part_that_differs(
    session: Session, tiny_models: dict[str, Model]
) -> None:
    with pytest.raises(SessionError, match="config differs"):
        session.use_model(tiny_models["qwen3"])


def test_a_segment_with_the_wrong_tokens_is_noticed(session: Session) -> None:
    session._state.tokens.ids[-1] += 1
    session._state.segments.clear()
    with pytest.raises(SessionError, match="wrong tokens"):
        session._state.read_segments()


def test_random_units_are_whole_units(session: Session) -> None:
    session.ask(QUESTION, policy="units-random", budget=Budget.parse("30t"), max_new_tokens=1)
    unit = unit_of_rows(session.document.text, session._state.tokens.starts)
    refreshed = session.rows.refreshed[len(session._state.manifest.head_ids) :]
    cut = [
        number for number in np.unique(unit) if 0 < refreshed[unit == number].sum() < (unit == number).sum()
    ]
    assert len(cut) <= 1


def test_session_change_and_answer_have_a_short_repr(session):
    change = session.delete("2")
    answer = session.ask(QUESTION, max_new_tokens=2)
    assert repr(change).startswith("<Change 'delete --lines 2': -1 lines, -")
    assert f"{change.stale:,} stale" in repr(change)
    counts = f"{answer.missing:,} missing + {answer.refreshed:,} refreshed + {answer.reused:,} reused"
    assert repr(answer).startswith("<Answer ")
    assert counts in repr(answer)
    assert repr(session).startswith(f"<Session '{session.name}': {session.document.line_count:,} lines, ")
    assert all(len(repr(value)) < 200 for value in (session, change, answer))


def test_the_past_text_is_tokenized_only_where_it_is_needed(session, monkeypatch):
    past, encoded = session.text_of(0), []
    real = Tokenizer.encode_text
    monkeypatch.setattr(
        Tokenizer, "encode_text", lambda self, text: (encoded.append(text), real(self, text))[1]
    )
    session.delete("2")
    session.ask(QUESTION, max_new_tokens=1, keep=False)
    assert past not in encoded
    session.ask(QUESTION, policy="cachecraft", max_new_tokens=1, keep=False)
    session.ask(QUESTION, policy="cachecraft", max_new_tokens=1, keep=False)
    assert encoded.count(past) == 1


def test_a_session_is_freed_without_garbage_collection(llama: Model, home: Path) -> None:
    """A cycle of references would keep its caches in memory beside those of the next session."""
    session = load_session(home, llama, TEXT)
    session.delete("2")
    session.ask(QUESTION, max_new_tokens=1, keep=False)
    session.ask(QUESTION, policy="cachecraft", max_new_tokens=1)
    session.heal()
    state, working = weakref.ref(session._state), weakref.ref(session._state.working)
    gc.disable()
    try:
        del session
        assert state() is None
        assert working() is None
    finally:
        gc.enable()


def test_ids_of_past_rows_in_segments_equal_the_tokenized_text(llama: Model, home: Path) -> None:
    load_session(home, llama, TEXT)
    state = Session.open(home=home)._state
    assert state.exact_past() is None
    session = Session.open(home=home)
    session.delete("2")
    exact = session._state.exact_past()
    assert exact is not None
    read_ids, rows = exact
    every = np.arange(len(read_ids()))
    assert session._state.segments.find_ids(rows, every) is None  # none was read
    session._state.read_segments()
    found = session._state.segments.find_ids(rows, every)
    assert np.array_equal(found, read_ids())
