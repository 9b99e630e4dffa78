"""What commands return: the result of an edit, a status, an answer, a check. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import shorten

import numpy as np
import numpy.typing as npt

from kvedit.repair.options import Options
from kvedit.timing import Timings


@dataclass(frozen=True, slots=True)
class Change:
    """The result of an edit, an undo or a redo.

    Attributes:
        command: The command; empty if nothing changed.
        revision: The current revision afterwards.
        removed_lines, added_lines: Lines removed and added; a changed line counts as both.
        token_change: Change in the number of tokens.
        lines: Lines of the document now.
        tokens: T, rows of the session now.
        missing: Rows to compute: new text, and boundaries where tokens merged differently.
        stale: Rows that are stale now.
        suffix: S, the rows from the frontier on that have a state.
        replay_s: Estimated time of a full replay, from the prefill speed at load.
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
    """The contents of a session. The counts of the four states add up to `tokens`.

    Attributes:
        tokens: T, the rows of head, document and conversation.
        conversation: Rows of the conversation among them.
        suffix: S.
        edits: Edits of the text since the load.
        undone: Number of edits that `redo` can restore.
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
    """An answer and its cost.

    Attributes:
        text: The answer.
        ids: Its token ids.
        finish_reason: `stop`, `length` or `interrupted`.
        options: The options of the question.
        executor: How rows were recomputed; `none` if there were none.
        budget_rows: B, the resolved budget.
        suffix: S, before the answer.
        missing, refreshed, reused: Rows of head, document and (with `conversation`)
            conversation, by what was done with them; they add up to `tokens`.
        runs: Runs of adjacent rows among those computed.
        tokens: T, the sum of these rows.
        timings: Phases, in order.
        first_token_s: Time of shift, selection, refresh and question prefill.
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
        """Return the time of shift, selection and refresh, which replace a full replay."""
        return self.timings.seconds("shift", "selection", "refresh")


@dataclass(frozen=True, slots=True)
class Token:
    """One id of an answer, and the text that it completes, possibly none.

    Attributes:
        id: `None` for text held back until the end: bytes that never formed a character.
        text: Text to print next.
    """

    id: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Healed:
    """The result of healing.

    Attributes:
        rows: Rows that became exact.
        frontier: The rows before it are exact.
        tokens: T, rows of the session.
        seconds: Duration.
        finished: `done`, `budget` (used up before the end) or `interrupted`.
    """

    rows: int
    frontier: int
    tokens: int
    seconds: float
    finished: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of the first token and the answer, between the current cache and a clean one.

    Attributes:
        kl: KL(clean || repaired) at the first token, in nats.
        agreement: Share of the clean answer's tokens, including its end, that the repaired cache
            ranks first, each given the clean tokens before it.
        tie_gap: The smallest lead of one of these tokens over the runner-up on the clean cache, in
            nats. If it is smaller than rounding errors, either may come first.
        differs_at: Index (from 0) of the first token that the repaired cache does not rank first;
            `None` if there is none.
        differs_gap: The lead of that token on the clean cache.
        answer, clean_answer: Greedy answers from the two caches.
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
    """The deviation of the working cache from a clean prefill.

    Attributes:
        tokens: T.
        frontier: The rows before it should be exact.
        computed: Number of rows computed for the check: missing and selected ones.
        keys, values: Relative deviation of each layer, the norm of the difference over the norm
            of the clean states.
        heat: Relative deviation by layer and row, `float32 [L, T]`, the larger of keys and values.
        exact_deviation: The largest deviation before the frontier.
        tolerance: What rounding alone can cause.
        exact: Whether every row is exact.
        comparison: Comparison of answers, if a question was given.
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
    """A unit with rows that would be refreshed.

    Attributes:
        first_line, last_line: Its lines, from 1; 0 for the conversation.
        text: Its text.
        score: The policy's score.
        chosen, tokens: Number of selected rows, and of all rows.
    """

    first_line: int
    last_line: int
    text: str
    score: float
    chosen: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The rows that an answer would refresh, and the estimated cost.

    Attributes:
        policy, budget: As given.
        budget_rows, suffix, missing, tokens: B, S, missing rows, T.
        runs: Runs of adjacent rows that would be computed.
        refresh_s, replay_s: Estimates from the prefill speed at load.
        units: Selected units, best first.
        lines: For each line, the share of its rows that is selected.
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
    """The result of a purge.

    Attributes:
        tokens: Number of recomputed rows.
        revisions: Number of removed revisions.
        freed_bytes: Size of the removed files.
        size_bytes: Size of the session now.
        seconds: Duration.
    """

    tokens: int
    revisions: int
    freed_bytes: int
    size_bytes: int
    seconds: float
