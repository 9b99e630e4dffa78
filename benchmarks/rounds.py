"""Helpers of the benchmarks: documents of a given length, and ratios of things measured side by side.

Each round runs all sides of each ratio one after another, so a slower machine slows them all. The first round
warms up and is not counted. Reports show the median of the rounds' ratios with the lowest and the highest,
the target, and the machine.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvedit import __version__
from kvedit.model.model import Model
from kvedit.timing import clock

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = ROOT / "sessions" / "quickstart" / "contract.md"
OTHERS = ("contract/lease.md", "samekey/depot.txt", "minutes/minutes.txt", "log/ferry.log", "code/tides.py")
QUESTION = "When must fees be paid?"
EDIT = "4-6"
Sample = dict[str, float]
"""Seconds or another figure, by name of the side."""


@dataclass(slots=True)
class Ratio:
    """The ratio of two figures of the same round.

    Attributes:
        title: What is compared.
        work: Runs all sides once.
        over, under: Names of the side in the numerator and the one in the denominator.
        target: The lowest acceptable ratio, or the highest if `at_most`.
        at_most: Whether smaller is better.
        unit: Unit of the sides in tables: `s`, `MB` or `ms`.
        samples: One per round.
    """

    title: str
    work: Callable[[], Sample]
    over: str
    under: str
    target: float
    at_most: bool = False
    unit: str = "s"
    samples: list[Sample] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """The ratio of each round."""
        return [sample[self.over] / sample[self.under] for sample in self.samples]

    @property
    def met(self) -> bool:
        middle = statistics.median(self.values)
        return middle <= self.target if self.at_most else middle >= self.target

    def record(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        sign = "at most" if self.at_most else "at least"
        return {
            "median": statistics.median(self.values),
            "all": self.values,
            "over": self.over,
            "under": self.under,
            "target": f"{sign} {self.target:g}",
            "met": self.met,
            "samples": self.samples,
        }


def run(ratios: Sequence[Ratio], rounds: int, console: Console) -> None:
    """Run the rounds after a warm-up round, which is not counted."""
    with console.status("") as status:
        for number in range(rounds + 1):
            for ratio in ratios:
                status.update(f"round {number} of {rounds}: {ratio.title}")
                sample = ratio.work()
                if number:
                    ratio.samples.append(sample)


def table(ratios: Sequence[Ratio]) -> Table:
    """Return a table of ratios that fits 80 columns."""
    shown = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    shown.add_column("ratio", max_width=34)
    for heading in ("sides", "median", "range", "target"):
        shown.add_column(heading, justify="right")
    for ratio in ratios:
        sides = [
            statistics.median(sample[side] for sample in ratio.samples) for side in (ratio.over, ratio.under)
        ]
        values = ratio.values
        shown.add_row(
            ratio.title,
            f"{_short(sides[0])} / {_short(sides[1])} {ratio.unit}",
            f"{statistics.median(values):.2f}",
            f"{min(values):.2f}-{max(values):.2f}",
            f"{'<=' if ratio.at_most else '>='} {ratio.target:g}{'' if ratio.met else ' (no)'}",
        )
    return shown


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def machine(*packages: str) -> dict[str, Any]:
    """Return a description of the machine with the versions of torch and `packages`."""
    found = {"processor": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    found |= {"python": platform.python_version(), "kvedit": __version__}
    for package in ("torch", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def processor() -> str:
    """Return the system's name of the processor and the instruction sets relevant to kvedit."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"model name\s*: (.*)", text)
    flags = re.search(r"flags\s*: (.*)", text)
    supported = set(flags.group(1).split()) if flags else set()
    relevant = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    useful = [flag for flag in relevant if flag in supported]
    return " ".join([name.group(1).strip() if name else platform.machine(), *useful])


def seconds(work: Callable[[], object]) -> float:
    """Time a call."""
    start = clock()
    work()
    return clock() - start


def document(path: Path | None = None) -> str:
    """Read a document; by default those of sessions/, concatenated: 4,788 tokens without repetition."""
    paths = [CONTRACT, *(ROOT / "sessions" / name for name in OTHERS)] if path is None else [path]
    return "\n".join(each.read_text(encoding="utf-8") for each in paths)


def text_of(text: str, model: Model, tokens: int) -> str:
    """Repeat and truncate a text to about `tokens` tokens, at the end of a line."""
    count = len(model.tokenizer.encode_text(text))
    text = text * (1 + tokens // count)
    encoded = model.tokenizer.encode_text(text)
    return text[: text.rindex("\n", 0, int(encoded.starts[tokens])) + 1]
