"""Measure latency as ratios of figures measured side by side.

    python benchmarks/speed.py                        # everything: about fifteen minutes on two cores
    python benchmarks/speed.py --only decode --rounds 7
    python benchmarks/speed.py --document book.txt --tokens 6000

By default with the default model and 4,000 tokens. `benchmarks/llama.py` compares with llama.cpp. The last
line of stdout is JSON. Run nothing else at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peak import measure as measure_peak
from rich.console import Console
from rounds import EDIT, QUESTION, Ratio, Sample, document, machine, run, seconds, table, text_of
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from kvedit.cache.kv import KVCache
from kvedit.cache.rows import runs
from kvedit.checkpoint.opening import admit, open_stock
from kvedit.checkpoint.resolve import resolve
from kvedit.model.decode import prefill_question_
from kvedit.names import DEFAULT_MODEL
from kvedit.repair.budget import Budget
from kvedit.repair.refresh import prefill_, refresh_, shift_
from kvedit.repair.reports import Answer
from kvedit.session.session import Session
from kvedit.store.home import Home
from kvedit.text.document import Document
from kvedit.timing import Timings, clock

QUOTING = ("What happened at the meeting?", "What did the minutes say about the harbour?")
SAYING = ("Explain how photosynthesis works.", "What is the function of tides?")
ANSWER = 48
COMPUTING = ("selection", "shift", "refresh", "question", "decode")


class Bench:
    """Two sessions of one document: `exact` as loaded, and `edited` with lines near its start deleted.

    Args:
        folder: Folder for the sessions.
        text: Text of the document, repeated if it is too short.
        tokens: Length of the document.
        model: Folder of the model.
    """

    def __init__(self, folder: Path, text: str, tokens: int, model: Path) -> None:
        self.folder, stock = folder, open_stock(model, device="cpu")
        self.stock, self.model = stock.network, admit(stock)
        text = text_of(text, self.model, tokens)
        self.exact = Session.load(Document(text), model=self.model, name="exact", home=folder)
        Home(folder).copy(self.exact.name, "edited")
        self.edited = self._open("edited")
        self.change = self.edited.delete(EDIT)
        self.edited._state.read_segments()
        self.exact._state.read_segments()
        self.ids = self.model.to_device(self.edited._state.ids)
        self.question = self._question_ids(QUESTION)

    def _open(self, name: str) -> Session:
        session = Session.open(name, home=self.folder)
        session.use_model(self.model)
        return session

    def _question_ids(self, question: str) -> torch.Tensor:
        session = self.exact
        return self.model.to_device(session._state.prompt.question_ids(session._state.tokenizer, question))

    def cache(self) -> KVCache:
        """Return a shifted cache of the edited document."""
        cache = self.model.new_cache(len(self.ids) + len(self.question))
        shift_(self.model, cache, self.edited.rows.placed(), self.edited._state.segments.states)
        return cache

    def ask(self) -> Answer:
        """Ask at 5 % with an empty working cache, so that every row is shifted."""
        session = self._open("edited")
        session._state.read_segments()
        return session.ask(QUESTION, budget=Budget.parse("5%"), max_new_tokens=1, keep=False)

    def first_token(self) -> Sample:
        """Ask at 5 %, and re-prefill the edited document with the question."""
        answer = self.answer = self.ask()

        def reprefill() -> None:
            cache = self.model.new_cache(len(self.ids) + len(self.question))
            for _ in prefill_(self.model, cache, self.ids):
                pass
            prefill_question_(self.model, cache, self.question)

        phases = answer.timings.phases
        share = phases["selection"].seconds / phases["refresh"].seconds
        return {"repair": answer.first_token_s, "re-prefill": seconds(reprefill), "selection share": share}

    def replay(self) -> Sample:
        """Refresh 5 % in units, and all rows."""
        answer = self.ask()
        cache, rows = self.cache(), np.flatnonzero(self.edited.rows.suffix)
        return {
            "refresh": answer.timings.phases["refresh"].seconds,
            "replay": seconds(lambda: list(refresh_(self.model, cache, self.ids, rows, "direct"))),
        }

    def executors(self, count: int) -> Sample:
        """Refresh 5 % in `count` runs, packed and by interval."""
        suffix = np.flatnonzero(self.edited.rows.suffix)
        rows = _spread(suffix, len(suffix) // 20, count)
        assert sum(1 for _ in runs(rows)) == count
        cache = self.cache()

        def work(executor: Any) -> float:
            return seconds(lambda: list(refresh_(self.model, cache, self.ids, rows, executor)))

        return {"packed": work("packed"), "interval": work("interval")}

    def limit(self) -> Sample:
        """Refresh 5 % in 64 runs; compare with 5 % of replay's arithmetic at the speed of prefill."""
        suffix = np.flatnonzero(self.edited.rows.suffix)
        rows, cache = _spread(suffix, len(suffix) // 20, 64), self.cache()
        refresh = seconds(lambda: list(refresh_(self.model, cache, self.ids, rows, "packed")))
        prefill = seconds(lambda: list(prefill_(self.model, cache, self.ids)))
        replay, every = (self._work(part) for part in (suffix, np.arange(len(self.ids))))
        return {"refresh": refresh, "limit": 0.05 * prefill * replay / every}

    def _work(self, rows: np.ndarray) -> float:
        """Return the multiplications needed to compute rows, with weights and in attention."""
        model = self.model
        table = model.network.table.numel()
        weights = sum(part.numel() for part in self.stock.parameters()) - table * (1 if model.tied else 2)
        pairs = 2 * model.layers * model.heads * model.groups * model.width
        return float(weights * len(rows) + pairs * (rows + 1).sum())

    def prefill(self) -> Sample:
        """Prefill with kvedit and with transformers' forward pass, with logits of the last row only."""

        def own() -> None:
            cache = self.model.new_cache(len(self.ids))
            for _ in prefill_(self.model, cache, self.ids):
                pass

        def stock() -> None:
            with torch.no_grad():
                self.stock(self.ids[None], use_cache=True, logits_to_keep=1)

        return {"kvedit": seconds(own), "transformers": seconds(stock)}

    def decode(self, questions: tuple[str, ...]) -> Sample:
        """Measure seconds per token of kvedit and of transformers' generate, with equal cache and ids."""
        own = stock = quoted = 0.0
        count = 0
        for question in questions:
            answer = self.exact.ask(question, budget=Budget.parse("0"), max_new_tokens=ANSWER, keep=False)
            ids, spent = self._generate(self._question_ids(question), len(answer.ids))
            assert ids == list(answer.ids), f"{question}: ids differ from those of transformers"
            own, stock = own + answer.timings.phases["decode"].seconds, stock + spent
            quoted += len(ids) * _quoted(ids, self.exact._state.ids.tolist())
            count += len(ids)
        # The first token comes from the question's prefill.
        steps = count - len(questions)
        return {"kvedit": own / steps, "generate": stock / steps, "quoted": quoted / count, "tokens": count}

    def _generate(self, question: torch.Tensor, count: int) -> tuple[list[int], float]:
        """Return `count` ids of transformers' generate, and the seconds from the first to the last."""
        own, total = self.exact._state.working.cache, len(self.exact.rows)
        cache = DynamicCache(config=self.stock.config)
        for layer in range(self.model.layers):
            cache.update(own.keys[None, layer, :, :total], own.values[None, layer, :, :total], layer)
        ids, clocks = torch.cat([self.model.to_device(self.exact._state.ids), question])[None], list[float]()

        class Watch(StoppingCriteria):
            def __call__(self, ids: torch.Tensor, scores: object, **more: Any) -> torch.Tensor:
                clocks.append(clock())
                return torch.zeros(len(ids), dtype=torch.bool)

        output = self.stock.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=count,
            stopping_criteria=StoppingCriteriaList([Watch()]),
        )
        return output[0, ids.shape[1] :].tolist(), clocks[-1] - clocks[0]

    def one_shot(self) -> Sample:
        """Measure the fixed overhead of `kvedit ask`, and of a Python that imports torch."""
        self.edited.checkout(self.edited._state.revision.entry.number)
        command = [sys.executable, "-m", "kvedit", "ask", QUESTION, "--budget", "5%", "--json"]
        command += ["--session", "edited", "--max-new-tokens", "16"]
        environment = {**os.environ, "KVEDIT_HOME": str(self.folder)}
        start, number = clock(), self.edited._state.revision.entry.number
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        whole = clock() - start
        phases = json.loads(done.stdout)["timings"]
        computing = sum(phases[name]["seconds"] for name in COMPUTING)
        self.edited.checkout(number)  # restore the stale rows for the next round
        return {"ask": whole - computing, "import torch": _python("-c", "import torch"), "whole": whole}

    def opening(self) -> Sample:
        """Open the session until the cache is filled, and copy as many bytes in memory."""

        start = clock()
        session = self._open("exact")
        session._state.read_segments()
        session._state.working.reserve(len(session.rows))
        for _ in session._state.segments.gather(
            session._state.working, session.rows, np.arange(len(session.rows))
        ):
            pass
        spent, cache = clock() - start, session._state.working.cache
        return {"open": spent, "copy": seconds(lambda: (cache.keys.clone(), cache.values.clone()))}

    def saving(self) -> Sample:
        """Save after `load`, and write as many bytes with dd and a flush."""
        store, timings, home = self.exact._state.store, Timings(), self.folder / "saved"
        Session.load(self.exact.document, model=self.model, home=home, timings=timings)
        shutil.rmtree(home)
        size, target = store.size_bytes(), self.folder / "dd"
        source = self.folder / "bytes"
        if not source.exists():
            source.write_bytes(os.urandom(size))
        command = ["dd", f"if={source}", f"of={target}", "bs=1M", "conv=fsync"]
        dd = seconds(lambda: subprocess.run(command, check=True, capture_output=True))
        target.unlink()
        return {"save": timings.phases["save"].seconds, "dd": dd}

    def peak(self, tokens: int = 8000) -> Sample:
        """Measure peak memory of `load` in its own process; compare with weights and cache, in MB."""
        with tempfile.TemporaryDirectory() as home:
            found = measure_peak(self.model.directory, tokens, Path(home), "load")
        bare = found["weights_bytes"] + found["cache_bytes"]
        return {"peak": found["peak_bytes"] / 1e6, "weights and cache": bare / 1e6}


