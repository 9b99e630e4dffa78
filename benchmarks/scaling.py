"""Measure how seconds, memory and bytes grow with the document and its history, and fit exponents.

    python benchmarks/scaling.py                        # 500 to 8,000 tokens; 1, 100, 10,000 revisions
    python benchmarks/scaling.py --model FOLDER --lengths 1000,4000,16000,64000
    python benchmarks/scaling.py --write                # also writes docs/performance.md, docs/scaling.svg

A document of each length is loaded, edited, opened and queried, each verb in its own process. The first run
warms up: its peak and its written bytes are recorded, but not its time. An exponent is the slope of a
least-squares line through the logarithms. This needs Linux for the peak. The last line of stdout is JSON. Run
nothing else at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from scaling_page import Record, show, write

from kvedit.names import DEFAULT_MODEL
from kvedit.session.session import Session
from kvedit.session.state import State
from kvedit.store.home import Home
from kvedit.store.store import Store
from kvedit.text.document import Document
from kvedit.timing import Timings, clock

if TYPE_CHECKING:
    from kvedit.model.model import Model

# `rounds` and `kvedit.model.model` import torch, so functions import them when needed: a process that only
# deletes lines must not have torch in memory.
ROOT = Path(__file__).resolve().parents[1]
from peak import resident  # noqa: E402

T = TypeVar("T")
Files = dict[Path, tuple[int, int]]
"""Inode and size in bytes of each path."""
TINY = "".join(f"Line {number}.\n" for number in range(1, 9))
"""The document whose peak is subtracted: libraries and weights, and almost no rows."""
LINES = "4-6"  # as `rounds.EDIT`
ALLOWED_S = 60
"""No round of a verb starts after this time."""
PEAK = Path("/proc/self/clear_refs")
"""Writing to this file resets the peak of the process."""
PAST_TOKENS = 4000
"""Maximum length of the document with a history, among the lengths given."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Inputs of the measurements.

    Attributes:
        checkpoint: Folder of the model.
        weights: Multiplications of one token with the weights of the layers.
        pairs: Multiplications of one query with one key, over all heads and layers.
        texts: Documents, by the length to which they were truncated.
    """

    checkpoint: Path
    weights: int
    pairs: int
    texts: dict[int, str]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a verb.

    Attributes:
        seconds: Duration.
        tokens: T, rows of the session before the run.
        first: First row that can be computed.
        rows: Number of rows of the document that were computed.
        question: Number of rows of the question that were computed.
    """

    seconds: float
    tokens: int
    first: int = 0
    rows: int = 0
    question: int = 0


@dataclass
class Place:
    """The document and session that a verb uses.

    Attributes:
        checkpoint: Folder of the model.
        text: Text of the document.
        store: Store of its session.
    """

    checkpoint: Path
    text: str
    store: Store

    @cached_property
    def model(self) -> Model:
        from kvedit.checkpoint.opening import open_model

        return open_model(self.checkpoint, device="cpu")

    def open(self) -> Session:
        """Open the session like a new process, but with a model that is already in memory."""
        session = Session(State(self.store))
        session.use_model(self.model)
        session._state.read_segments()
        return session


def load(place: Place, first: bool) -> Run:
    """Load the document; time prefill and saving, without opening the model."""
    if place.store.exists():
        Home(place.store.folder.parent).remove(place.store.name)
    home, timings = place.store.folder.parent, Timings()
    session = Session.load(
        Document(place.text), model=place.model, name=place.store.name, home=home, timings=timings
    )
    count = len(session.rows)
    return Run(timings.seconds("prefill", "save"), count, rows=count)


def delete(place: Place, first: bool) -> Run:
    """Delete lines near the start, after undoing the deletion of the previous run."""
    session = Session(State(place.store))
    if session._state.revision.entry.edits:
        session.undo()
    tokens, start = len(session.rows), clock()
    session.delete(LINES)
    return Run(clock() - start, tokens)


