"""docs/using.md lists every key that `--json` prints, and no other, for every command."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.pages import commands, read
from typer.testing import CliRunner

from kvedit.cli.app import app

TEXT = "".join(f"Line {number}: the fees of item {number} are {number * 37}.\n" for number in range(1, 25))
ASKED = "'What are the fees?' --budget 20% --max-new-tokens 3"
# Each with the files and the session that the ones before it left behind.
LINES = f"""
load contract.txt --model MODEL
insert --after 2 'A new line.'
append 'Another one.'
replace --lines 3 'An old line.'
move --lines 4 --after 8
delete --lines 9
edit --lines 1
sync
undo
redo
status
show
diff
export
log
log --script
ask {ASKED}
explain {ASKED.partition(" --max")[0]}
verify --question {ASKED}
heal --budget 10t
checkout 1
forget
purge
replay script.kvedit
sessions list
sessions use contract
sessions copy contract lease
sessions rename lease rent
sessions check
sessions compact
sessions remove rent --yes
models list
models pull MODEL
doctor MODEL
"""


def documented() -> dict[str, set[str]]:
    """Keys by command, from the sections of docs/using.md."""
    found: dict[str, set[str]] = {}
    page = read("docs/using.md").partition("\n## JSON\n")[2]
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        cells = re.findall(r"^\| (`.*?) \|", body, re.MULTILINE)
        keys = {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}
        if base := re.match(r"\nThe keys of `(\w+)`, and:", body):
            keys |= found[base[1]]
        for words in re.findall(r"`([^`]+)`", heading) or [heading]:
            found[words] = keys
    return found


def keys_of(value: Any, path: str = "") -> set[str]:
    """Keys as the page spells them: `a.b` and `a[].b`; the phases of an answer are one."""
    if isinstance(value, list):
        return {key for item in value for key in keys_of(item, f"{path}[]")} or {path}
    if not isinstance(value, dict):
        return {path.removesuffix("[]").removesuffix("[]")}
    if path == "timings":
        assert set(value) <= {"load", "shift", "selection", "refresh", "question", "decode", "save"}
        return {found for phase in value.values() for found in keys_of(phase, "timings.PHASE")}
    return {found for key, inner in value.items() for found in keys_of(inner, f"{path}.{key}".lstrip("."))}


def run(line: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*shlex.split(line), "--json"])
    assert result.exit_code == 0, (line, result.output)
    printed = json.loads(result.stdout)
    assert printed.pop("schema_version") == 1
    return printed


@pytest.fixture
def folder(home: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    Path("contract.txt").write_text(TEXT)
    Path("script.kvedit").write_text("status\nexpect exit equals 0\n")
    monkeypatch.setenv("VISUAL", "sed -i s/fees/costs/")
    return checkpoints["llama"]


def test_every_key_of_every_command_is_in_the_docs_and_no_other(folder: Path) -> None:
    printed: dict[str, set[str]] = {}
    for line in LINES.strip().splitlines():
        words = line.split()
        name = " ".join(words[:2] if words[0] in ("sessions", "models") or "--script" in words else words[:1])
        printed[name] = keys_of(run(line.replace("MODEL", str(folder))))
    # Null stands for an object, and a list of scalars for itself.
    printed["verify"].add("comparison")
    expected = documented()
    assert printed == {name: keys for name, keys in expected.items() if name != "errors"}
    assert set(printed) - {"log --script"} == {
        name
        for name in commands()
        if name != "repl" and not name.startswith("bench ")  # whose keys benchmarks/rigs/schema.py has
    }


def test_what_depends_on_an_option_is_as_the_docs_say(folder: Path) -> None:
    run(f"load contract.txt --model {folder}")
    run("delete --lines 2")
    page = documented()
    assert keys_of(run("export --output out.txt")) == page["export"] - {"text"}
    assert keys_of(run("verify")) == {key for key in page["verify"] if not key.startswith("comparison.")}
    assert "save" not in run(f"ask {ASKED} --no-keep")["timings"]
    failed = CliRunner().invoke(app, ["delete", "--lines", "99", "--json"])
    printed = json.loads(failed.stdout)
    assert printed.pop("schema_version") == 1
    assert keys_of(printed) == page["errors"]
