"""The records of a session and their JSON: a manifest, and the revisions in its journal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, to_builtins

from kvedit.cache.rows import Piece
from kvedit.errors import SessionError
from kvedit.names import DEVICE_NAMES, DTYPES
from kvedit.store import checks
from kvedit.store.checks import Count, FilePath, Fingerprint, Name, Positive, T, Text, Time, form
from kvedit.store.files import digest
from kvedit.text.document import Edit, changed

FORMAT = 2
JOURNAL_BYTES = 1 << 30
"""What a journal may have: it is read into memory."""
PARTS = ("config", "weights", "tokenizer", "chat_template")
LATER_PARTS = ("tensor_samples",)  # sessions of kvedit 0.2 lack them

Run = tuple[str | None, Count, Positive, Literal[0, 1]]
"""Segment, start, length and whether refreshed, of a `Piece`."""


class ModelRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The model that computed the rows.

    Attributes:
        name: As the user named it.
        directory: Where its checkpoint was found.
        dtype, device: As they were chosen at load.
        context_length: Positions that it was made for.
        parts: Fingerprint, by the name of the part.
    """

    name: FilePath
    directory: FilePath
    dtype: Annotated[str, form("|".join(DTYPES))]
    device: Annotated[str, form("|".join(DEVICE_NAMES))]
    context_length: Positive
    parts: dict[str, Fingerprint]

    def differs_from(self, parts: Mapping[str, str]) -> str | None:
        """Name the first part that is recorded and is another in a model; `None` if it is this one."""
        return next((name for name, kept in self.parts.items() if parts.get(name) != kept), None)


class JournalRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """How much of which journal is the session's.

    Attributes:
        name: Of the file.
        size_bytes: Bytes that count; what a killed command wrote after them does not.
        digest: Of those bytes.
    """

    name: checks.JournalName
    size_bytes: Annotated[int, Meta(ge=1, le=JOURNAL_BYTES)]
    digest: Name


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The one small file that is replaced: `session.json`.

    Attributes:
        created: When the document was loaded.
        used: When it was loaded or chosen; the latest one is the current session. Empty for a copy.
        source: Path of the document, or `-`.
        encoding: How its bytes were read.
        bom: Whether they began with a byte order mark.
        system: System text of the prompt.
        model: What computed the rows.
        tokenizer: Name of the tokenizer's file.
        head_ids, before_question, after_question, before_next: The prompt's layout.
        prefill_tokens_per_s: Speed of the prefill at load.
        journal: Where the revisions are.
        revision: Number of the present one.
        undone: Numbers of the edits that `redo` makes again, the next one last.
    """

    created: Time
    used: str
    source: FilePath
    encoding: checks.Encoding
    bom: bool
    system: Text | None
    model: ModelRecord
    tokenizer: Name
    head_ids: tuple[Count, ...]
    before_question: Text
    after_question: Text
    before_next: Text
    prefill_tokens_per_s: checks.Speed
    journal: JournalRecord
    revision: Count
    undone: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """What the log says of a revision.

    Attributes:
        number: Counts from 0.
        parent: The revision before; `None` for the first.
        state: Number of the load or edit that made its text.
        created: When.
        command: What made it, as one can type it.
        edits: Edits of the text since the load.
        changes: How its text differs from its parent's.
        lines: Of the document.
        tokens, stale, missing: Rows in all, and of these states.
        frontier: The rows before it are exact.
    """

    number: int
    parent: int | None
    state: int
    created: str
    command: str
    edits: int
    changes: tuple[Edit, ...]
    lines: int
    tokens: int
    stale: int
    missing: int
    frontier: int


@dataclass(frozen=True, slots=True)
class Revision:
    """One state of the document and of its rows.

    Attributes:
        entry: What the log says of it.
        text: The document.
        rows: Where the rows live, and which were refreshed.
        turns: Ids of the conversation after the document.
    """

    entry: Entry
    text: str
    rows: tuple[Piece, ...]
    turns: tuple[int, ...] = ()


class Line(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of the journal: an `Entry`, and how the revision differs from its parent.

    Attributes:
        text: The document, on a line that says all of a revision.
        rows, turns: Elements shared with the parent's at the start, those between, shared at the end.
    """

    number: Count
    parent: Count | None
    state: Count
    created: Time
    command: Text
    edits: Count
    changes: tuple[tuple[Count, Count, Text], ...]
    lines: Count
    tokens: Count
    stale: Count
    missing: Count
    frontier: Count
    text: Text | UnsetType = UNSET
    rows: tuple[Count, tuple[Run, ...], Count]
    turns: tuple[Count, tuple[Count, ...], Count]


