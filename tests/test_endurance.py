"""A process that runs many commands holds no more at the end than at the start.

The whole thousand is a row of `benchmarks/reliability.py`; here is a short cut of it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from endurance import a_line

from kvedit.cli.line import commands, words_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_many_commands_a_process_holds_no_more_files_mappings_or_threads(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    command = [sys.executable, str(ROOT / "tests/endurance.py"), str(checkpoints["llama"])]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(tmp_path / "home"), "100", "3"],
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == []
    assert found["codes"]["0"] > 70
    early, end = found["settled"], found["end"]
    assert (end["operations"], end["files"], end["threads"]) == (100, early["files"], early["threads"])
    for sample in found["samples"]:  # each segment that rows of the present live in is mapped, once
        assert sample["mappings"] <= sample["segments"]
    assert end["resident_bytes"] < early["resident_bytes"] + 20e6
    print(f"last over first: {found['last_ms'] / found['first_ms']:.2f}")


def test_the_lines_are_of_every_kind_and_all_are_commands() -> None:
    chance = random.Random(1)
    verbs = {words_of(a_line(chance, lines))[0] for lines in (10, 25, 40) for _ in range(300)}
    assert verbs <= set(commands())
    assert verbs >= {"ask", "heal", "verify", "explain", "delete", "insert", "replace", "move", "undo"}
