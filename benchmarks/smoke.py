"""Run a small version of every bench on the default model, and check its files. Takes about 3 minutes.

    python benchmarks/smoke.py
    python benchmarks/smoke.py --keep FOLDER    # keep the run folders, to compare the records of two versions

Prints one line per bench with its time, and stops at the first failure with exit code 1. The files must have
the form that benchmarks/rigs/schema.py defines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from rigs.schema import check_comparison, check_run, check_summary
from typer.testing import CliRunner

from kvedit.cli.app import app

NEEDLES = ("--cases", "2", "--tokens", "300-400")
ARMS = ("--policies", "sur,infoflow", "--budgets", "10%")
ASKED = ("question.jsonl", "--questions", "1")
BENCHES = {
    **{
        f"niah {variant}": (
            "niah",
            "--variant",
            variant,
            *NEEDLES,
            *ARMS,
            "--arm",
            "sur@10%",
            "--arm",
            "erratum",
        )
        for variant in ("same-key", "relabel", "derived", "injection")
    },
    "qa": ("qa", *ASKED, *ARMS),
    "location": ("location", *ASKED, *ARMS),
    "evidence": ("evidence", *ASKED),
    "geometry": ("geometry", *NEEDLES, "--budgets", "5%,40%"),
    "executor": ("executor", "--contexts", "400", "--budgets", "2%", "--rounds", "1"),
    "numerics": ("numerics", "--contexts", "300", "--cases", "1"),
}


def write_question(path: Path) -> None:
    """Write a question in kvedit's own format, with passages of equal length."""
    rooms = ("kitchen", "library", "laundry", "storage", "gallery", "nursery", "hallway")
    paragraphs = [
        {
            "title": f"The {room}",
            "text": f"The {room} was painted by the team of {1900 + number}. It stands on floor {number}, "
            "and its door is always kept open for whoever comes by.",
            "supporting": number in (2, 5),
            "has_answer": number == 5,
        }
        for number, room in enumerate(rooms, start=1)
    ]
    question = {
        "id": "floor",
        "dataset": "hotpotqa",
        "type": "bridge",
        "question": "On which floor is the room that the team of 1905 painted?",
        "answers": ["5"],
        "paragraphs": paragraphs,
    }
    path.write_text(json.dumps(question) + "\n", encoding="utf-8")


def kvedit(*args: str) -> dict[str, object]:
    """Run a command in this process and return what it prints; exit with its output if it fails."""
    result = CliRunner().invoke(app, ["bench", *args, "--json"])
    if result.exit_code:
        sys.exit(f"kvedit bench {' '.join(args)} ended with {result.exit_code}:\n{result.output}")
    printed: dict[str, object] = json.loads(result.stdout)
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a small version of every bench and check its files.")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the runs here, and keep them")
    keep = parser.parse_args().keep
    if keep is not None:
        keep.mkdir(parents=True)
    with tempfile.TemporaryDirectory() if keep is None else nullcontext(keep) as folder:
        os.chdir(folder)
        write_question(Path("question.jsonl"))
        start = time.perf_counter()
        for number, (name, command) in enumerate(BENCHES.items()):
            began, out = time.perf_counter(), f"run-{number}"
            try:
                kvedit(*command, "--out", out)
                _, records, summary = check_run(Path(out))
                assert kvedit("report", out) == summary, "`report` gives a different summary"
                check_summary(summary, command[0])
                if "arms" in summary:
                    check_comparison(kvedit("compare", out, out))
            except AssertionError as error:
                sys.exit(f"{name}: {error}")
            spent = time.perf_counter() - began
            print(f"{name:<16} {len(records):3} records {spent:6.1f} s", flush=True)
        print(f"{'all':<16}             {time.perf_counter() - start:6.1f} s")
        os.chdir("/")


if __name__ == "__main__":
    main()