def ready_cache(place: Place, first: bool) -> Run:
    """Open the session up to a cache with all rows at their positions."""
    start = clock()
    session = place.open()
    session._state.working.reserve(len(session.rows))
    for _ in session._state.segments.gather(
        session._state.working, session.rows, session._state.working.differing(session.rows)
    ):
        pass
    return Run(clock() - start, len(session.rows))


def ask(budget: str, place: Place, first: bool) -> Run:
    """Ask, and time up to the first token. The first run keeps its rows, and then returns to before."""
    from rounds import QUESTION

    session = place.open()
    before = session._state.revision.entry.number
    answer = session.ask(QUESTION, budget=budget, max_new_tokens=1, keep=first)
    if first:
        session.checkout(before)
    question = answer.timings.phases["question"].tokens or 0
    rows = answer.refreshed + answer.missing
    return Run(answer.first_token_s, answer.tokens, session.rows.frontier, rows, question)


VERBS: dict[str, Callable[[Place, bool], Run]] = {
    "load": load,
    "delete": delete,
    "open": ready_cache,
    "ask at 5 %": partial(ask, "5%"),
    "ask at full": partial(ask, "full"),
}
EXPECTED: dict[str, dict[str, tuple[float, float] | None]] = {
    "load": {"memory_bytes": (1, 1), "written_bytes": (1, 1)},
    "delete": {"seconds": (0, 1), "memory_bytes": (0, 1), "written_bytes": (0, 0)},
    "open": {"seconds": (1, 1), "memory_bytes": (1, 1), "written_bytes": None},
    "ask at 5 %": {"memory_bytes": (1, 1), "written_bytes": (1, 1)},
    "ask at full": {"memory_bytes": (1, 1), "written_bytes": (1, 1)},
}
"""Expected lowest and highest exponents; for seconds of other verbs, they follow from the arithmetic."""


def main() -> None:
    """Measure and print; write the page if `--write` is given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--lengths", type=numbers, default="500,1000,2000,4000,8000", help="tokens; default: %(default)s")
    add("--revisions", type=numbers, default="1,100,10000", help="revisions; default: %(default)s")
    add(
        "--rounds",
        type=int,
        default=5,
        help=f"default: %(default)s; none starts after {ALLOWED_S} s",
    )
    add("--model", default=DEFAULT_MODEL, help="as for `kvedit load`; default: %(default)s")
    add(
        "--write",
        type=Path,
        nargs="?",
        const=ROOT / "docs",
        metavar="FOLDER",
        help="write the tables to its performance.md, and the plot beside it; default: docs",
    )
    options = parser.parse_args()
    if options.write and not (options.write / "performance.md").exists():
        parser.error(f"{options.write} has no performance.md")
    with tempfile.TemporaryDirectory() as folder:
        record = measure(Path(folder), options)
    show(record)
    if options.write:
        write(options.write, record)
    print(json.dumps(record))


def numbers(text: str) -> list[int]:
    """Parse a list such as `500,1000` of positive integers; return them sorted."""
    found = sorted({int(part) for part in text.split(",")})
    if found[0] < 1:
        raise argparse.ArgumentTypeError("numbers must be at least 1")
    return found


def measure(home: Path, options: argparse.Namespace) -> Record:
    """Measure each verb at each length, and edits on each history, and show the progress."""
    from rounds import machine

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        shown = progress.add_task("opening the model", total=None)
        ready = apart(prepare, options.model, options.lengths)
        texts = {0: TINY, **ready.texts}
        progress.update(shown, total=len(texts) * len(VERBS))
        samples: dict[str, list[Record]] = {verb: [] for verb in VERBS}
        for length, text in texts.items():
            place = Place(ready.checkpoint, text, Home(home).store(f"tokens-{length}"))
            for verb in VERBS:
                progress.update(shown, description=f"{verb}: {length:,} tokens")
                samples[verb].append({"length": length, **apart(cost, verb, place, options.rounds)})
                progress.advance(shown)
            Home(place.store.folder.parent).remove(place.store.name)
        past = measure_past(home, ready, options, progress)
    return {
        "model": options.model,
        "lengths": list(ready.texts),
        "rounds": options.rounds,
        "verbs": {verb: growth(verb, ready, found) for verb, found in samples.items()},
        "past": past,
        "machine": machine("transformers"),
    }


def apart(work: Callable[..., T], *args: object) -> T:
    """Run `work` in its own process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def prepare(name: str, lengths: Sequence[int]) -> Ready:
    """Check the model, so that it opens without transformers from now on, and truncate the documents.

    A length that does not fit the context together with a question and one token of answer becomes the
    longest that fits.
    """
    from rounds import CONTRACT, QUESTION, text_of

    from kvedit.checkpoint.opening import admit, open_stock
    from kvedit.checkpoint.resolve import resolve

    stock = open_stock(resolve(name), device="cpu")
    model = admit(stock)
    prompt, text = model.layout(None), CONTRACT.read_text(encoding="utf-8")
    others = len(prompt.head_ids) + len(prompt.question_ids(model.tokenizer, QUESTION)) + 1
    fitting = sorted({min(length, model.context_length - others) for length in lengths})
    tables = model.network.table.numel() * (1 if model.tied else 2)
    return Ready(
        checkpoint=model.directory,
        weights=sum(part.numel() for part in stock.network.parameters()) - tables,
        pairs=model.layers * model.heads * model.groups * model.width,
        texts={length: text_of(text, model, length) for length in fitting},
    )