def dump_manifest(manifest: Manifest) -> bytes:
    """Write a manifest as JSON, with a checksum of its own."""
    fields = {"format": FORMAT, **to_builtins(manifest)}
    fields["checksum"] = _checksum(fields)
    return json.dumps(fields).encode()


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest, and check all of it but what other files say.

    Raises:
        SessionError: Of another format.
        ValueError: Damaged, or made so that it would do harm.
    """
    fields = checks.load_json(data)
    found = fields.pop("format", None)
    if found != FORMAT:
        raise _another_format(checks.record(found, Count))
    if fields.pop("checksum", None) != _checksum({"format": FORMAT, **fields}):
        raise ValueError("the checksum differs")
    manifest = checks.record(fields, Manifest)
    checks.check_moment(manifest.created)
    if manifest.used:
        checks.check_moment(checks.record(manifest.used, Time))
    checks.check_encoding(manifest.encoding)
    if not {*PARTS} <= manifest.model.parts.keys() <= {*PARTS, *LATER_PARTS}:
        raise ValueError("other parts of a model")
    return manifest


def _another_format(found: int) -> SessionError:
    newer = "Update kvedit" if found > FORMAT else "Use the kvedit that wrote it"
    return SessionError(
        f"The session was written in format {found}, and this kvedit reads format {FORMAT}.",
        f"{newer}, or load the document again with --force.",
    )


def dump_revision(revision: Revision, parent: Revision | None) -> bytes:
    """Write a revision as one line of JSON: what differs from its parent, or all of it.

    Of the rows and of the conversation, what both share at their two ends is left out; the text
    is that of the parent with the entry's changes.
    """
    fields = asdict(revision.entry)
    fields["changes"] = [[edit.start, edit.stop, edit.text] for edit in revision.entry.changes]
    if parent is None:
        fields["text"] = revision.text
    rows, turns = (parent.rows, parent.turns) if parent else ((), ())
    head, pieces, tail = _cut(rows, revision.rows)
    fields["rows"] = head, [[p.segment, p.start, p.length, int(p.refreshed)] for p in pieces], tail
    fields["turns"] = _cut(turns, revision.turns)
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def parse_line(data: bytes, number: int) -> Line:
    """Read line `number` of a journal, and check all of it but what its parent says.

    Raises:
        ValueError: Damaged, or made so that it would do harm.
    """
    line = checks.record(checks.load_json(data), Line)
    checks.check_moment(line.created)
    first = number == 0 and line.parent is None
    if line.number != number or line.state > number or not (first or line.parent in range(number)):
        raise ValueError("out of order")
    whole = line.text is not UNSET
    if (first and not whole) or (whole and any((*line.rows[::2], *line.turns[::2]))):
        raise ValueError("nothing to share with")
    if any(start > stop for start, stop, _ in line.changes):
        raise ValueError("a change that ends before it starts")
    if any(start or refreshed for name, start, _, refreshed in line.rows[1] if name is None):
        raise ValueError("a place of missing rows")
    checks.record([*{run[0] for run in line.rows[1]}], list[Name | None])  # once each: patterns take time
    return line


def parse_entry(line: Line) -> Entry:
    """Return what a line says of its revision."""
    fields = {name: getattr(line, name) for name in Entry.__slots__}
    return Entry(**{**fields, "changes": tuple(Edit(*change) for change in line.changes)})


def parse_revision(line: Line, parent: Revision | None) -> Revision:
    """Return the revision of a line, with that of its parent unless it is whole.

    Raises:
        ValueError: It does not fit its parent.
    """
    entry = parse_entry(line)
    if line.text is not UNSET:
        before, text = None, line.text
    elif parent:
        before, text = parent, changed(parent.text, entry.changes)
    else:
        raise ValueError("no parent")
    rows, turns = (before.rows, before.turns) if before else ((), ())
    head, runs, tail = line.rows
    pieces = tuple(Piece(name, start, length, bool(flag)) for name, start, length, flag in runs)
    return Revision(entry, text, _joined(rows, head, pieces, tail), _joined(turns, *line.turns))


def _joined(before: tuple[T, ...], head: int, middle: tuple[T, ...], tail: int) -> tuple[T, ...]:
    """Undo `_cut`; raises `ValueError` where the two ends would be more than there is."""
    if head + tail > len(before):
        raise ValueError("more than the parent has")
    return (*before[:head], *middle, *before[len(before) - tail :])


def _cut(before: tuple[T, ...], after: tuple[T, ...]) -> tuple[int, tuple[T, ...], int]:
    """Say how `after` differs: elements shared at the start, those between, shared at the end."""
    shorter = min(len(before), len(after))
    head = 0
    while head < shorter and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < shorter - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    return head, after[head : len(after) - tail], tail


def _checksum(fields: dict[str, Any]) -> str:
    return digest(json.dumps(fields).encode())
