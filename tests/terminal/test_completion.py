"""The Tab key: in the REPL, and in a shell through the protocol of its completion."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

import kvedit.cli.app  # noqa: F401, without which there are no commands
from kvedit.cli.repl.completion import CommandCompleter
from kvedit.cli.repl.line import lines_of, words_of
from kvedit.policies.registry import POLICIES

SHELL = "import sys; sys.argv = ['kvedit']; from kvedit.__main__ import main; main()"


def offered(text: str) -> list[str]:
    """What the REPL offers after a text, as the line would read."""
    document = Document(text, len(text))
    found = CommandCompleter().get_completions(document, CompleteEvent())
    return [text[: len(text) + item.start_position] + item.text for item in found]


@pytest.fixture
def sessions(home: Path) -> Path:
    for name in ("contract", "copy", "minutes"):
        (home / name).mkdir(parents=True)
        (home / name / "session.json").write_text("{}")
    Path("annex.md").write_text("Annex.")
    return home


@pytest.mark.parametrize(
    "name", ["my annex.md", "an'nex.md", "annex\nsessions remove contract --yes", "#annex"]
)
def test_a_file_name_of_any_characters_is_completed_as_one_word(home: Path, name: str) -> None:
    (home.parent / name).mkdir()
    (home.parent / name / "text.md").write_text("Annex.")
    [line] = offered(f"load {name[:2]}" if name[2] != "'" else "load an")
    assert lines_of(line) == [line]
    assert words_of(line) == ["load", name]
    [line] = offered(f"load {shlex.quote(name + '/')}")  # what stood there is replaced as a whole
    assert words_of(line) == ["load", f"{name}/text.md"]
    [item] = CommandCompleter().get_completions(Document("load ", 5), CompleteEvent())
    assert "\n" not in item.display_text


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("sta", ["status"]),
        ("  un", ["  undo"]),
        ("se", ["sessions", "set"]),
        ("ask --bu", ["ask --budget"]),
        ("ask --policy units-", ["ask --policy units-bm25", "ask --policy units-random"]),
        ("ask --policy units-bm25 --see", ["ask --policy units-bm25 --seed"]),
        ("ask -b 1", ["ask -b 1%", "ask -b 10%", "ask -b 128t"]),
        ("status -s co", ["status -s contract", "status -s copy"]),
        ("sessions use c", ["sessions use contract", "sessions use copy"]),
        ("sessions c", ["sessions copy", "sessions compact", "sessions check"]),
        ("load an", ["load annex.md"]),
        ("append --file ann", ["append --file annex.md"]),
        ("set ", ["set budget", "set policy", "set decode-weights", "set conversation", "set heal"]),
        ("set decode-weights ", [f"set decode-weights {kind}" for kind in ("bf16", "int4", "default")]),
        ("set heal o", ["set heal on", "set heal off"]),
        ("help und", ["help undo"]),
        ("help undo ", []),
        ("?sta", []),
        ("# sta", []),
        ("ask 'sta", []),
        ("nosuch --", []),
        ("sessions nosuch --", []),
        ("ask --no-keep --se", ["ask --no-keep --seed", "ask --no-keep --session"]),
    ],
)
def test_the_repl_offers_what_can_stand_there(sessions: Path, text: str, lines: list[str]) -> None:
    assert offered(text) == lines


def test_the_repl_offers_every_policy_and_every_option(sessions: Path) -> None:
    assert offered("set policy ") == [f"set policy {name}" for name in (*POLICIES, "default")]
    assert {"ask --budget", "ask --policy", "ask --continue", "ask --json"} <= set(offered("ask --"))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("kvedit che", ["checkout"]),
        ("kvedit ask --bu", ["--budget"]),
        ("kvedit ask --policy units-", ["units-bm25", "units-random"]),
        ("kvedit status --session co", ["contract", "copy"]),
        ("kvedit sessions use m", ["minutes"]),
        ("kvedit load x --device c", ["cpu", "cuda"]),
    ],
)
def test_a_shell_is_offered_the_same(
    sessions: Path, words: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_KVEDIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    done = subprocess.run([sys.executable, "-c", SHELL], capture_output=True, text=True, check=True)
    assert done.stdout.split() == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_can_be_printed(
    home: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setenv("_KVEDIT_COMPLETE", f"source_{shell}")
    done = subprocess.run([sys.executable, "-c", SHELL], capture_output=True, text=True, check=True)
    assert f"_KVEDIT_COMPLETE=complete_{shell}" in done.stdout
