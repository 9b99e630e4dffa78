"""The benchmark for accelerators: that its models are what they are called, and its figures add up."""

from __future__ import annotations

import importlib
import io
import json
import os
import statistics
import subprocess
import sys
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from kvedit.checkpoint.adapt import from_transformers
from kvedit.checkpoint.compare import Stock
from kvedit.lab.executor import shapes
from kvedit.model.model import Model
from kvedit.repair.refresh import refresh_

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM, Qwen3RotaryEmbedding),
    "Llama": (LlamaConfig, LlamaForCausalLM, LlamaRotaryEmbedding),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
IDS = torch.arange(90) * 37 % 509


@pytest.fixture
def gpu() -> Any:
    return importlib.import_module("gpu")


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the toy size prints, by line, in a process of its own."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--toy", "--device", "cpu", "--rounds", "2"],
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# --- the models -----------------------------------------------------------------------------------


def of_transformers(shape: Any) -> tuple[Any, Any, Any]:
    """transformers' configuration of a shape, and its classes of network and RoPE."""
    make, network, rotary = KINDS[shape.name.split("-")[0].split(",")[0]]
    rope = LLAMA3 if make is LlamaConfig else {"rope_type": "default"}
    config = make(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads * shape.groups,
        num_key_value_heads=shape.heads,
        head_dim=shape.width,
        max_position_embeddings=shape.context_length,
        rms_norm_eps=shape.epsilon,
        tie_word_embeddings=False,
        rope_parameters={**rope, "rope_theta": shape.theta},
    )
    return config, network, rotary


def pair(gpu: Any, shape: Any, dtype: torch.dtype) -> tuple[Model, Stock]:
    """The benchmark's model, and the same tensors in transformers' modules."""
    config, network, _ = of_transformers(shape)
    stock = network(config).eval()
    stock.load_state_dict(gpu.random_weights(shape, CPU, dtype), strict=True, assign=True)
    own = gpu.random_model(shape, CPU, dtype)
    return own, Stock(Model(Path(), from_transformers(stock), "", (), {}, own.layout), stock)


@pytest.mark.parametrize(("at", "parameters"), [(0, 8_190_735_360), (1, 8_030_261_248)])
def test_sizes_are_those_of_the_published_models(gpu: Any, at: int, parameters: int) -> None:
    shape = gpu.SHAPES[at]
    config, network, _ = of_transformers(shape)
    with torch.device("meta"):
        tensors = network(config).state_dict()
    assert shape.sizes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert sum(tensor.numel() for tensor in tensors.values()) == parameters


@pytest.mark.parametrize("shapes_of", ["SHAPES", "TOYS"])
@pytest.mark.parametrize("at", [0, 1])
def test_frequencies_are_those_of_transformers(gpu: Any, shapes_of: str, at: int) -> None:
    shape = getattr(gpu, shapes_of)[at]
    config, _, rotary = of_transformers(shape)
    found = torch.tensor(gpu.inverse_frequencies(shape))
    assert torch.equal(found, rotary(config).inv_freq)


def test_llama3_stretches_only_long_waves_and_blends_between(gpu: Any) -> None:
    shape = gpu.SHAPES[1]
    plain = torch.tensor(gpu.inverse_frequencies(gpu.replace(shape, original_length=None)))
    ratio = plain / torch.tensor(gpu.inverse_frequencies(shape))
    assert ratio[0] == 1
    assert ratio[-1] == 8
    assert bool((ratio.diff() >= 0).all())
    assert bool(((ratio > 1) & (ratio < 8)).any())


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_random_model_walks_as_transformers_modules_do(gpu: Any, at: int, dtype: torch.dtype) -> None:
    found = []
    own, stock = pair(gpu, gpu.TOYS[at], dtype)
    for model in (own, stock.model):
        cache = model.new_cache(len(IDS))
        hidden = [model.walk(IDS[:60], slice(0, 60), cache, outputs=60).hidden]
        hidden.append(model.walk(IDS[60:], slice(60, 90), cache, outputs=30).hidden)
        list(refresh_(model, cache, IDS + 1, torch.arange(5, 80, 3).numpy(), "packed"))
        found.append([*map(model.logits, hidden), cache.keys, cache.values, model.mean_embedding])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("at", [0, 1])
