"""docs/session.svg, the picture in the README, matches the current output."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.pages import commands, read, script
from typer.testing import CliRunner

from kvedit.cli.app import app

TIME = r"[\d.,]+ (?:ms|s|min \d+ s)"


def shown() -> dict[str, list[str]]:
    """Return the lines in the picture, by command."""
    blocks: dict[str, list[str]] = {}
    for line in script("picture").lines(read("docs/session.svg")):
        if line.startswith("$ "):
            blocks[line.removeprefix("$ ")] = block = []
        elif line:
            block.append(line)
    return blocks


def labels(lines: list[str]) -> list[str]:
    """Return the first column of a table."""
    return [re.split(r"\s{2,}", line)[0] for line in lines if "  " in line]


def table(lines: list[str]) -> list[str]:
    """Return an answer's table, without the answer."""
    return lines[next(number for number, line in enumerate(lines) if line.startswith("phase ")) :]


def without_times(line: str) -> str:
    """Remove what differs between two runs: times, speeds, ratios of times, widths of columns."""
    phase = re.fullmatch(rf"(\D+?)\s+{TIME}(?:\s+([\d,]+)\s+[\d,]+)?", line)
    if phase:
        return f"{phase[1]}: {phase[2]} tokens"
    line = re.sub(rf"{TIME}|[\d,]+ tokens/s|[\d.]+ x |\d{{4}}-\d\d-\d\dT[\d:]+Z", "TIME ", line)
    return " ".join(line.split())


def words_of(line: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", without_times(line))


def test_the_picture_was_recorded_with_the_current_inputs() -> None:
    picture = script("picture")
    assert tuple(shown()) == picture.COMMANDS
    assert f"<!-- {picture.inputs()} -->" in read("docs/session.svg"), "run: make picture"
    assert "![" in read("README.md")
    assert "docs/session.svg" in read("README.md")


def test_the_commands_in_the_picture_exist_and_parse() -> None:
    quickstart = read("sessions/quickstart/script.txt").splitlines()
    for command in shown():
        assert command in quickstart
        name, *words = shlex.split(command)[1:]
        commands()[name].make_context("kvedit", words)


def test_the_picture_has_the_labels_kvedit_prints(home: Path, checkpoints: dict[str, Path]) -> None:
    text = "".join(f"{number}. The fees are due in {number} days.\n" for number in range(20))
    Path("contract.md").write_text(text, encoding="utf-8")
    for command, lines in shown().items():
        name, *words = shlex.split(command)[1:]
        model = ["--model", str(checkpoints["llama"])] if name == "load" else []
        result = CliRunner().invoke(app, [name, *words, *model])
        assert result.exit_code == 0, result.output
        printed = [line for line in result.output.splitlines() if line]
        if name == "ask":
            assert labels(table(lines)) == labels(table(printed))
        elif name == "status":
            assert labels(lines) == labels(printed)
        else:
            assert words_of(lines[-1]) == words_of(printed[-1])


@pytest.mark.model
def test_the_picture_matches_a_new_recording(default_folder: Path) -> None:
    picture = script("picture")
    again = picture.lines(picture.draw(picture.record()))
    before = picture.lines(read("docs/session.svg"))
    assert [without_times(line) for line in again] == [without_times(line) for line in before]
