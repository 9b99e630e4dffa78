"""What a value in a session's JSON may be.

A session may come from a stranger, and a checksum only says that a file is as it was written. So each
value is checked before it is used: its type, its bounds, its form. What msgspec can say about a value is
said in these types, for the records to name; `load_json` guards what a record never sees.
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
"""Of counts, numbers and ids: sums and products of them still fit 64 bits."""
NAME = re.compile(r"[0-9a-f]{32}")
"""Of a tokenizer or a segment, and a checksum."""
JOURNAL = re.compile(r"journal-[0-9a-f]{32}\.jsonl")
"""Of a journal's file."""
_DIGITS = 15  # Python turns digits into a number in the square of their count


def form(pattern: str, most: int | None = None, least: int = 0) -> Meta:
    """Describe a string that matches a pattern from its first character to its last."""
    return Meta(pattern=rf"\A(?:{pattern})\Z", min_length=least, max_length=most)


Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Speed = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Text = Annotated[str, form(r"[^\ud800-\udfff]*")]
"""Whole characters: JSON can also spell halves of one."""
FilePath = Annotated[str, form(r"[^\0\ud800-\udc7f\udd00-\udfff]*", 4096, least=1)]
"""Bytes of a path that are not UTF-8 stand in it as half characters."""
Name = Annotated[str, form(NAME.pattern)]
JournalName = Annotated[str, form(JOURNAL.pattern)]
Fingerprint = Annotated[str, form("[0-9a-f]{64}")]
"""Of a part of a model."""
Encoding = Annotated[str, form("[0-9A-Za-z_-]{1,40}")]
Time = Annotated[str, form(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")]


def load_json(data: bytes, encoding: str = "ascii") -> dict[str, Any]:
    """Read a JSON object: no key twice, no number beyond 15 digits, no NaN, not nested deep.

    Raises:
        ValueError: It is not such an object.
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
        raise ValueError("a key comes twice")
    return fields


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError("a number is too long")
    return int(digits)  # which refuses NaN and Infinity


def record(fields: Any, kind: type[T]) -> T:
    """Build a record from the values of its fields; raises `ValueError` where one does not fit."""
    try:
        return msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def check_encoding(name: str) -> None:
    """Check the name of an encoding of texts, as Python spells it; raises `ValueError`."""
    try:
        "".encode(name)  # refuses codecs that are not for text
        known = codecs.lookup(name).name
    except LookupError:
        raise ValueError("unknown encoding") from None
    if known != name:
        raise ValueError("spelled in another way")


def check_moment(moment: str) -> None:
    """Check a time, as `kvedit.timing.now` writes it, before the year 9999: there is a later one."""
    if datetime.fromisoformat(moment).year >= 9999:
        raise ValueError("too late")
