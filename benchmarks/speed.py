"""What kvedit saves, as ratios of two things run side by side in one process.

    python benchmarks/speed.py                      # the default model, 4,000 tokens
    python benchmarks/speed.py --document book.txt --rounds 7

Every round runs both sides of each ratio, one after the other, so a machine that slows down
slows both. The table gives the median of the rounds' ratios with the lowest and the highest;
the last line of stdout is the same as JSON. Run nothing else beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from kvedit import __version__
from kvedit.cache import KVCache
from kvedit.decode import prefill_question_
from kvedit.document import Document
from kvedit.model import Model
from kvedit.model.resolve import DEFAULT_MODEL, resolve
from kvedit.refresh import prefill_, refresh_, shift_
from kvedit.reports import Answer
from kvedit.rows import runs
from kvedit.select import Budget
from kvedit.session import Session
from kvedit.timing import clock

CONTRACT = Path(__file__).resolve().parents[1] / "sessions" / "quickstart" / "contract.md"
QUESTION = "When must fees be paid?"
EDIT = "4-6"


class Bench:
    """A session of `tokens` tokens, with lines near its start deleted.

    Args:
        folder: For the session.
        document: Text to take the document from, repeated if it is short.
        tokens: Length of the document.
        model: Name of the model.
    """

    def __init__(self, folder: Path, document: Path, tokens: int, model: str) -> None:
        directory = resolve(model)
        self.model = Model.open(directory, device="cpu", stock=True)
        text = _text_of(document.read_text(encoding="utf-8"), self.model, tokens)
        self.session = Session.load(Document(text), model=self.model, name="speed", home=folder)
        self.change = self.session.delete(EDIT)
        self.session.read_segments()
        self.ids = self.model.to_device(self.session.ids)
        prompt = self.session.prompt
        self.question = self.model.to_device(prompt.question_ids(self.session.tokenizer, QUESTION))

    def cache(self) -> KVCache:
        """The shifted cache."""
        cache = self.model.new_cache(len(self.ids) + len(self.question))
        shift_(self.model, cache, self.session.rows.placed(), self.session.segments)
        return cache

    def ask(self) -> Answer:
        """Ask at 5 % with nothing in the working cache: every row has to be shifted."""
        session = Session(self.session.store)
        session.use_model(self.model)
        session.read_segments()
        return session.ask(QUESTION, budget=Budget.parse("5%"), max_new_tokens=1, keep=False)

    def first_token(self) -> dict[str, float]:
        """Ask at 5 %, and re-prefill the edited document with the question."""
        answer = self.answer = self.ask()

        def anew() -> None:
            cache = self.model.new_cache(len(self.ids) + len(self.question))
            for _ in prefill_(self.model, cache, self.ids):
                pass
            prefill_question_(self.model, cache, self.question)

        phases = answer.timings.phases
        share = phases["selection"].seconds / phases["refresh"].seconds
        return {"repair": answer.first_token_s, "re-prefill": _seconds(anew), "selection share": share}

    def replay(self) -> dict[str, float]:
        """Refresh 5 % in units, and all rows."""
        answer = self.ask()
        cache, rows = self.cache(), np.flatnonzero(self.session.rows.suffix)
        return {
            "refresh": answer.timings.phases["refresh"].seconds,
            "replay": _seconds(lambda: list(refresh_(self.model, cache, self.ids, rows, "direct"))),
        }

    def executors(self, count: int) -> dict[str, float]:
        """Refresh 5 % cut into `count` runs, packed and by interval."""
        suffix = np.flatnonzero(self.session.rows.suffix)
        rows = _spread(suffix, len(suffix) // 20, count)
        assert sum(1 for _ in runs(rows)) == count
        cache = self.cache()

        def run(executor: Any) -> float:
            return _seconds(lambda: list(refresh_(self.model, cache, self.ids, rows, executor)))

        return {"packed": run("packed"), "interval": run("interval")}

    def prefill(self) -> dict[str, float]:
        """Prefill by kvedit and by transformers' own forward pass, logits of the last row only."""

        def own() -> None:
            cache = self.model.new_cache(len(self.ids))
            for _ in prefill_(self.model, cache, self.ids):
                pass

        def stock() -> None:
            with torch.no_grad():
                self.model.network(self.ids[None], use_cache=True, logits_to_keep=1)

        return {"kvedit": _seconds(own), "transformers": _seconds(stock)}


