"""Measure repair on an accelerator, with random weights in the shapes of two 8B models.

    python benchmarks/gpu.py                        # CUDA or MPS; under four minutes
    python benchmarks/gpu.py --toy --device cpu     # tiny shapes, to test this script

The weights are created on the device, so nothing is downloaded. Pairs of methods are timed side by side, with
one synchronization per phase:

    replay / refresh      refresh all rows after the edit, or 2 % and 5 % of them in units
    in turn / overlapped  select rows after the shift, or while the shift runs
    interval / packed     refresh 5 % of the rows in more and more runs, one run at a time or all together

Figures are medians of the rounds, and ratios are ratios of two medians; the first round warms up and is not
counted. Each model gets an equal share of the time; measures for which no time is left are not reached. The
last line of stdout has the same figures as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rounds import machine
from torch import Tensor

from kvedit.cache.memory import allocating
from kvedit.cache.rows import Piece
from kvedit.checkpoint.assemble import assemble
from kvedit.checkpoint.recipe import Norm, Recipe
from kvedit.errors import KveditError, UsageError
from kvedit.lab.executor import shapes, spread
from kvedit.lab.recovery import HEAD_ROWS, Edited, recover
from kvedit.model.decode import Sampler, decode_, prefill_question_
from kvedit.model.model import Model
from kvedit.model.network import Sizes
from kvedit.repair.budget import Budget
from kvedit.repair.refresh import refresh_, shift_
from kvedit.timing import clock
from kvedit.tokens.prompt import Prompt

CONTEXTS = (8192, 2048, 32768)  # the most important one first, in case time runs out
TOY_CONTEXTS = (256, 160, 384)
BUDGETS = ("2%", "5%")
GATHERED_ROWS = 256  # as many as a session gathers from its files at once
STEPS = 3  # decoded ids; the second one is measured
ROPE_FACTOR, ROPE_LOW, ROPE_HIGH = 8.0, 1.0, 4.0  # of Llama 3.1


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model.

    Attributes:
        name: Name of the model.
        layers, heads, groups, width, context_length: As in `Model`.
        hidden, inner: Width of the hidden states, and inside the MLP.
        vocabulary: Number of ids.
        theta: Base of RoPE.
        epsilon: Of every RMS norm.
        head_norms: Whether queries and keys are normalized.
        original_length: Context length before RoPE was scaled as in Llama 3.1; `None` if it was not.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    groups: int
    width: int
    inner: int
    vocabulary: int
    context_length: int
    theta: float
    epsilon: float
    head_norms: bool
    original_length: int | None

    @property
    def recipe(self) -> Recipe:
        """The recipe for a network of plain parts."""
        sizes = Sizes(
            hidden=self.hidden,
            intermediate=self.inner,
            layers=self.layers,
            heads=self.heads,
            groups=self.groups,
            width=self.width,
            scaling=self.width**-0.5,
            context_length=self.context_length,
            inverse_frequencies=inverse_frequencies(self),
            attention_scaling=1.0,
            tied=False,
        )
        norm = Norm(centred=False, offset=0.0, epsilon=self.epsilon)
        return Recipe(sizes, norm, self.head_norms, gated=True, stop_ids=(), parts={}, prompt=None)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of the checkpoint, by name."""
        keys = self.heads * self.width
        queries = keys * self.groups
        layer = {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        if self.head_norms:
            layer |= {"self_attn.q_norm": (self.width,), "self_attn.k_norm": (self.width,)}
        table = (self.vocabulary, self.hidden)
        return {
            "model.embed_tokens.weight": table,
            **{
                f"model.layers.{number}.{name}.weight": size
                for number in range(self.layers)
                for name, size in layer.items()
            },
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": table,
        }


SHAPES = (
    Shape("Qwen3-8B", 36, 4096, 8, 4, 128, 12288, 151936, 40960, 1e6, 1e-6, True, None),
    Shape("Llama-3.1-8B", 32, 4096, 8, 4, 128, 14336, 128256, 131072, 5e5, 1e-5, False, 8192),
)
SMALL = {"layers": 3, "hidden": 64, "heads": 2, "groups": 2, "width": 16, "inner": 96, "vocabulary": 512}
TOYS = tuple(replace(shape, name=f"{shape.name}, toy", **SMALL) for shape in SHAPES)


def inverse_frequencies(shape: Shape) -> tuple[float, ...]:
    """Compute RoPE's inverse frequencies, scaled as in Llama 3.1 if the shape has an original length.

    Wavelengths above the original length are multiplied by a factor, those below a quarter of it are kept,
    and between the two the factor is interpolated.
    """
    plain = 1.0 / (shape.theta ** (torch.arange(0, shape.width, 2).float() / shape.width))
    if shape.original_length is None:
        return tuple(plain.tolist())
    turns = shape.original_length / (2 * math.pi / plain)
    stays = ((turns - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW)).clamp(0, 1)
    return tuple(((1 - stays) * plain / ROPE_FACTOR + stays * plain).tolist())


def random_weights(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Create the tensors of a checkpoint on the device: norms around 1, all others around 0."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.empty(size, dtype=dtype, device=device).normal_(
            1.0 if len(size) == 1 else 0.0, 0.02, generator=generator
        )
        for name, size in shape.sizes.items()
    }


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> Model:
    """Return a model with random weights. It has no tokenizer, and nothing that is measured needs one."""
    network = assemble(shape.recipe, random_weights(shape, device, dtype).get)
    return Model(Path(), network, "", (), {}, lambda system: Prompt((), "", "", ""))


