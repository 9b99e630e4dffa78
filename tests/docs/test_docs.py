"""The docs match the code: examples run, and names and options are complete."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rigs.reference import load_session
from support.pages import ROOT, code, commands, read, script

from kvedit import __version__
from kvedit.model.model import Model
from kvedit.policies.registry import POLICIES
from kvedit.repair.budget import Budget
from kvedit.text.document import LineRange

TEXT = "".join(
    f"{number}. The fees are paid in {number} days. One code is {number * 37}.\n" for number in range(14)
)
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_changelog_names_the_version() -> None:
    assert re.findall(r"^## \[(\d.*?)\]", read("CHANGELOG.md"), re.MULTILINE)[0] == __version__


def test_the_commands_page_matches_the_help() -> None:
    assert script("generate").page() == read("docs/cli.md"), "run: python docs/generate.py"


@pytest.mark.parametrize("page", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_on_a_page_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # may name files that no longer exist
        return
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:kvedit|tests|benchmarks|docs)/[\w/]+(?:\.py|/))`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    modules = re.findall(r"`kvedit((?:\.[a-z_]+)+)`", text)
    files = [ROOT / "kvedit" / name.strip(".").replace(".", "/") for name in modules]
    assert [str(file) for file in files if not (file.is_dir() or file.with_suffix(".py").exists())] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_the_docs_resolve(page: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        found = page.parent / target if target else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{target}#{anchor}"


@pytest.mark.parametrize("words", commands())
def test_every_command_has_help_an_example_and_documentation(words: str) -> None:
    command = commands()[words]
    assert command.help
    assert f"Example: kvedit {words}" in command.epilog
    page = read("docs/cli.md")
    assert words in page
    for parameter in command.params:
        for option in parameter.opts:
            assert option in page or not option.startswith("--"), option


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_documented_and_spends_its_budget(name: str, llama: Model, home: Path) -> None:
    policy = next(parameter for parameter in commands()["ask"].params if parameter.name == "policy")
    assert name in policy.help
    assert f"`{name}`" in read("docs/policies.md")
    if name == "oracle":  # `ask` has no clean cache for it
        return
    session = load_session(home, llama, TEXT)
    session.delete(LineRange(2, 2))
    answer = session.ask("What is the code?", policy=name, budget=Budget.parse("20%"), max_new_tokens=1)
    assert answer.refreshed == answer.budget_rows > 0
    again = load_session(home / "again", llama, TEXT)
    again.delete(LineRange(2, 2))
    again.ask("What is the code?", policy=name, budget=Budget.parse("20%"), max_new_tokens=1)
    assert again.rows.pieces() == session.rows.pieces()  # equal inputs, equal support


def test_the_example_policy_works(llama: Model, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example: Any = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", example)  # a dataclass looks up its module
    exec(code("docs/policies.md"), example.__dict__)
    monkeypatch.setitem(POLICIES, "recent", "example:Recent")
    session = load_session(home, llama, TEXT)
    session.delete(LineRange(2, 2))
    session.ask("When?", policy="recent", budget=Budget.parse("12t"), max_new_tokens=1)
    assert session.rows.refreshed[-8:].all()


def test_the_format_example_reads_a_session(
    llama: Model, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load_session(Path(".kvedit"), llama, TEXT, name="contract")
    session.insert("Käufer und Verkäufer.", after=3)
    session.move("2-3", after=9)
    session.ask("When?", conversation=True, max_new_tokens=2)
    for number in range(150):  # enough for a second complete line
        session.replace("1", f"{number}. " + "The fees are paid in advance. " * (number % 5))
    session.undo(2)
    read: dict[str, Any] = {}
    exec(code("docs/session-format.md"), read)
    assert read["text"] == session.document.text
    assert tuple(read["turns"]) == session._state.revision.turns
    assert [tuple(piece) for piece in read["rows"]] == [
        (piece.segment, piece.start, piece.length, int(piece.refreshed))
        for piece in session._state.revision.rows
    ]
    assert len(read["past"]) < len(session._state.journal) / 2
    keys = read["keys"]
    assert keys.shape == (llama.layers, llama.heads, read["length"], keys.shape[3])


def test_the_format_page_lists_all_keys(llama: Model, home: Path) -> None:
    session = load_session(home, llama, TEXT, name="contract")
    session.delete("2")
    page = read("docs/session-format.md")
    manifest = json.loads((home / "contract" / "session.json").read_text())
    first, second = (home / "contract" / manifest["journal"]["name"]).read_text().splitlines()
    for heading, found in (
        ("## session.json", set(manifest)),
        ("Keys of `model`", set(manifest["model"])),
        ("## The journal", set(json.loads(first))),
        ("## tokenizers/, segments/", set(session._state.store.read_segment(session.rows.segments[0]))),
    ):
        table = page.partition(heading)[2].partition("|---|---|---|\n")[2].partition("\n\n")[0]
        assert {
            key for row in table.splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1])
        } == found
    assert set(json.loads(first)) - set(json.loads(second)) == {"text"}


def test_the_privacy_check_finds_nothing_after_a_purge(llama: Model, home: Path) -> None:
    session = load_session(home, llama, f"The term is sixty days.\n{TEXT}", name="contract")
    session.ask("Is it sixty?", conversation=True, max_new_tokens=2)
    session.delete("1")
    with pytest.raises(AssertionError):
        exec(code("docs/privacy.md"), {})
    session.purge()
    exec(code("docs/privacy.md"), {})
    assert not [path for path in home.rglob("*") if path.is_file() and b"sixty" in path.read_bytes()]
