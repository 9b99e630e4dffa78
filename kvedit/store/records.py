"""The records of a session and their JSON: a manifest, and a chain of immutable revisions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvedit.document import Edit, kept_spans
from kvedit.errors import SessionError
from kvedit.files import digest
from kvedit.rows import Piece

FORMAT = 1


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
class Manifest:
    """The one small file that changes: `session.json`.

    Attributes:
        created: When the document was loaded.
        source: Path of the document, or `-`.
        encoding: How its bytes were read.
        bom: Whether they began with a byte order mark.
        model: What computed the rows.
        tokenizer: Name of the tokenizer's file.
        head_ids, before_question, after_question: The prompt's layout.
        prefill_tokens_per_s: Speed of the prefill at load.
        revision: Name of the present revision.
    """

    created: str
    source: str
    encoding: str
    bom: bool
    model: ModelRecord
    tokenizer: str
    head_ids: tuple[int, ...]
    before_question: str
    after_question: str
    prefill_tokens_per_s: float
    revision: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Characters `[start, stop)` of an immutable text."""

    text: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Revision:
    """One state of the document.

    Attributes:
        number: Counts from 0, the load.
        parent: Name of the revision before; `None` for the load.
        created: When.
        command: What made it.
        edits: Edits of the text since the load.
        text: Where the text's characters live.
        rows: Where the rows live, and which were refreshed.
        frontier: The rows before it are exact.
    """

    number: int
    parent: str | None
    created: str
    command: str
    edits: int
    text: tuple[TextPiece, ...]
    rows: tuple[Piece, ...]
    frontier: int


def splice_text(
    pieces: Sequence[TextPiece], edits: Sequence[Edit], inserted: Sequence[str]
) -> tuple[TextPiece, ...]:
    """Apply edits to a text's pieces.

    Args:
        pieces: The text before.
        edits: Sorted, disjoint edits of it.
        inserted: For each edit, the name of the immutable text that holds its new characters.
    """
    length = sum(piece.stop - piece.start for piece in pieces)
    fresh = [
        (edit.start, TextPiece(name, 0, len(edit.text)))
        for edit, name in zip(edits, inserted, strict=True)
        if edit.text
    ]
    kept = [
        (old, piece)
        for start, _, size in kept_spans(edits, length)
        for old, piece in _cut(pieces, start, start + size)
    ]
    # A new text stands before the old characters at its place.
    ordered = sorted(
        [*((at, 0, piece) for at, piece in fresh), *((at, 1, piece) for at, piece in kept)],
        key=lambda item: item[:2],
    )
    return tuple(piece for _, _, piece in ordered)


def _cut(pieces: Sequence[TextPiece], start: int, stop: int) -> list[tuple[int, TextPiece]]:
    """Give the parts of `pieces` within `[start, stop)`, each with where it begins."""
    found: list[tuple[int, TextPiece]] = []
    offset = 0
    for piece in pieces:
        low, high = max(start, offset), min(stop, offset + piece.stop - piece.start)
        if low < high:
            found.append(
                (low, TextPiece(piece.text, piece.start + low - offset, piece.start + high - offset))
            )
        offset += piece.stop - piece.start
    return found


def dump(record: Manifest | Revision) -> bytes:
    """Write a record as JSON."""
    fields = asdict(record)
    if isinstance(record, Revision):
        fields["text"] = [[piece.text, piece.start, piece.stop] for piece in record.text]
        fields["rows"] = [[p.segment, p.start, p.length, int(p.refreshed)] for p in record.rows]
    fields = {"format": FORMAT, **fields}
    if isinstance(record, Manifest):  # every other file is named by its checksum
        fields["checksum"] = _checksum(fields)
    return json.dumps(fields).encode()


def _checksum(fields: dict[str, Any]) -> str:
    return digest(json.dumps(fields).encode())


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        SessionError: Of another format.
        ValueError, KeyError, TypeError: Damaged.
    """
    fields = _fields(data)
    if fields.pop("checksum") != _checksum({"format": FORMAT, **fields}):
        raise ValueError("the checksum differs")
    fields["model"] = ModelRecord(**fields["model"])
    fields["head_ids"] = tuple(fields["head_ids"])
    return Manifest(**fields)


def parse_revision(data: bytes) -> Revision:
    """Read a revision; raises as `parse_manifest` does."""
    fields = _fields(data)
    fields["text"] = tuple(TextPiece(*piece) for piece in fields["text"])
    fields["rows"] = tuple(Piece(s, start, length, bool(flag)) for s, start, length, flag in fields["rows"])
    return Revision(**fields)


def _fields(data: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(data)
    found = fields.pop("format")
    if found != FORMAT:
        raise SessionError(
            f"The session was written in format {found}, and this kvedit reads format {FORMAT}.",
            "Use the kvedit that wrote it, or load the document again with --force.",
        )
    return fields
