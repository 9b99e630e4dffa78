"""The records of a session and their JSON: a manifest, and the revisions in its journal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kvedit.document import Edit
from kvedit.errors import SessionError
from kvedit.files import digest
from kvedit.rows import Piece

FORMAT = 2


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model that computed the rows.

    Attributes:
        name: As the user named it.
        directory: Where its checkpoint was found.
        dtype, device: As they were chosen at load.
        context_length: Positions that it was made for.
        parts: Fingerprint, by the name of the part.
    """

    name: str
    directory: str
    dtype: str
    device: str
    context_length: int
    parts: dict[str, str]


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """How much of which journal is the session's.

    Attributes:
        name: Of the file.
        size_bytes: Bytes that count; what a killed command wrote after them does not.
        digest: Of those bytes.
    """

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The one small file that is replaced: `session.json`.

    Attributes:
        created: When the document was loaded.
        used: When it was loaded or chosen; the latest one is the current session.
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

    created: str
    used: str
    source: str
    encoding: str
    bom: bool
    system: str | None
    model: ModelRecord
    tokenizer: str
    head_ids: tuple[int, ...]
    before_question: str
    after_question: str
    before_next: str
    prefill_tokens_per_s: float
    journal: JournalRecord
    revision: int
    undone: tuple[int, ...] = ()


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


def dump_manifest(manifest: Manifest) -> bytes:
    """Write a manifest as JSON, with a checksum of its own."""
    fields = {"format": FORMAT, **asdict(manifest)}
    fields["checksum"] = _checksum(fields)
    return json.dumps(fields).encode()


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        SessionError: Of another format.
        ValueError, KeyError, TypeError: Damaged.
    """
    fields: dict[str, Any] = json.loads(data)
    found = fields.pop("format")
    if found != FORMAT:
        raise SessionError(
            f"The session was written in format {found}, and this kvedit reads format {FORMAT}.",
            "Use the kvedit that wrote it, or load the document again with --force.",
        )
    if fields.pop("checksum") != _checksum({"format": FORMAT, **fields}):
        raise ValueError("the checksum differs")
    fields["model"] = ModelRecord(**fields["model"])
    fields["journal"] = JournalRecord(**fields["journal"])
    for name in ("head_ids", "undone"):
        fields[name] = tuple(fields[name])
    return Manifest(**fields)


def dump_revision(revision: Revision, parent: Revision | None) -> bytes:
    """Write a revision as one line of JSON: what differs from its parent, or all of it.

    Of the rows and of the conversation, what both share at their two ends is left out; the text
    is that of the parent with the entry's changes.
    """
    entry = asdict(revision.entry)
    entry["changes"] = [[edit.start, edit.stop, edit.text] for edit in revision.entry.changes]
    if parent is None:
        entry["text"] = revision.text
    rows, turns = (parent.rows, parent.turns) if parent else ((), ())
    entry["rows"] = _cut(rows, revision.rows)
    entry["rows"][1] = [[p.segment, p.start, p.length, int(p.refreshed)] for p in entry["rows"][1]]
    entry["turns"] = _cut(turns, revision.turns)
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def parse_entry(fields: dict[str, Any]) -> Entry:
    """Read what the log says of a revision."""
    names = Entry.__slots__
    changes = tuple(Edit(start, stop, text) for start, stop, text in fields["changes"])
    return Entry(**{**{name: fields[name] for name in names}, "changes": changes})


def parse_revision(fields: dict[str, Any], text: str, parent: Revision | None) -> Revision:
    """Read a revision, given its text and, unless it is whole, its parent."""
    head, middle, tail = fields["rows"]
    before = parent.rows if parent else ()
    pieces = tuple(Piece(name, start, length, bool(flag)) for name, start, length, flag in middle)
    rows = (*before[:head], *pieces, *before[len(before) - tail :])
    head, ids, tail = fields["turns"]
    spoken = parent.turns if parent else ()
    return Revision(parse_entry(fields), text, rows, (*spoken[:head], *ids, *spoken[len(spoken) - tail :]))


def _cut(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[Any]:
    """Say how `after` differs: elements shared at the start, those between, shared at the end."""
    shorter = min(len(before), len(after))
    head = 0
    while head < shorter and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < shorter - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    return [head, list(after[head : len(after) - tail]), tail]


def _checksum(fields: dict[str, Any]) -> str:
    return digest(json.dumps(fields).encode())