@dataclass(frozen=True, slots=True)
class Measure:
    """Two ways of the same thing, as `Bench.seconds` knows them.

    Attributes:
        slow, fast: The ways.
        budget: Rows that are refreshed, such as `5%`.
        runs: How many runs the rows are cut into; `None` where they are selected.
    """

    slow: str
    fast: str
    budget: str
    runs: int | None = None

    @property
    def title(self) -> str:
        runs = "" if self.runs is None else f", {self.runs:,} run{'s' * (self.runs > 1)}"
        return f"{self.slow} / {self.fast}, {self.budget}{runs}"


def plan(context: int) -> list[Measure]:
    """Return the measures for a context; the slowest come last."""
    suffix = context - HEAD_ROWS
    rows = Budget.parse(BUDGETS[-1]).resolve(suffix)
    counts = shapes(rows, suffix, [*(4**power for power in range(8)), rows])
    return [
        *(Measure("replay", "refresh", budget) for budget in BUDGETS),
        Measure("in turn", "overlapped", BUDGETS[-1]),
        *(Measure("interval", "packed", BUDGETS[-1], count) for count in counts),
    ]


class Bench:
    """A document of random ids with rows deleted near its start, and a cache to repair.

    Args:
        model: The model.
        context: Rows after the edit.
    """

    def __init__(self, model: Model, context: int) -> None:
        ids = np.random.default_rng(0).integers(model.vocabulary, size=context)
        self.edited = Edited.of(model, ids, context)
        self.cache = model.new_cache(context + len(self.edited.query_ids) + STEPS)

    def seconds(self, measure: Measure, way: str) -> float:
        """Repair the cache by one of the two methods of a measure; return the seconds to compare."""
        suffix = self.edited.suffix
        rows = Budget.parse(measure.budget).resolve(len(suffix))
        settings: dict[str, Any] = {"overlap": way == "overlapped"}
        if way == "replay":
            settings = {"executor": "direct", "support": suffix}
        elif measure.runs is not None:
            settings = {"executor": way, "support": spread(suffix, rows, measure.runs)}
        timings = recover(self.edited, self.cache, rows, policy="sur", **settings).timings
        all_phases = way in ("in turn", "overlapped")
        return timings.seconds() if all_phases else timings.seconds("refresh")

    def synchronising_calls(self) -> dict[str, int | None]:
        """Count the calls that make the host wait for the device, in three phases.

        These are a shift of rows on the host, where a session has them, a packed refresh, and one decoding
        step.
        """
        edited, cache, model = self.edited, self.cache, self.edited.model
        suffix, ids = edited.suffix, model.to_device(edited.ids)
        rows = Budget.parse(BUDGETS[-1]).resolve(len(suffix))
        support = spread(suffix, rows, rows)
        count = min(GATHERED_ROWS, len(suffix))
        keys, values = edited.segments["text"]
        stored = {"text": (keys[:, :, :count].cpu(), values[:, :, :count].cpu())}
        pieces = [(HEAD_ROWS, Piece("text", 0, count))]
        found = {
            "shift": waits(model.device, lambda: shift_(model, cache, pieces, stored)),
            "refresh": waits(model.device, lambda: list(refresh_(model, cache, ids, support, "packed"))),
        }
        logits, _ = prefill_question_(model, cache, model.to_device(edited.query_ids))
        answer = decode_(model, cache, logits, Sampler(0.0, 0), STEPS, [])
        next(answer)
        return found | {"decode": waits(model.device, lambda: next(answer))}


