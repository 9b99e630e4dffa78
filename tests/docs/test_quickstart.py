"""The session that `make demo` runs, and the commands in the README, on the default model."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from support.pages import commands, read
from typer.testing import CliRunner

from kvedit.cli.app import app

FOLDER = Path(__file__).resolve().parents[2] / "sessions" / "quickstart"


@pytest.mark.model
def test_the_quickstart_answers_from_the_edited_text(home: Path, default_folder: Path) -> None:
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


def readme_commands() -> list[list[str]]:
    """Return the commands of the README's "Five minutes", without the word kvedit."""
    section = read("README.md").partition("## Five minutes")[2]
    block = section.partition("```sh\n")[2].partition("```")[0]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert lines
    assert all(words[0] == "kvedit" for words in lines)
    return [words[1:] for words in lines]


def test_the_readme_commands_parse() -> None:
    for name, *words in readme_commands():
        commands()[name].make_context("kvedit", words)


@pytest.mark.model
def test_the_readme_commands_run(home: Path, default_folder: Path) -> None:
    shutil.copy(FOLDER / "contract.md", "contract.md")
    for words in readme_commands():
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output)