def cost(verb: str, place: Place, rounds: int) -> Record:
    """Measure a verb in this process, which must be new."""
    run, folder = VERBS[verb], place.store.folder
    if verb != "delete":
        _ = place.model
        PEAK.write_text("5")  # reset the peak: opening a model can need more than a short document
    start, before = clock(), files(folder)
    run(place, True)
    peak, written = resident("VmHWM"), written_bytes(before, files(folder))
    runs: list[Run] = []
    while len(runs) < rounds and (not runs or clock() - start < ALLOWED_S):
        runs.append(run(place, False))
    last = runs[-1]
    return {
        "tokens": last.tokens,
        "seconds": [each.seconds for each in runs],
        "peak_bytes": peak,
        "written_bytes": written,
        "first": last.first,
        "rows": last.rows,
        "question": last.question,
    }


def files(folder: Path) -> Files:
    """Return the files below a folder."""
    every = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    return {path: (found.st_ino, found.st_size) for path, found in every}


def written_bytes(before: Files, after: Files) -> int:
    """Return the bytes of new and replaced files, plus the bytes appended to others."""
    total = 0
    for path, (inode, size) in after.items():
        old_inode, old_size = before.get(path, (None, 0))
        total += size - (old_size if old_inode == inode else 0)
    return total


def growth(verb: str, ready: Ready, found: Sequence[Record]) -> Record:
    """Fit a verb's figures; the first sample is of the tiny document."""
    base, *samples = found
    tokens = [sample["tokens"] for sample in samples]
    costs = {
        "seconds": [statistics.median(sample["seconds"]) for sample in samples],
        "memory_bytes": [sample["peak_bytes"] - base["peak_bytes"] for sample in samples],
        "written_bytes": [sample["written_bytes"] for sample in samples],
    }
    worked = exponent(tokens, [work(ready, sample) for sample in samples])
    known = {"seconds": None if worked is None else (worked, worked), **EXPECTED[verb]}
    return {
        "base": base,
        "samples": samples,
        **{
            figure: {"values": values, "exponent": exponent(tokens, values), "expected": known[figure]}
            for figure, values in costs.items()
        },
    }


def exponent(tokens: Sequence[float], costs: Sequence[float]) -> float | None:
    """Fit costs as a power of the tokens; `None` if there are fewer than two or one is not positive."""
    if len(tokens) < 2 or min(costs) <= 0:
        return None
    return float(np.polyfit(np.log(tokens), np.log(costs), 1)[0])


def work(ready: Ready, sample: Record) -> float:
    """Estimate the multiplications of a run, as `kvedit doctor` does.

    The computed rows are assumed to be spread evenly from the first possible one to the end, followed by the
    question's. A row multiplies with the weights, and twice with each row up to itself.
    """
    total, rows, question = sample["tokens"], sample["rows"], sample["question"]
    pairs = rows * (sample["first"] + 1 + total) / 2 + question * (2 * total + 1 + question) / 2
    return ready.weights * (rows + question) + 2 * ready.pairs * pairs


