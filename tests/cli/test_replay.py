"""Replay: scripts of commands with expectations, their exit codes and their records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sessions import FEE_LINES, reset_workspace
from typer.testing import CliRunner

from kvedit.cli.app import app
from kvedit.session.session import Session

ASK = "ask --max-new-tokens 2 --budget 9t Fees?"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    reset_workspace()


@pytest.fixture
def contract(home: Path, fee_sessions: Path) -> Path:
    return shutil.copytree(fee_sessions, home)


def replay(*lines: str, code: int = 0, options: tuple[str, ...] = ()) -> Any:
    Path("script.kvedit").write_text("".join(f"{line}\n" for line in lines))
    return run("script.kvedit", *options, code=code)


def run(*args: str, code: int = 0, stdin: str | None = None) -> Any:
    result = CliRunner().invoke(app, ["replay", *args], input=stdin)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert "this is a bug in kvedit" not in result.output
    return result


@pytest.mark.parametrize(
    ("command", "held", "failed", "problem"),
    [
        (ASK, "answer lacks 'no such words'", "answer contains 'no such words'", "it was: "),
        (ASK, "refreshed equals 9", "refreshed equals 8", "it was 9"),
        (ASK, "missing equals 0", "missing equals 1", "it was 0"),
        (ASK, "stale below 99.5%", "stale below 50%", "% of the rows are stale or missing"),
        ("heal", "stale below 0.1%", "stale below 0%", "0.00% of the rows are stale or missing"),
        ("status", "lines equals 29", "lines equals 30", "it was 29"),
        ("status", "exit equals 0", "exit equals 2", "it was 0"),
        ("status", "stale below 100%", "answer contains a", "there was no answer"),
        ("status", "lines equals 29", "refreshed equals 9", "it was 0"),
        ("show", "exit equals 0", "tokens equals 9", "the last command reported no tokens"),
    ],
)
def test_an_expectation_holds_or_fails_and_says_what_was_found(
    contract: Path, command: str, held: str, failed: str, problem: str
) -> None:
    replay("delete --lines 2", command, f"expect {held}")
    Session.open().undo()
    done = replay("delete --lines 2", command, f"expect {failed}", code=1)
    assert f"Line 3: expected {failed}, and" in done.stderr
    assert problem in done.stderr
    assert "2 commands and 1 expectation in" in done.stderr


def test_an_answer_contains_what_it_says(contract: Path) -> None:
    answer = json.loads(CliRunner().invoke(app, [*ASK.split(), "--no-keep", "--json"]).stdout)["answer"]
    word = answer.split()[0]
    replay("status", ASK, f"expect answer contains '{word}'")
    done = replay(ASK, f"expect answer lacks '{word}'", code=1)
    assert f"expected answer lacks '{word}', and it was: {answer.strip()}." in done.stderr


def test_a_script_has_comments_and_shows_its_commands(contract: Path) -> None:
    done = replay("# A tour.", "", "show -l 1", "  status")
    assert done.stdout.startswith(f" 1  {FEE_LINES[0]}\n")
    assert done.stderr.splitlines()[:2] == ["> show -l 1", "> status"]
    assert "2 commands and 0 expectations" in done.stderr


def test_a_failed_command_stops_the_script_with_its_own_code(contract: Path) -> None:
    done = replay("delete --lines 99", "delete --lines 1", code=2)
    assert "1 command and 0 expectations in" in done.stderr
    assert "1 failed." in done.stderr
    assert Session.open().document.line_count == 30


def test_a_failed_expectation_stops_the_script_with_code_1(contract: Path) -> None:
    replay("status", "expect lines equals 1", "delete --lines 1", code=1)
    assert Session.open().document.line_count == 30


def test_keep_going_runs_all_and_gives_the_first_code(contract: Path) -> None:
    lines = ("status", "expect lines equals 1", "delete -l 99", "delete -l 1", "expect lines equals 29")
    done = replay(*lines, code=1, options=("--keep-going",))
    assert "3 commands and 2 expectations in" in done.stderr
    assert "2 failed." in done.stderr
    assert Session.open().document.line_count == 29
    replay("nosuch", "status", "expect lines equals 1", code=2, options=("-k",))


def test_an_expected_failure_counts_as_success(contract: Path) -> None:
    done = replay("delete -l 99", "# which is refused", "", "expect exit equals 2", "delete -l 1")
    assert "all held." in done.stderr
    assert Session.open().document.line_count == 29
    replay("delete -l 99", "expect exit equals 3", "delete -l 1", code=1)
    assert Session.open().document.line_count == 29


@pytest.mark.parametrize(
    "bad",
    [
        "answer is 5",
        "stale below five",
        "stale below 5",
        "refreshed equals -1",
        "refreshed below 5",
        "",
        "'open",
    ],
)
def test_a_mistaken_expectation_is_refused_before_anything_runs(contract: Path, bad: str) -> None:
    done = replay("delete --lines 1", f"expect {bad}", code=2)
    fact, remedy = done.stderr.splitlines()
    assert fact.startswith("Error: Line 2 has an unknown expectation")
    assert "expect answer contains TEXT" in remedy
    assert Session.open().document.line_count == 30


def test_a_script_comes_from_standard_input(contract: Path) -> None:
    done = run("-", stdin="delete --lines 1\nexpect lines equals 29\n")
    assert "all held." in done.stderr


def test_paths_count_from_the_folder_of_the_script(contract: Path) -> None:
    folder = Path("elsewhere")
    folder.mkdir()
    (folder / "annex.md").write_text("The annex.\n")
    (folder / "a.kvedit").write_text("append --file annex.md\nexport -o copy.md\n")
    run("elsewhere/a.kvedit", "--jsonl", "out.jsonl")
    assert (folder / "copy.md").read_text().endswith("\nThe annex.\n")
    assert Path("out.jsonl").is_file()  # an option counts from where the command runs


def test_an_unreadable_or_unwritable_file_is_reported(contract: Path) -> None:
    assert "cannot be read" in run("gone.kvedit", code=2).stderr
    Path("bad.kvedit").write_bytes(b"\xff\xfe\0")
    assert "Error: " in run("bad.kvedit", code=2).stderr
    done = replay("delete -l 1", code=1, options=("--jsonl", "gone/out.jsonl"))
    assert "cannot be written" in done.stderr
    assert Session.open().document.line_count == 30


def test_each_command_and_expectation_leaves_a_record(contract: Path) -> None:
    lines = (
        "delete -l 2",
        f"{ASK} --seed 7",
        "expect refreshed equals 9",
        "expect lines equals 3",
        "delete -l 99",
    )
    replay(*lines, code=1, options=("-k", "--jsonl", "out.jsonl"))
    records = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [(record["event"], record["line"]) for record in records] == [
        ("command", 1),
        ("command", 2),
        ("expect", 3),
        ("expect", 4),
        ("command", 5),
    ]
    keys = "schema_version event line command exit_code seconds result error seed at versions machine model"
    assert all(set(record) == set(keys.split()) for record in records if record["event"] == "command")
    deleted, asked, held, failed, refused = records
    assert (deleted["command"], deleted["exit_code"], deleted["error"]) == ("delete -l 2", 0, None)
    assert deleted["result"]["removed_lines"] == 1
    assert (asked["seed"], asked["result"]["rows"]["refreshed"]) == (7, 9)
    assert {"answer", "answer_ids", "timings", "total_s"} <= set(asked["result"])
    assert set(asked["versions"]) == {"kvedit", "python", "torch", "transformers", "tokenizers"}
    model = Session.open()._state.manifest.model
    assert {name: asked["model"][name] for name in model.parts} == model.parts
    assert 0 < asked["result"]["total_s"] <= asked["seconds"] + 0.01
    assert (held["expect"], held["held"], held["found"]) == ("refreshed equals 9", True, None)
    assert (failed["held"], failed["found"]) == (False, "the last command reported no lines")
    assert (refused["exit_code"], refused["result"], refused["seed"]) == (2, None, None)
    assert set(refused["error"]) == {"fact", "remedy"}


def test_json_prints_only_the_totals(contract: Path) -> None:
    done = replay("show", "delete -l 99", "expect exit equals 2", options=("--json",))
    totals = json.loads(done.stdout)
    assert set(totals) == set("schema_version commands expectations failed seconds exit_code".split())
    assert (totals["commands"], totals["expectations"], totals["failed"], totals["exit_code"]) == (2, 1, 0, 0)


def test_the_script_of_a_session_replays_to_the_same_session(contract: Path) -> None:
    for line in ("delete -l 2-3", "insert --after 1 'A new one.'", ASK):
        replay(line)
    before = Session.open()
    script = CliRunner().invoke(app, ["log", "--script"]).stdout
    run("-", stdin=script.replace("load ", "load --force --session again ", 1))
    after = Session.open("again")
    assert (after.document.text, after.rows.pieces()) == (before.document.text, before.rows.pieces())


def test_ctrl_c_stops_the_script(contract: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "status", interrupt)
    done = replay("status", "delete -l 1", code=130, options=("--keep-going",))
    assert "Interrupted; the session is intact." in done.stderr
    assert Session.open().document.line_count == 30
