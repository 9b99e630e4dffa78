"""Edits of a document: insert, replace and move lines, and the difference of two texts.

Line numbers refer to the document that a function is given. Each function returns sorted, disjoint
edits of its characters; an empty list means that nothing would change.
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
_ESCAPED = re.compile(r"[^ -\[\]-~]")  # few characters of most texts match
_LINES = re.compile(r"[^\n]*\n|[^\n]+\Z")


def insertion(document: Document, after: int, text: str, *, exact: bool = False) -> list[Edit]:
    """Insert lines after line `after`; 0 is the top.

    Args:
        document: Document to edit.
        after: Line that stays before the new ones.
        text: The new lines; all of them, including the last, get the document's line endings.
        exact: Insert the characters unchanged, without adding a line ending.

    Raises:
        UsageError: The line does not exist, or the text is empty or contains a NUL character.
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
    """Replace lines with new text.

    Args:
        document: Document to edit.
        lines: The lines to replace.
        text: The new lines; they end like the last replaced line.
        exact: Insert the characters unchanged, without adding a line ending.

    Raises:
        UsageError: The range is outside the document, or the text contains a NUL character.
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
    """Move lines after line `after`, counted before the move.

    If the last line had no line ending, the line that ends up last has none.

    Raises:
        UsageError: The range or the line is outside the document, or the line is inside the range.
    """
    first, last = lines.resolve(document.line_count)
    at = _end_of_line(document, after)
    if first < after < last:
        raise UsageError(
            f"Line {after} is inside the range {lines} that would be moved.",
            "Give a line outside the range.",
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
    """Return edits that turn one text into another: changed lines, trimmed to what differs in them.

    `difflib` compares the lines between the common prefix and the common suffix of the texts.
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
    r"""Interpret `\n`, `\r`, `\t`, `\\`, `\uXXXX` and `\UXXXXXXXX`.

    Raises:
        UsageError: A backslash is followed by anything else.
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
    """Return a text as one line of printable characters that `unescape` reverses."""
    return _ESCAPED.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    if char.isprintable() and char != "\\":
        return char
    return _WRITTEN.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 65536 else f"\\U{ord(char):08x}")


def line_counts(old: Document, new: Document, changes: Sequence[Edit]) -> tuple[int, int]:
    """Return how many lines the changes removed from the old text and added to the new one.

    A line that was changed or moved counts as both.
    """
    starts = old.line_starts
    near: set[int] = set()  # all other lines are unchanged
    for edit in changes:
        first = max(0, bisect_right(starts, edit.start - 1) - 1)
        near.update(range(first, bisect_right(starts, edit.stop)))
    removed = sum(not _is_kept(old, new, changes, line) for line in near)
    return removed, removed + new.line_count - old.line_count


def _is_kept(old: Document, new: Document, changes: Sequence[Edit], line: int) -> bool:
    """Return whether a line (0-based) survived; at the end of the text its line ending may change."""
    content, ending = _line_at(old, line)
    start = old.line_starts[line]
    # What must survive: its characters or, for an empty line, its line feed.
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
    """Return the character offset after a line (1-based); 0 for line 0."""
    count = document.line_count
    if not 0 <= line <= count:
        held = "no lines" if count == 0 else f"lines 1 to {count}"
        raise UsageError(
            f"Line {line} does not exist; the document has {held}.",
            "Run `kvedit show` to see the line numbers; 0 is the top.",
        )
    return (*document.line_starts, len(document.text))[line] if line else 0


def _is_open(document: Document) -> bool:
    """Return whether the last line has no line ending."""
    return bool(document.text) and not document.text.endswith("\n")


def _ending(text: str) -> str:
    return "\r\n" if text.endswith("\r\n") else "\n" if text.endswith("\n") else ""


def _check(text: str) -> None:
    """Raise if the text contains what a text file cannot."""
    if "\0" in text:
        raise UsageError("The new text contains a NUL character.", "Remove it.")


def _with_endings(text: str, newline: str) -> str:
    return re.sub(r"\r?\n", newline, text)


def _trimmed(old: str, edit: Edit) -> list[Edit]:
    """Trim the unchanged characters at both ends of an edit; return no edit if nothing remains."""
    replaced = old[edit.start : edit.stop]
    head = _shared(replaced, edit.text)
    replaced, text = replaced[head:], edit.text[head:]
    tail = _shared(replaced[::-1], text[::-1])
    if not replaced and not text:
        return []
    return [Edit(edit.start + head, edit.stop - tail, text[: len(text) - tail])]


def _shared(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the length of the common prefix of two sequences."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count
