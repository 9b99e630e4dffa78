"""The comparison with llama.cpp, on a tiny model and with a stand-in for llama-cpp-python."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from rigs.tiny import save_tiny

from kvedit.checkpoint.opening import open_model

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["prefill-512", "prefill-4096", "decode", "decode-quoting", "first-token"]
STAND_IN = '''
import time

import numpy as np

__version__ = "0.0.stand-in"


class Llama:
    """Takes ids and a tenth of a millisecond for each; says 7 for ever."""

    def __init__(self, path, **options):
        assert options["n_threads"] == options["n_threads_batch"] > 0
        self.input_ids, self.n_tokens = np.zeros(options["n_ctx"], dtype=np.intc), 0

    def reset(self):
        self.n_tokens = 0

    def eval(self, tokens):
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)
        time.sleep(1e-4 * len(tokens))

    def generate(self, tokens, top_k, temp):
        assert (top_k, temp) == (1, 0.0)
        held = self.input_ids[: self.n_tokens].tolist()
        same = 0
        while same < min(len(held), len(tokens) - 1) and held[same] == tokens[same]:
            same += 1
        self.n_tokens = same
        self.eval(tokens[same:])
        while True:
            yield 7
            self.eval([7])
'''


@pytest.fixture
def llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module that the worker finds as llama_cpp; empty."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "llama_cpp.py"


@pytest.fixture
def benchmark() -> Any:
    return importlib.import_module("llama")


def run(benchmark: Any, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["llama.py", *options])
    benchmark.main()


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A tiny checkpoint with room for 4,096 ids, and no id that ends an answer."""
    return save_tiny(tmp_path / "tiny", "llama", max_position_embeddings=8192, eos_token_id=None)


def test_ratios_are_those_of_the_samples(
    benchmark: Any,
    llama_cpp: Path,
    tiny_folder: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    llama_cpp.write_text(STAND_IN)
    options = ["--gguf", "any.gguf", "--model", str(tiny_folder), "--tokens", "700", "--rounds", "2"]
    run(benchmark, monkeypatch, *options, "--agreement-tokens", "150", "--decode-weights", "bf16")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    record = json.loads(lines[-1])

    assert list(record["ratios"]) == NAMES
    for found in record["ratios"].values():
        assert len(found["samples"]) == 2
        assert found["all"] == [sample["llama.cpp"] / sample["kvedit"] for sample in found["samples"]]
        assert found["median"] == statistics.median(found["all"])
    # The stand-in's time is known: a tenth of a millisecond an id.
    for name, least in (("prefill-512", 0.0512), ("prefill-4096", 0.4096), ("decode", 0.1)):
        assert all(sample["llama.cpp"] >= least for sample in record["ratios"][name]["samples"])
    for sample in record["ratios"]["first-token"]["samples"]:
        computed = record["tokens"] - sample["reused"]
        assert record["suffix_rows"] <= computed < record["tokens"]
        assert sample["llama.cpp"] >= 1e-4 * computed

    agreement = record["agreement"]
    assert agreement["tokens"] >= 150
    assert agreement["share"] == agreement["same"] / agreement["tokens"]
    assert agreement["met"] == (agreement["share"] >= 0.99)
    assert record["machine"]["llama_cpp"] == "0.0.stand-in"


def test_the_same_weights_agree_always_and_others_do_not(
    benchmark: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = benchmark.Bench(tmp_path / "home", benchmark.document(), 700, tiny_folder)
    counts = list[int]()
    monkeypatch.setattr(type(bench.model), "reduced", lambda model, weights: model)
    found = benchmark.agreement(bench, "float32", 200, counts.append)
    assert (found["share"], found["met"]) == (1.0, True)
    assert found["tokens"] == counts[-1] >= 200 > counts[-2]

    other = open_model(save_tiny(tmp_path / "other", "llama", seed=1), device="cpu")
    monkeypatch.setattr(type(bench.model), "reduced", lambda model, weights: other)
    found = benchmark.agreement(bench, "another", 200, counts.append)
    assert found["share"] < 0.5
    assert not found["met"]


def test_without_llama_cpp_it_says_how_to_get_it(
    benchmark: Any,
    llama_cpp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    llama_cpp.write_text("raise ImportError('no such thing')")
    with pytest.raises(SystemExit) as ended:
        run(benchmark, monkeypatch, "--gguf", "any.gguf")
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot import llama_cpp (no such thing)" in said
    assert "pip install llama-cpp-python" in said


def test_an_interpreter_that_is_not_there_is_refused(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(benchmark, monkeypatch, "--gguf", "any.gguf", "--python", "/nowhere/python")
    assert ended.value.code == 2
    assert "/nowhere/python cannot be run" in " ".join(capsys.readouterr().err.split())
