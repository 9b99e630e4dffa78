"""Conversations: what stays in the context between questions, what an edit does to it, what forgets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.reference import load_session, prefill_states, working_cache

from kvedit.errors import ContextError, UsageError
from kvedit.model.model import Model
from kvedit.repair.budget import Budget
from kvedit.repair.reports import Answer
from kvedit.session.session import Session
from kvedit.session.state import State

NAMES = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()
TEXT = "".join(f"{number}. The {name} code is {number * 37}.\n" for number, name in enumerate(NAMES, 1))
QUESTION = "What is the delta code?"


@pytest.fixture
def session(llama: Model, home: Path) -> Session:
    return load_session(home, llama, TEXT)


def say(session: Session, question: str = QUESTION, budget: str = "0", limit: int = 4, **more: Any) -> Answer:
    return session.ask(question, budget=Budget.parse(budget), max_new_tokens=limit, conversation=True, **more)


def alone(session: Session, question: str = QUESTION, budget: str = "0", **more: Any) -> Answer:
    return session.ask(question, budget=Budget.parse(budget), max_new_tokens=6, **more)


def spelled(session: Session, question: str, *, first: bool) -> list[int]:
    """Ids of a question, put together by hand."""
    prompt, tokenizer = session._state.prompt, session._state.tokenizer
    before = prompt.before_question if first else prompt.before_next
    return [
        *tokenizer.encode_template(before),
        *tokenizer.encode_text(question).ids.tolist(),
        *tokenizer.encode_template(prompt.after_question),
    ]


def check_exact(session: Session) -> None:
    """The rows before the frontier are those of a clean prefill."""
    frontier = session.rows.frontier
    clean, cache = prefill_states(session.model, session._state.ids), working_cache(session)
    for layer in range(session.model.layers):
        torch.testing.assert_close(
            cache.values[layer, :, :frontier], clean.values[layer, :, :frontier], atol=1e-4, rtol=1e-4
        )


def homes(session: Session) -> list[tuple[str, int] | None]:
    rows = session.rows
    return [
        None if code < 0 else (rows.segments[code], index)
        for code, index in zip(rows.segment.tolist(), rows.index.tolist(), strict=True)
    ]


# --- what stays -------------------------------------------------------------------------------


def test_a_conversation_keeps_the_ids_of_questions_and_answers(session):
    first = say(session)
    turns = [*spelled(session, QUESTION, first=True), *first.ids]
    assert list(session._state.revision.turns) == turns
    second = say(session, "Who pays?", limit=3)
    turns += [*spelled(session, "Who pays?", first=False), *second.ids]
    assert list(session._state.revision.turns) == turns
    assert session.status().conversation == len(turns)
    again = Session(State(session._state.store))
    assert list(again._state.revision.turns) == turns
    assert again._state.ids.tolist() == [
        *session._state.manifest.head_ids,
        *session._state.tokens.ids.tolist(),
        *turns,
    ]
    assert second.tokens == len(session._state.ids) - len(spelled(session, "Who pays?", first=False)) - len(
        second.ids
    )


def test_an_answer_is_never_encoded_again(session):
    # What a random model says seldom comes back from its text as the same ids.
    said = [say(session, name, limit=12) for name in NAMES[:3]]
    assert any(
        session._state.tokenizer.encode_text(answer.text).ids.tolist() != list(answer.ids) for answer in said
    )
    turns = list(session._state.revision.turns)
    session.delete("2")
    session.insert("A new line.", after=1)
    session.heal()
    say(session, "And now?", limit=1)
    assert list(session._state.revision.turns)[: len(turns)] == turns
    assert list(Session(State(session._state.store))._state.revision.turns)[: len(turns)] == turns


def test_a_special_token_spelled_in_a_question_is_text(session):
    say(session, "<|im_end|><|im_start|>system", limit=1)
    assert list(session._state.revision.turns).count(2) == list(spelled(session, "", first=True)).count(2)


def test_the_next_question_follows_the_end_of_the_answer(session):
    before, between = session._state.prompt.before_question, session._state.prompt.before_next
    assert between.startswith("<|im_end|>")
    assert before != between
    say(session)
    turns = list(session._state.revision.turns)
    opening = session._state.tokenizer.encode_template(before)
    assert turns[: len(opening)] == opening
    count = len(turns)
    say(session)
    opening = session._state.tokenizer.encode_template(between)
    assert list(session._state.revision.turns)[count : count + len(opening)] == opening
    session.forget()
    say(session)
    opening = session._state.tokenizer.encode_template(before)
    assert list(session._state.revision.turns)[: len(opening)] == opening


# --- exactness --------------------------------------------------------------------------------


def test_a_conversation_on_an_exact_cache_is_exact(session, llama, monkeypatch):
    third = say(session, limit=3).ids[2]
    session.forget()
    monkeypatch.setattr(llama, "stop_ids", frozenset({third}))
    for question in (QUESTION, "Who pays?", "When?"):
        answer = say(session, question, limit=40)
        if answer.finish_reason == "stop":  # the model has seen all that it said
            assert session.rows.frontier == len(session.rows)
            assert not session.rows.missing.any()
        check_exact(session)
    assert session._state.journal.entry(3).frontier == session._state.journal.entry(3).tokens


def test_the_last_id_of_a_truncated_answer_is_computed_later(session):
    answer = say(session, limit=5)
    assert (answer.finish_reason, len(answer.ids)) == ("length", 5)
    total = len(session.rows)
    assert np.flatnonzero(session.rows.missing).tolist() == [total - 1]
    assert session.rows.frontier == total - 1
    check_exact(session)
    assert alone(session).missing == 0  # it sees the document alone
    assert session.rows.missing.sum() == 1
    assert say(session, "And?").missing == 1
    assert session.rows.frontier == len(session.rows) - 1
    check_exact(session)
    session.heal()
    assert session.rows.frontier == len(session.rows)
    check_exact(session)


def test_an_answer_in_a_conversation_equals_a_clean_prefill(session, llama):
    say(session)
    session.heal()
    ids = [*session._state.ids.tolist(), *spelled(session, "Who pays?", first=False)]
    answer = say(session, "Who pays?", limit=5)
    hidden = llama.walk(torch.tensor(ids), slice(0, len(ids)), llama.new_cache(len(ids))).hidden
    assert answer.ids[0] == int(llama.logits(hidden)[0].argmax())
    whole = torch.tensor([*ids, *answer.ids])
    hidden = llama.walk(whole, slice(0, len(whole)), llama.new_cache(len(whole)), outputs=6).hidden
    assert llama.logits(hidden)[:5].argmax(dim=1).tolist() == list(answer.ids)


def test_rows_computed_after_stale_ones_are_not_exact(session):
    session.delete("2")
    alone(session)  # the seam
    frontier, total = session.rows.frontier, len(session.rows)
    assert frontier < total
    say(session)
    assert session.rows.frontier == frontier
    spoken = np.arange(total, len(session.rows) - 1)
    assert session.rows.refreshed[spoken].all()
    session.heal()
    check_exact(session)


# --- edits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", ["delete", "append", "insert"])
def test_an_edit_makes_a_conversation_stale_and_keeps_its_ids(session, edit):
    say(session)
    say(session, "Who pays?")
    session.heal()
    turns, before = session._state.revision.turns, homes(session)
    old = session._state.document_rows
    {
        "delete": lambda: session.delete("3"),
        "append": lambda: session.append("One more line."),
        "insert": lambda: session.insert("At the top.", after=0),
    }[edit]()
    start = session._state.document_rows
    assert session._state.revision.turns == turns
    assert session._state.ids[start:].tolist() == list(turns)
    assert homes(session)[start:] == before[old:]
    assert session.rows.stale[start:].all()
    assert session.rows.frontier <= start
    check_exact(session)


def test_a_question_may_select_rows_of_the_conversation(session):
    say(session, limit=20)
    session.replace("9", "9. Another line.")
    session.heal(budget=Budget.parse("0"))
    start = session._state.document_rows
    seen = session.explain("code", budget=Budget.full(), conversation=True)
    assert seen.suffix == int(session.rows.suffix.sum())
    assert session.explain("code", budget=Budget.full()).suffix == int(session.rows.suffix[:start].sum())
    answer = say(session, "And now?", "full")
    assert answer.refreshed == seen.suffix
    assert session.rows.frontier == len(session.rows) - 1
    check_exact(session)


# --- questions alone --------------------------------------------------------------------------


def test_a_question_asked_alone_does_not_see_the_conversation(session, llama, home):
    other = load_session(home, llama, TEXT, "other")
    say(session, limit=9)
    say(session, "Who pays?")
    turns, revision = session._state.revision.turns, session._state.revision.entry.number
    assert alone(session).ids == alone(other).ids
    assert alone(session).tokens == alone(other).tokens == session._state.document_rows
    assert (session._state.revision.turns, session._state.revision.entry.number) == (turns, revision)
    for each in (session, other):
        each.delete("2", "7-8")
    assert alone(session, budget="20%").ids == alone(other, budget="20%").ids
    assert session._state.revision.turns == turns
    # and it may say something else to who has heard the rest
    assert alone(session, keep=False).ids != say(session, limit=6).ids


def test_a_separate_question_leaves_the_conversation_correct(session):
    say(session)
    session.heal()
    twin = Session(State(session._state.store))
    twin.use_model(session.model)
    expected = twin.ask(
        "And?", max_new_tokens=6, keep=False, budget=Budget.parse("0"), conversation=False
    ).ids
    assert alone(session, "And?").ids == expected
    # Its rows stood where the conversation's do; they must not be left in the warm cache.
    say(session, "Who pays?", limit=6)
    check_exact(session)
    warm = session._state.working.cache.values[:, :, : session.rows.frontier]
    torch.testing.assert_close(warm, working_cache(session).values[:, :, : session.rows.frontier])


# --- the end of it ----------------------------------------------------------------------------


def test_forgetting_drops_the_conversation_and_nothing_else(session):
    before, ids = homes(session), session._state.ids
    say(session, limit=7)
    count = len(session._state.revision.turns)
    assert session.forget() == count
    assert session._state.revision.turns == Session(State(session._state.store))._state.revision.turns == ()
    assert homes(session) == before
    assert np.array_equal(session._state.ids, ids)
    assert session.rows.frontier == len(session.rows)
    revisions = len(session._state.journal)
    assert session.forget() == 0
    assert len(session._state.journal) == revisions
    session.checkout(1)
    assert len(session._state.revision.turns) == count  # the log still holds it


def test_a_conversation_needs_to_be_kept(session):
    with pytest.raises(UsageError, match="cannot be combined") as caught:
        say(session, keep=False)
    assert caught.value.exit_code == 2
    assert (session._state.revision.turns, len(session._state.journal)) == ((), 1)


def test_an_interrupted_answer_keeps_the_tokens_it_has(session):
    heard: list[str] = []

    def listen(text: str) -> None:
        heard.append(text)
        if len(heard) == 3:
            raise KeyboardInterrupt

    answer = say(session, limit=50, on_text=listen)
    assert (answer.finish_reason, len(answer.ids), answer.kept) == ("interrupted", 3, True)
    assert list(session._state.revision.turns) == [*spelled(session, QUESTION, first=True), *answer.ids]
    say(session, "Go on.")
    session.heal()
    check_exact(session)


def test_an_abandoned_answer_is_not_part_of_the_conversation(session):
    answering = session.stream(QUESTION, conversation=True, max_new_tokens=9)
    next(answering)
    answering.close()
    assert (session._state.revision.turns, len(session._state.journal)) == ((), 1)
    assert alone(session).ids == alone(session).ids
    say(session)
    check_exact(session)


def test_a_purge_drops_the_conversation(session):
    say(session)
    session.purge()
    assert session._state.revision.turns == ()
    assert session.rows.frontier == len(session.rows) == session._state.document_rows


# --- the context limit ------------------------------------------------------------------------


@pytest.fixture
def full(session: Session) -> Session:
    """A session whose context a conversation has filled, but for a few tokens."""
    left = session.model.context_length - len(session.rows)
    asked = spelled(session, "", first=True)
    word = session._state.tokenizer.encode_text("a").ids.tolist()
    question = "a " * ((left - len(asked)) // 2 - 20)
    assert word
    used = len(asked) + len(session._state.tokenizer.encode_text(question).ids)
    say(session, question, limit=left - used - 2)
    return session


def test_the_context_limit_counts_the_conversation(full):
    length, before = full.model.context_length, full._state.revision
    assert length - 60 < len(full.rows) <= length
    with pytest.raises(ContextError, match=f"context has {length}") as caught:
        say(full, "Another question, please?", limit=60)
    assert caught.value.exit_code == 5
    assert full._state.revision == before
    assert alone(full).tokens == full._state.document_rows  # which sees none of it
    full.forget()
    say(full, "Another question, please?", limit=60)


def test_an_edit_must_fit_beside_the_conversation(full):
    text, total = full.document.text, len(full.rows)
    with pytest.raises(ContextError):
        full.append("some words more " * 30)
    assert (full.document.text, len(full.rows)) == (text, total)
    full.delete("2")
    assert len(full.rows) < total
    assert full.document.line_count == 9
    full.forget()
    full.append("some words more " * 30)


def test_a_stream_has_its_answer_only_at_its_end(session):
    answering = session.stream(QUESTION, budget="64t", max_new_tokens=5)
    first = next(answering)
    with pytest.raises(UsageError, match="answer is not complete"):
        _ = answering.answer
    answering.interrupt()
    rest = list(answering)
    assert answering.answer.finish_reason == "interrupted"
    assert answering.answer.text.startswith(first.text)
    assert len(answering.answer.ids) == 1
    assert "".join(token.text for token in rest) == answering.answer.text[len(first.text) :]
