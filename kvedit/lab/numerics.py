"""The effect of rounding on answers: the same replay along different execution paths.

Chunks, threads and executor change only the order of summation, and dtype the precision (Appendix E
of Budgeted KV-Cache Repair). Differences between two methods that are smaller than their effect on
logits and answers are not meaningful.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit.checkpoint.opening import open_model
from kvedit.errors import UsageError
from kvedit.model.decode import Sampler, decode_
from kvedit.model.model import CHUNK_ROWS, Model
from kvedit.tokens.prompt import check_context

SCHEMA_VERSION = 1
ANSWER_TOKENS = 32
_LOGIT_ROWS = 128  # rows whose logits are in memory at once
IntArray = npt.NDArray[np.int64]
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Path:
    """One way to compute the same result.

    Attributes:
        name: Name in the records.
        chunk: Maximum number of rows per walk.
        threads: Number of torch threads; 0 leaves it unchanged.
        dtype: Name of a dtype; empty for the model's own.
        executor: `direct`, adjacent rows as a slice, or `packed`, the same rows by index.
    """

    name: str
    chunk: int = CHUNK_ROWS
    threads: int = 0
    dtype: str = ""
    executor: Literal["direct", "packed"] = "direct"


PATHS = (
    Path("reference"),
    Path("again"),
    Path("chunks of 512", chunk=512),
    Path("chunks of 128", chunk=128),
    Path("one thread", threads=1),
    Path("packed", executor="packed"),
    Path("bfloat16", dtype="bfloat16"),
)
"""The first is the reference for the others; `again` repeats it."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Hidden states of all positions, `[T + Nq, hidden]`, the model that maps them to logits, the answer."""

    model: Model
    hidden: Tensor
    answer: list[int]


def numerics(
    model: Model, ids: IntArray, question_ids: IntArray, paths: Sequence[Path] = PATHS
) -> Iterator[Record]:
    """Replay a document along several paths, ask a question, and compare with the first path.

    Args:
        model: The model. For another dtype, it is opened again from its folder.
        ids: Ids of head and document, `int64 [T]`.
        question_ids: `int64 [Nq]`, not empty.
        paths: The first is the reference.

    Yields:
        A JSON-serializable record for each other path: its settings, `reference`, `positions`;
        `logit_max` and `logit_mean`, absolute differences over positions and vocabulary;
        `exact_disagreement` and `argmax_disagreement`, the share of positions where any logit,
        or the most likely id, differs; `sequence_differs`, whether the greedy answers of 32
        tokens do, and `first_difference`, the index of the first token that does or None.

    Raises:
        UsageError: There is nothing to compare.
        ContextError: Document, question and answer do not fit the model's context.
    """
    if len(paths) < 2 or not len(question_ids) or any(path.chunk < 1 for path in paths):
        raise UsageError(
            "Numerics needs at least two paths, a question, and chunks of at least one row.",
            "Give more paths, a question, or larger chunks.",
        )
    check_context(len(ids), len(question_ids) + ANSWER_TOKENS, "question and answer", model.context_length)
    reference = _replay(model, ids, question_ids, paths[0])
    for path in paths[1:]:
        yield {
            "schema_version": SCHEMA_VERSION,
            **asdict(path),
            "dtype": path.dtype or model.dtype_name,
            "reference": paths[0].name,
            "positions": len(ids) + len(question_ids),
            **_compare(reference, _replay(model, ids, question_ids, path)),
        }


def _replay(model: Model, ids: IntArray, question_ids: IntArray, path: Path) -> _Outcome:
    """Compute the rows of document and question along a path, and answer greedily."""
    if path.dtype not in ("", model.dtype_name):
        device = "map" if model.spread else model.device.type
        model = open_model(model.directory, device=device, dtype=path.dtype)
    threads = torch.get_num_threads()
    if path.threads:
        torch.set_num_threads(path.threads)
    try:
        both = model.to_device(np.concatenate([ids, question_ids]).astype(np.int64))
        cache = model.new_cache(len(both) + ANSWER_TOKENS)
        hidden = []
        for start, stop in ((0, len(ids)), (len(ids), len(both))):  # the question has its own chunks
            for first in range(start, stop, path.chunk):
                last = min(first + path.chunk, stop)
                rows: slice | Tensor = slice(first, last)
                if path.executor == "packed":
                    rows = torch.arange(first, last)
                hidden.append(model.walk(both[first:last], rows, cache, outputs=last - first).hidden)
        logits = model.logits(hidden[-1][-1:])[0]
        answer = list(decode_(model, cache, logits, Sampler(0.0, 0), ANSWER_TOKENS, []))
        return _Outcome(model, torch.cat(hidden), answer)
    finally:
        torch.set_num_threads(threads)


def _compare(reference: _Outcome, other: _Outcome) -> Record:
    worst = total = 0.0
    unequal = moved = 0
    count = len(reference.hidden)
    vocabulary = 1
    for first in range(0, count, _LOGIT_ROWS):
        part = slice(first, first + _LOGIT_ROWS)
        left, right = (side.model.logits(side.hidden[part]) for side in (reference, other))
        gap = (left - right).abs()
        vocabulary = gap.shape[-1]
        worst, total = max(worst, float(gap.max())), total + float(gap.double().sum())
        unequal += int((gap > 0).any(dim=-1).sum())
        moved += int((left.argmax(dim=-1) != right.argmax(dim=-1)).sum())
    pairs = enumerate(zip_longest(reference.answer, other.answer))
    first_difference = next((at for at, (left, right) in pairs if left != right), None)
    return {
        "logit_max": worst,
        "logit_mean": total / (count * vocabulary),
        "exact_disagreement": unequal / count,
        "argmax_disagreement": moved / count,
        "sequence_differs": first_difference is not None,
        "first_difference": first_difference,
    }


def summarise_numerics(records: Iterable[Record]) -> list[Record]:
    """Combine the records of several cases, one row per path, in order of first occurrence.

    Returns:
        For each path: `cases`; the largest `logit_max`; means of `logit_mean`,
        `exact_disagreement` and `argmax_disagreement`; `sequence_disagreement`, the share of cases
        whose answers differ; and the smallest `first_difference`, or None.
    """
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record["name"]].append(record)
    found: list[Record] = []
    for name, group in groups.items():
        firsts = [record["first_difference"] for record in group if record["sequence_differs"]]
        row: Record = {"name": name, "reference": group[0]["reference"], "cases": len(group)}
        row["logit_max"] = max(record["logit_max"] for record in group)
        for measure in ("logit_mean", "exact_disagreement", "argmax_disagreement"):
            row[measure] = statistics.fmean(record[measure] for record in group)
        row["sequence_disagreement"] = len(firsts) / len(group)
        row["first_difference"] = min(firsts, default=None)
        found.append(row)
    return found
