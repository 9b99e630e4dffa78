"""Edits of a document: insert, replace and move lines, and the difference of two texts.

Each function counts the lines of the document it is given, and gives sorted, disjoint edits of
its characters; no edits at all mean that nothing would change. Knows characters only.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from difflib import SequenceMatcher

from kvedit.errors import UsageError
from kvedit.text.document import Document, Edit, LineRange

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.)|\Z)", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
_WRITTEN = {char: f"\\{name}" for name, char in _NAMED.items()}
_ESCAPED = re.compile(r"[^ -\[\]-~]")  # most characters of most texts are none of these
_LINES = re.compile(r"[^\n]*\n|[^\n]+\Z")


def insertion(document: Document, after: int, text: str, *, exact: bool = False) -> list[Edit]:
    """Insert lines after line `after`; 0 is the top.

    Args:
        document: What to edit.
        after: Line that stays before the new ones.
        text: The new lines. They get the document's line endings, the last one too.
        exact: Take the characters as they are, without a line ending of their own.

    Raises:
        UsageError: There is no such line, no text, or a zero character in it.
    """
    _check(text)
    at = _end_of_line(document, after)
    if not exact:
        newline = document.newline
        text = _with_endings(text, newline)
        text += "" if text.endswith("\n") else newline
        if at == len(document.text) and _is_open(document):
            text = newline + text.removesuffix(newline)
    if not text:
        raise UsageError("There is no text to insert.", "Give a TEXT, --file FILE, or - for standard input.")
    return [Edit(at, at, text)]


def replacement(document: Document, lines: LineRange, text: str, *, exact: bool = False) -> list[Edit]:
    """Put other lines in the place of some.

    Args:
        document: What to edit.
        lines: The lines to replace.
        text: The new lines; they end as the last one replaced did.
        exact: Take the characters as they are, without a line ending of their own.

    Raises:
        UsageError: The range lies outside the document, or the text holds a zero character.
    """
    _check(text)
    start, stop = document.characters(*lines.resolve(document.line_count))
    if not exact:
        newline = document.newline
        text = _with_endings(text, newline)
        if document.text[start:stop].endswith("\n"):
            text += "" if text.endswith("\n") else newline
        else:
            text = text.removesuffix(newline)
    return _trimmed(document.text, Edit(start, stop, text))


def movement(document: Document, lines: LineRange, after: int) -> list[Edit]:
    """Move lines to stand after line `after`, counted before the move.

    A last line without a line ending leaves that to the line that comes last then.

    Raises:
        UsageError: The range or the line lies outside the document, or the one in the other.
    """
    first, last = lines.resolve(document.line_count)
    at = _end_of_line(document, after)
    if first < after < last:
        raise UsageError(
            f"Line {after} is one of the lines {lines} that would be moved.",
            "Name a line outside the range.",
        )
    if after in (first, last):
        return []
    text = document.text
    start, stop = document.characters(first, last)
    if stop == len(text) and _is_open(document):
        cut = start - len(_ending(text[:start]))
        moved = [Edit(at, at, text[start:stop], start), Edit(at, at, text[cut:start])]
        return [*moved, Edit(cut, stop)]
    if at == len(text) and _is_open(document):
        ending = _ending(text[start:stop])
        block = text[start : stop - len(ending)]
        return [Edit(start, stop), Edit(at, at, ending), Edit(at, at, block, start)]
    moved = [Edit(start, stop), Edit(at, at, text[start:stop], start)]
    return sorted(moved, key=lambda edit: edit.start)


def difference(old: str, new: str) -> list[Edit]:
    """Find edits of whole lines, trimmed to what differs in them, that turn one text into another.

    Lines are compared by Python's `difflib` within what the texts do not share at both ends.
    """
    before, after = _LINES.findall(old), _LINES.findall(new)
    head = _shared(before, after)
    tail = _shared(before[head:][::-1], after[head:][::-1])
    left, right = before[head : len(before) - tail], after[head : len(after) - tail]
    starts = [sum(map(len, before[:head]))]
    for line in left:
        starts.append(starts[-1] + len(line))
    found: list[Edit] = []
    for kind, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if kind != "equal":
            found += _trimmed(old, Edit(starts[a], starts[b], "".join(right[c:d])))
    return found


def unescape(text: str) -> str:
    r"""Read `\n`, `\r`, `\t`, `\\`, `\uXXXX` and `\UXXXXXXXX`.

    Raises:
        UsageError: A backslash before anything else.
    """

    def read(match: re.Match[str]) -> str:
        code = match[1] or match[2]
        if code and int(code, 16) <= 0x10FFFF and not 0xD800 <= int(code, 16) <= 0xDFFF:
            return chr(int(code, 16))
        if match[3] in _NAMED:
            return _NAMED[match[3]]
        raise UsageError(
            f"'{match[0]}' is not an escape sequence.",
            r"Write \n, \r, \t, \\, \uXXXX, or leave --exact out.",
        )

    return _ESCAPE.sub(read, text)


def escape(text: str) -> str:
    """Write a text on one line of printable characters, as `unescape` reads it."""
    return _ESCAPED.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    if char.isprintable() and char != "\\":
        return char
    return _WRITTEN.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 65536 else f"\\U{ord(char):08x}")


def line_counts(old: Document, new: Document, changes: Sequence[Edit]) -> tuple[int, int]:
    """Count the lines that changes took away from one text and put into the other.

    A line whose characters changed went and came. A moved one did, too.
    """
    starts = old.line_starts
    near: set[int] = set()  # all other lines are surely still there
    for edit in changes:
        first = max(0, bisect_right(starts, edit.start - 1) - 1)
        near.update(range(first, bisect_right(starts, edit.stop)))
    removed = sum(not _is_kept(old, new, changes, line) for line in near)
    return removed, removed + new.line_count - old.line_count


def _is_kept(old: Document, new: Document, changes: Sequence[Edit], line: int) -> bool:
    """Whether a line (0-based) is still a line of its own; at an open end its ending may come or go."""
    content, ending = _line_at(old, line)
    start = old.line_starts[line]
    # What must have survived: its characters, or the line feed that makes an empty line.
    stop = start + (len(content) or len(ending))
    start = start if content else stop - 1
    shift = 0
    for edit in changes:
        if edit.stop <= start:
            shift += len(edit.text) - (edit.stop - edit.start)
        elif edit.start < stop:
            return False
    found, end = _line_at(new, bisect_right(new.line_starts, start + shift) - 1)
    return found == content and (end == ending or not end or not ending)


def _line_at(document: Document, line: int) -> tuple[str, str]:
    """Return a line (0-based) and its ending."""
    starts, last = document.line_starts, line + 1 == document.line_count
    text = document.text[starts[line] : None if last else starts[line + 1]]
    ending = _ending(text)
    return text[: len(text) - len(ending)], ending


def _end_of_line(document: Document, line: int) -> int:
    """Return the character after a line, 1-based; 0 is the start of the text."""
    count = document.line_count
    if not 0 <= line <= count:
        held = "no lines" if count == 0 else f"lines 1 to {count}"
        raise UsageError(
            f"There is no line {line} to stand after; the document has {held}.",
            "Run `kvedit show` to see the lines with their numbers; 0 is the top.",
        )
    return (*document.line_starts, len(document.text))[line] if line else 0


def _is_open(document: Document) -> bool:
    """Whether the last line has no line ending."""
    return bool(document.text) and not document.text.endswith("\n")


def _ending(text: str) -> str:
    return "\r\n" if text.endswith("\r\n") else "\n" if text.endswith("\n") else ""


def _check(text: str) -> None:
    """Refuse what no file of text could hold."""
    if "\0" in text:
        raise UsageError("The new text holds a zero character, which no text file does.", "Leave it out.")


def _with_endings(text: str, newline: str) -> str:
    return re.sub(r"\r?\n", newline, text)


def _trimmed(old: str, edit: Edit) -> list[Edit]:
    """Leave out of an edit what it would not change at its two ends; nothing if that is all."""
    replaced = old[edit.start : edit.stop]
    head = _shared(replaced, edit.text)
    replaced, text = replaced[head:], edit.text[head:]
    tail = _shared(replaced[::-1], text[::-1])
    if not replaced and not text:
        return []
    return [Edit(edit.start + head, edit.stop - tail, text[: len(text) - tail])]


def _shared(left: Sequence[str], right: Sequence[str]) -> int:
    """Count the elements that two sequences share at their start."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count
