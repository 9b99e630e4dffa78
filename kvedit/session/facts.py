"""What commands report: a session's status, and what an edit changed."""

from __future__ import annotations

from collections.abc import Sequence

from kvedit.repair.reports import Change, Status
from kvedit.session.state import State
from kvedit.text import edits
from kvedit.text.document import Edit


def status(state: State) -> Status:
    """Return a session's counts; see `Session.status`."""
    rows, manifest, entry = state.rows, state.manifest, state.revision.entry
    stale, missing, suffix = (int(mask.sum()) for mask in (rows.stale, rows.missing, rows.suffix))
    return Status(
        name=state.store.name,
        model=manifest.model.name,
        dtype=manifest.model.dtype,
        context_length=manifest.model.context_length,
        source=manifest.source,
        lines=state.document.line_count,
        tokens=len(rows),
        conversation=len(state.revision.turns),
        suffix=suffix,
        frontier=rows.frontier,
        exact=rows.frontier,
        refreshed=suffix - stale,
        stale=stale,
        missing=missing,
        size_bytes=state.store.size_bytes(),
        edits=entry.edits,
        undone=len(manifest.undone),
        revision=entry.number,
        created=manifest.created,
    )


class Before:
    """A session as it was before a command, to report what the command changed.

    Args:
        state: The session that the command changes.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._document, self._tokens = state.document, len(state.rows)
        self._written = state.store.written_bytes

    def change(self, command: str, changes: Sequence[Edit] = ()) -> Change:
        """Return the change since then.

        Args:
            command: The command; empty if it changed nothing.
            changes: The edits it made; if empty, the difference between the texts' lines.
        """
        state, rows = self._state, self._state.rows
        changes = changes or edits.difference(self._document.text, state.document.text)
        removed, added = edits.line_counts(self._document, state.document, changes)
        return Change(
            command=command,
            revision=state.revision.entry.number,
            removed_lines=removed,
            added_lines=added,
            token_change=len(rows) - self._tokens,
            lines=state.document.line_count,
            tokens=len(rows),
            missing=int(rows.missing.sum()),
            stale=int(rows.stale.sum()),
            suffix=int(rows.suffix.sum()),
            replay_s=state.replay_s,
            written_bytes=state.store.written_bytes - self._written,
        )
