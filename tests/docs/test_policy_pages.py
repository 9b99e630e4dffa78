"""The page of each policy matches the policy: its settings, what it sees, and a worked example."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.pages import commands, read
from support.staged import staged

from kvedit.cache.kv import KVCache
from kvedit.model.model import Model
from kvedit.policies import attention, cachecraft, infoflow
from kvedit.policies.cachecraft import _chunks
from kvedit.policies.evidence import Evidence, Past
from kvedit.policies.neighbor import Neighbor
from kvedit.policies.qcfuse import QcFuse
from kvedit.policies.registry import POLICIES, policy_named
from kvedit.policies.seam import origins
from kvedit.repair.select import select

ROOT = Path(__file__).resolve().parents[2]
OVERVIEW = "docs/policies.md"
KEYS = ["formula", "source", "cost", "support", "settings", "sees"]
OURS = {"sur-seam", "sur-plain", "tokens", "window", "units-bm25", "units-random"}
"""Our own policies and the controls, which follow no published method."""


def page(name: str) -> str:
    return read(f"docs/policies/{name}.md")


def section(name: str, heading: str) -> str:
    return re.split(r"^## ", page(name).split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]


def cells(name: str) -> dict[str, str]:
    """The table at the top of a page."""
    rows = re.findall(r"^\| (\w+) \| (.*) \|$", page(name).split("\n## ")[0], re.MULTILINE)
    return dict(rows)


# --- the shape ---------------------------------------------------------------------------------


def test_each_policy_has_a_page_and_each_page_a_policy() -> None:
    assert {path.stem for path in (ROOT / "docs" / "policies").iterdir()} == set(POLICIES)
    assert re.findall(r"^\| \[`([\w-]+)`\]\(policies/\1\.md\) \|", read(OVERVIEW), re.MULTILINE) == list(
        POLICIES
    )


@pytest.mark.parametrize("name", POLICIES)
def test_a_page_has_the_expected_sections(name: str) -> None:
    lines = page(name).splitlines()
    assert lines[0] == f"# `{name}`"
    assert re.match(r"# .+\n\nIt selects [^.]+\.\n\n\|", page(name))
    assert list(cells(name)) == KEYS
    assert re.findall(r"^## (.+)$", page(name), re.MULTILINE) == [
        "Worked example",
        "When it fails",
        *([] if name in OURS else ["Differs from the published method"]),
        "Try it",
    ]
    assert max(len(line) for line in lines if line[:1] != "|") <= 110


@pytest.mark.parametrize("name", POLICIES)
def test_the_settings_on_a_page_match_the_fields(name: str) -> None:
    policy: Any = policy_named(name)
    settings = {field.name: getattr(policy, field.name) for field in fields(policy)}
    assert cells(name)["support"] == f"`{settings.pop('support')}`"
    told = dict(re.findall(r"`(\w+) = ([^`]+)`", cells(name)["settings"]))
    assert told == {key: str(value) for key, value in settings.items()}
    assert told or cells(name)["settings"].startswith("none")
    row = next(line for line in read(OVERVIEW).splitlines() if line.startswith(f"| [`{name}`]"))
    assert row.endswith(f"| `{policy.support}` |")


@pytest.mark.parametrize("name", POLICIES)
def test_the_command_on_a_page_parses(name: str) -> None:
    (line,) = re.findall(r"^```\nkvedit (.+)\n```$", section(name, "Try it"), re.MULTILINE)
    words = [word.strip('"') for word in re.findall(r'"[^"]+"|\S+', line)]
    leaf = " ".join(words[: 2 if words[0] == "bench" else 1])
    commands()[leaf].make_context("kvedit", words[len(leaf.split()) :])
    assert name in words or name == "sur-seam" or f"{name}@5%" in words


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_depends_on_what_its_page_says(name: str, llama: Model) -> None:
    """A policy sees an input if its scores change with it."""
    whole = staged(llama)[0]
    assert whole.past is not None
    past_ids = whole.past.ids
    gone = np.ones(len(past_ids), dtype=bool)
    origin = origins(whole.ids, past_ids, whole.past.source)
    gone[origin[origin >= 0]] = False
    # Another seam, further back: only the last nine rows keep their origin.
    source, selected = whole.past.source.copy(), np.flatnonzero(whole.suffix)
    source[selected[:-9]] = -1
    source[selected[-9:]] += 1
    noisy = whole.cache.clone()
    noisy.keys.neg_()
    noisy.values.neg_()
    other = {
        "question": replace(whole, query_ids=whole.ids[-5:]),
        "edit": replace(whole, past=Past(lambda: np.append(past_ids, 0), source)),
        "past": replace(whole, past=replace(whole.past, read_ids=lambda: np.where(gone, 7, past_ids))),
        "states": replace(whole, cache=noisy),
        "clean": replace(whole, clean=noisy),
    }
    seen = {thing for thing, evidence in other.items() if differ(name, whole, evidence)}
    assert seen == set(cells(name)["sees"].split(", ")) - {"nothing"}
    assert policy_named(name).reads_cache == ("states" in seen)


def differ(name: str, one: Evidence, other: Evidence) -> bool:
    found, again = (policy_named(name).score(evidence) for evidence in (one, other))
    firsts = [scores.first.rows if scores.first else np.zeros(0) for scores in (found, again)]
    return not all(
        np.array_equal(a, b)
        for a, b in ((found.rows, again.rows), (found.units, again.units), (firsts[0], firsts[1]))
    )


# --- the worked examples -----------------------------------------------------------------------

WORDS = "Fees are due . Rent is low . The code is 7 .".split()
VOCABULARY = sorted({*WORDS, "Old"})
"""One token per word."""
SEEN = {
    4: (0.10, 0.10),
    5: (0.02, 0.10),
    9: (0.30, 0.04),
    10: (0.02, 0.20),
    11: (0.04, 0.16),
    12: (0.02, 0.02),
}
"""The attention of the question's two rows."""


