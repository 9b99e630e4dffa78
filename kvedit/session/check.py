"""Check a session: verify its segments and revisions against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvedit.cache.rows import RowTable
from kvedit.errors import SessionError
from kvedit.session.reading import join_ids
from kvedit.session.state import State


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check.

    Attributes:
        revisions, segments: How many were checked.
        findings: One sentence per problem; empty if there are none.
    """

    revisions: int
    segments: int
    findings: tuple[str, ...]


def check(state: State, progress: Callable[[int, int], None]) -> Checked:
    """Verify every segment and every revision.

    For each revision: its text can be read, its rows match the text's ids (law 6, by the
    ids in the segments), and its counts add up (law 11).

    Args:
        state: An open session, so its manifest, journal and tokenizer are valid.
        progress: Called with the number of steps done and the total.
    """
    names, journal = sorted(state.journal.segments()), state.journal
    total = len(names) + len(journal)
    segment_ids: dict[str, np.ndarray] = {}
    findings: list[str] = []
    for done, name in enumerate(names):
        try:
            segment_ids[name] = state.store.read_segment(name)["ids"].numpy().copy()
        except SessionError as error:
            findings.append(error.fact)
        progress(done + 1, total)
    text_ids: dict[int, np.ndarray] = {}
    for number in range(len(journal)):
        try:
            findings += _check_revision(state, number, segment_ids, text_ids)
        except SessionError as error:
            findings.append(error.fact)
        progress(len(names) + number + 1, total)
    return Checked(len(journal), len(names), tuple(findings))


def _check_revision(
    state: State, number: int, segment_ids: dict[str, np.ndarray], text_ids: dict[int, np.ndarray]
) -> list[str]:
    revision = state.journal.revision(number)
    entry = revision.entry
    if entry.state not in text_ids:  # the revisions of one text share its ids
        text_ids.clear()
        text_ids[entry.state] = state.tokenizer.encode_text(revision.text).ids
    ids = join_ids(state.manifest.head_ids, text_ids[entry.state], revision.turns)
    total = sum(piece.length for piece in revision.rows)
    if total != len(ids):
        return [f"Revision {number} has {total} rows for {len(ids)} tokens."]
    rows = RowTable.from_pieces(revision.rows, entry.frontier)
    findings: list[str] = []
    row = 0
    for piece in revision.rows:
        if piece.segment in segment_ids:
            stored = segment_ids[piece.segment][piece.start : piece.start + piece.length]
            if not np.array_equal(stored, ids[row : row + piece.length]):
                findings.append(
                    f"Revision {number} and segment {piece.segment} differ in their tokens at row {row}."
                )
        row += piece.length
    counted = (len(rows), int(rows.stale.sum()), int(rows.missing.sum()))
    if counted != (entry.tokens, entry.stale, entry.missing):
        findings.append(f"Revision {number} records counts that do not match its rows.")
    if rows.missing[: entry.frontier].any():
        findings.append(f"Revision {number} has missing rows before its frontier.")
    return findings
