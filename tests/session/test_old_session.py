"""A session that kvedit wrote before its packages were made (commit 21b459e) still opens.

`tests/data/session-0.3` has the session, its tiny model, and what that kvedit said of it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvedit.checkpoint.opening import open_model
from kvedit.session.session import Session

DATA = Path(__file__).parent.parent / "data" / "session-0.3"


@pytest.fixture
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "expected.json").read_text())
    return found


@pytest.fixture
def session(tmp_path: Path) -> Session:
    shutil.copytree(DATA / "sessions" / "old", tmp_path / "old")
    return Session.open("old", home=tmp_path)


def test_an_old_session_has_its_counts_and_its_past(session: Session, expected: dict[str, Any]) -> None:
    status = asdict(session.status())
    assert {name: status[name] for name in expected["status"]} == expected["status"]
    entries = session.log(everything=True)[::-1]
    assert len(entries) == len(expected["revisions"])
    for entry, wanted in zip(entries, expected["revisions"], strict=True):
        assert session.text_of(entry.number) == wanted.pop("text")
        assert {name: getattr(entry, name) for name in wanted} == wanted


def test_an_old_session_passes_its_check(session: Session) -> None:
    checked = session.check()
    assert checked.findings == ()
    assert (checked.revisions, checked.segments) == (8, 5)


def test_an_old_session_can_be_edited_and_asked(session: Session) -> None:
    session.use_model(open_model(DATA / "model", device="cpu"))
    assert session.redo().command == "redo"
    session.delete("4")
    session.undo(2)
    answer = session.ask("What is item 5?", budget="full", max_new_tokens=2)
    assert answer.missing + answer.refreshed + answer.reused == answer.tokens
    session.heal()
    assert session.verify().exact