def test_a_random_model_gives_the_logits_of_transformers(gpu: Any, at: int) -> None:
    own, stock = pair(gpu, gpu.TOYS[at], torch.float32)
    with torch.no_grad():
        wanted = stock.network(IDS[None]).logits[0]
    found = own.logits(own.walk(IDS, slice(0, 90), own.new_cache(90), outputs=90).hidden)
    assert float(wanted.std()) > 0.05
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


# --- the figures ----------------------------------------------------------------------------------


def test_every_measure_runs_and_reports_the_ratio_of_medians(printed: list[str]) -> None:
    found = json.loads(printed[-1])
    assert (found["device"], found["toy"], found["rounds"]) == ("cpu", True, 2)
    assert 0 < found["spent_s"] < found["limit_s"]
    assert found["machine"]["accelerator"] is None
    assert len(found["models"]) == 2
    for model in found["models"]:
        assert (model["dtype"], len(model["contexts"])) == ("float32", 3)
        for part in model["contexts"]:
            assert part["failed"] is None
            assert part["suffix"] < part["context"]
            assert part["synchronising_calls"] == dict.fromkeys(("shift", "refresh", "decode"))
            for one in part["measures"]:
                check(one, part["suffix"], rounds=2)
            check_plan(part)


def check(one: dict[str, Any], suffix: int, rounds: int) -> None:
    assert one["reached"]
    assert one["rounds"] == len(one["slow_s"]) == len(one["fast_s"]) == rounds
    assert min(*one["slow_s"], *one["fast_s"]) > 0
    assert one["slow_median_s"] == statistics.median(one["slow_s"])
    assert one["fast_median_s"] == statistics.median(one["fast_s"])
    assert one["ratio"] == one["slow_median_s"] / one["fast_median_s"]
    assert one["rows"] == suffix * int(one["budget"].removesuffix("%")) // 100
    assert one["peak_bytes"] > 1_000_000


def check_plan(part: dict[str, Any]) -> None:
    ways = [(one["slow"], one["fast"], one["budget"]) for one in part["measures"]]
    assert ways[:3] == [
        ("replay", "refresh", "2%"),
        ("replay", "refresh", "5%"),
        ("in turn", "overlapped", "5%"),
    ]
    assert set(ways[3:]) == {("interval", "packed", "5%")}
    rows = part["measures"][-1]["rows"]
    counts = [one["runs"] for one in part["measures"][3:]]
    assert counts == sorted({1, *(4**power for power in (1, 2, 3) if 4**power <= rows), rows})


def test_the_tables_have_a_line_for_each_measure_in_80_columns(printed: list[str]) -> None:
    found = json.loads(printed[-1])
    assert max(map(len, printed[:-1])) <= 80
    for model in found["models"]:
        assert any(line.startswith(f"{model['model']}, float32, cpu") for line in printed)
        for part in model["contexts"]:
            for one in part["measures"]:
                wanted = f"{part['context']:,} {one['title']} {1000 * one['slow_median_s']:,.1f}"
                assert any(" ".join(line.split()).startswith(wanted) for line in printed)


def test_the_plan_of_32k_ends_with_a_run_per_row(gpu: Any) -> None:
    context = gpu.CONTEXTS[-1]
    runs = [measure.runs for measure in gpu.plan(context) if measure.runs]
    assert runs == [1, 4, 16, 64, 256, 1024, 1637]
    assert runs == shapes(1637, context - 16, runs)
    samples = [(34.5678, 12.3456)] * 3
    measures = [gpu.record(measure, 32752, samples, 123_456_789_012) for measure in gpu.plan(context)]
    part = {"context": context, "measures": measures}
    found = {"model": "Llama-3.1-8B", "dtype": "bfloat16", "contexts": [part]}
    out = io.StringIO()
    Console(file=out, width=80).print(gpu.table(found, "NVIDIA H200"))
    assert "…" not in out.getvalue()
    assert "interval / packed, 5%, 1,637 runs  34,567.8  12,345.6   2.80   123.46" in out.getvalue()


