"""The scripted sessions in `sessions/` replay on the default model and are shown in the docs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvedit.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "sessions").glob("*/script.kvedit"))
NAMES = [script.parent.name for script in SCRIPTS]


def test_all_example_sessions_exist() -> None:
    assert {"code", "contract", "log", "marathon", "minutes", "samekey"} <= set(NAMES)


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_the_docs_contain_each_session_script(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0].startswith("# ")
    assert sum(line.startswith("expect ") for line in lines) >= 2
    assert f"```\n{text}```" in (ROOT / "docs" / "sessions.md").read_text(encoding="utf-8")


@pytest.mark.model
@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_a_session_replays(script: Path, home: Path, default_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(script.parent, tmp_path / "copy")
    records = tmp_path / "records.jsonl"
    run = ["replay", str(folder / script.name), "--keep-going", "--jsonl", str(records), "--json"]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    totals = json.loads(result.stdout)
    assert totals["failed"] == 0
    found = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    assert sum(record["event"] == "expect" for record in found) == totals["expectations"] > 0
    for answer in (record["result"] for record in found if "answer" in (record.get("result") or {})):
        rows = answer["rows"]
        assert rows["missing"] + rows["refreshed"] + rows["reused"] == rows["total"]
    for path in script.parent.iterdir():  # a session never writes the user's own files
        assert (folder / path.name).read_bytes() == path.read_bytes()
