"""What commands report: an edit, a status, an answer, a check. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import shorten

import numpy as np
import numpy.typing as npt

from kvedit.repair.options import Options
from kvedit.timing import Timings


@dataclass(frozen=True, slots=True)
class Change:
    """What an edit, an undo or a redo did.

    Attributes:
        command: What did it; empty if nothing changed.
        revision: The present one now.
        removed_lines, added_lines: Lines that went and came; a changed line did both.
        token_change: Tokens more, or fewer if negative.
        lines: Of the document now.
        tokens: T, rows of the session now.
        missing: Rows of the session to compute: new text, and seams where tokens merged differently.
        stale: Rows of the session that are stale now.
        suffix: S, the rows from the frontier on that a budget may buy.
        replay_s: Estimated time of a full replay, from the speed of the prefill at load.
        written_bytes: Bytes written to the session.
    """

    command: str
    revision: int
    removed_lines: int
    added_lines: int
    token_change: int
    lines: int
    tokens: int
    missing: int
    stale: int
    suffix: int
    replay_s: float
    written_bytes: int

    def __repr__(self) -> str:
        return (
            f"<Change {self.command!r}: {self.added_lines - self.removed_lines:+,} lines, "
            f"{self.token_change:+,} tokens; {self.stale:,} stale, {self.missing:,} missing>"
        )


@dataclass(frozen=True, slots=True)
class Status:
    """What a session holds. The four states add up to `tokens`.

    Attributes:
        tokens: T, the rows of head, document and conversation.
        conversation: Rows of the conversation among them.
        suffix: S.
        edits: Edits of the text since the load.
        undone: Edits that `redo` can make again.
    """

    name: str
    model: str
    dtype: str
    context_length: int
    source: str
    lines: int
    tokens: int
    conversation: int
    suffix: int
    frontier: int
    exact: int
    refreshed: int
    stale: int
    missing: int
    size_bytes: int
    edits: int
    undone: int
    revision: int
    created: str


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and what it took.

    Attributes:
        text: The answer.
        ids: Its token ids.
        finish_reason: `stop`, `length` or `interrupted`.
        options: What it was asked with.
        executor: How rows were recomputed; `none` without rows.
        budget_rows: B, as it was resolved.
        suffix: S, before the answer.
        missing, refreshed, reused: Rows of head and document by what was done with them; they
            add up to `tokens`.
        runs: Runs of adjacent rows among those computed.
        tokens: T, rows of head and document.
        timings: Phases, in order.
        first_token_s: Shift, selection, refresh and question prefill.
        replay_s: Estimated time of recomputing every row from the frontier on.
        kept: Whether rows were kept in the session.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: str
    options: Options
    executor: str
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

    def __repr__(self) -> str:
        text = shorten(self.text, 60, placeholder="...")
        return (
            f"<Answer {text!r}: {len(self.ids)} tokens, {self.finish_reason}; "
            f"{self.missing:,} missing + {self.refreshed:,} refreshed + {self.reused:,} reused rows, "
            f"first token after {self.first_token_s:.2f} s>"
        )

    @property
    def repair_s(self) -> float:
        """Shift, selection and refresh: what a full replay would stand in for."""
        return self.timings.seconds("shift", "selection", "refresh")


@dataclass(frozen=True, slots=True)
class Token:
    """One id of an answer, and the text that it completes, possibly none.

    Attributes:
        id: `None` for what was held back at the end: bytes that never became a character.
        text: To print after the text before.
    """

    id: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Healed:
    """What healing did.

    Attributes:
        rows: Rows that became exact.
        frontier: The rows before it are exact.
        tokens: T, rows of the session.
        seconds: Time that it took.
        finished: `done`, `budget` (spent before the end) or `interrupted`.
    """

    rows: int
    frontier: int
    tokens: int
    seconds: float
    finished: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the first token and the answer are, on the cache as it is and on a clean one.

    Attributes:
        kl: KL(clean || repaired) of the first token, in nats.
        agreement: Share of the clean answer's tokens, its end included, that the repaired cache
            ranks first, each after the clean ones before it.
        tie_gap: The smallest lead of one of these tokens over the next best, in nats: the odds of
            the two on the clean cache. Below what rounding does, either may come first.
        differs_at: The first token, from 0, that the repaired cache does not rank first; `None`
            where there is none.
        differs_gap: The lead of that token on the clean cache.
        answer, clean_answer: Greedy, from either cache.
    """

    kl: float
    agreement: float
    tie_gap: float
    differs_at: int | None
    differs_gap: float | None
    answer: str
    clean_answer: str


@dataclass(frozen=True, slots=True)
class Verification:
    """How far the working cache is from a clean prefill.

    Attributes:
        tokens: T.
        frontier: The rows before it should be exact.
        computed: Rows that were computed for the check: missing and chosen ones.
        keys, values: Relative deviation of each layer, the norm of the difference over the norm
            of the clean states.
        heat: Relative deviation by layer and row, `float32 [L, T]`, the larger of keys and values.
        exact_deviation: The largest of the rows before the frontier.
        tolerance: What rounding may make of it.
        exact: Whether every row is exact.
        comparison: For the question, if there was one.
    """

    tokens: int
    frontier: int
    computed: int
    keys: tuple[float, ...]
    values: tuple[float, ...]
    heat: npt.NDArray[np.float32]
    exact_deviation: float
    tolerance: float
    exact: bool
    comparison: Comparison | None


@dataclass(frozen=True, slots=True)
class ChosenUnit:
    """A unit of which rows would be refreshed.

    Attributes:
        first_line, last_line: Lines that it touches, from 1; 0 for the conversation.
        text: Its characters.
        score: What the policy gave it.
        chosen, tokens: Rows chosen, and rows in all.
    """

    first_line: int
    last_line: int
    text: str
    score: float
    chosen: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an answer would refresh, and what that would cost.

    Attributes:
        policy, budget: As asked for.
        budget_rows, suffix, missing, tokens: B, S, missing rows, T.
        runs: Runs of adjacent rows that would be computed.
        refresh_s, replay_s: Estimates, from the speed of the prefill at load.
        units: Chosen units, the best first.
        lines: Share of each line's rows that was chosen, by line.
    """

    policy: str
    budget: str
    budget_rows: int
    suffix: int
    missing: int
    tokens: int
    runs: int
    refresh_s: float
    replay_s: float
    units: tuple[ChosenUnit, ...]
    lines: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Purge:
    """What a purge did.

    Attributes:
        tokens: Rows that were computed anew.
        revisions: Revisions that were dropped.
        freed_bytes: Bytes that the session takes less, before the new rows.
        size_bytes: What it takes now.
        seconds: Time that it took.
    """

    tokens: int
    revisions: int
    freed_bytes: int
    size_bytes: int
    seconds: float