def spell(*words: str) -> np.ndarray:
    return np.array([VOCABULARY.index(word) for word in words], dtype=np.int64)


def scene() -> Evidence:
    """Return the scene of docs/policies.md: a deleted sentence and two sentences after it."""
    size = len(VOCABULARY)
    axes = torch.cat([torch.eye(size), -torch.eye(size)])  # so that the mean is 0
    model: Any = SimpleNamespace(
        device=torch.device("cpu"),
        layers=2,
        embed=lambda ids: axes[ids],
        mean_embedding=axes.mean(0),
        to_device=torch.from_numpy,
        tokenizer=SimpleNamespace(decode=lambda ids: " ".join(VOCABULARY[token] for token in ids)),
    )
    past = spell(*WORDS[:4], "Old", "code", ".", *WORDS[4:])
    return Evidence(
        model=model,
        cache=KVCache(2, 1, 13, 2, dtype=torch.float32, device=torch.device("cpu")),
        ids=spell(*WORDS),
        unit=np.repeat([0, 1, 2], [4, 4, 5]),
        units=3,
        query_ids=spell("code", "is"),
        suffix=np.arange(13) >= 4,
        seed=0,
        past=Past(lambda: past, np.array([0, 1, 2, 3, *range(7, 16)])),
    )


def of_places(source: list[int], unit: np.ndarray) -> Evidence:
    """Return rows that have positions, but no text."""
    count = len(source)
    return replace(
        scene(),
        ids=np.zeros(count, dtype=np.int64),
        unit=unit,
        units=int(unit.max()) + 1,
        suffix=np.arange(count) >= 2,
        past=Past(np.zeros(20, dtype=np.int64), np.array(source)),
    )


