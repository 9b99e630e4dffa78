"""Heal: recompute rows from the frontier onward, piece by piece, so that they become exact."""

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

# To begin with, and at least: a few rows take about as long as one, so fewer would heal ever less.
_PIECE_ROWS = 8
KEEP_ROWS = 1024
"""Rows that healing computes at most before it keeps them."""
_PIECE_S = 0.5  # time of a piece, and so the delay of an interrupt


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
                healing.step(min(goal - done, KEEP_ROWS - healing.unkept), _PIECE_S)
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
    """The sweep of one session, which can stop after any piece.

    Rows before the frontier are exact; the rows that are computed next, in order, see only exact
    ones, and so become exact themselves. Rows count as healed once they are kept.

    Args:
        session: Healed. Nobody else may change it between two pieces.
    """

    def __init__(self, session: State) -> None:
        self._session = session
        self._rows: RowTable = session.rows
        self._start = self.frontier = session.rows.frontier
        self._parts: list[States] = []
        self._size = _PIECE_ROWS
        self._preparing = self._prepare()

    @property
    def left(self) -> int:
        """Rows that are not exact yet."""
        return len(self._rows) - self.frontier

    @property
    def unkept(self) -> int:
        """Rows that were computed and are not kept yet."""
        return self.frontier - self._start

    @property
    def current(self) -> bool:
        """Whether the session is still the one that this heals."""
        return self._rows is self._session.rows

    def step(self, limit: int, seconds: float, on_layer: Callable[[int], None] = lambda layer: None) -> int:
        """Do one piece of about `seconds`; give the rows that were computed, 0 while preparing.

        Args:
            limit: Rows at most.
            seconds: What the piece may take, as far as the pieces before tell.
            on_layer: Called after each layer; what it raises ends the piece without a trace.
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
        if size == self._size and taken > 0:  # never more than twice as many: one fast piece may be luck
            self._size = max(_PIECE_ROWS, min(2 * size, int(size * seconds / taken)))
        return size

    def keep(self) -> None:
        """Keep what was computed, unless the session has changed since. The caller holds the lock."""
        if not self._parts or not self.current:
            return
        session, count = self._session, self.unkept
        rows = np.arange(self._start, self.frontier)
        session.keep([States.concatenate(self._parts)], f"heal --budget {count}t")
        session.working.settle(session.rows, rows)
        self._parts, self._start, self._rows = [], self.frontier, session.rows

    def keep_locked(self) -> None:
        """Take the session's lock and keep what was computed; raises `LockedError` as commands do."""
        with self._session.writing("heal"):
            self.keep()

    def _prepare(self) -> Iterator[None]:
        """Bring the exact rows into the working cache, in pieces."""
        session = self._session
        while not session.read_segments(limit=1):
            yield
        yield
        model, total = session.model, len(self._rows)
        # What it computes is held until it is kept, and then a second time while it is written.
        needed = session.working.wanting(total) + 3 * model.walk_bytes(min(self.left, KEEP_ROWS))
        check_memory(f"Healing {total:,} tokens", needed, model.device)
        session.working.reserve(total)
        wanted = session.working.differing(self._rows)
        wanted = wanted[wanted < self.frontier]
        for _ in session.segments.gather(session.working, self._rows, wanted):
            yield
