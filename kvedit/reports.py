"""What commands report: a deletion, a status, an answer. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from kvedit.timing import Timings


@dataclass(frozen=True, slots=True)
class Removal:
    """What a deletion did.

    Attributes:
        lines, tokens: Removed.
        missing: Rows of the session to compute: at a seam their tokens merged differently.
        stale: Rows of the session that are stale now.
        suffix: S, the rows from the frontier on that a budget may buy.
        replay_s: Estimated time of a full replay, from the speed of the prefill at load.
        written_bytes: Bytes written to the session.
    """

    lines: int
    tokens: int
    missing: int
    stale: int
    suffix: int
    replay_s: float
    written_bytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """What a session holds. The four states add up to `tokens`."""

    name: str
    model: str
    dtype: str
    context_length: int
    lines: int
    tokens: int
    suffix: int
    frontier: int
    exact: int
    refreshed: int
    stale: int
    missing: int
    size_bytes: int
    edits: int
    created: str


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and what it took.

    Attributes:
        text: The answer.
        ids: Its token ids.
        finish_reason: `stop`, `length` or `interrupted`.
        policy, executor, seed, temperature: As they were used; `executor` is `none` without rows.
        budget: As it was asked for.
        budget_rows: B, as it was resolved.
        suffix: S, before the answer.
        missing, refreshed, reused: Rows of head and document by what was done with them; they
            add up to `tokens`.
        runs: Runs of adjacent rows in the support, missing rows included.
        tokens: T, rows of head and document.
        timings: Phases, in order.
        first_token_s: Shift, selection, refresh and question prefill.
        replay_s: Estimated time of recomputing every row from the frontier on.
        kept: Whether the refreshed rows were kept in the session.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: str
    policy: str
    executor: str
    seed: int
    temperature: float
    budget: str
    budget_rows: int
    suffix: int
    missing: int
    refreshed: int
    reused: int
    runs: int
    tokens: int
    timings: Timings
    first_token_s: float
    replay_s: float
    kept: bool

    @property
    def repair_s(self) -> float:
        """Shift, selection and refresh: what a full replay would stand in for."""
        return self.timings.seconds("shift", "selection", "refresh")
