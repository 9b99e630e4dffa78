"""The history of a session: undo, redo, checkout, log. All of them use revisions already written."""

from __future__ import annotations

from kvedit.errors import UsageError
from kvedit.session.state import State
from kvedit.store.files import damaged
from kvedit.store.records import Entry


def log(state: State, *, everything: bool = False) -> list[Entry]:
    """Return the revisions that led to the current one, or all revisions; latest first."""
    journal = state.journal
    if everything:
        return [journal.entry(number) for number in reversed(range(len(journal)))]
    entries: list[Entry] = []
    number: int | None = state.revision.entry.number
    while number is not None:
        entries.append(journal.entry(number))
        number = entries[-1].parent
    return entries


def text_of(state: State, revision: int) -> str:
    """Return the text of a revision; raises `UsageError` if it does not exist."""
    _check_number(state, revision)
    return state.journal.revision(revision).text


def checkout(state: State, revision: int) -> None:
    """Make a revision the current one. The caller holds the lock.

    Raises:
        UsageError: No revision has that number.
    """
    _check_number(state, revision)
    state.go_to(revision, ())


def undo(state: State, count: int) -> None:
    """Return to the text before the last `count` edits. The caller holds the lock.

    Raises:
        UsageError: Fewer edits can be undone, or `count` is below 1.
    """
    _check_count("undo", count)
    undone, number = list(state.manifest.undone), state.revision.entry.state
    for step in range(count):
        parent = state.journal.entry(number).parent
        if parent is None:
            raise _too_many("undo", step)
        undone.append(number)
        number = state.journal.entry(parent).state
    state.go_to(_best_revision(state, number), tuple(undone))


def redo(state: State, count: int) -> None:
    """Redo the last `count` undone edits; raises the same errors as `undo`."""
    _check_count("redo", count)
    undone, number = list(state.manifest.undone), state.revision.entry.state
    for step in range(count):
        if not undone:
            raise _too_many("redo", step)
        number = undone.pop()
    state.go_to(_best_revision(state, number), tuple(undone))


def _best_revision(state: State, number: int) -> int:
    """Return the revision of text `number` with the most exact rows; the latest, if several have them.

    Only revisions with the text's last conversation count, so a forgotten one stays forgotten.
    """
    journal = state.journal
    entries = [journal.entry(later) for later in range(number, len(journal))]
    entries = [entry for entry in entries if entry.state == number]
    if not entries:
        raise damaged(f"revision {number}", "does not have the recorded text")
    last = entries[-1]
    conversation = journal.revision(last.number).turns
    for entry in sorted(entries, key=lambda entry: (entry.frontier, entry.number), reverse=True):
        if entry.tokens == last.tokens and journal.revision(entry.number).turns == conversation:
            return entry.number
    return last.number


def _check_number(state: State, revision: int) -> None:
    if not 0 <= revision < len(state.journal):
        raise UsageError(
            f"There is no revision {revision}; the log has 0 to {len(state.journal) - 1}.",
            "Run `kvedit log --all` to see them.",
        )


def _check_count(verb: str, count: int) -> None:
    if count < 1:
        raise UsageError("The number of edits must be at least 1.", f"Run `kvedit {verb} 1`, or more.")


def _too_many(verb: str, possible: int) -> UsageError:
    fact = {"undo": "undone", "redo": "redone"}[verb]
    edits = "edit" if possible == 1 else "edits"
    return UsageError(
        f"Only {possible} {edits} can be {fact}." if possible else f"There is nothing to {verb}.",
        "Run `kvedit log` to see the edits of the session.",
    )
