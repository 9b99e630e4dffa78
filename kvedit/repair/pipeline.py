"""The repair pipeline: from a shifted cache and a question to a repaired cache, step by step.

`Session.ask`, `explain` and `verify` run these steps, and so do the benches that select rows. The
pipeline knows no session, no disk and no clock: its caller provides the cache, and `Timings` to measure
with. Decoding, which follows the repair, is in `kvedit.model.decode`.

    missing   compute rows without a state, if the policy reads the cache
    select    score rows and units, and choose B rows
    refresh   recompute the selected and the missing rows
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvedit.cache.kv import KVCache, States
from kvedit.cache.rows import RowTable, runs
from kvedit.model.decode import prefill_question_
from kvedit.model.model import Model
from kvedit.policies.evidence import Evidence, Past
from kvedit.policies.registry import policy_named
from kvedit.policies.scores import Scores
from kvedit.repair.options import Options
from kvedit.repair.refresh import choose_executor, refresh_
from kvedit.repair.select import select
from kvedit.timing import Timings

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Selection:
    """The rows to recompute for a question.

    Attributes:
        rows: The selected rows, sorted `int64 [B]`.
        missing: Rows without a state, sorted `int64 [N]`; they are computed in addition to the budget.
        evidence: The input of the policy.
        scores: Its result; `None` if the budget resolves to 0 rows, so that nothing was scored.
    """

    rows: IntArray
    missing: IntArray
    evidence: Evidence
    scores: Scores | None

    @cached_property
    def computed(self) -> IntArray:
        """Return the selected and missing rows, sorted `int64 [N]`."""
        return np.union1d(self.rows, self.missing)

    @property
    def runs(self) -> int:
        """Return the number of runs of adjacent rows among the computed ones."""
        return sum(1 for _ in runs(self.computed))


@dataclass(frozen=True)
class Repair:
    """The repair for one question, on a cache whose stored rows were shifted to their positions.

    Attributes:
        model: The model.
        cache: The shifted cache, with capacity for rows and question; changed in place.
        ids: Ids of all rows, `int64 [T]`.
        rows: The row table: where each row is stored, and its state.
        unit: Unit of each row, `int64 [T]`; -1 before the body.
        query_ids: Ids of the bare question, `int64 [Nq]`; policies score with them.
        past: Returns the rows of the last text whose rows were all exact; called only before scoring.
        clean: The cache of a clean prefill, for diagnostics.
        timings: Receives the phases `selection`, `refresh` and `question`.
        on_phase: Called with the name of each phase as it begins.
        on_write: Called with cache rows before they are overwritten.
    """

    model: Model
    cache: KVCache
    ids: IntArray
    rows: RowTable
    unit: IntArray
    query_ids: IntArray
    past: Callable[[], Past | None] = lambda: None
    clean: KVCache | None = None
    timings: Timings = field(default_factory=Timings)
    on_phase: Callable[[str], None] = lambda name: None
    on_write: Callable[[IntArray], None] = lambda rows: None

    @cached_property
    def missing(self) -> IntArray:
        """Return the rows without a state, sorted `int64 [N]`."""
        return np.flatnonzero(self.rows.missing)

    def select(self, options: Options) -> Selection:
        """Select rows. With a budget of 0 rows, nothing is scored.

        Raises:
            UsageError: The policy cannot be used here.
        """
        suffix, policy = self.rows.suffix, policy_named(options.policy)
        budget = options.budget.resolve(int(suffix.sum()))
        if budget and policy.reads_cache and len(self.missing):
            self.refresh(self.missing, options.executor)
        self.on_phase("selection")
        with self.timings.measure("selection", int(suffix.sum())):
            evidence = self._evidence(suffix, options.seed, self.past() if budget else None)
            if not budget:
                return Selection(np.zeros(0, dtype=np.int64), self.missing, evidence, None)
            scores = policy.score(evidence)
            support = options.support or policy.support
            rows = select(scores, self.unit, self.rows.stale, suffix, budget, support)
            return Selection(rows, self.missing, evidence, scores)

    def refresh(self, rows: IntArray, executor: str) -> tuple[str, list[States]]:
        """Recompute rows through all layers.

        Returns:
            The executor used (`none` without rows), and the raw states, in parts of ascending rows.
        """
        self.on_phase("refresh")
        if not len(rows):
            self.timings.add("refresh", 0.0, 0)
            return "none", []
        chosen = choose_executor(executor, rows)
        ids = self.model.to_device(self.ids)
        self.on_write(rows)
        with self.timings.measure("refresh", len(rows)):
            return chosen, list(refresh_(self.model, self.cache, ids, rows, chosen))

    def question(self, ids: IntArray) -> tuple[Tensor, States]:
        """Prefill the question's ids after the rows; returns what `prefill_question_` returns."""
        self.on_phase("question")
        total = len(self.rows)
        self.on_write(np.arange(total, self.cache.capacity))
        self.cache.length = total
        with self.timings.measure("question", len(ids)):
            return prefill_question_(self.model, self.cache, self.model.to_device(ids))

    def _evidence(self, suffix: npt.NDArray[np.bool_], seed: int, past: Past | None) -> Evidence:
        return Evidence(
            model=self.model,
            cache=self.cache,
            ids=self.ids,
            unit=self.unit,
            units=int(self.unit.max(initial=-1)) + 1,
            query_ids=self.query_ids,
            suffix=suffix,
            seed=seed,
            past=past,
            clean=self.clean,
        )


def follow_greedy(
    model: Model,
    clean: KVCache,
    other: KVCache,
    first: tuple[Tensor, Tensor],
    limit: int,
    stop_ids: Collection[int],
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Follow the greedy answer of a clean cache on two caches.

    Args:
        model: The model.
        clean: The cache whose greedy tokens are followed.
        other: The cache that is given the same tokens.
        first: Logits after the question, of the clean cache and of the other, `float32 [vocabulary]`.
        limit: Maximum number of tokens, including the one that ends the answer.
        stop_ids: Ids that end the answer.

    Yields:
        The clean cache's token, and the logits of both caches that it was chosen from.
    """
    ours, theirs = first
    for number in range(1, limit + 1):
        token = int(ours.argmax())
        yield token, ours, theirs
        if token in stop_ids or number == limit:
            return
        said = model.to_device(np.array([token], dtype=np.int64))
        ours, theirs = (prefill_question_(model, cache, said)[0] for cache in (clean, other))
