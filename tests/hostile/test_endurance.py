"""A process that runs many commands holds no more at the end than at the start.

The whole thousand is a row of `benchmarks/reliability.py`; here is a short cut of it.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from endurance import a_line

from kvedit.cli.repl.line import commands, words_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_commands_leak_no_files_mappings_or_threads(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/endurance.py"), str(checkpoints["llama"])]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(tmp_path / "home"), "60", "3"],
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == []
    assert found["codes"]["0"] > 40
    early, end = found["settled"], found["end"]
    assert (end["operations"], end["files"], end["threads"]) == (60, early["files"], early["threads"])
    for sample in found["samples"]:  # each segment that rows of the present live in is mapped, once
        assert sample["mappings"] <= sample["segments"]
    assert end["resident_bytes"] < early["resident_bytes"] + 20e6
    print(f"last over first: {found['last_ms'] / found['first_ms']:.2f}")


def test_the_script_has_every_kind_of_line_and_all_are_commands() -> None:
    chance = random.Random(1)
    verbs = {words_of(a_line(chance, lines))[0] for lines in (10, 25, 40) for _ in range(300)}
    assert verbs <= set(commands())
    assert verbs >= {"ask", "heal", "verify", "explain", "delete", "insert", "replace", "move", "undo"}


# --- the table of docs/reliability.md --------------------------------------------------------------


def reliability(*args: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/reliability.py"), *args],
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def bench() -> Any:
    return importlib.import_module("reliability")


def test_the_page_has_every_row_and_no_row_lost_data(bench: Any) -> None:
    page = bench.PAGE.read_text()
    table = page.partition(bench.BEGIN)[2].partition(bench.END)[0]
    found = [name for line in table.splitlines() if (name := bench.name_of(line))]
    assert found == list(bench.ROWS)
    for line in table.splitlines()[3:]:
        *_, count, wrong, seconds, seed, _ = (cell.strip() for cell in line.split("|"))
        assert (wrong, seed) == ("none", "1") or count == "not run"
        assert int(seconds.replace(",", "")) >= 0
    for name in bench.ROWS:
        assert f"`{name}`" in page.partition(bench.END)[2]


def test_rows_replace_those_with_the_same_name(bench: Any) -> None:
    page = f"Before.\n{bench.BEGIN}\n{bench.END}\nAfter.\n"
    first = bench.written(page, [bench.Row("kills", "killed", 200, [], 1, 60.4)])
    both = bench.written(
        first, [bench.Row("faults", "injected", 3, ["one"], 2), bench.Row("fuzz", "x", None, [], 1)]
    )
    again = bench.written(both, [bench.Row("kills", "killed", 1000, [], 3, 1.0)])
    assert again.startswith("Before.\n")
    assert again.endswith(f"{bench.END}\nAfter.\n")
    assert [line for line in again.splitlines() if bench.name_of(line)] == [
        "| `faults` | injected | 3 | 1 | 0 | 2 |",
        "| `fuzz` | x | not run |  | 0 | 1 |",
        "| `kills` | killed | 1,000 | none | 1 | 3 |",
    ]


def test_one_row_can_be_made_again_from_its_seed(tmp_path: Path) -> None:
    done = reliability("--quick", "--only", "oracles", "--seed", "5", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["name"], row["count"], row["wrong"], row["seed"]) == ("oracles", 10, [], 5)


def test_a_fault_is_counted_and_named_and_exits_with_1(bench: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(bench.ROWS, "oracles", (lambda task: ("tried", 2, [f"seed {task.seed}"]), 1, 1))
    monkeypatch.setattr(sys, "argv", ["reliability.py", "--only", "oracles", "--seed", "9"])
    with pytest.raises(SystemExit) as left:
        bench.main()
    assert left.value.code
    assert "oracles: seed 9" in capsys.readouterr().out


def test_quick_and_write_cannot_be_combined() -> None:
    assert reliability("--quick", "--write").returncode == 2
