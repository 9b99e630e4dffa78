"""The document: its text, its lines, and edits of line ranges.

Lines are counted as in `grep -n`: they end at a line feed, and a carriage return before it
belongs to the line. Form feeds, lone carriage returns and U+2028 do not end a line. This module
handles characters only, not tokens or models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from kvedit.errors import UsageError
from kvedit.text.encoding import FOUND, MARKS, codec, decode, read_bytes

_RANGE = re.compile(r"(?P<first>\d{1,18})?(?P<dash>-)?(?P<last>\d{1,18})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class LineRange:
    """Lines `first..last`, 1-based and inclusive; `None` means "from the start" or "to the end"."""

    first: int | None
    last: int | None

    @classmethod
    def parse(cls, text: str) -> LineRange:
        """Read `7`, `40-60`, `40-` or `-5`.

        Raises:
            UsageError: The text is not a range, or its end is before its start.
        """
        match = _RANGE.fullmatch(text.strip())
        if not match or (match["first"] is None and match["last"] is None):
            raise UsageError(
                f"'{text}' is not a range of lines.",
                "Write 7, 40-60, 40- or -5, counting lines from 1.",
            )
        first = int(match["first"]) if match["first"] is not None else None
        last = int(match["last"]) if match["last"] is not None else None
        if match["dash"] is None:
            last = first
        if first is not None and last is not None and last < first:
            raise UsageError(f"The range {text} ends before it starts.", f"Write it as {last}-{first}.")
        return cls(first, last)

    def resolve(self, line_count: int) -> tuple[int, int]:
        """Return the half-open, 0-based span of lines in a document of `line_count` lines.

        Raises:
            UsageError: The range is not within `1..line_count`.
        """
        first = 1 if self.first is None else self.first
        last = line_count if self.last is None else self.last
        if first < 1 or last > line_count or first > last:
            held = "no lines" if line_count == 0 else f"lines 1 to {line_count}"
            raise UsageError(
                f"The range {self} is outside the document, which has {held}.",
                "Run `kvedit show` to see the lines with their numbers.",
            )
        return first - 1, last

    def __str__(self) -> str:
        if self.first is not None and self.first == self.last:
            return str(self.first)
        first = "" if self.first is None else self.first
        return f"{first}-{'' if self.last is None else self.last}"


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement of the characters `[start, stop)` by `text`; a deletion has an empty `text`.

    Attributes:
        origin: Start of the new characters in the old text, if they were moved.
    """

    start: int
    stop: int
    text: str = ""
    origin: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where a document came from, and how its bytes were read."""

    path: str
    encoding: str = "utf-8"
    bom: bool = False

    @property
    def named(self) -> str | None:
        """The encoding, if it must be named to read the same bytes again."""
        found = self.encoding == "utf-8" or (self.bom and self.encoding in FOUND)
        return None if found else self.encoding


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where its lines start.

    Attributes:
        text: The text as in the file, including line endings, without its BOM.
        source: Where it came from; the path `-` stands for no file.
        line_starts: Character offset of each line; a final newline does not start another line.
    """

    text: str
    source: Source = Source("-")
    line_starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        starts = [0, *(match.end() for match in re.finditer("\n", self.text))]
        if starts[-1] == len(self.text):
            starts.pop()
        object.__setattr__(self, "line_starts", tuple(starts))

    @classmethod
    def read(cls, path: str | Path, encoding: str | None = None) -> Document:
        """Read a file.

        Args:
            path: Path of the file.
            encoding: Encoding of its bytes; default: that of its byte order mark, else UTF-8.

        Raises:
            UsageError: The file cannot be read, or is not text.
        """
        return cls.decode(read_bytes(path), str(Path(path).resolve()), str(path), encoding)

    @classmethod
    def decode(cls, data: bytes, path: str, name: str, encoding: str | None = None) -> Document:
        """Create a document from a file's bytes; `name` is used in messages."""
        text, found = decode(data, name, encoding)
        return cls(text, Source(path, found, bom=len(data) > len(text.encode(found))))

    def encode(self) -> bytes:
        """Return the text as bytes, in the encoding of its source and with its byte order mark.

        Raises:
            UsageError: The encoding cannot represent a character.
        """
        encoding = self.source.encoding
        try:
            return (MARKS[encoding] if self.source.bom else b"") + self.text.encode(encoding)
        except UnicodeEncodeError as error:
            line = self.text.count("\n", 0, error.start) + 1
            raise UsageError(
                f"Line {line} contains '{self.text[error.start]}', which {encoding} cannot represent.",
                "Edit that line, or use another encoding: `kvedit export --encoding utf-8`.",
            ) from None

    def recoded(self, encoding: str) -> Document:
        """Return this document with a different encoding for `encode`.

        `utf-8-sig`, `utf-16` and `utf-32` are written with a byte order mark, other names without.

        Raises:
            UsageError: The encoding is unknown.
        """
        name = codec(encoding)
        marked = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
        return Document(self.text, Source(self.source.path, marked.get(name, name), name in marked))

    @property
    def line_count(self) -> int:
        return len(self.line_starts)

    @property
    def newline(self) -> str:
        """The line ending: CR LF if every line has it, else LF."""
        crlf = self.text.count("\r\n")
        return "\r\n" if crlf and crlf == self.text.count("\n") else "\n"

    def characters(self, first: int, last: int) -> tuple[int, int]:
        """Return the character span of the 0-based, half-open span of lines `[first, last)`."""
        ends = (*self.line_starts, len(self.text))
        return ends[first], ends[last]

    def lines(self, first: int, last: int) -> list[str]:
        """Return the lines `[first, last)` (0-based, half-open) without their line endings."""
        spans = pairwise((*self.line_starts, len(self.text))[first : last + 1])
        return [self.text[start:stop].removesuffix("\n").removesuffix("\r") for start, stop in spans]

    def deletions(self, ranges: Iterable[LineRange]) -> list[Edit]:
        """Turn line ranges into edits. Ranges refer to lines of this document; overlaps merge.

        Raises:
            UsageError: A range is outside the document.
        """
        spans = sorted(self.characters(*lines.resolve(self.line_count)) for lines in ranges)
        merged: list[tuple[int, int]] = []
        for start, stop in spans:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return [Edit(start, stop) for start, stop in merged]

    def apply(self, edits: Sequence[Edit]) -> Document:
        """Return the document after `edits`: sorted, disjoint, and relative to this text."""
        return Document(changed(self.text, edits), self.source)


def changed(text: str, edits: Sequence[Edit]) -> str:
    """Return a text after `edits`; raises `ValueError` unless they are sorted, disjoint spans of it."""
    kept: list[str] = []
    position = 0
    for edit in edits:
        if not position <= edit.start <= edit.stop <= len(text):
            raise ValueError("edits that do not fit the text")
        kept += [text[position : edit.start], edit.text]
        position = edit.stop
    return "".join([*kept, text[position:]])


def kept_spans(edits: Sequence[Edit], length: int) -> list[tuple[int, int, int]]:
    """Return the spans that survive `edits`, as `(old_start, new_start, length)` in the new order.

    Args:
        edits: Sorted, disjoint edits of the old text.
        length: Number of characters in the old text.
    """
    spans: list[tuple[int, int, int]] = []
    old = new = 0
    for edit in [*edits, Edit(length, length)]:
        if edit.start > old:
            spans.append((old, new, edit.start - old))
        new += edit.start - old
        if edit.origin is not None:
            spans.append((edit.origin, new, len(edit.text)))
        new += len(edit.text)
        old = edit.stop
    return spans