def of_cacheblend() -> Evidence:
    evidence = scene()
    fresh = torch.zeros(1, 13, 2)
    fresh[0, [4, 8, 9]] = torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0]])
    evidence.cache.values[1] = fresh
    evidence.cache.values[1, 0, [4, 8, 9]] = torch.tensor([[0.0, 2.0], [1.0, 0.0], [2.0, 3.0]])

    def walk(ids: torch.Tensor, rows: slice, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(states=SimpleNamespace(values=[fresh[:, rows]]))

    evidence.model.walk = walk  # type: ignore[method-assign]
    return evidence


def of_oracle() -> Evidence:
    held, clean = (KVCache(2, 1, 4, 1, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    clean.keys.fill_(2)
    clean.values.fill_(1)
    held.keys[1, 0, :, 0] = torch.tensor([2.0, 2, 1, 2])
    held.values[1, 0, :, 0] = torch.tensor([1.0, 1, 1, 0])
    few = of_places([0, 1, 2, 3], np.zeros(4, dtype=np.int64))
    return replace(few, cache=held, clean=clean, suffix=np.arange(4) >= 1)


def looks(evidence: Evidence, layers: Any, keys: str, see: Callable[[int, torch.Tensor], None]) -> None:
    """Replace the probe; all heads and layers are equal."""
    seen = torch.zeros(2, 2, 13)
    seen[:, :, 0] = torch.tensor([0.30, 0.18])
    for row, both in SEEN.items():
        seen[:, :, row] = torch.tensor(both)
    for layer in layers:
        see(layer, seen / seen.sum(-1, keepdim=True) if keys == "context" else seen)


def reads(model: Model, ids: np.ndarray, wanted: np.ndarray, chunk: np.ndarray, gone: np.ndarray) -> Any:
    """Replace layer 0: what units 1 and 2 attend to, in their first rows."""
    assert np.flatnonzero(gone).tolist() == [4, 5, 6]
    gave = np.array([0.1, 0.5, 0.1, 0.1, 0.1, 0.2, 0.1, 0.05, 0.05])
    own, other, spread = np.zeros((3, 9))
    own[[0, 4]] = 2.0, 2.5
    other[[0, 4]] = 2.0, 2.5
    spread[[0, 4]] = 0.8 / 3 + 1.2 / 4, 0.5 / 3 + 1.2 / 4 + 0.8 / 4
    return gave, own, other, spread


STAGES: dict[str, Callable[[], Evidence]] = {
    "editlocal": lambda: of_places([0, 1, 4, 5, 6, 9], np.zeros(6, dtype=np.int64)),
    "epic": lambda: of_places([0, 1, *range(6, 20)], np.repeat([0, 1, 2, 3], [4, 4, 2, 6])),
    "cacheblend": of_cacheblend,
    "oracle": of_oracle,
}
"""Examples with their own scene."""
SMALL: dict[str, Any] = {"qcfuse": QcFuse(block=3), "neighbor": Neighbor(block=3)}


@pytest.mark.parametrize("name", POLICIES)
def test_the_worked_example_matches_the_policy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "probe", looks)
    monkeypatch.setattr(infoflow, "probe", looks)
    monkeypatch.setattr(cachecraft, "_read", reads)
    evidence, policy = STAGES.get(name, scene)(), SMALL.get(name) or policy_named(name)
    scores, example = policy.score(evidence), section(name, "Worked example")
    checked, prose = 0, " ".join(example.split())
    for head, body in re.findall(r"^\| (.*score) \|\n\|[-|]+\n((?:\|.*\n)+)", example, re.MULTILINE):
        found = {"row": scores.rows, "unit": scores.units}[head.split(" | ")[0]]
        for line in body.splitlines():
            told = line.strip("| ").split(" | ")
            assert len(told) == len(head.split(" | "))
            value = told[-1].rpartition("= ")[2]
            digits = len(value.partition(".")[2])
            assert abs(found[int(told[0])] - float(value)) <= 0.5001 * 10.0**-digits, line
            checked += 1
    selected = re.findall(r"B = (\d+) selects rows? (\d+(?:, \d+)*)", prose)
    assert checked >= 2
    assert len(selected) == prose.count(" selects ") > 0
    for budget, rows in selected:
        every = evidence.suffix
        support = select(scores, evidence.unit, every, every, int(budget), policy.support)
        assert support.tolist() == [int(row) for row in rows.split(", ")]


def test_the_scene_matches_the_overview() -> None:
    evidence = scene()
    drawn = read(OVERVIEW).partition("## The scene of the examples")[2].partition("\n## ")[0]
    told = re.findall(r"^\| (\d+) \| (\d+) \| (.+) \| (\d) \|$", drawn, re.MULTILINE)
    assert evidence.past is not None
    assert [(int(row), int(old), int(unit)) for row, old, _, unit in told] == list(
        zip(range(13), evidence.past.source.tolist(), evidence.unit.tolist(), strict=True)
    )
    assert [word for _, _, word, _ in told] == WORDS
    assert evidence.seams.tolist() == [4]
    assert not _chunks(evidence, evidence.past.source, 16)[1][[*range(4), *range(7, 16)]].any()
