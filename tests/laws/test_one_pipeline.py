"""Law 12: the laboratory measures the code that `ask` runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvedit.errors import UsageError
from kvedit.lab import trial
from kvedit.lab.arms import Arm
from kvedit.lab.case import Case
from kvedit.lab.trial import Trial
from kvedit.model.model import Model
from kvedit.names import EXECUTOR_NAMES
from kvedit.policies.registry import POLICIES
from kvedit.repair import pipeline
from kvedit.repair.pipeline import Repair
from kvedit.session.session import Session
from kvedit.text.document import Document, Edit

LINES = [f"Line {number}: the fees of item {number} are {number * 37} pounds.\n" for number in range(1, 21)]
TEXT = "".join(LINES)
QUESTION = "What are the fees of item 12?"
DELETION = (Edit(len(LINES[0]), len(LINES[0]) + len(LINES[1])),)
# Text in place of a line leaves missing rows.
REPLACEMENT = (Edit(DELETION[0].start, DELETION[0].stop, "The fees of item 2 are waived.\n"),)
ASKED = sorted({*POLICIES} - {"oracle"})  # `ask` has no clean prefill for it


def case_of(edits: tuple[Edit, ...]) -> Case:
    """A case about `TEXT`."""
    return Case("case", "case", TEXT, edits, QUESTION, ("444",), max_new_tokens=6)


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch, module: Any) -> Iterator[dict[str, list[Any]]]:
    """Record the selected rows, the logits behind each prefilled question, and a trial's answer ids."""
    seen: dict[str, list[Any]] = {"rows": [], "logits": [], "ids": []}
    plain, select, view = module.prefill_question_, Repair.select, trial.Asked.view
    with monkeypatch.context() as patch:

        def prefill(*args: Any) -> Any:
            logits, states = plain(*args)
            seen["logits"].append(logits.clone())
            return logits, states

        def viewing(*args: Any, **more: Any) -> Any:
            answered = view(*args, **more)
            seen["ids"].append(answered.ids)
            return answered

        def selecting(self: Repair, options: Any) -> Any:
            selection = select(self, options)
            seen["rows"].append(selection.rows.tolist())
            return selection

        patch.setattr(module, "prefill_question_", prefill)
        patch.setattr(trial.Asked, "view", viewing)
        patch.setattr(Repair, "select", selecting)
        yield seen


def check_alike(
    session: Session,
    tried: Trial,
    arm: Arm,
    executor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The arm and `ask` select the same rows, and answer with the same logits and ids."""
    options = arm.options(tried.seed, executor)
    tried.executor = executor
    with watching(monkeypatch, trial) as theirs:
        record = tried.run(arm)
    with watching(monkeypatch, pipeline) as ours:
        answer = session.ask(QUESTION, options, keep=False, max_new_tokens=6)
    assert ours["rows"] == theirs["rows"]
    assert torch.equal(ours["logits"][0], theirs["logits"][0])
    assert theirs["ids"] == [answer.ids]
    assert answer.text == record["answer"]
    assert answer.refreshed == record["refreshed"]


def staged(model: Model, home: Path, edits: tuple[Edit, ...]) -> tuple[Session, Trial]:
    """A session with the edits made, and a trial of the same case."""
    case = case_of(edits)
    session = Session.load(Document(TEXT), model=model, home=home)
    with session._state.writing("replace"):
        session._state.edit(edits, "replace --lines 2 x")  # the very characters, not a difference of lines
    return session, Trial(model, case, seed=5)


@pytest.mark.parametrize("edits", [DELETION, REPLACEMENT], ids=["deletion", "replacement"])
def test_every_arm_is_what_ask_does(
    edits: tuple[Edit, ...], llama: Model, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, tried = staged(llama, home, edits)
    for policy in ASKED:
        for budget in ("0", "7t", "20%", "full"):
            check_alike(session, tried, Arm.parse(f"{policy}@{budget}"), "auto", monkeypatch)


@pytest.mark.parametrize("executor", sorted({*EXECUTOR_NAMES} - {"custom"}))  # which compiles for minutes
def test_every_executor_is_the_same_in_both(
    executor: str, llama: Model, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, tried = staged(llama, home, DELETION)
    for name in ("window@20%", "recency@full", "sur-seam@20%"):
        arm = Arm.parse(name)
        try:
            check_alike(session, tried, arm, executor, monkeypatch)
        except UsageError:  # several runs cannot go through `direct`, in neither of them
            assert executor == "direct"
            with pytest.raises(UsageError, match="one run"):
                session.ask(QUESTION, arm.options(5, executor), keep=False, max_new_tokens=6)


@pytest.mark.model
@pytest.mark.parametrize("name", ["sur-seam@5%", "infoflow@20%", "sur@full", "tokens@5%"])
def test_the_default_model_answers_alike(
    name: str, default_model: Model, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, tried = staged(default_model, home, REPLACEMENT)
    check_alike(session, tried, Arm.parse(name), "auto", monkeypatch)
