"""The journal: every revision of a session, one line of JSON each, in one file that only grows.

A line says how a revision differs from its parent. From time to time a line says all of it, so
that opening one reads a few lines back, however many there are: once the lines since the last
whole one are as long as that one was.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from msgspec import UNSET

from kvedit.errors import KveditError
from kvedit.store import files
from kvedit.store.files import damaged
from kvedit.store.records import (
    JOURNAL_BYTES,
    Entry,
    JournalRecord,
    Line,
    Revision,
    dump_revision,
    parse_entry,
    parse_line,
    parse_revision,
)

_LEAST_BYTES = 16384  # lines that one may have to read, however short the document is
_SUFFIX = ".jsonl"
_LINE_BYTES = 100  # every line is longer, so there are not too many of them to hold


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
        if (data and not data.endswith(b"\n")) or data.count(b"\n") > 1 + len(data) // _LINE_BYTES:
            raise damaged("the journal", "does not consist of lines")
        self._lines = data.split(b"\n")[:-1]
        self._known: Revision | None = None  # the last one read or written

    @property
    def record(self) -> JournalRecord:
        """What the manifest keeps of it."""
        return JournalRecord(self._name, self._size_bytes, self._hash.hexdigest()[:32])

    def __len__(self) -> int:
        return len(self._lines)

    def entry(self, number: int) -> Entry:
        """Give what the log says of a revision; raises `SessionError` when it cannot be understood."""
        return parse_entry(self._line(number))

    def revision(self, number: int) -> Revision:
        """Read a revision; raises `SessionError` when it cannot be understood."""
        lines: list[Line] = []
        sizes: list[int] = []
        at = number
        while not (self._known and at == self._known.entry.number):
            lines.append(self._line(at))
            sizes.append(len(self._lines[at]))
            if lines[-1].text is not UNSET:
                # No writer lets one read more than this; see `append`.
                if sum(sizes[1:-1]) > max(sizes[-1], _LEAST_BYTES):
                    raise damaged(f"revision {number}", "is too far from a whole line")
                break
            assert lines[-1].parent is not None
            at = lines[-1].parent
        found = self._known
        try:
            for line in reversed(lines):
                found = parse_revision(line, found)
        except ValueError:
            raise damaged(f"revision {number}", "does not fit the one before it") from None
        assert found is not None
        self._known = found
        return found

    def append(self, revision: Revision) -> bytes:
        """Write a revision at the end; it counts once the manifest says so.

        Raises:
            KveditError: It cannot be written, or the journal would be larger than one is read.
        """
        parent = revision.entry.parent
        whole = parent is None or self._is_far(parent)
        line = dump_revision(revision, None if whole or parent is None else self.revision(parent))
        if self._size_bytes + len(line) > JOURNAL_BYTES:
            raise KveditError(
                f"The session's journal would be larger than {JOURNAL_BYTES} bytes.",
                "Run `kvedit purge`, which drops the past, or load the document again.",
            )
        if not self._name:
            self._name = f"journal-{files.digest(line)}{_SUFFIX}"
        files.append_file(self._folder / self._name, self._size_bytes, line)
        self._hash.update(line)
        self._size_bytes += len(line)
        self._lines.append(line)
        self._known = revision
        return line

    def segments(self) -> set[str]:
        """Names of all segments that any revision points into; raises as `entry` does."""
        found = {run[0] for number in range(len(self)) for run in self._line(number).rows[1]}
        return {name for name in found if name is not None}

    def _line(self, number: int) -> Line:
        try:
            if not 0 <= number < len(self._lines):
                raise ValueError("no such line")
            return parse_line(self._lines[number], number)
        except ValueError:
            raise damaged(f"revision {number}", "cannot be understood") from None

    def _is_far(self, number: int) -> bool:
        """Whether the lines from the last whole one to this one have become longer than that one."""
        length = 0
        while True:
            line, size = self._line(number), len(self._lines[number])
            if line.text is not UNSET:
                return length > max(size, _LEAST_BYTES)
            assert line.parent is not None
            length += size
            number = line.parent


def _read(path: Path, size_bytes: int) -> bytes:
    data = files.read_file(path, "the journal", JOURNAL_BYTES)
    if len(data) < size_bytes:
        raise damaged("the journal", f"has {len(data)} bytes of {size_bytes}")
    return data[:size_bytes]