# --- what does not go as planned --------------------------------------------------------------------


def run_main(gpu: Any, monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *args])
    code: int = gpu.main()
    return code


def test_without_time_no_measure_is_reached_and_a_note_says_so(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(gpu, monkeypatch, "--toy", "--device", "cpu", "--limit-s", "0") == 0
    printed = capsys.readouterr().out.splitlines()
    models = json.loads(printed[-1])["models"]
    measures = [one for model in models for part in model["contexts"] for one in part["measures"]]
    assert {(one["reached"], one["rounds"], one["ratio"]) for one in measures} == {(False, 0, None)}
    assert sum("not reached" in line for line in printed[:-1]) == len(measures)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "mps"])
def test_a_missing_gpu_is_one_sentence_and_a_remedy(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    assert run_main(gpu, monkeypatch, "--device", device) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.count(". ") == 1
    assert "--toy --device cpu" in error


def test_a_context_that_does_not_fit_is_named_and_skipped(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpu.random_model(gpu.TOYS[0], CPU, torch.float32)
    seconds = gpu.Bench.seconds

    def failing(bench: Any, measure: Any, way: str) -> float:
        if measure.runs and len(bench.edited.ids) == 160:
            raise torch.OutOfMemoryError("out of memory")
        return float(seconds(bench, measure, way))

    monkeypatch.setattr(gpu.Bench, "seconds", failing)
    large, small = (gpu.measure_context(model, size, 1, 1e9, lambda text: None) for size in (160, 80))
    assert "not enough memory (out of memory)" in large["failed"]
    assert [one["reached"] for one in large["measures"]] == [True] * 3 + [False] * 3
    assert gpu.notes({"contexts": [large]}) == [f"160 tokens: {large['failed']}"]
    assert small["failed"] is None
    assert all(one["reached"] for one in small["measures"])


class Ticking:
    """A bench whose every way takes a second of a clock that it is the owner of."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ways: list[str] = []

    def seconds(self, measure: Any, way: str) -> float:
        self.now += 1
        self.ways.append(way)
        return 1.0 if way == measure.fast else 3.0


@pytest.mark.parametrize(
    ("expected_s", "until", "ways"),
    [
        (0.0, 8.5, 8),  # a round takes 2 s, and there are three with the first
        (0.0, 5.9, 2),  # the first round shows that two more do not fit
        (0.0, 0.0, 0),
        (2.9, 8.5, 0),  # known before
    ],
)
def test_a_measure_without_enough_time_is_abandoned_early(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, expected_s: float, until: float, ways: int
) -> None:
    bench = Ticking()
    monkeypatch.setattr(gpu, "clock", lambda: bench.now)
    found = gpu.sample(bench, gpu.Measure("slow", "fast", "5%"), 3, expected_s, until)
    assert found == ([(3.0, 1.0)] * 3 if ways == 8 else [])
    assert bench.ways == (["fast", "slow", "slow", "fast"] * 2)[:ways]  # no way always follows the other


def test_only_calls_that_wait_are_counted(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    said = count()

    def work() -> None:
        assert modes == ["warn"]
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn(f"something else {next(said)}", stacklevel=1)

    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)
    assert gpu.waits(torch.device("cuda"), work) == 3
    assert modes == ["warn", "default"]
    assert gpu.waits(CPU, lambda: next(said)) is None
    assert next(said) == 2  # the work was done
    part = {"context": 8192, "failed": None, "synchronising_calls": {"shift": 0, "decode": 1}}
    assert gpu.notes({"contexts": [part]}) == [
        "8,192 tokens: calls that wait for the device: shift 0, decode 1"
    ]