def _spread(suffix: np.ndarray, total: int, count: int) -> np.ndarray:
    """Spread `total` rows evenly over the suffix as `count` runs of nearly equal length."""
    starts = np.linspace(0, len(suffix) - total // count - 2, count).astype(int)
    lengths = np.full(count, total // count) + (np.arange(count) < total % count)
    return suffix[np.concatenate([at + np.arange(size) for at, size in zip(starts, lengths, strict=True)])]


def _quoted(ids: list[int], text: list[int], size: int = 6) -> float:
    """Return the share of ids that belong to a sequence of `size` ids from the text."""
    sequences = {tuple(text[start : start + size]) for start in range(len(text) - size + 1)}
    quoted = np.zeros(len(ids), dtype=bool)
    for start in range(len(ids) - size + 1):
        if tuple(ids[start : start + size]) in sequences:
            quoted[start : start + size] = True
    return float(quoted.mean()) if ids else 0.0


def _python(*arguments: str) -> float:
    command = [sys.executable, *arguments]
    return seconds(lambda: subprocess.run(command, capture_output=True, check=True))


def _start_up() -> Sample:
    """Measure the wall time of `kvedit --help` and of a Python that does nothing."""
    return {"help": _python("-m", "kvedit", "--help"), "python": _python("-c", "pass")}


def ratios(bench: Bench, counts: list[int]) -> dict[str, Ratio]:
    """Return the measures by their names for `--only`."""

    def executors(count: int) -> Callable[[], Sample]:
        return lambda: bench.executors(count)

    found = {
        "first-token": Ratio(
            "first token at 5 %, against re-prefill", bench.first_token, "re-prefill", "repair", 8
        ),
        "replay": Ratio("refresh of 5 % in units, against replay", bench.replay, "replay", "refresh", 12),
        "limit": Ratio(
            "refresh of 5 % in 64 runs, against its arithmetic", bench.limit, "refresh", "limit", 1.4, True
        ),
        "prefill": Ratio("prefill, against transformers", bench.prefill, "transformers", "kvedit", 1),
        "decode-quoting": Ratio(
            "decode, answers that quote, against generate",
            lambda: bench.decode(QUOTING), "generate", "kvedit", 3,
        ),
        "decode": Ratio(
            "decode, others", lambda: bench.decode(SAYING), "generate", "kvedit", 1.5
        ),
        "one-shot": Ratio(
            "fixed overhead of one ask, against import torch", bench.one_shot, "ask", "import torch", 2, True
        ),
        "open": Ratio("session to ready cache, against memory copy", bench.opening, "open", "copy", 3, True),
        "save": Ratio("save after load, against dd", bench.saving, "save", "dd", 1.5, True),
        "peak": Ratio(
            "peak of load, 8,000 tokens, against weights + cache",
            bench.peak, "peak", "weights and cache", 1.25, True, unit="MB",
        ),
    }  # fmt: skip
    for count in (min(count, bench.change.suffix // 20) for count in counts):
        found[f"packed-{count}"] = Ratio(
            f"packed against interval, {count} runs", executors(count), "interval", "packed", 10
        )
    return found


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--document", type=Path)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, nargs="+", default=[64, 100, 200])
    parser.add_argument("--only", nargs="+", help="names of measures, or prefixes of names")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        with console.status("loading"):
            bench = Bench(Path(folder), document(options.document), options.tokens, resolve(options.model))
        measures = ratios(bench, options.runs)
        chosen = {
            name: ratio
            for name, ratio in measures.items()
            if not options.only or name.startswith(tuple(options.only))
        }
        if not chosen:
            parser.error(f"--only needs names or prefixes of: {', '.join(measures)}")
        run(list(chosen.values()), options.rounds, console)
        start_up = [_start_up() for _ in range(options.rounds + 1)][1:]
    Console().print(table(list(chosen.values())))
    more = [sample["help"] - sample["python"] for sample in start_up]
    facts = {
        "bytes written by delete": f"{bench.change.written_bytes:,} (target: under 100,000)",
        "kvedit --help, in addition to python -c pass": f"{statistics.median(more):.2f} s (target: < 0.4 s)",
    }
    if "first-token" in chosen:
        shares = [sample["selection share"] for sample in chosen["first-token"].samples]
        facts["selection, share of refresh"] = f"{100 * statistics.median(shares):.2f} % (target: under 2 %)"
    for name, value in facts.items():
        Console().print(f"{name}: {value}", highlight=False)
    record = {
        "ratios": {name: {"title": ratio.title, **ratio.record()} for name, ratio in chosen.items()},
        "delete_bytes": bench.change.written_bytes,
        "help_extra_s": more,
        "tokens": len(bench.ids),
        "suffix_rows": bench.change.suffix,
        "rounds": options.rounds,
        "machine": machine("transformers"),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
