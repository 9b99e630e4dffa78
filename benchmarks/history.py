"""What a long past costs: `status` after many edits against `status` on a fresh session.

    python benchmarks/history.py                     # 10,000 edits of a 4,000-token document
    python benchmarks/history.py --edits 1000 --rounds 3

The edits delete, insert, replace and move lines, and undo now and then; nothing is computed.
Rounds run `kvedit status` on both sessions in turn. The last line of stdout is JSON. Run
nothing else beside it.
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
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rounds import CONTRACT, text_of

from kvedit.document import Document
from kvedit.model import Model
from kvedit.model.resolve import DEFAULT_MODEL, resolve
from kvedit.session import Session
from kvedit.timing import clock


def main() -> None:
    """Edit, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--edits", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options)))


def measure(home: Path, options: argparse.Namespace) -> dict[str, object]:
    """Load two sessions, edit one, and time `status` on both."""
    model = Model.open(resolve(options.model), device="cpu")
    document = Document(text_of(CONTRACT.read_text(encoding="utf-8"), model, options.tokens))
    fresh = Session.load(document, model=model, name="fresh", home=home)
    edited = Session.load(document, model=model, name="edited", home=home)
    loaded = edited.store.size_bytes()
    start = clock()
    for number in track(range(options.edits), "edits", console=Console(stderr=True)):
        edit(edited, random.Random(number))
    edit_s = (clock() - start) / options.edits
    seconds: dict[str, list[float]] = {"fresh": [], "edited": []}
    for _ in range(options.rounds):
        for name, found in seconds.items():
            found.append(status_s(home, name))
    gaps = [late - early for early, late in zip(seconds["fresh"], seconds["edited"], strict=True)]
    record = {
        "edits": options.edits,
        "tokens": len(fresh.rows),
        "edit_ms": 1000 * edit_s,
        "status_fresh_s": statistics.median(seconds["fresh"]),
        "status_edited_s": statistics.median(seconds["edited"]),
        "status_more_s": [min(gaps), statistics.median(gaps), max(gaps)],
        "loaded_bytes": loaded,
        "bytes_an_edit": (edited.store.size_bytes() - loaded) / options.edits,
        "segments_added": len(edited.journal.segments()) - len(fresh.journal.segments()),
    }
    table = Table(box=None, pad_edge=False, title=f"{options.edits:,} edits, {len(fresh.rows):,} tokens")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in record.items():
        table.add_row(name, json.dumps(value, default=str))
    Console(stderr=True).print(table)
    return record


def edit(session: Session, chance: random.Random) -> None:
    """Make one edit that keeps the document about as long as it is."""
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
    elif session.revision.entry.edits:
        session.undo()


def status_s(home: Path, name: str) -> float:
    """Seconds of one `kvedit status`."""
    command = [sys.executable, "-m", "kvedit", "status", "--session", name]
    environment = {**os.environ, "KVEDIT_HOME": str(home)}
    start = clock()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return clock() - start


if __name__ == "__main__":
    main()
