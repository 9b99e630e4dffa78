"""Decode text files strictly, so that the result can be written back byte for byte.

This module handles bytes and characters, not lines, tokens or sessions.
"""

from __future__ import annotations

import codecs
from pathlib import Path

from kvedit.errors import UsageError

MARKS = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}
FOUND = ("utf-8", "utf-16-le", "utf-16-be")
"""Encodings recognized by byte order mark; UTF-32 must be named, since its mark can also mean UTF-16."""
_NAME_IT = (
    "Say how it is encoded with --encoding, for example --encoding cp1252, "
    "or convert it: `iconv -f CP1252 -t UTF-8`."
)


def read_bytes(path: str | Path) -> bytes:
    """Read a user's file; raises `UsageError` if that fails."""
    try:
        return Path(path).read_bytes()
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder.", "Give one text file.") from None
    except (OSError, ValueError) as error:  # a NUL in a path raises ValueError
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}.", "Check the path and its permissions.") from None


def decode(data: bytes, name: str, encoding: str | None = None) -> tuple[str, str]:
    """Decode a file's bytes strictly; return the text without its BOM, and the encoding.

    Nothing is replaced or left out: encoding the text gives the same bytes.

    Args:
        data: Content of the whole file.
        name: Name of the file in messages.
        encoding: Python name; default: UTF-8, or UTF-16 if there is a BOM for it.

    Raises:
        UsageError: The file is empty, binary, or not in the given encoding; or the encoding is
            unknown.
    """
    found, start = _recognised(data, name, encoding)
    if len(data) == start:
        raise UsageError(f"{name} is empty.", "Give a file with some text.")
    if found == "utf-8" and (zero := data.find(b"\0")) >= 0:
        raise _binary(name, zero)
    body = data[start:]
    try:
        text = body.decode(found)
        back = text.encode(found)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not valid {found.upper()}: byte {start + error.start} cannot be decoded.", _NAME_IT
        ) from None
    except UnicodeError:  # for example from Python's idna, which is not for files
        raise _unknown(encoding or found) from None
    if (place := text.find("\0")) >= 0:
        raise _binary(name, start + len(text[:place].encode(found)))
    if back != body:
        same = next((at for at, (a, b) in enumerate(zip(back, body, strict=False)) if a != b), len(back))
        raise UsageError(
            f"{name} does not round-trip through {found.upper()}: byte {start + same} would change.",
            "Convert it to UTF-8 first, or give --encoding the exact name, such as cp932 for shift_jis.",
        )
    return text, found


def _recognised(data: bytes, name: str, encoding: str | None) -> tuple[str, int]:
    """Return the encoding of the bytes, and the length of their byte order mark."""
    if encoding is None:
        found = next((known for known in FOUND if data.startswith(MARKS[known])), None)
        return (found, len(MARKS[found])) if found else ("utf-8", 0)
    asked = codec(encoding)
    if asked in ("utf-16", "utf-32"):
        ends = [f"{asked}-le", f"{asked}-be"]
        found = next((known for known in ends if data.startswith(MARKS[known])), None)
        if found is None:
            raise UsageError(
                f"{name} has no byte order mark, so the byte order of {asked.upper()} is unknown.",
                f"Give --encoding {ends[0]} or {ends[1]}.",
            )
        return found, len(MARKS[found])
    found = "utf-8" if asked == "utf-8-sig" else asked
    mark = MARKS.get(found)
    return found, len(mark) if mark and data.startswith(mark) else 0


def codec(encoding: str) -> str:
    """Return Python's normalized name of an encoding."""
    try:
        name = codecs.lookup(encoding).name
        " ".encode(name)  # some of Python's codecs are not for text
        return name
    except (LookupError, ValueError):  # ValueError: an invalid codec name
        raise _unknown(encoding) from None


def _unknown(encoding: str) -> UsageError:
    return UsageError(
        f"'{encoding}' is not a text encoding.",
        "Give a name such as utf-8, utf-16-le, cp1252, latin-1, cp932 or gb18030.",
    )


def _binary(name: str, zero: int) -> UsageError:
    return UsageError(
        f"{name} looks like a binary file: byte {zero} is zero.",
        "Give a text file; UTF-16 without a byte order mark needs --encoding utf-16-le or utf-16-be.",
    )
