"""Run llama.cpp for `benchmarks/llama.py`: read JSON commands and write JSON answers, one per line.

    python llama_worker.py FILE.gguf THREADS

This needs llama-cpp-python and not kvedit, so any Python with that package will do. The first line of output
is its version, or the error on importing it. Commands contain token ids, so no tokenizer is used.
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
    """Evaluate all ids with an empty cache."""
    start = time.perf_counter()
    llm.reset()
    llm.eval(ids)
    return {"seconds": time.perf_counter() - start}


def first(llm: Any, ids: list[int]) -> dict[str, Any]:
    """Generate the first id after `ids`; llama-cpp-python reuses the cached rows of a common prefix."""
    reused = _common(llm.input_ids[: llm.n_tokens].tolist(), ids)
    start = time.perf_counter()
    token = next(llm.generate(ids, temp=0.0, top_k=1))
    return {"seconds": time.perf_counter() - start, "reused": reused, "ids": [int(token)]}


def decode(llm: Any, ids: list[int], count: int) -> dict[str, Any]:
    """Generate `count` ids after `ids`; time from the first of them to the last."""
    tokens = llm.generate(ids, temp=0.0, top_k=1)
    answer = [int(next(tokens))]
    start = time.perf_counter()
    for _ in range(count - 1):
        answer.append(int(next(tokens)))
    return {"seconds": time.perf_counter() - start, "ids": answer}


def _common(cached: list[int], ids: list[int]) -> int:
    """Return the length of the common prefix."""
    for index, (one, other) in enumerate(zip(cached, ids)):  # noqa: B905, either can be longer
        if one != other:
            return index
    return min(len(cached), len(ids))


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
