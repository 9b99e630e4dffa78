"""Compare executors: how the time of a repair depends on the shape of the selected rows.

A fixed number of rows is split into more and more runs (section 4.4 and Appendix G of Budgeted
KV-Cache Repair). Each round times every executor on every shape, one after the other, so a slowdown
of the machine affects all of them. Only ratios within a round are compared.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit.cache.kv import KVCache, States
from kvedit.errors import UsageError
from kvedit.lab.recovery import Edited, recover
from kvedit.model.model import Model
from kvedit.names import Executor
from kvedit.repair.budget import Budget
from kvedit.repair.refresh import choose_executor, refresh_, shift_

SCHEMA_VERSION = 1
IntArray = npt.NDArray[np.int64]
Record = dict[str, Any]


class Tally(KVCache):
    """A cache that counts operations: the counts of section G.1, measured.

    Args:
        cache: The cache whose tensors it shares.

    Attributes:
        token_layers: Rows written, summed over layers.
        pairs: Pairs of a query and a visible key, summed over layers.
    """

    def __init__(self, cache: KVCache) -> None:
        self.keys, self.values, self.length = cache.keys, cache.values, cache.length
        self.token_layers = self.pairs = 0
        self._rows: slice | Tensor = slice(0, 0)

    def scatter_(self, layer: int, rows: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Write like `KVCache`, and count."""
        super().scatter_(layer, rows, keys, values)
        self.token_layers += keys.shape[1]
        self._rows = rows

    def see(self, layer: int, query: Tensor) -> None:
        """Count the pairs for queries `[Hq, N, D]` of the rows written last."""
        rows = self._rows
        place = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        self.pairs += int((place[-query.shape[1] :] + 1).sum())


def token_layers(rows: IntArray, layers: int) -> int:
    """Return the token-layer updates of a refresh: L per row (section G.1)."""
    return layers * len(rows)


def pairs(rows: IntArray, layers: int) -> int:
    """Return the causal pairs of query and key of a refresh: row i sees i + 1 keys (section G.1).

    The last layer does not count, because a refresh only needs its keys and values.
    """
    return (layers - 1) * int((rows + 1).sum())


