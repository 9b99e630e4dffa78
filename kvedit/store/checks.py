"""What a value in a session's JSON may be.

A session may come from a stranger, and a checksum only says that a file is as it was written. So each
value is checked before it is used: its type, its bounds, its form. All functions raise `ValueError`.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Collection
from datetime import datetime
from typing import Any

LARGEST = 2**31 - 1
"""Of counts, numbers and ids: sums and products of them still fit 64 bits."""
NAME = re.compile(r"[0-9a-f]{32}")
"""Of a tokenizer or a segment, and a checksum."""
JOURNAL = re.compile(r"journal-[0-9a-f]{32}\.jsonl")
"""Of a journal's file."""
FINGERPRINT = re.compile(r"[0-9a-f]{64}")
"""Of a part of a model."""
_ENCODING = re.compile(r"[0-9A-Za-z_-]{1,40}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")
_DIGITS = 15  # Python turns digits into a number in the square of their count
_PATH_LENGTH = 4096


def load_json(data: bytes) -> dict[str, Any]:
    """Read a JSON object in ASCII: no key twice, no number beyond 15 digits, no NaN, not nested deep."""
    try:
        found = json.loads(
            data.decode("ascii"), object_pairs_hook=_once, parse_int=_integer, parse_constant=_integer
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    if type(found) is not dict:
        raise ValueError("no object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError("a number is too long")
    return int(digits)  # which refuses NaN and Infinity


def mapping(value: Any, keys: Collection[str]) -> dict[str, Any]:
    """Check an object: it has these keys and no others."""
    if type(value) is not dict or value.keys() != set(keys):
        raise ValueError("other keys")
    return value


def items(value: Any, length: int | None = None) -> list[Any]:
    """Check an array, of that length if one is given."""
    if type(value) is not list or length not in (None, len(value)):
        raise ValueError("no array of that length")
    return value


def count(value: Any, most: int = LARGEST, least: int = 0) -> int:
    """Check a whole number; true and false are none."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError("no number in range")
    return value


def speed(value: Any) -> float:
    """Check a finite number above zero."""
    if type(value) is not float or not (math.isfinite(value) and value > 0):
        raise ValueError("no speed")
    return value


def flag(value: Any) -> bool:
    """Check true or false."""
    if type(value) is not bool:
        raise ValueError("neither true nor false")
    return value


def text(value: Any) -> str:
    """Check a string of whole characters."""
    if type(value) is not str:
        raise ValueError("no string")
    if not value.isascii():
        value.encode()  # half of a character is a UnicodeEncodeError, which is a ValueError
    return value


def path(value: Any) -> str:
    """Check a path; what was no UTF-8 in it stands as half characters."""
    if type(value) is not str or not 0 < len(value) <= _PATH_LENGTH or "\0" in value:
        raise ValueError("no path")
    value.encode(errors="surrogateescape")
    return value


def form(value: Any, pattern: re.Pattern[str]) -> str:
    """Check a string of a fixed form."""
    if type(value) is not str or not pattern.fullmatch(value):
        raise ValueError("another form")
    return value


def one_of(value: Any, names: Collection[str]) -> str:
    """Check a string that is one of a few."""
    if type(value) is not str or value not in names:
        raise ValueError("none of those")
    return value


def encoding(value: Any) -> str:
    """Check the name of an encoding of texts, as Python spells it."""
    try:
        "".encode(form(value, _ENCODING))  # refuses codecs that are not for text
        known = codecs.lookup(value).name
    except LookupError:
        raise ValueError("no encoding") from None
    if known != value:
        raise ValueError("spelled in another way")
    return known


def moment(value: Any) -> str:
    """Check a time, as `kvedit.timing.now` writes it, before the year 9999: there is a later one."""
    if datetime.fromisoformat(form(value, _TIME)).year >= 9999:
        raise ValueError("too late")
    return str(value)
