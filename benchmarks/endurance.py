"""Run many commands in one process, as the REPL does, and measure its resources and their times.

python benchmarks/endurance.py MODEL HOME OPERATIONS SEED    # prints one JSON object
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import random
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rigs.oracles import QUESTION, WORDS, a_text

SETTLED = 200
"""Number of operations after which a process should not grow any more."""


def held() -> dict[str, int]:
    """Return the resources of this process: resident bytes, open files, mapped session files, threads."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return {
        "resident_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": sum("/segments/" in line for line in maps),
        "threads": int(status["Threads"]),
    }


def a_line(chance: random.Random, lines: int) -> str:
    """Return a random command line that keeps the document at about the same length."""
    first = chance.randint(2, lines - 2)
    verb = chance.choice(["delete", "insert", "insert", "replace", "move", "undo", "redo"] + ["ask"] * 8)
    if lines < 20 or (verb == "insert" and lines < 32):
        text = f"A note of {chance.choice(WORDS)}, number {chance.randrange(1000)}."
        return f"insert --after {first} {shlex.quote(text)}"
    if verb in ("delete", "insert"):
        return f"delete --lines {first}-{first + 1}"
    if verb == "replace":
        return f"replace --lines {first} 'This line is number {chance.randrange(1000)}.'"
    if verb == "move":
        return f"move --lines {first} --after {chance.randrange(first - 1)}"
    if verb == "ask":
        budget = chance.choice(["", "--budget 0", "--budget 30%", "--budget full"])
        return chance.choice(
            [
                f"? {QUESTION}",
                f"ask '{QUESTION}' --max-new-tokens 3 {budget}",
                f"ask '{QUESTION}' --max-new-tokens 3 {budget} --no-keep",
                f"ask 'And then?' --continue --max-new-tokens 2 {budget}",
                "explain 'Who pays?'",
                "heal --budget 20%",
                "forget",
                "status",
                "log",
                "verify --question 'Who pays?' --max-new-tokens 2",
                "ask 'This is refused' --budget 5x",
                "delete --lines 999",
            ]
        )
    return verb


def endure(model: Path, home: Path, operations: int, seed: int) -> dict[str, Any]:
    """Load a text and run `operations` lines in this process; return samples of its resources."""
    import kvedit.cli.app  # noqa: F401  (all commands)
    from kvedit.cli.repl.line import run_line
    from kvedit.cli.workspace import here

    os.environ["KVEDIT_HOME"] = str(home)
    home.mkdir(parents=True, exist_ok=True)
    text, chance = home / "text.txt", random.Random(seed)
    text.write_text(a_text(28))
    here.warm = True
    codes: dict[int, int] = {}
    seconds, samples, failed = list[float](), list[dict[str, int]](), list[str]()

    def run(line: str, allowed: tuple[int, ...]) -> None:
        output = io.StringIO()
        start = time.process_time()  # not wall time, since the machine may be busy
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = run_line(line)
        seconds.append(time.process_time() - start)
        codes[code] = codes.get(code, 0) + 1
        if code not in allowed:
            failed.append(f"{line}: {code}: {output.getvalue()[-200:]}")

    load = f"load {shlex.quote(str(text))} -m {shlex.quote(str(model))}"
    run(load, (0,))
    if failed:
        raise RuntimeError(failed[0])
    seconds.clear()
    # A random model would rarely end an answer.
    if here.held is not None:
        here.held.model.stop_ids = here.held.model.stop_ids | frozenset(range(0, 500, 3))
    for number in range(operations):
        session = here.session()
        line = a_line(chance, session.document.line_count)
        # 2: an invalid line, or an undo without an edit; 5: a conversation that fills the context.
        run(line, (0, 2, 5))
        if 5 in codes and line.startswith(("ask", "?", "verify", "insert", "replace")):
            codes.pop(5)
            run("forget", (0,))
        if (number + 1) % 20 == 0 and here.held is not None:
            here.held._state.read_segments()  # drop segments that are no longer used
            samples.append(
                {"operations": number + 1, "segments": len(here.held._state.segments.states), **held()}
            )
    window = min(100, max(1, operations // 3))
    settled = next(
        (one for one in samples if one["operations"] >= min(SETTLED, operations // 2)), samples[-1]
    )
    return {
        "operations": operations,
        "seed": seed,
        "failed": failed,
        "codes": {str(code): count for code, count in sorted(codes.items())},
        "first_ms": 1000 * statistics.median(seconds[:window]),
        "last_ms": 1000 * statistics.median(seconds[-window:]),
        "settled": settled,
        "end": samples[-1],
        "samples": samples,
    }


if __name__ == "__main__":
    folder, home, operations, seed = sys.argv[1:]
    print(json.dumps(endure(Path(folder), Path(home), int(operations), int(seed))))