def spread(suffix: IntArray, rows: int, count: int) -> IntArray:
    """Return `rows` rows in `count` runs of nearly equal length, spread evenly over the suffix.

    Raises:
        UsageError: They do not fit with a gap between all runs.
    """
    free = len(suffix) - rows
    if not 1 <= count <= rows or free < (count if count > 1 else 0):
        raise UsageError(
            f"{rows} rows cannot be divided into {count} runs among {len(suffix)} rows.",
            "Use fewer runs or fewer rows.",
        )
    lengths = np.full(count, rows // count) + (np.arange(count) < rows % count)
    gaps = free * (2 * np.arange(count) + 1) // (2 * count)
    return suffix[np.arange(rows) + np.repeat(gaps, lengths)]


def shapes(rows: int, suffix: int, wanted: Sequence[int] | None = None) -> list[int]:
    """Return the numbers of runs to try, sorted.

    These are the `wanted` numbers that are possible with `rows` rows among `suffix` rows. By default,
    powers of two up to the largest possible number, and that number.
    """
    most = max(min(rows, suffix - rows), 1) if rows else 0
    if wanted is not None:
        return sorted({count for count in wanted if count <= most})
    return sorted({*(1 << power for power in range(most.bit_length())), most} - {0})


def sweep(
    model: Model,
    ids: IntArray,
    contexts: Sequence[int],
    budgets: Sequence[str],
    executors: Sequence[str] = ("packed", "interval", "direct"),
    *,
    runs: Sequence[int] | None = None,
    rounds: int = 5,
    policy: str = "sur",
) -> Iterator[Record]:
    """Time recoveries of a fixed number of rows in more and more runs.

    The first round warms up and counts operations; it is not reported.

    Args:
        model: The model.
        ids: Ids of a text, repeated if it is shorter than a context. `int64 [N]`.
        contexts: T of each document.
        budgets: As for `ask`, such as `5%`.
        executors: Names; `direct` is skipped if there is more than one run.
        runs: Numbers of runs, as for `shapes`.
        rounds: Number of reported rounds.
        policy: Run for its time only; the selected rows are replaced by those of each shape.

    Yields:
        A record for each measurement, ready for JSON: `context`, `suffix`, `budget`, `rows`,
        `runs`, `executor`, `round` from 1, `shift_s`, `selection_s`, `refresh_s`, their sum
        `recovery_s`, and the counts `token_layers` and `pairs` beside those of a replay.

    Raises:
        UsageError: A name, a budget or a length is not valid.
        ContextError: The model does not support such a long context.
    """
    for context in contexts:
        edited = Edited.of(model, ids, context)
        suffix, cache = edited.suffix, model.new_cache(context + len(edited.query_ids))
        trials = _trials(suffix, budgets, executors, runs)
        counts: dict[int, Tally] = {}
        for number in range(rounds + 1):
            # Every other round runs in reverse, so that no executor always follows the same one.
            for at in range(len(trials)) if number % 2 else reversed(range(len(trials))):
                budget, count, support, name = trials[at]
                done = recover(edited, cache, len(support), policy=policy, executor=name, support=support)
                if not number:
                    counts[at] = counted(edited, cache, support, name)
                    continue
                times = {f"{phase}_s": spent.seconds for phase, spent in done.timings.phases.items()}
                yield {
                    "schema_version": SCHEMA_VERSION,
                    "context": context,
                    "suffix": len(suffix),
                    "budget": budget,
                    "rows": len(support),
                    "runs": count,
                    "executor": name,
                    "round": number,
                    **times,
                    "recovery_s": sum(times.values()),
                    "token_layers": counts[at].token_layers,
                    "pairs": counts[at].pairs,
                    "replay_token_layers": token_layers(suffix, model.layers),
                    "replay_pairs": pairs(suffix, model.layers),
                }


def _trials(
    suffix: IntArray, budgets: Sequence[str], executors: Sequence[str], runs: Sequence[int] | None
) -> list[tuple[str, int, IntArray, str]]:
    """List what a round measures: budget, count of runs, rows, and executor."""
    trials: list[tuple[str, int, IntArray, str]] = []
    for budget in budgets:
        rows = Budget.parse(budget).resolve(len(suffix))
        for count in shapes(rows, len(suffix), runs):
            support = spread(suffix, rows, count)
            trials += [(budget, count, support, name) for name in executors if name != "direct" or count == 1]
    return trials


def counted(edited: Edited, cache: KVCache, rows: IntArray, executor: str) -> Tally:
    """Refresh rows in `cache`, and count the work."""
    tally, model = Tally(cache), edited.model
    ids = model.to_device(edited.ids)
    for _ in refresh_(model, tally, ids, rows, choose_executor(executor, rows), on_query=tally.see):
        pass
    return tally


def summarise_executor(records: Iterable[Record]) -> list[Record]:
    """Return medians of times, and of ratios to packed within each round, by shape.

    Args:
        records: Records of `sweep`, in any order.

    Returns:
        For each (context, budget, rows, runs), sorted: counts; `refresh_s` and `recovery_s` by
        executor; `refresh_over_packed` and `recovery_over_packed` by the other executors. Each is
        `{"median", "min", "max"}`; a ratio above 1 means that packed is faster.
    """
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        key = record["context"], record["rows"], record["runs"], record["budget"]
        groups[key].append(record)
    found: list[Record] = []
    for (context, rows, count, budget), group in sorted(groups.items()):
        row: Record = {"context": context, "budget": budget, "rows": rows, "runs": count}
        row |= {name: group[0][name] for name in ("suffix", "token_layers", "pairs")}
        row |= {
            f"{name}_share": group[0][name] / group[0][f"replay_{name}"] for name in ("token_layers", "pairs")
        }
        for measure in ("refresh", "recovery"):
            by_name: dict[str, dict[int, float]] = defaultdict(dict)
            for record in group:
                by_name[record["executor"]][record["round"]] = record[f"{measure}_s"]
            packed = by_name.get("packed", {})
            row[f"{measure}_s"] = {name: _spread(list(times.values())) for name, times in by_name.items()}
            row[f"{measure}_over_packed"] = {
                name: _spread([times[at] / packed[at] for at in sorted(times.keys() & packed.keys())])
                for name, times in by_name.items()
                if name != "packed" and times.keys() & packed.keys()
            }
        found.append(row)
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def layer_errors(
    edited: Edited, rows: IntArray, left: Executor = "custom", right: Executor = "packed"
) -> list[Record]:
    """Compare two executors on the same rows, layer by layer: the check of section G.5.

    Args:
        edited: The document; shifted separately for each executor.
        rows: The selected rows, sorted `int64 [B]`.
        left: The executor to check.
        right: The reference.

    Returns:
        For each layer, from 0: `keys_max` and `values_max`, the largest absolute error of a number
        (keys before RoPE), and `keys_relative` and `values_relative`, the largest error of a row
        in a head, relative to the row's norm.
    """
    results = []
    for executor in (left, right):
        cache = edited.model.new_cache(len(edited.rows))
        shift_(edited.model, cache, edited.rows.placed(), edited.segments)
        ids = edited.model.to_device(edited.ids)
        parts = refresh_(edited.model, cache, ids, rows, choose_executor(executor, rows))
        results.append(States.concatenate(list(parts)))
    found: list[Record] = []
    for layer in range(edited.model.layers):
        row: Record = {"layer": layer}
        for name in ("keys", "values"):
            held, wanted = (getattr(states, name)[layer].float() for states in results)
            gap = held - wanted
            length = wanted.norm(dim=-1).clamp_min(1e-30)
            row[f"{name}_max"] = float(gap.abs().max())
            row[f"{name}_relative"] = float((gap.norm(dim=-1) / length).max())
        found.append(row)
    return found
