"""A budget as a user writes it: which rows it selects, what is counted apart, and the order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.sessions import reset_workspace
from typer.testing import CliRunner

from kvedit.cli.app import app
from kvedit.cli.repl.line import run_line
from kvedit.cli.workspace import here

QUESTION = "What are the fees?"


def kvedit(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def edited(home: Path, fee_sessions: Path) -> int:
    """A session with missing rows and stale ones; gives S."""
    shutil.copytree(fee_sessions, home)
    kvedit("replace", "--lines", "3", "A line of other words.")
    record = json.loads(kvedit("status", "--json").stdout)
    assert record["missing"] > 0
    assert record["suffix"] > 200
    return int(record["suffix"])


def asked(*words: str) -> dict[str, Any]:
    done = kvedit("ask", QUESTION, "--no-keep", "--max-new-tokens", "1", "--json", *words)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("form", "hundredths", "rows"),
    [
        ("0", 0, 0),
        ("0%", 0, 0),
        ("1%", 100, 0),
        ("5%", 500, 0),
        ("5 %", 500, 0),
        ("2.5%", 250, 0),
        ("100%", 10000, 0),
        ("full", 10000, 0),
        ("128t", 0, 128),
        ("128 T", 0, 128),
        ("1000000000t", 10000, 0),
    ],
)
def test_a_budget_is_rounded_down_and_excludes_missing_rows(
    edited: int, form: str, hundredths: int, rows: int
) -> None:
    """https://github.com/LMCache/LMCache/pull/1227"""
    selected = max(edited * hundredths // 10000, rows)
    missing = json.loads(kvedit("status", "--json").stdout)["missing"]
    answer = asked("--budget", form)
    assert answer["budget"]["rows"] == answer["rows"]["refreshed"] == selected
    assert answer["budget"]["suffix_rows"] == edited
    assert answer["rows"]["missing"] == missing
    explained = json.loads(kvedit("explain", QUESTION, "--json", "--budget", form).stdout)
    assert (explained["budget_rows"], explained["missing"]) == (selected, missing)


@pytest.mark.parametrize(
    "form",
    ["-5%", "101%", "5", "0.05", "1e9", "1e9t", "128 tokens", "NaN", "nan%", "inf", "", "%", "٥%", "5%,6%"],
)
def test_an_ambiguous_budget_is_refused_with_the_valid_forms(edited: int, form: str) -> None:
    for words in (
        ["ask", QUESTION, "--budget", form],
        ["explain", QUESTION, "--budget", form],
        ["verify", "-q", QUESTION, "--budget", form],
        ["heal", "--budget", form],
    ):
        done = kvedit(*words, "--json", code=2)
        error = json.loads(done.stdout)["error"]
        assert "5%" in error["remedy"]
        assert "128t" in error["remedy"]
        assert "full" in error["remedy"]


def test_an_option_overrides_the_setting_and_that_the_default(edited: int) -> None:
    here.warm = True
    try:

        def selected(line: str) -> int:
            assert run_line(line) == 0
            assert here.record is not None
            return int(here.record["budget"]["rows"])

        ask = f"ask '{QUESTION}' --no-keep --max-new-tokens 1 --json"
        assert selected(ask) == max(64, edited // 20)
        assert run_line("set budget 10%") == 0
        assert selected(ask) == edited // 10
        assert selected(f"{ask} --budget 7t") == 7
        assert selected(f"{ask} --budget 0") == 0  # a zero is a budget like any other
        assert run_line("set budget 1e9") == 2
        assert selected(ask) == edited // 10
        assert run_line("set budget default") == 0
        assert selected(ask) == max(64, edited // 20)
    finally:
        reset_workspace()


def test_no_variable_of_the_environment_changes_the_budget(
    edited: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BUDGET", "KVEDIT_BUDGET", "KVEDIT_ASK_BUDGET", "ASK_BUDGET"):
        monkeypatch.setenv(name, "full")
    assert asked()["budget"]["rows"] == max(64, edited // 20)
