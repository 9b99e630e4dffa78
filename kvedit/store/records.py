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
"""Largest size of a journal, which is read into memory."""
PARTS = ("config", "weights", "tokenizer", "chat_template")
LATER_PARTS = ("tensor_samples",)  # sessions of kvedit 0.2 lack them

Run = tuple[str | None, Count, Positive, Literal[0, 1]]
"""A `Piece`: segment, start, length, and whether its rows were refreshed."""


class ModelRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The model that computed the rows.

    Attributes:
        name: As the user named it.
        directory: Folder of its checkpoint.
        dtype, device: As chosen at load.
        context_length: Number of positions that it was trained for.
        parts: Fingerprints by name of the part.
    """

    name: FilePath
    directory: FilePath
    dtype: Annotated[str, form("|".join(DTYPES))]
    device: Annotated[str, form("|".join(DEVICE_NAMES))]
    context_length: Positive
    parts: dict[str, Fingerprint]

    def differs_from(self, parts: Mapping[str, str]) -> str | None:
        """Return the first recorded part that differs in `parts`, or `None` if all are equal."""
        return next((name for name, recorded in self.parts.items() if parts.get(name) != recorded), None)


class JournalRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The session's journal and how much of it is valid.

    Attributes:
        name: File name.
        size_bytes: Valid bytes; a killed command may have left more.
        digest: Checksum of the valid bytes.
    """

    name: checks.JournalName
    size_bytes: Annotated[int, Meta(ge=1, le=JOURNAL_BYTES)]
    digest: Name


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of `session.json`, the one small file that is replaced.

    Attributes:
        created: When the document was loaded.
        used: When the session was last loaded or chosen; the latest one is current. Empty for a copy.
        source: Path of the document, or `-`.
        encoding: Encoding of the document.
        bom: Whether the document started with a byte order mark.
        system: System text of the prompt.
        model: The model that computed the rows.
        tokenizer: Name of the tokenizer's file.
        head_ids, before_question, after_question, before_next: The prompt's layout.
        prefill_tokens_per_s: Speed of the prefill at load.
        journal: The file with the revisions.
        revision: Number of the current revision.
        undone: Numbers of the revisions whose edits `redo` restores, the next one last.
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
    """A revision's entry in the log.

    Attributes:
        number: Counts from 0.
        parent: Number of the previous revision; `None` for the first.
        state: Number of the load or edit that produced its text.
        created: When it was created.
        command: The command that created it.
        edits: Number of edits since the load.
        changes: How its text differs from its parent's.
        lines: Number of lines of the document.
        tokens, stale, missing: Number of rows, and of rows in these states.
        frontier: Rows before this one are exact.
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
    """The document, its rows and the conversation at one point in time.

    Attributes:
        entry: Its entry in the log.
        text: The document.
        rows: Where the rows are stored, and which were refreshed.
        turns: Ids of the conversation after the document.
    """

    entry: Entry
    text: str
    rows: tuple[Piece, ...]
    turns: tuple[int, ...] = ()


class Line(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of the journal: an `Entry`, and how the revision differs from its parent.

    Attributes:
        text: The document; only a complete line has it.
        rows, turns: Number of leading elements shared with the parent, those between, number of trailing.
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
    """Serialize a manifest as JSON that includes its checksum."""
    fields = {"format": FORMAT, **to_builtins(manifest)}
    fields["checksum"] = _checksum(fields)
    return json.dumps(fields).encode()


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest, and check everything that does not depend on other files.

    Raises:
        SessionError: It has another format version.
        ValueError: It is damaged or malicious.
    """
    fields = checks.load_json(data)
    version = fields.pop("format", None)
    if version != FORMAT:
        raise _wrong_format(checks.record(version, Count))
    if fields.pop("checksum", None) != _checksum({"format": FORMAT, **fields}):
        raise ValueError("the checksum differs")
    manifest = checks.record(fields, Manifest)
    checks.check_moment(manifest.created)
    if manifest.used:
        checks.check_moment(checks.record(manifest.used, Time))
    checks.check_encoding(manifest.encoding)
    if not {*PARTS} <= manifest.model.parts.keys() <= {*PARTS, *LATER_PARTS}:
        raise ValueError("wrong parts of a model")
    return manifest


def _wrong_format(version: int) -> SessionError:
    remedy = "Update kvedit" if version > FORMAT else "Use the kvedit that wrote it"
    return SessionError(
        f"The session has format {version}, but this kvedit reads format {FORMAT}.",
        f"{remedy}, or load the document again with --force.",
    )


def dump_revision(revision: Revision, parent: Revision | None) -> bytes:
    """Serialize a revision as one line of JSON: its differences from `parent`, or all of it if `None`.

    Leading and trailing rows and ids shared with the parent are left out. The text follows from the
    parent's text and the entry's changes.
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
    """Parse line `number` of a journal, and check everything that does not depend on its parent.

    Raises:
        ValueError: It is damaged or malicious.
    """
    line = checks.record(checks.load_json(data), Line)
    checks.check_moment(line.created)
    first = number == 0 and line.parent is None
    if line.number != number or line.state > number or not (first or line.parent in range(number)):
        raise ValueError("out of order")
    complete = line.text is not UNSET
    if (first and not complete) or (complete and any((*line.rows[::2], *line.turns[::2]))):
        raise ValueError("nothing to share elements with")
    if any(start > stop for start, stop, _ in line.changes):
        raise ValueError("a change that ends before it starts")
    if any(start or refreshed for name, start, _, refreshed in line.rows[1] if name is None):
        raise ValueError("missing rows with a position")
    # Each name only once: matching a pattern takes time.
    checks.record([*{run[0] for run in line.rows[1]}], list[Name | None])
    return line


def parse_entry(line: Line) -> Entry:
    """Return the log entry of a line."""
    fields = {name: getattr(line, name) for name in Entry.__slots__}
    return Entry(**{**fields, "changes": tuple(Edit(*change) for change in line.changes)})


def parse_revision(line: Line, parent: Revision | None) -> Revision:
    """Return the revision of a line, given its parent's; a complete line needs no parent.

    Raises:
        ValueError: The line does not fit its parent.
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
    """Undo `_cut`; raise `ValueError` if `before` has fewer elements than the two ends."""
    if head + tail > len(before):
        raise ValueError("more than the parent has")
    return (*before[:head], *middle, *before[len(before) - tail :])


def _cut(before: tuple[T, ...], after: tuple[T, ...]) -> tuple[int, tuple[T, ...], int]:
    """Return the number of shared leading elements, the elements of `after` between, and shared trailing."""
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
