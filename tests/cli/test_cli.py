"""The command line: what it prints where, its exit codes, and that a failed command changes nothing."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rigs.tiny import save_tiny
from typer.testing import CliRunner

from kvedit.cli.app import app
from kvedit.names import SUPPORTS
from kvedit.policies.registry import POLICIES
from kvedit.store.home import Home

LINES = [f"Line {number}: the fees of item {number} are {number * 37}." for number in range(1, 25)]
TEXT = "\n".join(LINES) + "\n"
STATUS = "name model dtype context_length source conversation undone revision lines tokens suffix"
STATUS += " frontier exact refreshed stale missing "
STATUS = f"{STATUS} size_bytes edits created schema_version".split()
CHANGE = set(
    "schema_version command revision removed_lines added_lines token_change lines tokens missing stale "
    "suffix replay_s written_bytes".split()
)
ANSWER = "question answer answer_ids finish_reason policy executor seed temperature budget options rows "
ANSWER += "runs kept timings total_s first_token_s repair_s replay_estimate_s replay_ratio schema_version"


def kvedit(*args: str | Path, code: int = 0, stdin: str | bytes | None = None) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert "this is a bug in kvedit" not in result.output
    assert "\x1b" not in result.output
    return result


def parsed(*args: str | Path, code: int = 0) -> dict[str, Any]:
    result = kvedit(*args, "--json", code=code)
    assert result.stdout.isascii()
    return json.loads(result.stdout)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def folders(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    good = checkpoints["llama"]
    found = {"model": good, "other": save_tiny(root / "other", "llama", seed=1)}
    for name in ("bare", "cut", "mute", "retold"):
        found[name] = shutil.copytree(good, root / name)
    (found["bare"] / "model.safetensors").unlink()
    os.truncate(found["cut"] / "model.safetensors", 4000)
    for path in found["mute"].glob("*token*"):
        path.unlink()
    (found["retold"] / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ 'x' }}")
    return found


@pytest.fixture(scope="module")
def original(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session `contract` with one deletion behind it, never to be changed: each test gets a copy."""
    root = tmp_path_factory.mktemp("original")
    (root / "contract.txt").write_text(TEXT)
    for args in (["load", root / "contract.txt", "-m", folders["model"]], ["delete", "-l", "3-4"]):
        CliRunner().invoke(app, [*map(str, args)], env={"KVEDIT_HOME": str(root / "sessions")})
    return root / "sessions"


@pytest.fixture
def contract(home: Path, original: Path) -> Path:
    return shutil.copytree(original, home)


