"""Test robustness: faults, fuzzed inputs, kills, long use, oracles and memory, as one table.

    python benchmarks/reliability.py --write           # everything, into docs/reliability.md; takes an hour
    python benchmarks/reliability.py --quick           # a small version of every row
    python benchmarks/reliability.py --only kills --seed 7

Each row shows what was done, how often, and how often something was lost or wrong; if anything was, the exit
code is 1. It uses the helpers of the tests. `--json` prints the rows as one object on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvedit.timing import clock

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
TESTS = ROOT / "tests"
BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"
_GROWN_BYTES = 20_000_000  # growth that the allocator can explain


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        name: Name for `--only`.
        what: What was done, with results.
        count: How often; `None` if it could not be done on this machine.
        wrong: What was lost or wrong, one entry each.
        seed: Seed that repeats the row.
        seconds: Duration.
    """

    name: str
    what: str
    count: int | None
    wrong: list[str]
    seed: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Task:
    """Input of a row: how much to do, the seed, and a folder for files."""

    size: int
    seed: int
    folder: Path

    def python(self, *args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Python with this checkout on its path."""
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *map(str, args)]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=check)


Found = tuple[str, int | None, list[str]]
"""What was done, how often, and what was wrong."""


def faults(task: Task) -> Found:
    """Run the tests that make the file system fail: full, read-only and slow disks, damage, lost folders."""
    files = [name for name in ("hostile/test_faults.py", "store/test_store.py") if (TESTS / name).exists()]
    report = task.folder / "report.xml"
    which = ["-k", "full_disk"] if task.size == 0 else []
    task.python(
        "-m", "pytest", "-q", *which, *(TESTS / name for name in files), f"--junitxml={report}", check=False
    )
    cases = list(ET.parse(report).getroot().iter("testcase"))
    ran = [case for case in cases if case.find("skipped") is None]
    wrong = [
        str(case.get("name"))
        for case in ran
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return "faults injected: disks, permissions, locks, clocks, damaged files", len(ran), wrong


def fuzz(task: Task) -> Found:
    """Fuzz the readers of a session's files, guided by coverage."""
    what, script = "inputs fuzzed: every file that a session has", ROOT / "benchmarks" / "fuzz.py"
    if not script.exists():
        return f"{what} (the fuzzer is missing)", None, []
    done = task.python(script, "--inputs", task.size, "--seed", task.seed, "--json", check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        output = (done.stderr + done.stdout).strip().splitlines()
        if any("not installed" in line for line in output):
            return f"{what} (the fuzzer is not installed)", None, []
        return what, 0, [output[-1] if output else f"exit code {done.returncode}"]
    wrong = [f"{each['target']}: {each['wrong']}" for each in found if each["wrong"]]
    return what, sum(each["inputs"] for each in found), wrong


def kills(task: Task) -> Found:
    """Kill a script of thirteen commands at random moments."""
    from rigs.killing import kill_scripts, serving, stage

    for name in ("server", "start", "turns"):
        (task.folder / name).mkdir()
    with serving(task.folder / "server") as server:
        start = stage(task.folder / "start", server, 40)
        done = kill_scripts(server, start, task.folder / "turns", task.size, task.seed)
    what = f"sessions killed at random moments of a script; {done.steps} of its states occurred"
    return what, done.killed, done.wrong


def endurance(task: Task) -> Found:
    """Run commands in one REPL process, whose resources must not grow."""
    from rigs.tiny import save_tiny

    model = save_tiny(task.folder / "model", "llama", max_position_embeddings=4096)
    script = ROOT / "benchmarks" / "endurance.py"
    done = task.python(script, model, task.folder / "home", task.size, task.seed, check=False)
    if done.returncode:
        return "operations in one process", 0, [done.stderr.strip().splitlines()[-1]]
    found = json.loads(done.stdout.splitlines()[-1])
    early, end, wrong = found["settled"], found["end"], list(found["failed"])
    wrong += [
        f"{what}: {early[what]}, then {end[what]}" for what in ("files", "threads") if end[what] > early[what]
    ]
    wrong += [f"mappings: {end}"] * (end["mappings"] > end["segments"])
    grown = end["resident_bytes"] - early["resident_bytes"]
    wrong += [f"memory grew by {grown / 1e6:.0f} MB"] * (grown > _GROWN_BYTES)
    what = (
        f"operations in one process: memory {grown / 1e6:+.0f} MB from operation {early['operations']} on, "
        f"the last hundred took {found['last_ms'] / found['first_ms']:.2f} times the CPU time of the first"
    )
    return what, task.size, wrong


def oracles(task: Task) -> Found:
    """Check random series of edits with both oracles."""
    from rigs.oracles import run_scripts, without_context
    from rigs.tiny import save_tiny

    from kvedit.checkpoint.opening import open_model

    free = without_context(save_tiny(task.folder / "free", "qwen3"))
    whole = open_model(save_tiny(task.folder / "whole", "llama"), device="cpu")
    done, wrong = run_scripts(free, whole, task.folder / "home", task.size, task.seed)
    return f"scripts of edits checked by two oracles, {done:,} steps", 2 * task.size, wrong


def memory(task: Task) -> Found:
    """Measure the peak memory of `load` and `ask` with the default model."""
    from peak import limit_bytes, measure

    from kvedit.checkpoint.resolve import resolve
    from kvedit.names import DEFAULT_MODEL

    peaks, wrong, tokens = list[str](), list[str](), 0
    for verb in ("load", "ask"):  # one session for both
        found = measure(resolve(DEFAULT_MODEL), task.size, task.folder / "home", verb)
        peak, limit = found["peak_bytes"] / 1e6, limit_bytes(found) / 1e6
        peaks.append(f"`{verb}` peak {peak:,.0f} MB, limit {limit:,.0f}")
        wrong += [f"{verb}: {peak - limit:,.0f} MB above the limit"] * (peak >= limit)
        tokens = max(tokens, found["tokens"])
    return f"tokens of the default model in memory: {'; '.join(peaks)}", tokens, wrong


ROWS: dict[str, tuple[Callable[[Task], Found], int, int]] = {
    "faults": (faults, 1, 0),
    "fuzz": (fuzz, 200_000, 3_000),
    "kills": (kills, 200, 6),
    "endurance": (endurance, 1_000, 60),
    "oracles": (oracles, 200, 5),
    "memory": (memory, 8_000, 500),
}
"""For each row, its function, its full size and its size with `--quick`."""


def main() -> None:
    """Make and print the rows; exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--quick", action="store_true", help="run a small version of every row")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write the rows to {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.write and options.quick:
        parser.error("--quick and --write cannot be combined")
    rows = make(options.only or list(ROWS), options.seed, options.quick)
    if options.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        show(rows)
    sys.exit(any(row.wrong for row in rows))


def make(names: list[str], seed: int, quick: bool) -> list[Row]:
    """Make rows, and show the progress."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    rows: list[Row] = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        all_rows = progress.add_task("rows", total=len(names))
        for name in names:
            function, full, small = ROWS[name]
            shown = progress.add_task(name, total=None)
            with tempfile.TemporaryDirectory() as folder:
                start = clock()
                what, count, wrong = function(Task(small if quick else full, seed, Path(folder)))
                rows.append(Row(name, what, count, wrong, seed, clock() - start))
            progress.update(shown, total=1, completed=1)
            progress.advance(all_rows)
    return rows


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row."""
    count = "not run" if row.count is None else f"{row.count:,}"
    wrong = "none" if not row.wrong else str(len(row.wrong))
    return row.name, row.what, count, "" if row.count is None else wrong, f"{row.seconds:,.0f}", str(row.seed)


def show(rows: list[Row]) -> None:
    """Print the rows, and what was wrong."""
    table = Table(box=None, pad_edge=False)
    for heading in ("row", "what", "how many", "lost or wrong", "seconds", "seed"):
        table.add_column(heading, justify="left" if heading in ("row", "what") else "right")
    for row in rows:
        table.add_row(*cells(row))
    console = Console()
    console.print(table)
    for row in rows:
        for each in row.wrong:
            console.print(f"{row.name}: {each}", markup=False)


def written(page: str, rows: list[Row]) -> str:
    """Return the page with rows inserted into its table or replaced by name."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    kept = {name: line for line in table.splitlines() if (name := name_of(line)) is not None}
    for row in rows:
        name, *others = cells(row)
        kept[name] = " | ".join([f"| `{name}`", *others]) + " |"
    head = "| row | what | how many | lost or wrong | seconds | seed |\n|---|---|---:|---:|---:|---:|"
    lines = [kept[name] for name in ROWS if name in kept]
    return "\n".join([before + BEGIN, head, *lines, END + after])


def name_of(line: str) -> str | None:
    """Return the name of the row in a line of the page."""
    found = re.match(r"\| `([\w-]+)` \|", line)
    return found[1] if found else None


if __name__ == "__main__":
    main()
