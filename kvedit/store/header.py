"""What a segment's header says, checked against the file before any memory is taken. No torch.

A segment is a safetensors file: eight bytes with the length of the header, the header as JSON, and the
tensors one after the other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from kvedit.store import checks

FORMAT = {"format": "kvedit-segment-1"}
_SIZES = {"F32": 4, "BF16": 2, "F16": 2}
_PARTS = ("dtype", "shape", "data_offsets")
_HEADER_BYTES = 4096  # ours takes some 300
HEADER_BYTES = 8 + _HEADER_BYTES
"""How many bytes of a file `parse_header` wants."""
_MOST_BYTES = 1 << 48


@dataclass(frozen=True, slots=True)
class Header:
    """The sizes of a segment.

    Attributes:
        shape: L, H, N and D of its keys, and of its values.
        dtype: Of both: `F32`, `BF16` or `F16`.
    """

    shape: tuple[int, int, int, int]
    dtype: str


def parse_header(start: bytes, size_bytes: int) -> Header:
    """Read a header.

    Args:
        start: The first bytes of the file: 4,104 of them, or all there are.
        size_bytes: Of the whole file.

    Raises:
        ValueError: It is none of a segment, or says other sizes than the file has.
    """
    if len(start) < 8:
        raise ValueError("no length")
    (length,) = struct.unpack("<Q", start[:8])
    if length > min(_HEADER_BYTES, len(start) - 8):
        raise ValueError("too long")
    fields = checks.load_json(start[8 : 8 + length])
    checks.mapping(fields, ("__metadata__", "keys", "values", "ids"))
    if checks.mapping(fields["__metadata__"], FORMAT) != FORMAT:
        raise ValueError("another format")
    dtype = checks.one_of(checks.mapping(fields["keys"], _PARTS)["dtype"], _SIZES)
    shape = [checks.count(each, least=1) for each in checks.items(fields["keys"]["shape"], 4)]
    taken = [
        _span(fields["keys"], dtype, shape, _SIZES[dtype]),
        _span(fields["values"], dtype, shape, _SIZES[dtype]),
        _span(fields["ids"], "I32", shape[2:3], 4),
    ]
    if any(
        (8 + length + start) % size
        for (start, _), size in zip(taken, (_SIZES[dtype],) * 2 + (4,), strict=True)
    ):
        raise ValueError("no tensor can be mapped there")
    ends = [0, *(stop for _, stop in sorted(taken))]
    if sorted(start for start, _ in taken) != ends[:-1] or 8 + length + ends[-1] != size_bytes:
        raise ValueError("other sizes than the file has")
    layers, heads, rows, width = shape
    return Header((layers, heads, rows, width), dtype)


def _span(value: Any, dtype: str, shape: list[int], size: int) -> tuple[int, int]:
    """Check one tensor's entry; give its bytes, counted after the header."""
    fields = checks.mapping(value, _PARTS)
    if fields["dtype"] != dtype or fields["shape"] != shape:
        raise ValueError("another dtype or shape")
    start, stop = checks.items(fields["data_offsets"], 2)
    if checks.count(stop, _MOST_BYTES) - checks.count(start, _MOST_BYTES) != prod(shape) * size:
        raise ValueError("other bytes than its shape takes")
    return start, stop
