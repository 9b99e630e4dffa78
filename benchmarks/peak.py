"""Measure the peak of a command's resident memory, in its own process.

    python benchmarks/peak.py load MODEL TOKENS HOME    # prints one JSON object

The peak consists of weights, cache, intermediate results and libraries; torch alone takes about 240 MB. The
model has been checked before, so it is opened without transformers, as in all but the first command with a
model.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

ALLOWED_BYTES = 300_000_000
"""Allowance for libraries and everything else except weights and 1.15 times the cache."""


def limit_bytes(found: dict[str, Any]) -> int:
    """Return the limit of the peak."""
    return int(found["weights_bytes"] + 1.15 * found["cache_bytes"] + ALLOWED_BYTES)


def measure(model: Path, tokens: int, home: Path, verb: str) -> dict[str, Any]:
    """Measure `load`, or `ask` on a session that is loaded first, each in its own process."""
    root = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    steps = ["check", "load", "ask"] if verb == "ask" and not home.exists() else ["check", verb]
    for step in steps:
        command = [sys.executable, __file__, step, str(model), str(tokens), str(home)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def resident(name: str) -> int:
    """Return `VmRSS` or `VmHWM` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def weights(folder: Path) -> int:
    """Return the number of weights."""
    from safetensors import safe_open

    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def a_long_text(encode: Any, tokens: int) -> str:
    """Return a text of different sentences, with at most about `tokens` tokens."""
    chance, lines, count = random.Random(8000), list[str](), 0
    nouns = "invoice keeper harbour engine letter witness orchard ledger signal tenant".split()
    verbs = "follows carries refuses answers delays repairs measures records".split()
    while True:
        line = (
            f"{chance.choice(['The', 'Every', 'One', 'Some'])} {chance.choice(nouns)} of room "
            f"{chance.randint(1, 9999)} {chance.choice(verbs)} the {chance.choice(nouns)} on day "
            f"{chance.randint(1, 365)}.\n"
        )
        count += len(encode(line))
        if count > tokens:
            return "".join(lines)
        lines.append(line)


def main(verb: str, folder: str, tokens: str, home: str) -> None:
    """Run one command and print the peak of the process."""
    from kvedit.checkpoint.opening import open_model
    from kvedit.session import asking as ask  # noqa: F401
    from kvedit.session.session import Session
    from kvedit.text.document import Document

    if verb == "check":
        open_model(Path(folder), device="cpu")
        return
    libraries = resident("VmRSS")
    if verb == "load":
        model = open_model(Path(folder), device="cpu")
        text = a_long_text(lambda line: model.tokenizer.encode_text(line).ids, int(tokens))
        opened = Session.load(Document(text), model=model, home=Path(home))
    else:
        opened = Session.open(home=Path(home))
        opened.delete("5-6")
        opened.ask("Which keeper repairs the engine?", max_new_tokens=16)
        model = opened.model
    record = {
        "verb": verb,
        "tokens": len(opened.rows),
        "libraries_bytes": libraries,
        "weights_bytes": weights(Path(folder)) * model.dtype.itemsize,
        "cache_bytes": model.cache_bytes(len(opened.rows)),
        "peak_bytes": resident("VmHWM"),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
