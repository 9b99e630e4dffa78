"""The session that the README shows and `make demo` runs, on the default model."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvedit.cli.app import app

FOLDER = Path(__file__).resolve().parents[2] / "sessions" / "quickstart"


@pytest.mark.model
def test_the_quickstart_answers_from_the_text_that_is_left(home: Path, default_folder: Path) -> None:
    shutil.copy(FOLDER / "contract.md", "contract.md")
    runner, answers = CliRunner(), []
    for line in (FOLDER / "script.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        words = shlex.split(line)
        assert words[0] == "kvedit"
        result = runner.invoke(app, [*words[1:], *(["--json"] if words[1] == "ask" else [])])
        assert result.exit_code == 0, (line, result.output)
        if words[1] == "ask":
            answers.append(json.loads(result.stdout))
    assert "thirty days" in answers[0]["answer"]
    assert "18,400 pounds" in answers[1]["answer"]
    for answer in answers:
        rows = answer["rows"]
        assert rows["missing"] + rows["refreshed"] + rows["reused"] == rows["total"]
        assert rows["refreshed"] == answer["budget"]["rows"] == answer["budget"]["suffix_rows"] * 5 // 100


def test_the_readme_shows_the_script_that_is_run() -> None:
    readme = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    script = (FOLDER / "script.txt").read_text(encoding="utf-8").splitlines()
    shown = [line.removeprefix("$ ") for line in readme.splitlines() if line.startswith("$ kvedit")]
    assert shown
    assert all(line in script for line in shown)
