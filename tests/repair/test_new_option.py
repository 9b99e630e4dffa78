"""A new option of a question is one field of `Options`; everything else follows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, pathlib, sys
from dataclasses import dataclass

from kvedit.repair import options


@dataclass(frozen=True, slots=True, kw_only=True)
class More(options.Options):
    mood: str = options.option(
        "calm", "A field for this test.", choices=("calm", "wild"), selects=True, setting="mood"
    )


options.Options = More  # before anything takes it

from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document as Line
from typer.testing import CliRunner

from kvedit import Document, Session, UsageError
from kvedit.cli.app import app
from kvedit.cli.repl.completion import CommandCompleter
from kvedit.cli.repl.line import run_line
from kvedit.cli.workspace import here


def cli(*words, code=0):
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == code, (words, done.output)
    return done


def offered(text):
    return [item.text for item in CommandCompleter().get_completions(Line(text, len(text)), CompleteEvent())]


session = Session.load(Document("One is 1.\\nTwo is 2.\\nThree is 3.\\n"), model=sys.argv[1], name="new")
session.delete("1")

# Python
assert session.ask("Who?", max_new_tokens=1, mood="wild").options.mood == "wild"
stream = session.stream("Who?", max_new_tokens=1, mood="wild")
list(stream)
assert stream.answer.options.mood == "wild"
session.explain("Who?", mood="wild")
try:
    session.ask("Who?", mood="sad")
except UsageError as error:
    assert (error.fact, error.remedy) == ("Unknown mood 'sad'.", "Choose one of calm, wild.")
else:
    raise AssertionError("it should have been refused")

# The command line, its help and its JSON
for verb in ("ask", "explain"):
    assert "--mood" in cli(verb, "--help").stdout
asked = cli("ask", "Who?", "--mood", "wild", "--max-new-tokens", "1", "--json")
assert json.loads(asked.stdout)["options"]["mood"] == "wild"
assert "Unknown mood" in cli("ask", "Who?", "--mood", "sad", code=2).stderr

# Completion
assert offered("set mo") == ["mood"]
assert offered("set mood ") == ["calm", "wild", "default"]
assert offered("ask --mood ") == ["calm", "wild"]

# `set`, and a replay
pathlib.Path("script").write_text("set mood wild\\nask Who? --max-new-tokens 1\\nset mood default\\n")
cli("replay", "script", "--jsonl", "records")
first, second, _ = map(json.loads, pathlib.Path("records").read_text().splitlines())
assert first["result"]["mood"] == "wild"
assert second["result"]["options"]["mood"] == "wild"

# `log --script`
session.update()
session.ask("Why?", max_new_tokens=1, mood="wild", budget="full")
assert "--mood wild" in session.script()
assert "--mood wild" in cli("log", "--script").stdout
"""


def test_an_option_that_is_added_is_everywhere(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(checkpoints["llama"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
