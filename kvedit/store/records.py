"""The records of a session and their JSON: a manifest, and the revisions in its journal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvedit.cache.rows import Piece
from kvedit.errors import SessionError
from kvedit.names import DEVICE_NAMES, DTYPES
from kvedit.store import checks
from kvedit.store.files import digest
from kvedit.text.document import Edit

FORMAT = 2
JOURNAL_BYTES = 1 << 30
"""What a journal may have: it is read into memory."""
PARTS = ("config", "weights", "tokenizer", "chat_template")
LATER_PARTS = ("tensor_samples",)  # sessions of kvedit 0.2 lack them


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

    def differs_from(self, parts: Mapping[str, str]) -> str | None:
        """Name the first part that is recorded and is another in a model; `None` if it is this one."""
        return next((name for name, kept in self.parts.items() if parts.get(name) != kept), None)


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
    """Read a manifest, and check all of it but what other files say.

    Raises:
        SessionError: Of another format.
        ValueError: Damaged, or made so that it would do harm.
    """
    fields = checks.load_json(data)
    found = fields.pop("format", None)
    if found != FORMAT:
        raise _another_format(checks.count(found))
    if fields.pop("checksum", None) != _checksum({"format": FORMAT, **fields}):
        raise ValueError("the checksum differs")
    checks.mapping(fields, Manifest.__slots__)
    for name in ("before_question", "after_question", "before_next"):
        checks.text(fields[name])
    if fields["system"] is not None:
        checks.text(fields["system"])
    checks.moment(fields["created"])
    if fields["used"] != "":
        checks.moment(fields["used"])
    checks.path(fields["source"])
    checks.encoding(fields["encoding"])
    checks.flag(fields["bom"])
    checks.form(fields["tokenizer"], checks.NAME)
    checks.speed(fields["prefill_tokens_per_s"])
    checks.count(fields["revision"])
    for name in ("head_ids", "undone"):
        fields[name] = tuple(checks.count(number) for number in checks.items(fields[name]))
    fields["model"] = _parse_model(fields["model"])
    fields["journal"] = _parse_journal(fields["journal"])
    return Manifest(**fields)


def _another_format(found: int) -> SessionError:
    newer = "Update kvedit" if found > FORMAT else "Use the kvedit that wrote it"
    return SessionError(
        f"The session was written in format {found}, and this kvedit reads format {FORMAT}.",
        f"{newer}, or load the document again with --force.",
    )


def _parse_model(value: Any) -> ModelRecord:
    fields = checks.mapping(value, ModelRecord.__slots__)
    checks.path(fields["name"])
    checks.path(fields["directory"])
    checks.one_of(fields["dtype"], DTYPES)
    checks.one_of(fields["device"], DEVICE_NAMES)
    checks.count(fields["context_length"], least=1)
    parts = fields["parts"]
    later = [name for name in LATER_PARTS if isinstance(parts, dict) and name in parts]
    for fingerprint in checks.mapping(parts, (*PARTS, *later)).values():
        checks.form(fingerprint, checks.FINGERPRINT)
    return ModelRecord(**fields)


def _parse_journal(value: Any) -> JournalRecord:
    fields = checks.mapping(value, JournalRecord.__slots__)
    checks.form(fields["name"], checks.JOURNAL)
    checks.count(fields["size_bytes"], JOURNAL_BYTES, least=1)
    checks.form(fields["digest"], checks.NAME)
    return JournalRecord(**fields)


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


def parse_line(data: bytes, number: int) -> dict[str, Any]:
    """Read line `number` of a journal, and check all of it but what its parent says.

    Raises:
        ValueError: Damaged, or made so that it would do harm.
    """
    fields = checks.load_json(data)
    whole = "text" in fields
    checks.mapping(fields, (*Entry.__slots__, "rows", "turns", *(["text"] if whole else [])))
    for name in ("number", "edits", "lines", "tokens", "stale", "missing", "frontier"):
        checks.count(fields[name])
    checks.count(fields["state"], number)
    if fields["number"] != number:
        raise ValueError("out of order")
    if number or fields["parent"] is not None:
        checks.count(fields["parent"], number - 1)
    elif not whole:
        raise ValueError("no text and no parent")
    checks.moment(fields["created"])
    checks.text(fields["command"])
    if whole:
        checks.text(fields["text"])
    for change in checks.items(fields["changes"]):
        checks.text(checks.items(change, 3)[2])
        checks.count(change[0], checks.count(change[1]))
    for name, check in (("rows", _check_piece), ("turns", checks.count)):
        head, middle, tail = checks.items(fields[name], 3)
        checks.count(head, 0 if whole else checks.LARGEST)
        checks.count(tail, 0 if whole else checks.LARGEST)
        for each in checks.items(middle):
            check(each)
    return fields


def _check_piece(value: Any) -> None:
    name, start, length, refreshed = checks.items(value, 4)
    missing = name is None
    if not missing:
        checks.form(name, checks.NAME)
    checks.count(start, 0 if missing else checks.LARGEST)
    checks.count(length, least=1)
    checks.count(refreshed, 0 if missing else 1)


def parse_entry(fields: dict[str, Any]) -> Entry:
    """Give what a line says of its revision."""
    changes = tuple(Edit(start, stop, text) for start, stop, text in fields["changes"])
    return Entry(**{**{name: fields[name] for name in Entry.__slots__}, "changes": changes})


def parse_revision(fields: dict[str, Any], parent: Revision | None) -> Revision:
    """Give the revision of a line, with that of its parent unless it is whole.

    Raises:
        ValueError: It does not fit its parent.
    """
    entry = parse_entry(fields)
    text = fields["text"] if parent is None else changed(parent.text, entry.changes)
    pieces = tuple(Piece(name, start, length, bool(flag)) for name, start, length, flag in fields["rows"][1])
    rows, turns = (parent.rows, parent.turns) if parent else ((), ())
    return Revision(entry, text, _joined(rows, fields["rows"], pieces), _joined(turns, fields["turns"]))


def changed(text: str, changes: Sequence[Edit]) -> str:
    """Give a text after changes; raises `ValueError` where they are not sorted and disjoint spans of it."""
    kept: list[str] = []
    position = 0
    for edit in changes:
        if not position <= edit.start <= edit.stop <= len(text):
            raise ValueError("changes that do not fit the text")
        kept += [text[position : edit.start], edit.text]
        position = edit.stop
    return "".join([*kept, text[position:]])


def _joined(
    before: tuple[Any, ...], spliced: list[Any], middle: tuple[Any, ...] | None = None
) -> tuple[Any, ...]:
    """Undo `_cut`; raises `ValueError` where the two ends would be more than there is."""
    head, own, tail = spliced
    if head + tail > len(before):
        raise ValueError("more than the parent has")
    return (*before[:head], *(own if middle is None else middle), *before[len(before) - tail :])


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
