"""The journal: every revision of a session, one line of JSON each, in one file that only grows.

A line says how a revision differs from its parent. From time to time a line says all of it, so
that opening one reads a few lines back, however many there are: once the lines since the last
whole one are as long as that one was.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvedit import files
from kvedit.document import Document
from kvedit.files import damaged
from kvedit.store.records import Entry, JournalRecord, Revision, dump_revision, parse_entry, parse_revision

_LEAST_BYTES = 16384  # lines that one may have to read, however short the document is
_SUFFIX = ".jsonl"


class Journal:
    """The revisions of a session.

    Args:
        folder: The session's.
        record: How much of which file counts; `None` for a new one.

    Raises:
        SessionError: The file is missing or damaged.
    """

    def __init__(self, folder: Path, record: JournalRecord | None) -> None:
        self._folder = folder
        self._name = record.name if record else ""
        data = b"" if record is None else _read(folder / record.name, record.size_bytes)
        self._hash = hashlib.sha256(data)
        self._size_bytes = len(data)
        if record and self.record != record:
            raise damaged("the journal", "does not match its checksum")
        self._lines = data.splitlines()
        self._known: Revision | None = None  # the last one read or written

    @property
    def record(self) -> JournalRecord:
        """What the manifest keeps of it."""
        return JournalRecord(self._name, self._size_bytes, self._hash.hexdigest()[:32])

    def __len__(self) -> int:
        return len(self._lines)

    def entry(self, number: int) -> Entry:
        """Give what the log says of a revision."""
        try:
            return parse_entry(self._fields(number))
        except (ValueError, KeyError, TypeError, IndexError):
            raise damaged(f"revision {number}", "cannot be understood") from None

    def revision(self, number: int) -> Revision:
        """Read a revision; raises `SessionError` when it cannot be understood."""
        try:
            lines: list[dict[str, Any]] = []
            at: int | None = number
            while at is not None and not (self._known and at == self._known.entry.number):
                lines.append(self._fields(at))
                at = None if "text" in lines[-1] else lines[-1]["parent"]
            found = self._known if at is not None else None
            text = found.text if found else ""
            for fields in reversed(lines):
                whole = fields.get("text")
                changes = parse_entry(fields).changes
                text = whole if whole is not None else Document(text).apply(changes).text
                found = parse_revision(fields, text, None if whole is not None else found)
            if found is None:
                raise ValueError("no revision")
            self._known = found
            return found
        except (ValueError, KeyError, TypeError, IndexError):
            raise damaged(f"revision {number}", "cannot be understood") from None

    def append(self, revision: Revision) -> bytes:
        """Write a revision at the end; it counts once the manifest says so."""
        parent = revision.entry.parent
        whole = parent is None or self._is_far(parent)
        line = dump_revision(revision, None if whole or parent is None else self.revision(parent))
        if not self._name:
            self._name = f"journal-{files.digest(line)}{_SUFFIX}"
        files.append_file(self._folder / self._name, self._size_bytes, line)
        self._hash.update(line)
        self._size_bytes += len(line)
        self._lines.append(line)
        self._known = revision
        return line

    def segments(self) -> set[str]:
        """Names of all segments that any revision points into."""
        found = {piece[0] for number in range(len(self)) for piece in self._fields(number)["rows"][1]}
        return {name for name in found if name is not None}

    def _fields(self, number: int) -> dict[str, Any]:
        if not 0 <= number < len(self._lines):
            raise IndexError(number)
        fields: dict[str, Any] = json.loads(self._lines[number])
        if fields["number"] != number or (fields["parent"] is not None and fields["parent"] >= number):
            raise ValueError("out of order")
        return fields

    def _is_far(self, number: int) -> bool:
        """Whether the lines from the last whole one to this one have become longer than that one."""
        length = 0
        while True:
            fields, size = self._fields(number), len(self._lines[number])
            if "text" in fields:
                return length > max(size, _LEAST_BYTES)
            length += size
            number = fields["parent"]


def _read(path: Path, size_bytes: int) -> bytes:
    data = files.read_file(path, "the journal")
    if len(data) < size_bytes:
        raise damaged("the journal", f"has {len(data)} bytes of {size_bytes}")
    return data[:size_bytes]
