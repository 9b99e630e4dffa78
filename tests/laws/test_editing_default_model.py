"""Editing, history, healing, conversation and purge on the default model and real text."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rigs.reference import load_session, working_cache

from kvedit.cli.repl.background import Healer
from kvedit.cli.workspace import here
from kvedit.model.model import Model
from kvedit.repair.budget import Budget
from kvedit.session.session import Session

pytestmark = pytest.mark.model
CONTRACT = Path(__file__).resolve().parents[2] / "sessions" / "quickstart" / "contract.md"
QUESTION = "When must fees be paid?"
NOTHING = Budget.parse("0")


@pytest.fixture
def session(default_model: Model, home: Path) -> Session:
    """The first 35 lines of the contract."""
    text = "".join(CONTRACT.read_text(encoding="utf-8").splitlines(keepends=True)[:35])
    return load_session(home, default_model, text)


def assert_equals_a_fresh_load(session: Session, home: Path) -> None:
    fresh = load_session(home / "fresh", session.model, session.document.text)
    total = len(fresh.rows)
    held, clean = working_cache(session), working_cache(fresh)
    torch.testing.assert_close(held.keys[:, :, :total], clean.keys[:, :, :total], atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(held.values[:, :, :total], clean.values[:, :, :total], atol=2e-3, rtol=1e-3)
    left, right = (one.ask(QUESTION, budget=NOTHING, max_new_tokens=12) for one in (session, fresh))
    assert left.ids == right.ids
    assert len(left.ids) > 3


def test_healing_any_edits_equals_loading_the_edited_text(session: Session, home: Path) -> None:
    session.insert("The word of the day is harbour.", after=4)
    session.move("9-11", after=20)
    session.replace("2", "A line with other words.")
    session.delete("15-16")
    session.append("The payment term is thirty days.\nIt begins with the invoice.")
    session.undo()
    session.redo()
    missing = session.status().missing
    assert missing > 20
    healed = session.heal(budget=Budget.parse("40%"))
    assert (healed.finished, healed.frontier < healed.tokens) == ("budget", True)
    assert session.heal().frontier == len(session.rows)
    verified = session.verify()
    assert verified.exact
    assert max(verified.keys + verified.values) < 1e-4
    assert_equals_a_fresh_load(session, home)


def test_undo_gives_the_exact_rows_back_and_the_same_answer(session: Session) -> None:
    before = session.ask(QUESTION, budget=NOTHING, max_new_tokens=12)
    segments, rows = session._state.journal.segments(), session.rows.pieces()
    session.delete("5-9")
    assert session.status().stale > 0
    session.undo()
    assert session.rows.pieces() == rows
    assert session.status().exact == len(session.rows)
    after = session.ask(QUESTION, budget=NOTHING, max_new_tokens=12)
    assert (after.ids, after.refreshed, after.missing) == (before.ids, 0, 0)
    assert session._state.journal.segments() == segments


def test_a_healed_conversation_equals_a_prefill_of_its_ids(session: Session) -> None:
    first = session.ask(QUESTION, conversation=True, max_new_tokens=8)
    session.ask("And how much is it?", conversation=True, max_new_tokens=8)
    turns = session._state.revision.turns
    place = len(session._state.prompt.question_ids(session._state.tokenizer, QUESTION))
    assert turns[place : place + len(first.ids)] == first.ids  # as they were sampled
    session.heal()  # the last id of an answer that was cut has no state yet
    assert session.verify().exact
    session.delete("5")
    assert session.status().stale > len(turns) - 2
    session.forget()
    assert session.status().conversation == 0


def test_purge_leaves_no_byte_of_what_was_deleted(session: Session) -> None:
    secret = "The vault code of Ambrosia Quill is 90417."
    session.insert(secret, after=3)
    session.heal()
    session.ask("What is the vault code of Ambrosia Quill?", max_new_tokens=8, conversation=True)
    session.delete("4")
    ids = session._state.tokenizer.encode_text(secret).ids.astype(np.int32).tobytes()[8:-8]
    assert b"Ambrosia" in everything(session)
    assert ids in everything(session)
    session.purge()
    left = everything(session)
    assert b"Ambrosia" not in left
    assert b"90417" not in left
    assert ids not in left
    assert session.verify().exact
    assert [entry.command for entry in session.log(everything=True)] == ["purge"]


def everything(session: Session) -> bytes:
    return b"".join(path.read_bytes() for path in session._state.store.folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_question_after_idle_healing_refreshes_nothing(
    default_model: Model, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CONTRACT.read_text(encoding="utf-8") * 2
    encoded = default_model.tokenizer.encode_text(text)
    text = text[: text.rindex("\n", 0, int(encoded.starts[4000])) + 1]
    load_session(home, default_model, text)
    monkeypatch.setattr(here, "warm", True)
    session = here.session()
    session.use_model(default_model)
    session.delete("4-8")
    stale = session.status().stale
    assert stale > 3500
    healer = Healer()
    deadline, start = time.monotonic() + 120, session.rows.frontier
    while session.rows.frontier < len(session.rows) and time.monotonic() < deadline:
        time.sleep(0.1)
    healer.end()
    here.drop()
    assert session.rows.frontier > start + 200
    session.heal()  # what a slow machine has left over
    answer = session.ask(QUESTION, max_new_tokens=12)
    assert (answer.refreshed, answer.missing, answer.reused) == (0, 0, len(session.rows))
    assert answer.timings.phases["shift"].tokens == 0
    assert answer.timings.phases["refresh"].tokens == 0
    fresh = load_session(home / "fresh", default_model, session.document.text)
    assert answer.ids == fresh.ask(QUESTION, max_new_tokens=12).ids