def waits(device: torch.device, work: Callable[[], object]) -> int | None:
    """Run `work` and count the calls that make the host wait; `None` without CUDA, which reports them."""
    if device.type != "cuda":
        work()
        return None
    with warnings.catch_warnings(record=True) as emitted:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in emitted)


def sample(
    bench: Bench, measure: Measure, rounds: int, expected_s: float, until: float
) -> list[tuple[float, float]]:
    """Time both methods in each round, in alternating order.

    Args:
        bench: Runs the methods.
        measure: What to measure.
        rounds: Number of rounds that count.
        expected_s: Expected duration of a round, if known before the first.
        until: Deadline on the clock.

    Returns:
        Seconds of the slow and the fast method for each round; empty if the time does not suffice.
    """
    found: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        start = clock()
        if number < 2 and start + expected_s * (rounds + 1 - number) >= until:
            return []
        ways = (measure.slow, measure.fast)
        times = {way: bench.seconds(measure, way) for way in (ways if number % 2 else reversed(ways))}
        expected_s = clock() - start
        if number:
            found.append((times[measure.slow], times[measure.fast]))
    return found


def measure_context(
    model: Model, context: int, rounds: int, until: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run as much of the plan as time and memory allow; return plain values."""
    measures, suffix = plan(context), context - HEAD_ROWS
    samples: dict[Measure, list[tuple[float, float]]] = {}
    peaks: dict[Measure, int] = {}
    calls: dict[str, int | None] | None = None
    failed, run_s = None, 0.0
    try:
        with allocating():
            say(f"{context:,} tokens: prefill")
            bench = Bench(model, context) if clock() < until else None
            for measure in measures if bench else ():
                say(f"{context:,} tokens: {measure.title}")
                reset_peak(model.device)
                found = sample(bench, measure, rounds, run_s * (measure.runs or 0), until)
                if found:
                    samples[measure], peaks[measure] = found, peak_bytes(model.device)
                    run_s = statistics.median(slow for slow, _ in found) / (measure.runs or math.inf)
            if bench:
                calls = bench.synchronising_calls()
    except KveditError as error:  # does not fit in memory; a smaller context can still fit
        failed = error.fact
    return {
        "context": context,
        "suffix": suffix,
        "measures": [
            record(measure, suffix, samples.get(measure, []), peaks.get(measure)) for measure in measures
        ],
        "synchronising_calls": calls,
        "failed": failed,
    }


def record(
    measure: Measure, suffix: int, samples: Sequence[tuple[float, float]], peak: int | None
) -> dict[str, Any]:
    """Return a measure as plain values; without samples, it was not reached."""
    slow_s, fast_s = ([pair[way] for pair in samples] for way in (0, 1))
    medians = [statistics.median(times) if times else None for times in (slow_s, fast_s)]
    return {
        "title": measure.title,
        "slow": measure.slow,
        "fast": measure.fast,
        "budget": measure.budget,
        "rows": Budget.parse(measure.budget).resolve(suffix),
        "runs": measure.runs,
        "reached": bool(samples),
        "rounds": len(samples),
        "slow_s": slow_s,
        "fast_s": fast_s,
        "slow_median_s": medians[0],
        "fast_median_s": medians[1],
        "ratio": medians[0] / medians[1] if samples else None,
        "peak_bytes": peak,
    }


def measure_model(
    shape: Shape, toy: bool, device: torch.device, rounds: int, until: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Create a model, and measure it at each context."""
    say(f"{shape.name}: creating weights")
    with allocating():
        model = random_model(shape, device, torch.float32 if toy else torch.bfloat16)
    return {
        "model": shape.name,
        "dtype": model.dtype_name,
        "parameters": sum(math.prod(size) for size in shape.sizes.values()),
        "contexts": [
            measure_context(model, context, rounds, until, lambda text: say(f"{shape.name}, {text}"))
            for context in (TOY_CONTEXTS if toy else CONTEXTS)
        ],
    }


def reset_peak(device: torch.device) -> None:
    """Reset the peak of memory, if possible."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Return peak memory: on CUDA that of tensors since the last reset, otherwise that of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_named(name: str, toy: bool) -> torch.device:
    """Return the device.

    Raises:
        UsageError: It is unavailable, or too slow for the full size.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    if not available[name]:
        raise UsageError(f"This machine has no {name} device.", "Use --toy --device cpu, or another machine.")
    if name == "cpu" and not toy:
        raise UsageError(
            "Without a GPU only the toy size can be measured.",
            "Use --toy --device cpu, or a machine with CUDA or MPS.",
        )
    return torch.device(name)


def described(device: torch.device) -> dict[str, Any]:
    """Return a description of the machine and its accelerator."""
    names = {"cuda": torch.cuda.get_device_name, "mps": lambda: "Apple GPU"}
    return machine() | {
        "accelerator": names[device.type]() if device.type in names else None,
        "cuda": torch.version.cuda,
    }


def table(found: dict[str, Any], where: str) -> Table:
    """Return a table of a model's figures that fits 80 columns."""
    shown = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    shown.title = f"{found['model']}, {found['dtype']}, {where}"
    for heading, side in (("tokens", "right"), ("ways", "left")):
        shown.add_column(heading, justify=side, no_wrap=True)
    for heading in ("slow ms", "fast ms", "ratio", "peak GB"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for part in found["contexts"]:
        for measured in part["measures"]:
            cells = ["not reached", "", "", ""]
            if measured["reached"]:
                times = (measured["slow_median_s"], measured["fast_median_s"])
                cells = [f"{1000 * time:,.1f}" for time in times]
                cells += [f"{measured['ratio']:.2f}", f"{measured['peak_bytes'] / 1e9:.2f}"]
            shown.add_row(f"{part['context']:,}", measured["title"], *cells)
    return shown


def notes(found: dict[str, Any]) -> list[str]:
    """Return lines on what the table does not show: waiting calls and failures."""
    lines = []
    for part in found["contexts"]:
        calls = part["synchronising_calls"] or {}
        counts = ", ".join(f"{name} {count}" for name, count in calls.items() if count is not None)
        if counts:
            lines.append(f"{part['context']:,} tokens: calls that wait for the device: {counts}")
        if part["failed"] is not None:
            lines.append(f"{part['context']:,} tokens: {part['failed']}")
    return lines


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--toy", action="store_true", help="tiny shapes in float32, for any machine")
    parser.add_argument("--limit-s", type=float, default=220.0, help="total seconds")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the warm-up")
    options = parser.parse_args()
    start, console = clock(), Console()
    try:
        device = device_named(options.device, options.toy)
        about, models = described(device), []
        wanted = TOYS if options.toy else SHAPES
        with Console(stderr=True).status("") as status:
            for number, shape in enumerate(wanted):
                left = start + options.limit_s - clock()
                until = clock() + left / (len(wanted) - number)
                models.append(measure_model(shape, options.toy, device, options.rounds, until, status.update))
                gc.collect()  # free this model before the next one is created
                console.print(table(models[-1], about["accelerator"] or device.type))
                for line in notes(models[-1]):
                    console.print(line, highlight=False)
    except KveditError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(
        json.dumps(
            {
                "device": device.type,
                "toy": options.toy,
                "limit_s": options.limit_s,
                "spent_s": clock() - start,
                "rounds": options.rounds,
                "peak_of": "tensors" if device.type == "cuda" else "process",
                "models": models,
                "machine": about,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
