"""The journal: all revisions of a session in one append-only file, one line of JSON per revision.

A line holds how a revision differs from its parent. When the lines since the last complete one are longer
than that line, the next line is complete, so reading a revision takes few lines in a journal of any length.
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

_LEAST_BYTES = 16384  # below this, no complete line is due, however short the last one is
_SUFFIX = ".jsonl"
_LINE_BYTES = 100  # every line is longer; this limits how many lines a crafted journal can have


class Journal:
    """The revisions of a session.

    Args:
        folder: Folder of the session.
        record: The file and how much of it is valid; `None` for a new journal.

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
            raise damaged("the journal", "is not a sequence of lines")
        self._lines = data.split(b"\n")[:-1]
        self._known: Revision | None = None  # the last one read or written

    @property
    def record(self) -> JournalRecord:
        """The journal's record in the manifest."""
        return JournalRecord(self._name, self._size_bytes, self._hash.hexdigest()[:32])

    def __len__(self) -> int:
        return len(self._lines)

    def entry(self, number: int) -> Entry:
        """Return a revision's entry in the log; raise `SessionError` if its line is invalid."""
        return parse_entry(self._line(number))

    def revision(self, number: int) -> Revision:
        """Read a revision; raise `SessionError` if it is invalid."""
        lines: list[Line] = []
        sizes: list[int] = []
        ancestor = number
        while not (self._known and ancestor == self._known.entry.number):
            lines.append(self._line(ancestor))
            sizes.append(len(self._lines[ancestor]))
            if lines[-1].text is not UNSET:
                # `append` never lets the distance become larger.
                if sum(sizes[1:-1]) > max(sizes[-1], _LEAST_BYTES):
                    raise damaged(f"revision {number}", "is too far from a complete line")
                break
            assert lines[-1].parent is not None
            ancestor = lines[-1].parent
        revision = self._known
        try:
            for line in reversed(lines):
                revision = parse_revision(line, revision)
        except ValueError:
            raise damaged(f"revision {number}", "does not fit its parent") from None
        assert revision is not None
        self._known = revision
        return revision

    def append(self, revision: Revision) -> bytes:
        """Append a revision; it becomes valid when the manifest is written.

        Raises:
            KveditError: It cannot be written, or the journal would exceed `JOURNAL_BYTES`.
        """
        parent = revision.entry.parent
        complete = parent is None or self._is_far(parent)
        line = dump_revision(revision, None if complete or parent is None else self.revision(parent))
        if self._size_bytes + len(line) > JOURNAL_BYTES:
            raise KveditError(
                f"The session's journal would be larger than {JOURNAL_BYTES} bytes.",
                "Run `kvedit purge`, which removes the history, or load the document again.",
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
        """Return the names of all segments that any revision uses; raise as `entry` does."""
        names = {run[0] for number in range(len(self)) for run in self._line(number).rows[1]}
        return {name for name in names if name is not None}

    def _line(self, number: int) -> Line:
        try:
            if not 0 <= number < len(self._lines):
                raise ValueError("no such line")
            return parse_line(self._lines[number], number)
        except ValueError:
            raise damaged(f"revision {number}", "is invalid") from None

    def _is_far(self, number: int) -> bool:
        """Return whether the lines after the last complete one, up to this one, are longer than that."""
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
