"""Keep sessions: list, choose, copy, rename, remove, compact and check them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from kvedit.cache.rows import RowTable
from kvedit.errors import SessionError, UsageError
from kvedit.session.state import State
from kvedit.store.home import Home
from kvedit.store.store import Store
from kvedit.timing import now


@dataclass(frozen=True, slots=True)
class Overview:
    """A session in a list.

    Attributes:
        name: Its name.
        current: Whether commands use it where none is named.
        lines, tokens, stale, missing: As at its present revision.
        size_bytes: What it takes on disk.
        created: When its document was loaded.
        damage: What is wrong with it, if it cannot be read.
    """

    name: str
    current: bool
    lines: int
    tokens: int
    stale: int
    missing: int
    size_bytes: int
    created: str
    damage: str | None


def overview(home: Home) -> list[Overview]:
    """List the sessions of a folder by name."""
    try:
        current = home.current().name
    except SessionError:
        current = ""
    found: list[Overview] = []
    for store in home.stores():
        size, is_current = store.size_bytes(), store.name == current
        try:
            manifest, journal = store.read()
            entry = journal.entry(manifest.revision)
        except SessionError as error:
            found.append(Overview(store.name, is_current, 0, 0, 0, 0, size, "", error.fact))
            continue
        counts = (entry.lines, entry.tokens, entry.stale, entry.missing)
        found.append(Overview(store.name, is_current, *counts, size, manifest.created, None))
    return found


def use(store: Store) -> None:
    """Make a session the current one."""
    store.read_manifest()
    with store.lock("use", now()):
        used = Home(store.folder.parent).next_use()
        store.write_manifest(replace(store.read_manifest(), used=used))


def copy(store: Store, target: Store) -> None:
    """Copy a session; raises `UsageError` when there is one of the new name."""
    store.read_manifest()
    _check_free(target)
    with target.lock("copy", now(), new=True):
        _check_free(target)
        store.copy(target)


def rename(store: Store, target: Store) -> None:
    """Give a session another name; raises `UsageError` when there is one of that name."""
    store.read_manifest()
    _check_free(target)
    if os.path.lexists(target.folder):
        raise UsageError(f"There is a folder {target.folder} already.", "Choose another name.")
    with store.lock("rename", now()):
        store.rename(target)


def remove(store: Store) -> int:
    """Remove a session, damaged or not; give the bytes that it took."""
    with store.lock("remove", now()):
        size = store.size_bytes()
        store.remove()
    return size


def compact(session: State) -> int:
    """Drop what no revision reaches; give the bytes that were freed."""
    with session.writing("compact"):
        return session.store.sweep(session.manifest, session.journal)


def check(session: State, progress: Callable[[int, int], None]) -> list[str]:
    """Verify every segment and every revision; give what is wrong, one sentence each.

    Of a revision: that its text can be read, that its rows are those of the text's ids (law 6,
    by the ids that the segments hold), and that its counts add up (law 11).

    Args:
        session: Opened, so its manifest, journal and tokenizer are in order.
        progress: Called with steps done and steps in all.
    """
    names, journal = sorted(session.journal.segments()), session.journal
    total = len(names) + len(journal)
    held: dict[str, np.ndarray] = {}
    findings: list[str] = []
    for done, name in enumerate(names):
        try:
            held[name] = session.store.read_segment(name)["ids"].numpy().copy()
        except SessionError as error:
            findings.append(error.fact)
        progress(done + 1, total)
    known: dict[int, np.ndarray] = {}
    for number in range(len(journal)):
        try:
            findings += _check_revision(session, number, held, known)
        except SessionError as error:
            findings.append(error.fact)
        progress(len(names) + number + 1, total)
    return findings


def _check_revision(
    session: State, number: int, held: dict[str, np.ndarray], known: dict[int, np.ndarray]
) -> list[str]:
    revision = session.journal.revision(number)
    entry, head = revision.entry, np.array(session.manifest.head_ids, dtype=np.int64)
    if entry.state not in known:  # the revisions of one text share its ids
        known.clear()
        known[entry.state] = session.tokenizer.encode_text(revision.text).ids
    ids = np.concatenate([head, known[entry.state], np.array(revision.turns, dtype=np.int64)])
    total = sum(piece.length for piece in revision.rows)
    if total != len(ids):
        return [f"Revision {number} has {total} rows for {len(ids)} tokens."]
    rows = RowTable.from_pieces(revision.rows, entry.frontier)
    findings: list[str] = []
    row = 0
    for piece in revision.rows:
        if piece.segment in held:
            stored = held[piece.segment][piece.start : piece.start + piece.length]
            if not np.array_equal(stored, ids[row : row + piece.length]):
                findings.append(
                    f"Revision {number} has other tokens than segment {piece.segment} at row {row}."
                )
        row += piece.length
    counted = (len(rows), int(rows.stale.sum()), int(rows.missing.sum()))
    if counted != (entry.tokens, entry.stale, entry.missing):
        findings.append(f"Revision {number} says other counts than its rows have.")
    if rows.missing[: entry.frontier].any():
        findings.append(f"Revision {number} has missing rows before its frontier.")
    return findings


def _check_free(target: Store) -> None:
    if target.exists():
        raise UsageError(f"There is a session '{target.name}' already.", "Choose another name.")
