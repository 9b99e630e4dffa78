"""Memory: what does not fit is refused before it is computed, with both numbers; what fits stays small."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peak import limit_bytes, measure
from rigs.oracles import QUESTION, a_text
from rigs.reference import load_session
from safetensors.torch import load_file
from typer.testing import CliRunner

import kvedit.cache.memory
from kvedit.cache.kv import States
from kvedit.cache.memory import available_bytes
from kvedit.cli.app import app
from kvedit.errors import KveditError
from kvedit.model.model import Model
from kvedit.session.session import Session
from kvedit.session.state import State
from kvedit.store.segments import read_segment, write_segment
from kvedit.store.tensorfile import release

TEXT = a_text(30)
KIB = 1024


def only(monkeypatch: pytest.MonkeyPatch, available: int | None) -> None:
    monkeypatch.setattr(kvedit.cache.memory, "available_bytes", lambda device: available)


def contents(home: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in home.rglob("*") if path.is_file() and path.suffix != ".json"}


@pytest.fixture
def session(llama: Model, home: Path) -> Session:
    session = load_session(home, llama, TEXT)
    session.delete("3-4")
    return session


def again(session: Session) -> Session:
    """The session as a new process opens it."""
    cold = Session(State(session._state.store))
    cold.use_model(session.model)
    return cold


VERBS: dict[str, Callable[[Session], Any]] = {
    "ask": lambda session: session.ask(QUESTION, max_new_tokens=2),
    "explain": lambda session: session.explain(QUESTION),
    "heal": lambda session: session.heal(),
    "verify": lambda session: session.verify(),
    "verify a question": lambda session: session.verify(QUESTION, max_new_tokens=2),
    "purge": lambda session: session.purge(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_computation_that_exceeds_memory_is_refused_first(
    session: Session, llama: Model, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    cold, before = again(session), contents(session._state.store.folder)
    cache = llama.cache_bytes(len(session.rows))
    only(monkeypatch, cache)  # room for the cache, and for nothing beside it
    monkeypatch.setattr(llama, "walk", lambda *args, **more: pytest.fail("it began"))
    with pytest.raises(KveditError, match="in addition to the model") as refused:
        VERBS[verb](cold)
    needed, available = (float(part.replace(",", "")) for part in numbers(refused.value.fact))
    assert needed >= available == round(cache / 1e6, 1)
    assert refused.value.exit_code == 1
    assert "bfloat16" in refused.value.remedy
    assert contents(session._state.store.folder) == before
    monkeypatch.undo()
    VERBS[verb](cold)  # and with memory, it goes on


def numbers(fact: str) -> list[str]:
    return re.findall(r"([\d,.]+) MB", fact)


def test_a_document_that_exceeds_memory_leaves_the_old_session(
    llama: Model, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load_session(home, llama, TEXT)
    before = contents(home)
    only(monkeypatch, llama.cache_bytes(len(session.rows)))
    with pytest.raises(KveditError, match=r"of [\d,]+ tokens needs [\d.]+ MB .* 0.\d MB is available"):
        load_session(home, llama, TEXT + "One more.\n")
    assert contents(home) == before


def test_too_little_memory_is_one_sentence_and_a_remedy(
    checkpoints: dict[str, Path], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    only(monkeypatch, 5)
    done = CliRunner().invoke(app, ["load", "a.txt", "-m", str(checkpoints["llama"])])
    assert done.exit_code == 1
    assert "0.0 MB is available." in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not list(home.glob("*/session.json"))


@pytest.mark.parametrize("verb", VERBS)
def test_unknown_memory_refuses_nothing(session: Session, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    only(monkeypatch, None)
    VERBS[verb](again(session))


def test_a_warm_session_needs_no_second_cache(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.ask(QUESTION, max_new_tokens=2)
    only(monkeypatch, session.model.cache_bytes(len(session.rows)) // 2)
    session.ask(QUESTION, budget="0", max_new_tokens=2)
    with pytest.raises(KveditError, match="Verifying"):  # which holds two
        session.verify()


def test_the_estimated_memory_covers_the_allocation(llama: Model) -> None:
    for count in (10, 200):
        cache = llama.new_cache(count)
        walked = llama.walk(torch.arange(count), slice(0, count), cache)
        assert llama.cache_bytes(count) == cache.keys.nbytes + cache.values.nbytes
        assert llama.walk_bytes(count) >= walked.states.keys.nbytes + walked.states.values.nbytes


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 5")]
)
def test_a_failed_allocation_is_not_reported_as_a_bug(
    session: Session, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(KveditError, match="not enough memory") as caught:
        session.ask(QUESTION)
    assert caught.value.exit_code == 1


# --- what is available ------------------------------------------------------------------------------


def system(root: Path, available_kib: int | None, **files: str) -> Path:
    """A Linux system, as far as memory goes."""
    (root / "proc/self").mkdir(parents=True)
    if available_kib is not None:
        text = f"MemTotal: 9000000 kB\nMemAvailable: {available_kib} kB\nHugePages_Total: 0\n"
        (root / "proc/meminfo").write_text(text)
    for name, held in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(held)
    return root


def group(root: Path, folder: str, version: int, limit: str, used: int, files: int) -> None:
    names = kvedit.cache.memory._GROUPS[version]
    place = root / "sys/fs/cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / names[0]).write_text(f"{limit}\n")
    (place / names[1]).write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 1\n{names[2][0]} {files}\n{names[2][1]} 0\n")


def test_without_control_groups_system_memory_counts(tmp_path: Path) -> None:
    assert kvedit.cache.memory._of_system(system(tmp_path, 700)) == 700 * KIB


def test_unreadable_limits_are_unknown(tmp_path: Path) -> None:
    assert kvedit.cache.memory._of_system(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: some kB\n\n")
    assert kvedit.cache.memory._of_system(tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_counts_and_pages_of_files_are_free(tmp_path: Path, version: int) -> None:
    line = "0::/a/b\n" if version == 2 else "5:cpu,memory:/a/b\n4:cpu:/\n"
    system(tmp_path, 700, proc__self__cgroup=line)
    top = "" if version == 2 else "memory/"
    group(tmp_path, f"{top}a/b", version, "max" if version == 2 else str(2**63 - 4096), 50 * KIB, 0)
    assert kvedit.cache.memory._of_system(tmp_path) == 700 * KIB
    group(tmp_path, f"{top}a", version, str(300 * KIB), 200 * KIB, 30 * KIB)
    assert kvedit.cache.memory._of_system(tmp_path) == 130 * KIB
    group(tmp_path, f"{top}a/b", version, str(60 * KIB), 90 * KIB, 0)  # it may be over its limit
    assert kvedit.cache.memory._of_system(tmp_path) == 0


def test_a_path_outside_the_container_means_its_own_group(tmp_path: Path) -> None:
    system(tmp_path, 700, proc__self__cgroup="0::/docker/abc\n")
    group(tmp_path, "", 2, str(100 * KIB), 10 * KIB, 0)
    assert kvedit.cache.memory._of_system(tmp_path) == 90 * KIB


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what it has left")
def test_this_system_has_some_memory_left() -> None:
    left = available_bytes(torch.device("cpu"))
    assert left is not None
    assert left > 1 << 20
    assert available_bytes(torch.device("mps")) is None


# --- files in memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_segment_reads_like_safetensors_even_after_release(tmp_path: Path, dtype: torch.dtype) -> None:
    shape = (2, 3, 5, 7)
    keys, values = (torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 2))
    name = write_segment(tmp_path, States(torch.arange(5), keys, values), np.arange(5))
    found = read_segment(tmp_path, name)
    stock = load_file(tmp_path / f"{name}.safetensors")
    for _ in range(2):
        assert set(found) == set(stock)
        assert all(torch.equal(found[part], stock[part]) for part in stock)
        assert torch.equal(found["keys"], keys)
        release(found["keys"])
    (tmp_path / f"{name}.safetensors").unlink()  # what is mapped stays, as long as somebody holds it
    assert torch.equal(found["values"], values)


def test_memory_without_a_file_is_never_released() -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    before = tensor.clone()
    release(tensor)
    assert torch.equal(tensor, before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_a_question_the_rows_are_in_memory_once(llama: Model, home: Path) -> None:
    session = load_session(home, llama, a_text(33))
    cold = again(session)
    cold.ask(QUESTION, max_new_tokens=1)
    mapped = re.compile("|".join(f"{name}.safetensors\n" for name in cold._state.segments.states))
    entries = mapped.split(Path("/proc/self/smaps").read_text())[1:]
    resident = sum(int(entry.partition("Rss:")[2].split()[0]) for entry in entries)
    assert resident * 1024 < llama.cache_bytes(len(cold.rows)) / 4
    assert "VmFlags" in entries[0]  # it is still mapped


# --- the peak ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("verb", ["load", "ask"])
def test_the_peak_stays_near_weights_cache_and_300_mb(
    default_folder: Path, tmp_path: Path, verb: str
) -> None:
    """A guard, with room for other machines; `benchmarks/reliability.py` holds the bound at 8,000 tokens."""
    found = measure(default_folder, 2000, tmp_path / "sessions", verb)
    assert found["tokens"] >= 1900
    assert found["peak_bytes"] < 1.1 * limit_bytes(found)
