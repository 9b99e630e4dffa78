"""Heal: recompute rows from the frontier onward, step by step, so that they become exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvedit.cache.kv import States
from kvedit.cache.memory import check_memory
from kvedit.cache.rows import RowTable
from kvedit.repair.budget import Budget
from kvedit.repair.refresh import refresh_
from kvedit.repair.reports import Healed
from kvedit.session.state import State
from kvedit.timing import clock, waiter

# The first and smallest step: a few rows take about as long as one, so smaller steps only lose time.
_STEP_ROWS = 8
KEEP_ROWS = 1024
"""Most rows that healing computes before it keeps them."""
_STEP_S = 0.5  # target time of a step, so an interrupt waits about that long


def heal(state: State, budget: Budget, progress: Callable[[int, int], None]) -> Healed:
    """Recompute rows from the frontier onward; see `Session.heal`."""
    start, finished = clock(), "done"
    with state.writing("heal"):
        healing = Healing(state)
        first = healing.frontier
        goal = budget.resolve(healing.left)
        try:
            while healing.frontier - first < goal:
                done = healing.frontier - first
                healing.step(min(goal - done, KEEP_ROWS - healing.unkept), _STEP_S)
                progress(healing.frontier - first, goal)
                if healing.unkept >= KEEP_ROWS:
                    healing.keep()
        except KeyboardInterrupt:
            finished = "interrupted"
        healing.keep()
        if finished == "done" and healing.left:
            finished = "budget"
        rows = healing.frontier - first
        return Healed(rows, healing.frontier, len(state.rows), clock() - start, finished)


class Healing:
    """The healing of one session, which can stop after any step.

    Rows before the frontier are exact. The rows computed next, in order, see only exact rows and so
    become exact too. Rows count as healed once they are kept.

    Args:
        session: The session. Nothing else may change it between two steps.
    """

    def __init__(self, session: State) -> None:
        self._session = session
        self._rows: RowTable = session.rows
        self._start = self.frontier = session.rows.frontier
        self._parts: list[States] = []
        self._size = _STEP_ROWS
        self._preparing = self._prepare()

    @property
    def left(self) -> int:
        """Rows that are not exact yet."""
        return len(self._rows) - self.frontier

    @property
    def unkept(self) -> int:
        """Rows that are computed but not kept yet."""
        return self.frontier - self._start

    @property
    def current(self) -> bool:
        """Whether the session is unchanged, except by this healing."""
        return self._rows is self._session.rows

    def step(self, limit: int, seconds: float, on_layer: Callable[[int], None] = lambda layer: None) -> int:
        """Compute for about `seconds`; return the number of rows computed, 0 while preparing.

        Args:
            limit: Maximum number of rows.
            seconds: Target time, judged by the speed of earlier steps.
            on_layer: Called after each layer; if it raises, the step is discarded.
        """
        if next(self._preparing, "prepared") is None:
            return 0
        session = self._session
        size = min(limit, self.left, self._size)
        rows = np.arange(self.frontier, self.frontier + size)
        session.working.forget(rows)
        start = clock()
        ids = session.model.to_device(session.ids)
        self._parts += list(refresh_(session.model, session.working.cache, ids, rows, "direct", on_layer))
        waiter(session.model.device.type)()
        self.frontier += size
        taken = clock() - start
        if size == self._size and taken > 0:  # at most double: one fast step may be luck
            self._size = max(_STEP_ROWS, min(2 * size, int(size * seconds / taken)))
        return size

    def keep(self) -> None:
        """Keep the computed rows unless the session has changed since. The caller holds the lock."""
        if not self._parts or not self.current:
            return
        session, count = self._session, self.unkept
        rows = np.arange(self._start, self.frontier)
        session.keep([States.concatenate(self._parts)], f"heal --budget {count}t")
        session.working.settle(session.rows, rows)
        self._parts, self._start, self._rows = [], self.frontier, session.rows

    def keep_locked(self) -> None:
        """Take the session's lock and keep the computed rows; raises `LockedError` as commands do."""
        with self._session.writing("heal"):
            self.keep()

    def _prepare(self) -> Iterator[None]:
        """Load the exact rows into the working cache, in steps."""
        session = self._session
        while not session.read_segments(limit=1):
            yield
        yield
        model, total = session.model, len(self._rows)
        # Computed rows stay in memory until they are kept, and are copied while they are written.
        needed = session.working.wanting(total) + 3 * model.walk_bytes(min(self.left, KEEP_ROWS))
        check_memory(f"Healing {total:,} tokens", needed, model.device)
        session.working.reserve(total)
        row_ids = session.working.differing(self._rows)
        row_ids = row_ids[row_ids < self.frontier]
        for _ in session.segments.gather(session.working, self._rows, row_ids):
            yield
