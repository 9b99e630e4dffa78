"""Validate the values in a session's JSON.

A session may come from an untrusted source, and a checksum shows only that a file is unchanged. So the type,
bounds and form of every value are checked before it is used. Records use the msgspec types defined here;
`load_json` checks what a record does not see, such as duplicate keys.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")
LARGEST = 2**31 - 1
"""Largest count, number or id; sums and products of two fit in 64 bits."""
NAME = re.compile(r"[0-9a-f]{32}")
"""Name of a tokenizer or a segment; also a checksum."""
JOURNAL = re.compile(r"journal-[0-9a-f]{32}\.jsonl")
"""File name of a journal."""
_DIGITS = 15  # the time that Python takes to parse an integer is quadratic in its digits


def form(pattern: str, most: int | None = None, least: int = 0) -> Meta:
    """Describe a string that matches a pattern as a whole."""
    return Meta(pattern=rf"\A(?:{pattern})\Z", min_length=least, max_length=most)


Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Speed = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Text = Annotated[str, form(r"[^\ud800-\udfff]*")]
"""No surrogates, which JSON can express with escapes."""
FilePath = Annotated[str, form(r"[^\0\ud800-\udc7f\udd00-\udfff]*", 4096, least=1)]
"""Surrogates stand for bytes of a path that are not UTF-8."""
Name = Annotated[str, form(NAME.pattern)]
JournalName = Annotated[str, form(JOURNAL.pattern)]
Fingerprint = Annotated[str, form("[0-9a-f]{64}")]
"""Checksum of one part of a model."""
Encoding = Annotated[str, form("[0-9A-Za-z_-]{1,40}")]
Time = Annotated[str, form(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")]


def load_json(data: bytes, encoding: str = "ascii") -> dict[str, Any]:
    """Parse a JSON object without duplicate keys, integers of over 15 digits, NaN or deep nesting.

    Raises:
        ValueError: The data is not such an object.
    """
    try:
        fields = json.loads(
            data.decode(encoding), object_pairs_hook=_once, parse_int=_integer, parse_constant=_integer
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    if type(fields) is not dict:
        raise ValueError("not an object")
    return fields


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("duplicate key")
    return fields


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError("a number is too long")
    return int(digits)  # raises for NaN and Infinity


def record(fields: Any, kind: type[T]) -> T:
    """Build a record from its fields; raise `ValueError` if one is invalid."""
    try:
        return msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def check_encoding(name: str) -> None:
    """Raise `ValueError` unless `name` is Python's canonical name of a text encoding."""
    try:
        "".encode(name)  # raises for codecs that do not encode text
        canonical = codecs.lookup(name).name
    except LookupError:
        raise ValueError("unknown encoding") from None
    if canonical != name:
        raise ValueError("not the canonical name of the encoding")


def check_moment(moment: str) -> None:
    """Raise `ValueError` unless a time in the format of `kvedit.timing.now` is before the year 9999.

    `Home.next_use` needs to be able to represent a later time.
    """
    if datetime.fromisoformat(moment).year >= 9999:
        raise ValueError("too late")
