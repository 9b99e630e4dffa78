"""How hard kvedit is to break: faults, fuzzed inputs, kills, long use, oracles and memory, as one table.

    python benchmarks/reliability.py --write           # everything, into docs/reliability.md; an hour
    python benchmarks/reliability.py --quick           # a small cut of every row
    python benchmarks/reliability.py --only kills --seed 7

Each row says what was done, how often, and what was lost or wrong; with any, the exit code is 1. The
machinery is that of the tests. `--json` prints the rows as one object on stdout.
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
_GROWN_BYTES = 20_000_000  # what the allocator may keep between two looks at a process


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        name: As `--only` takes it.
        what: What was done, and what came out.
        count: How often; `None` where it could not be done here.
        wrong: What was lost or wrong, one entry each.
        seed: That does the same again.
        seconds: Time that it took.
    """

    name: str
    what: str
    count: int | None
    wrong: list[str]
    seed: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Task:
    """What a row gets: how much to do, where, and from which seed."""

    size: int
    seed: int
    folder: Path

    def python(self, *args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Python on this tree."""
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *map(str, args)]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=check)


Found = tuple[str, int | None, list[str]]
"""What was done, how often, and what was wrong."""


def faults(task: Task) -> Found:
    """Tests that make the file system fail: full, read-only and slow disks, damage, folders gone."""
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
    """Inputs for what reads a session's files, guided by coverage."""
    what, script = "inputs fuzzed: every file that a session has", ROOT / "benchmarks" / "fuzz.py"
    if not script.exists():
        return f"{what} (the fuzzer is not there)", None, []
    done = task.python(script, "--inputs", task.size, "--seed", task.seed, "--json", check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        said = (done.stderr + done.stdout).strip().splitlines()
        if any("not installed" in line for line in said):
            return f"{what} (the fuzzer is not installed)", None, []
        return what, 0, [said[-1] if said else f"exit code {done.returncode}"]
    wrong = [f"{each['target']}: {each['wrong']}" for each in found if each["wrong"]]
    return what, sum(each["inputs"] for each in found), wrong


def kills(task: Task) -> Found:
    """A script of thirteen commands, killed at random instants."""
    from rigs.killing import kill_scripts, serving, stage

    for name in ("server", "start", "turns"):
        (task.folder / name).mkdir()
    with serving(task.folder / "server") as server:
        start = stage(task.folder / "start", server, 40)
        done = kill_scripts(server, start, task.folder / "turns", task.size, task.seed)
    what = f"sessions killed at random instants of a script; {done.steps} of its states were met"
    return what, done.killed, done.wrong


def endurance(task: Task) -> Found:
    """Commands in one REPL process; it must hold no more afterwards."""
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
        f"operations in one process: memory {grown / 1e6:+.0f} MB from operation {early['operations']} "
        f"on, the last hundred took {found['last_ms'] / found['first_ms']:.2f} of the first's CPU time"
    )
    return what, task.size, wrong


def oracles(task: Task) -> Found:
    """Random series of edits, each against both oracles."""
    from rigs.oracles import run_scripts, without_context
    from rigs.tiny import save_tiny

    from kvedit.checkpoint.opening import open_model

    free = without_context(save_tiny(task.folder / "free", "qwen3"))
    whole = open_model(save_tiny(task.folder / "whole", "llama"), device="cpu")
    done, wrong = run_scripts(free, whole, task.folder / "home", task.size, task.seed)
    return f"scripts of edits checked by two oracles, {done:,} steps", 2 * task.size, wrong


def memory(task: Task) -> Found:
    """The peak of `load` and of `ask` on the default model."""
    from peak import limit_bytes, measure

    from kvedit.checkpoint.resolve import resolve
    from kvedit.names import DEFAULT_MODEL

    said, wrong, tokens = list[str](), list[str](), 0
    for verb in ("load", "ask"):  # one session for both
        found = measure(resolve(DEFAULT_MODEL), task.size, task.folder / "home", verb)
        peak, limit = found["peak_bytes"] / 1e6, limit_bytes(found) / 1e6
        said.append(f"`{verb}` {peak:,.0f} MB at most, allowed {limit:,.0f}")
        wrong += [f"{verb}: {peak - limit:,.0f} MB too many"] * (peak >= limit)
        tokens = max(tokens, found["tokens"])
    return f"tokens of the default model in memory: {'; '.join(said)}", tokens, wrong


ROWS: dict[str, tuple[Callable[[Task], Found], int, int]] = {
    "faults": (faults, 1, 0),
    "fuzz": (fuzz, 200_000, 3_000),
    "kills": (kills, 200, 6),
    "endurance": (endurance, 1_000, 60),
    "oracles": (oracles, 200, 5),
    "memory": (memory, 8_000, 500),
}
"""What makes each row, and how much of it is done, in full and in the quick cut."""


def main() -> None:
    """Make the rows, print them, and say by the exit code whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--quick", action="store_true", help="a small cut of every row")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON object")
    parser.add_argument("--write", action="store_true", help=f"put the rows into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.write and options.quick:
        parser.error("a quick cut is not for the page")
    rows = make(options.only or list(ROWS), options.seed, options.quick)
    if options.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        show(rows)
    sys.exit(any(row.wrong for row in rows))


def make(names: list[str], seed: int, quick: bool) -> list[Row]:
    """Make rows, with a display of how far they are."""
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
    """Write a row as it is printed."""
    count = "not here" if row.count is None else f"{row.count:,}"
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
    """Put rows into the page's table, in place of those of the same names."""
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
    """Give the name of the row that a line of the page holds."""
    found = re.match(r"\| `([\w-]+)` \|", line)
    return found[1] if found else None


if __name__ == "__main__":
    main()