# --- history -----------------------------------------------------------------------------------------


def measure_past(home: Path, ready: Ready, options: argparse.Namespace, progress: Progress) -> Record:
    """Edit copies of a session to each number of revisions, and measure `status`, opening and an edit."""
    from kvedit.checkpoint.opening import open_model

    length = max((held for held in ready.texts if held <= PAST_TOKENS), default=min(ready.texts))
    model = open_model(ready.checkpoint, device="cpu")
    loaded = Session.load(Document(ready.texts[length]), model=model, name="loaded", home=home)
    size, segments = loaded._state.store.size_bytes(), len(loaded._state.journal.segments())
    shown = progress.add_task("edits", total=None)
    found: list[Record] = []
    for count in options.revisions:
        store = Home(home).store(f"past-{count}")
        Home(loaded._state.store.folder.parent).copy(loaded.name, store.name)
        session, edits, start = Session(State(store)), 0, clock()
        while len(session._state.journal) < count:
            edit(session, random.Random(edits))
            edits += 1
            done = len(session._state.journal)
            progress.update(shown, description=f"edits: {count:,} revisions", total=count, completed=done)
        seconds = clock() - start
        sample: Record = {"revisions": count, "edits": edits, "edit_s": [], "open_s": [], "status_s": []}
        sample |= {
            "edits_mean_s": seconds / edits if edits else None,
            "edits_mean_bytes": (store.size_bytes() - size) / edits if edits else None,
            "segments_added": len(session._state.journal.segments()) - segments,
        }
        found.append(sample)
    progress.update(shown, description="sessions with a history", total=options.rounds + 1, completed=0)
    for number in range(options.rounds + 1):
        for sample in found:
            one = one_more(Home(home).store(f"past-{sample['revisions']}"))
            sample["edit_bytes"] = one.pop("edit_bytes")
            if number:  # the first round warms up
                for name, value in one.items():
                    sample[name].append(value)
        progress.advance(shown)
    for sample in found:
        pairs = zip(sample["status_s"], found[0]["status_s"], strict=True)
        sample["status_more_s"] = [late - early for late, early in pairs]
    return {"tokens": len(loaded.rows), "loaded_bytes": size, "samples": found}


def edit(session: Session, chance: random.Random) -> None:
    """Make one random edit that keeps the document at about the same length."""
    lines = session.document.line_count
    first = chance.randint(1, lines - 3)
    verb = chance.choice(("delete", "insert", "replace", "move", "undo"))
    if verb == "delete":
        session.delete(f"{first}-{first + 1}")
    elif verb == "insert":
        session.insert(f"Note {chance.random()}.\nIt was added by hand.", after=first)
    elif verb == "replace":
        session.replace(str(first), f"This line reads {chance.random()} now.")
    elif verb == "move":
        session.move(f"{first}-{first + 1}", after=chance.randint(0, first - 1))
    elif session._state.revision.entry.edits:
        session.undo()


def one_more(store: Store) -> dict[str, float]:
    """Time `status` on a session, opening a copy of it without its model, and an edit of the copy."""
    seconds = {"status_s": status_s(store)}
    copy = Store(store.folder.with_name("copy"))
    Home(store.folder.parent).copy(store.name, copy.name)
    start = clock()
    session = Session(State(copy))
    opened = clock()
    before = files(copy.folder)
    edit_start = clock()
    session.delete(LINES)
    seconds |= {"open_s": opened - start, "edit_s": clock() - edit_start}
    seconds["edit_bytes"] = written_bytes(before, files(copy.folder))
    Home(copy.folder.parent).remove(copy.name)
    return seconds


def status_s(store: Store) -> float:
    """Return the seconds of one `kvedit status`."""
    command = [sys.executable, "-m", "kvedit", "status", "--session", store.name]
    environment = {**os.environ, "KVEDIT_HOME": str(store.folder.parent)}
    start = clock()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return clock() - start


if __name__ == "__main__":
    main()