def _text_of(text: str, model: Model, tokens: int) -> str:
    """Repeat and cut a text to about so many tokens, at a line end."""
    count = len(model.tokenizer.encode_text(text))
    text = text * (1 + tokens // count)
    encoded = model.tokenizer.encode_text(text)
    return text[: text.rindex("\n", 0, int(encoded.starts[tokens])) + 1]


def _spread(suffix: np.ndarray, total: int, count: int) -> np.ndarray:
    """Spread `total` rows evenly over the suffix as `count` runs of nearly equal length."""
    starts = np.linspace(0, len(suffix) - total // count - 2, count).astype(int)
    lengths = np.full(count, total // count) + (np.arange(count) < total % count)
    return suffix[np.concatenate([at + np.arange(size) for at, size in zip(starts, lengths, strict=True)])]


def _seconds(work: Callable[[], object]) -> float:
    start = clock()
    work()
    return clock() - start


def _start_up() -> dict[str, float]:
    """Wall time of `kvedit --help` and of a Python that does nothing."""

    def run(*arguments: str) -> float:
        return _seconds(lambda: subprocess.run([sys.executable, *arguments], capture_output=True, check=True))

    return {"help": run("-m", "kvedit", "--help"), "python": run("-c", "pass")}


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--document", type=Path, default=CONTRACT)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, nargs="+", default=[64, 100, 200])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, console.status("loading") as status:
        bench = Bench(Path(folder), options.document, options.tokens, options.model)
        measures: dict[str, tuple[Callable[[], dict[str, float]], str, str, float]] = {
            "first token at 5 % against re-prefill": (bench.first_token, "re-prefill", "repair", 8),
            "refresh of 5 % in units against replay": (bench.replay, "replay", "refresh", 12),
            "prefill against transformers": (bench.prefill, "transformers", "kvedit", 1),
        }
        for count in (min(count, bench.change.suffix // 20) for count in options.runs):
            title = f"packed against interval, 5 % as {count} runs"
            measures[title] = (lambda count=count: bench.executors(count), "interval", "packed", 10)
        samples: dict[str, list[dict[str, float]]] = {title: [] for title in measures}
        start_up = []
        for number in range(options.rounds + 1):  # the first round warms up and is not counted
            for title, (work, *_) in measures.items():
                status.update(f"round {number} of {options.rounds}: {title}")
                sample = work()
                if number:
                    samples[title].append(sample)
            start_up.append(_start_up())
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for heading in ("ratio", "slow", "fast", "median", "range", "target"):
        table.add_column(heading, justify="left" if heading == "ratio" else "right")
    record: dict[str, Any] = {"ratios": {}}
    for title, (_, slow, fast, target) in measures.items():
        ratios = [sample[slow] / sample[fast] for sample in samples[title]]
        times = [statistics.median(sample[side] for sample in samples[title]) for side in (slow, fast)]
        middle = statistics.median(ratios)
        span = f"{min(ratios):.1f}-{max(ratios):.1f}"
        table.add_row(title, f"{times[0]:.2f} s", f"{times[1]:.2f} s", f"{middle:.2f}", span, f"{target}")
        record["ratios"][title] = {"median": middle, "all": ratios, "seconds": samples[title]}
    shares = [sample["selection share"] for sample in samples["first token at 5 % against re-prefill"]]
    more = [sample["help"] - sample["python"] for sample in start_up[1:]]
    facts = {
        "selection, share of refresh": (f"{100 * statistics.median(shares):.2f} %", "under 2 %"),
        "bytes written by delete": (f"{bench.change.written_bytes:,}", "under 100,000"),
        "kvedit --help, more than python -c pass": (f"{statistics.median(more):.2f} s", "under 0.4 s"),
    }
    out = Console()
    out.print(table)
    for name, (value, target) in facts.items():
        out.print(f"{name}: {value} (target {target})", highlight=False)
    record |= {
        "selection_share": shares,
        "delete_bytes": bench.change.written_bytes,
        "help_extra_s": more,
        "tokens": len(bench.ids),
        "suffix_rows": bench.change.suffix,
        "support_runs": bench.answer.runs,
        "rounds": options.rounds,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kvedit": __version__,
        },
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