def test_a_document_is_loaded_edited_shown_and_asked(home, folders):
    Path("contract.txt").write_text(TEXT)
    loaded = parsed("load", "contract.txt", "--model", folders["model"])
    assert set(loaded) == {*STATUS, "seconds", "prefill_tokens_per_s"}
    assert (loaded["exact"], loaded["lines"], loaded["suffix"]) == (loaded["tokens"], 24, 0)
    deleted = parsed("delete", "--lines", "7,9-10", "-l", "10-")
    assert set(deleted) == CHANGE
    assert (deleted["removed_lines"], deleted["added_lines"], deleted["suffix"] > 0) == (17, 0, True)
    left = list(enumerate([*LINES[:6], LINES[7]], start=1))
    assert [(line["number"], line["text"]) for line in parsed("show")["lines"]] == left
    assert kvedit("show", "-l", "7").stdout == f"7  {LINES[7]}\n"
    held = parsed("status")
    assert set(held) == set(STATUS)
    assert held["tokens"] == loaded["tokens"] + deleted["token_change"] == deleted["tokens"]
    assert held["exact"] + held["refreshed"] + held["stale"] + held["missing"] == held["tokens"]
    answer = parsed("ask", "What are the fees?", "--budget", "20%", "--max-new-tokens", "4")
    assert set(answer) == set(ANSWER.split())
    rows = answer["rows"]
    assert rows["missing"] + rows["refreshed"] + rows["reused"] == rows["total"] == held["tokens"]
    assert answer["budget"] == {"asked": "20%", "rows": held["suffix"] // 5, "suffix_rows": held["suffix"]}
    assert (answer["finish_reason"], len(answer["answer_ids"])) in {("length", 4), ("stop", 3), ("stop", 2)}
    assert set(answer["timings"]) == set("load selection shift refresh question decode save".split())


def test_a_full_budget_answers_like_a_fresh_load(contract, folders):
    options = ("What are the fees?", "--budget", "full", "--max-new-tokens", "12")
    repaired = parsed("ask", *options)
    Path("edited.txt").write_text("\n".join(LINES[:2] + LINES[4:]) + "\n")
    kvedit("load", "edited.txt", "--model", folders["model"])
    assert parsed("ask", *options)["answer_ids"] == repaired["answer_ids"]


def test_stdout_has_the_answer_and_stderr_a_table_in_80_columns(contract):
    options = ("What are the fees?", "--no-keep", "--max-new-tokens", "5", "--budget", "10%")
    plain = kvedit("ask", *options)
    assert plain.stdout == parsed("ask", *options)["answer"] + "\n"
    words = ("selection", "question prefill", "total", "rows", "budget", "first token", "full replay")
    assert all(word in plain.stderr for word in words)
    assert all(len(line) <= 80 for line in plain.stderr.splitlines())


def test_without_keep_no_byte_of_the_session_changes(contract):
    before = contents(contract)
    kvedit("ask", "What are the fees?", "--no-keep", "--max-new-tokens", "2")
    assert kvedit("show").stdout
    assert contents(contract) == before


def test_kept_rows_are_not_refreshed_again(contract):
    before = parsed("status")
    answer = parsed("ask", "What are the fees?", "--budget", "30%", "--max-new-tokens", "1")
    after = parsed("status")
    assert before["stale"] - after["stale"] == answer["rows"]["refreshed"]
    assert (after["missing"], answer["kept"], after["tokens"]) == (0, True, before["tokens"])


def test_standard_input_is_a_document_or_a_question(home, folders):
    kvedit("load", "-", "--model", folders["model"], stdin="\ufeffOne line.\nשתיים 🙂\n".encode())
    assert kvedit("show").stdout == "1  One line.\n2  שתיים 🙂\n"
    assert parsed("status")["name"] == "stdin"
    asked = kvedit("ask", "-", "--json", "--max-new-tokens", "1", stdin="Who?\n")
    assert json.loads(asked.stdout)["question"] == "Who?"


def test_an_emptied_document_can_be_shown_and_asked(contract):
    kvedit("delete", "--lines", "1-")
    assert kvedit("show").stdout == ""
    assert parsed("show")["lines"] == []
    rows = parsed("ask", "What now?", "--max-new-tokens", "1")["rows"]
    assert (rows["refreshed"], rows["missing"], rows["reused"]) == (0, 0, parsed("status")["tokens"])


@pytest.mark.parametrize("name", sorted({*POLICIES} - {"oracle"}))  # which needs the clean cache
def test_every_policy_selects_the_rows_of_the_budget(contract, name):
    answer = parsed("ask", "fees of item 9", "--policy", name, "--budget", "40t", "--max-new-tokens", "1")
    assert (answer["rows"]["refreshed"], answer["policy"]) == (40, name)


def test_any_score_goes_with_any_support_rule(contract):
    ask = ("ask", "fees of item 9", "--budget", "40t", "--no-keep", "--max-new-tokens", "1")
    runs = [parsed(*ask, "--policy", "sur", "--support", rule)["runs"] for rule in SUPPORTS]
    assert runs[1] == 1 < runs[0]
    window = parsed(*ask, "--policy", "window")
    assert parsed(*ask, "--policy", "sur", "--support", "window")["runs"] == window["runs"]
    assert "units" in parsed("explain", "fees of item 9", "--policy", "qcfuse", "--budget", "40t")


# Exit code; words of the fact; command lines, where = stands for an empty argument.
BAD = """
2; cannot be read; load gone.txt -m {model}
2; is a folder; load . -m {model}
2; is empty; load empty.txt -m {model} | load mark.txt -m {model}
2; binary file: byte 3; load binary.txt -m {model}
2; byte 3; load latin.txt -m {model}
2; Unknown device 'tpu'; load fine.txt -m {model} --device tpu
2; Unknown dtype 'int8'; load fine.txt -m {model} --dtype int8
2; already; load contract.txt -m {model}
2; is not a valid session name; load fine.txt -m {model} -s ../up
2; lines 1 to 22; delete --lines 23 | delete -l 1 -l 20-40 | delete --lines 0-3 | show --lines 99
2; ends before it starts; delete --lines 5-2
2; not a range; delete --lines = | delete --lines 1,
2; outside 0% to 100%; ask Who? --budget=-1% | ask Who? --budget 200%
2; not a budget; ask Who? --budget abc
2; Unknown policy 'best'; ask Who? --policy best
2; Unknown executor 'fast'; ask Who? --executor fast
2; Unknown support 'lines'; ask Who? --support lines | explain Who? --support lines
2; clean; ask Who? --policy oracle
2; one run; ask Who? --executor direct --policy tokens --budget 40%
2; temperature; ask Who? --temperature -1 | ask Who? --temperature nan
2; --max-new-tokens must be at least 1.; ask Who? --max-new-tokens 0
2; question is empty; ask =
2; seed; ask Who? --seed 99999999999999999999 | ask Who? --seed -1 --policy units-random
3; no session 'nosuch'; ask Who? -s nosuch | delete --lines 1 -s nosuch | status -s nosuch
3; weights differ); ask Who? -m {other}
3; chat template differs); ask Who? -m {retold}
4; Unknown model 'nosuch'; load fine.txt -m nosuch | ask Who? -m nosuch
4; no safetensors weights; load fine.txt -m {bare}
4; weights; load fine.txt -m {cut}
4; no readable tokenizer; load fine.txt -m {mute}
4; no readable model configuration; load fine.txt -m .
4; is not a model; load fine.txt -m fine.txt
5; has 1024; load long.txt -m {model} | load long.txt -m {model} -s contract --force
5; has 1024; ask Who? --max-new-tokens 1000 | ask {long}
"""
ROWS = [row.split("; ") for row in BAD.strip().splitlines()]
CASES = [(code, fact, line) for code, fact, lines in ROWS for line in lines.split(" | ")]


@pytest.mark.parametrize(("code", "fact", "line"), CASES)
def test_a_refused_command_gives_a_remedy_and_changes_nothing(contract, folders, code, fact, line):
    texts = {"fine": "Fine.\n", "empty": "", "mark": "\ufeff", "binary": "ELF\0", "contract": TEXT}
    for name, text in {**texts, "long": TEXT * 3}.items():
        Path(f"{name}.txt").write_text(text, encoding="utf-8")
    Path("latin.txt").write_bytes(b"caf\xe9")
    args = ["" if part == "=" else part.format(**folders, long=TEXT * 3) for part in line.split()]
    before, files = {**parsed("status"), "size_bytes": 0}, contents(contract)
    result = kvedit(*args, code=int(code))
    error = result.stderr[result.stderr.index("Error: ") :].splitlines()
    assert fact in error[0]
    assert len(error) == 2, "one line of fact, one of remedy"
    assert (error[1][-1], result.stdout) == (".", "")
    assert {**parsed("status"), "size_bytes": 0} == before
    changed = {name for name, data in contents(contract).items() if files.get(name) != data}
    assert {Path(name).name for name in changed} <= {"lock", "holder.json"}
    told = parsed(*args, code=int(code))["error"]
    assert set(told) == {"kind", "fact", "remedy", "exit_code"}
    assert (told["exit_code"], error[0]) == (int(code), f"Error: {told['fact']}")


def test_a_failed_command_does_not_change_the_reported_size(contract):
    before = parsed("status")
    kvedit("ask", "Who?", "--policy", "best", code=2)
    assert parsed("status") == before


def test_without_any_session_every_verb_says_how_to_get_one(home):
    for line in ("status", "show", "ask Who?", "delete --lines 1"):
        assert "kvedit load FILE" in kvedit(*line.split(), code=3).stderr
    assert not home.exists()


def test_an_unknown_command_or_option_is_a_usage_error(home):
    for line in ("frobnicate", "ask", "delete", "load a.txt --nosuch", "ask Who? --seed x", "load a b"):
        assert kvedit(*line.split(), code=2).stderr
    assert kvedit("--version").stdout.startswith("kvedit ")


def test_a_damaged_segment_fails_an_ask_but_not_the_session(contract):
    path = next((contract / "contract" / "segments").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    assert "segment" in kvedit("ask", "Who?", code=3).stderr
    assert parsed("status")["lines"] == 22


def test_a_locked_session_names_its_holder_and_can_be_read(contract):
    with Home(contract).store("contract").lock("ask", "noon"):
        for args in (("delete", "--lines", "1"), ("ask", "Who?")):
            assert f"process {os.getpid()}" in kvedit(*args, code=3).stderr
        kvedit("ask", "Who?", "--no-keep", "--max-new-tokens", "1")
        kvedit("show")


def in_a_process(*args: str | Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1", **env})


ENDING = """import atexit, sys; from kvedit.__main__ import main
atexit.register(lambda: print([name for name in ("torch", "transformers") if name in sys.modules]))"""


def test_importing_reading_and_editing_load_no_torch(contract):
    assert in_a_process("-c", f"{ENDING}\nimport kvedit.cli.app, kvedit.session.session").stdout == b"[]\n"
    for line in ("delete --lines 1", "show --lines 2", "status", "status --json", "ask Who? --budget x"):
        done = in_a_process("-c", f"{ENDING}\nmain()", *line.split())
        assert done.stdout.endswith(b"[]\n"), done


def test_a_separate_process_prints_clean_streams(contract):
    done = in_a_process("-m", "kvedit", "ask", "What are the fees?", "--max-new-tokens", "3", "--no-keep")
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"Warning" not in done.stderr
    assert b"question prefill" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_an_unencodable_character_is_shown_as_a_question_mark(contract, encoding):
    odd = {"PYTHONIOENCODING": encoding, "COLUMNS": "20"}
    done = in_a_process("-m", "kvedit", "load", "gone-שלום🙂.txt", **odd)
    assert (done.returncode, b"gone-?????.txt" in done.stderr) == (2, True)
    assert in_a_process("-m", "kvedit", "status", **odd).returncode == 0


def test_a_closed_pipe_ends_the_command_quietly(contract):
    command = [sys.executable, "-m", "kvedit", "show"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_no_escapes_gets_none(contract, env):
    main, side = pty.openpty()
    command, asked = [sys.executable, "-m", "kvedit", "status"], {"TERM": "xterm-256color", **env}
    subprocess.run(command, stdout=side, stderr=side, stdin=side, env={**os.environ, **asked}, check=True)
    os.close(side)
    text = os.read(main, 1 << 16)
    os.close(main)
    assert b"contract" in text
    assert b"\x1b" not in text
