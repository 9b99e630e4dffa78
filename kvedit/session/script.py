"""The commands that rebuild a session: load, edits and questions, one per line."""

from __future__ import annotations

import hashlib
import shlex
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress

from kvedit.store.files import damaged
from kvedit.store.records import Entry, Manifest
from kvedit.text.document import Document, Edit, Source, changed
from kvedit.text.edits import escape

_VERBATIM = ("delete", "move", "ask", "heal", "forget")


def script(manifest: Manifest, past: Sequence[Entry], texts: Iterable[str]) -> str:
    """Return the script of a session.

    Args:
        manifest: The session's manifest.
        past: The revisions from the first to the current one.
        texts: Their texts, read one at a time.
    """
    texts = iter(texts)
    before = next(texts)
    digest = hashlib.sha256(before.encode()).hexdigest()
    lines = [f"# The text of the document had the SHA-256 {digest}."]
    source, encoding = manifest.source, Source("", manifest.encoding, manifest.bom).named
    if source == "-" or past[0].command != "load":
        source, encoding = "document.txt", None
        lines.append(f"# No file holds that text: write it to {source} first.")
    words = ["load", source, "--model", manifest.model.name]
    if encoding is not None:
        words += ["--encoding", encoding]
    if manifest.system is not None:
        words += ["--system", manifest.system]
    for option, value in (("--device", manifest.model.device), ("--dtype", manifest.model.dtype)):
        words += [option, value]
    lines.append(shlex.join(words))
    for entry, text in zip(past[1:], texts, strict=True):
        words = _checked(entry, before, text)
        if words[0] in _VERBATIM:
            lines.append(shlex.join(words))  # quoted, so it stays one command
        else:
            lines += spell(Document(before), entry.changes)
        before = text
    return "\n".join(lines) + "\n"


def _checked(entry: Entry, before: str, text: str) -> list[str]:
    """Return the words of the command that created a revision.

    Raises:
        SessionError: The revision's text is not the one before it with its changes applied. A complete
            line of the journal stores both.
    """
    with suppress(ValueError):
        words = shlex.split(entry.command)
        if words and changed(before, entry.changes) == text:
            return words
    raise damaged(f"revision {entry.number}", "does not follow from its recorded changes")


def spell(document: Document, changes: Sequence[Edit]) -> list[str]:
    """Return commands that apply changes to a text, from the last change to the first."""
    commands: list[str] = []
    for edit in reversed(changes):
        commands.append(_spell_one(document, edit))
        document = document.apply([edit])
    return commands


def _spell_one(document: Document, edit: Edit) -> str:
    text, ends = document.text, (*document.line_starts, len(document.text))
    whole = edit.start in ends and edit.stop in ends
    if whole and edit.start == edit.stop:
        after = 0 if edit.start == 0 else ends.index(edit.start)
        return f"insert --after {after} --exact -- {shlex.quote(escape(edit.text))}"
    first = bisect_right(document.line_starts, edit.start) - 1
    last = max(first + 1, bisect_right(document.line_starts, max(edit.stop - 1, 0)))
    start, stop = document.characters(first, last)
    new = text[start : edit.start] + edit.text + text[edit.stop : stop]
    lines = str(first + 1) if last == first + 1 else f"{first + 1}-{last}"
    if not new:
        return f"delete --lines {lines}"
    return f"replace --lines {lines} --exact -- {shlex.quote(escape(new))}"
