"""llama.cpp in a process of its own, for `benchmarks/llama.py`: a JSON command a line, a JSON answer a line.

    python llama_worker.py FILE.gguf THREADS

It needs llama-cpp-python and nothing of kvedit, so any Python that has it will do. The first line says
which version it is, or why there is none. Ids are the document's, so no tokenizer takes part.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

try:
    import llama_cpp
except ImportError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    sys.exit(2)


def prefill(llm: Any, ids: list[int]) -> dict[str, Any]:
    """Take all ids through the model, from nothing."""
    start = time.perf_counter()
    llm.reset()
    llm.eval(ids)
    return {"seconds": time.perf_counter() - start}


def first(llm: Any, ids: list[int]) -> dict[str, Any]:
    """Give the first id after `ids`; llama-cpp-python keeps the cached rows of their common prefix."""
    reused = _common(llm.input_ids[: llm.n_tokens].tolist(), ids)
    start = time.perf_counter()
    said = next(llm.generate(ids, temp=0.0, top_k=1))
    return {"seconds": time.perf_counter() - start, "reused": reused, "ids": [int(said)]}


def decode(llm: Any, ids: list[int], count: int) -> dict[str, Any]:
    """Give `count` ids after `ids`, and the seconds from the first of them to the last."""
    tokens = llm.generate(ids, temp=0.0, top_k=1)
    said = [int(next(tokens))]
    start = time.perf_counter()
    for _ in range(count - 1):
        said.append(int(next(tokens)))
    return {"seconds": time.perf_counter() - start, "ids": said}


def _common(held: list[int], ids: list[int]) -> int:
    """Length of the common prefix."""
    for at, (one, other) in enumerate(zip(held, ids)):  # noqa: B905, either may be longer
        if one != other:
            return at
    return min(len(held), len(ids))


def main() -> None:
    """Answer commands until stdin ends."""
    path, threads = sys.argv[1], int(sys.argv[2])
    llm = llama_cpp.Llama(
        path,
        n_ctx=8192,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=512,
        verbose=False,
        flash_attn=False,
    )
    print(json.dumps({"llama_cpp": llama_cpp.__version__}), flush=True)
    verbs = {"prefill": prefill, "first": first, "decode": decode}
    for line in sys.stdin:
        command = json.loads(line)
        answer = verbs[command.pop("do")](llm, **command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
