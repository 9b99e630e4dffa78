"""docs/python.md is one program that runs and prints nothing; it names all public methods."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import commands, read

import kvedit
from kvedit.session.session import Session
from kvedit.store.home import Home

PAGE = read("docs/python.md")
PROGRAM = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
MODEL = 'MODEL = "smollm2-135m"'


def run(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    exec(compile(program, "docs/python.md", "exec"), {"__name__": "example"})
    assert capfd.readouterr() == ("", "")


def test_the_page_runs_on_a_tiny_model(
    home: Path, checkpoints: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAM.count(MODEL) == 1
    run(PROGRAM.replace(MODEL, f"MODEL = {str(checkpoints['llama'])!r}"), capfd)


@pytest.mark.model
def test_the_page_runs_unchanged_on_the_default_model(
    home: Path, default_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(PROGRAM, capfd)


def test_the_page_names_a_method_for_every_command() -> None:
    table = PAGE.partition("## Which method is which verb")[2]
    verbs = {
        word
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for word in re.findall(r"`(\w+)", row)
    }
    assert verbs == {words.split()[0] for words in commands()} - {
        "repl",
        "replay",
        "models",
        "bench",
        "doctor",
    }
    methods = {
        word
        for row in re.findall(r"^\| `.*? \| (.*?) \|", table, re.MULTILINE)
        for word in re.findall(r"`(\w+)`", row)
    }
    assert methods - {"document"} <= {*dir(Session), *dir(Home)}


def test_public_names_work_at_run_time_and_for_type_checkers() -> None:
    names = set(kvedit.__all__) - {"__version__"}
    for name in names:
        assert getattr(kvedit, name) is not None
    tree = ast.parse(Path(kvedit.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == names
    code = "import kvedit, sys; kvedit.Session, kvedit.Budget; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
