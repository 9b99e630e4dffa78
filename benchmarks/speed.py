"""What people wait for, as ratios of two things run side by side.

    python benchmarks/speed.py                        # all of it: about fifteen minutes on two cores
    python benchmarks/speed.py --only decode --rounds 7
    python benchmarks/speed.py --document book.txt --tokens 6000

The default model, 4,000 tokens; `benchmarks/llama.py` compares with llama.cpp. The last line of stdout
is JSON. Run nothing else beside it.
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
    """Two sessions of one document: `exact` as it was loaded, and `edited` with lines near its start deleted.

    Args:
        folder: For the sessions.
        text: To take the document from, repeated if it is short.
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
        """The shifted cache."""
        cache = self.model.new_cache(len(self.ids) + len(self.question))
        shift_(self.model, cache, self.edited.rows.placed(), self.edited._state.segments.states)
        return cache

    def ask(self) -> Answer:
        """Ask at 5 % with nothing in the working cache: every row has to be shifted."""
        session = self._open("edited")
        session._state.read_segments()
        return session.ask(QUESTION, budget=Budget.parse("5%"), max_new_tokens=1, keep=False)

    def first_token(self) -> Sample:
        """Ask at 5 %, and re-prefill the edited document with the question."""
        answer = self.answer = self.ask()

        def anew() -> None:
            cache = self.model.new_cache(len(self.ids) + len(self.question))
            for _ in prefill_(self.model, cache, self.ids):
                pass
            prefill_question_(self.model, cache, self.question)

        phases = answer.timings.phases
        share = phases["selection"].seconds / phases["refresh"].seconds
        return {"repair": answer.first_token_s, "re-prefill": seconds(anew), "selection share": share}

    def replay(self) -> Sample:
        """Refresh 5 % in units, and all rows."""
        answer = self.ask()
        cache, rows = self.cache(), np.flatnonzero(self.edited.rows.suffix)
        return {
            "refresh": answer.timings.phases["refresh"].seconds,
            "replay": seconds(lambda: list(refresh_(self.model, cache, self.ids, rows, "direct"))),
        }

    def executors(self, count: int) -> Sample:
        """Refresh 5 % cut into `count` runs, packed and by interval."""
        suffix = np.flatnonzero(self.edited.rows.suffix)
        rows = _spread(suffix, len(suffix) // 20, count)
        assert sum(1 for _ in runs(rows)) == count
        cache = self.cache()

        def work(executor: Any) -> float:
            return seconds(lambda: list(refresh_(self.model, cache, self.ids, rows, executor)))

        return {"packed": work("packed"), "interval": work("interval")}

    def limit(self) -> Sample:
        """Refresh 5 % in 64 runs, and what 5 % of replay's arithmetic takes at prefill's own speed."""
        suffix = np.flatnonzero(self.edited.rows.suffix)
        rows, cache = _spread(suffix, len(suffix) // 20, 64), self.cache()
        refresh = seconds(lambda: list(refresh_(self.model, cache, self.ids, rows, "packed")))
        prefill = seconds(lambda: list(prefill_(self.model, cache, self.ids)))
        replay, every = (self._work(part) for part in (suffix, np.arange(len(self.ids))))
        return {"refresh": refresh, "limit": 0.05 * prefill * replay / every}

    def _work(self, rows: np.ndarray) -> float:
        """Multiplications of computing rows: with the weights of the layers, and in attention."""
        model = self.model
        table = model.network.table.numel()
        weights = sum(part.numel() for part in self.stock.parameters()) - table * (1 if model.tied else 2)
        pairs = 2 * model.layers * model.heads * model.groups * model.width
        return float(weights * len(rows) + pairs * (rows + 1).sum())

    def prefill(self) -> Sample:
        """Prefill by kvedit and by transformers' own forward pass, logits of the last row only."""

        def own() -> None:
            cache = self.model.new_cache(len(self.ids))
            for _ in prefill_(self.model, cache, self.ids):
                pass

        def stock() -> None:
            with torch.no_grad():
                self.stock(self.ids[None], use_cache=True, logits_to_keep=1)

        return {"kvedit": seconds(own), "transformers": seconds(stock)}

    def decode(self, questions: tuple[str, ...]) -> Sample:
        """Seconds a token by kvedit and by transformers' generate; same cache, same ids."""
        own = stock = quoted = 0.0
        count = 0
        for question in questions:
            answer = self.exact.ask(question, budget=Budget.parse("0"), max_new_tokens=ANSWER, keep=False)
            said, spent = self._generate(self._question_ids(question), len(answer.ids))
            assert said == list(answer.ids), f"{question}: other ids than those of transformers"
            own, stock = own + answer.timings.phases["decode"].seconds, stock + spent
            quoted += len(said) * _quoted(said, self.exact._state.ids.tolist())
            count += len(said)
        # The first token comes from the question's prefill.
        steps = count - len(questions)
        return {"kvedit": own / steps, "generate": stock / steps, "quoted": quoted / count, "tokens": count}

    def _generate(self, question: torch.Tensor, count: int) -> tuple[list[int], float]:
        """Give so many ids of transformers' generate, and the seconds from the first to the last."""
        held, total = self.exact._state.working.cache, len(self.exact.rows)
        cache = DynamicCache(config=self.stock.config)
        for layer in range(self.model.layers):
            cache.update(held.keys[None, layer, :, :total], held.values[None, layer, :, :total], layer)
        ids, clocks = torch.cat([self.model.to_device(self.exact._state.ids), question])[None], list[float]()

        class Watch(StoppingCriteria):
            def __call__(self, ids: torch.Tensor, scores: object, **more: Any) -> torch.Tensor:
                clocks.append(clock())
                return torch.zeros(len(ids), dtype=torch.bool)

        said = self.stock.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=count,
            stopping_criteria=StoppingCriteriaList([Watch()]),
        )
        return said[0, ids.shape[1] :].tolist(), clocks[-1] - clocks[0]

    def one_shot(self) -> Sample:
        """All of `kvedit ask` that is no computing, and a Python that imports torch."""
        self.edited.checkout(self.edited._state.revision.entry.number)
        command = [sys.executable, "-m", "kvedit", "ask", QUESTION, "--budget", "5%", "--json"]
        command += ["--session", "edited", "--max-new-tokens", "16"]
        environment = {**os.environ, "KVEDIT_HOME": str(self.folder)}
        start, number = clock(), self.edited._state.revision.entry.number
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        whole = clock() - start
        phases = json.loads(done.stdout)["timings"]
        computing = sum(phases[name]["seconds"] for name in COMPUTING)
        self.edited.checkout(number)  # the next round finds the same stale rows
        return {"ask": whole - computing, "import torch": _python("-c", "import torch"), "whole": whole}

    def opening(self) -> Sample:
        """Open the session to a ready cache, and copy the same bytes in memory."""

        start = clock()
        session = self._open("exact")
        session._state.read_segments()
        session._state.working.reserve(len(session.rows))
        for _ in session._state.segments.gather(
            session._state.working, session.rows, np.arange(len(session.rows))
        ):
            pass
        spent, held = clock() - start, session._state.working.cache
        return {"open": spent, "copy": seconds(lambda: (held.keys.clone(), held.values.clone()))}

    def saving(self) -> Sample:
        """Save after `load`, and write as many bytes with dd, which flushes them at the end."""
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
        """Peak memory of `load` in a process of its own, and weights and cache, in MB."""
        with tempfile.TemporaryDirectory() as home:
            found = measure_peak(self.model.directory, tokens, Path(home), "load")
        bare = found["weights_bytes"] + found["cache_bytes"]
        return {"peak": found["peak_bytes"] / 1e6, "weights and cache": bare / 1e6}


def _spread(suffix: np.ndarray, total: int, count: int) -> np.ndarray:
    """Spread `total` rows evenly over the suffix as `count` runs of nearly equal length."""
    starts = np.linspace(0, len(suffix) - total // count - 2, count).astype(int)
    lengths = np.full(count, total // count) + (np.arange(count) < total % count)
    return suffix[np.concatenate([at + np.arange(size) for at, size in zip(starts, lengths, strict=True)])]


def _quoted(said: list[int], text: list[int], size: int = 6) -> float:
    """Share of ids that are part of `size` ids in a row that stand in the text."""
    known = {tuple(text[at : at + size]) for at in range(len(text) - size + 1)}
    part = np.zeros(len(said), dtype=bool)
    for at in range(len(said) - size + 1):
        if tuple(said[at : at + size]) in known:
            part[at : at + size] = True
    return float(part.mean()) if said else 0.0


def _python(*arguments: str) -> float:
    command = [sys.executable, *arguments]
    return seconds(lambda: subprocess.run(command, capture_output=True, check=True))


def _start_up() -> Sample:
    """Wall time of `kvedit --help` and of a Python that does nothing."""
    return {"help": _python("-m", "kvedit", "--help"), "python": _python("-c", "pass")}


def ratios(bench: Bench, counts: list[int]) -> dict[str, Ratio]:
    """Give what is measured, by a name that `--only` takes."""

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
            "one ask but for computing, against import torch", bench.one_shot, "ask", "import torch", 2, True
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
    parser.add_argument("--only", nargs="+", help="names of measures, or their beginnings")
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
            parser.error(f"--only takes beginnings of {', '.join(measures)}")
        run(list(chosen.values()), options.rounds, console)
        start_up = [_start_up() for _ in range(options.rounds + 1)][1:]
    Console().print(table(list(chosen.values())))
    more = [sample["help"] - sample["python"] for sample in start_up]
    facts = {
        "bytes written by delete": f"{bench.change.written_bytes:,} (target: under 100,000)",
        "kvedit --help, more than python -c pass": f"{statistics.median(more):.2f} s (target: under 0.4 s)",
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
