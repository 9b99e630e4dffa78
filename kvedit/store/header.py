"""Parse the header of a safetensors file, and check it against the file before memory is allocated.

A safetensors file consists of the header's length in eight bytes, the header as JSON, and the tensors. The
segments of a session and the weights of a checkpoint are both read through this module. Does not use torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from typing import Annotated, BinaryIO

from msgspec import Meta, Struct

from kvedit.store import checks
from kvedit.store.checks import Count

FORMAT = {"format": "kvedit-segment-1"}
HEADER_BYTES = 8 + 4096
"""Number of bytes at the start of a segment that `parse_header` needs; its header takes about 300."""
_MOST_BYTES = 100_000_000  # of a checkpoint's header; the safetensors library has the same limit
_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2}
_BYTES |= {"BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}
_Offset = Annotated[int, Meta(ge=0, le=1 << 48)]


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its dtype in the format's spelling, its shape, and where its bytes start and end."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[_Offset, _Offset]


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file.

    Attributes:
        size_bytes: Offset at which the tensors start.
        metadata: Strings that describe the file.
        tensors: The tensors by name.
    """

    size_bytes: int
    metadata: dict[str, str]
    tensors: dict[str, Part]


def read_bytes(file: BinaryIO) -> bytes:
    """Read the header of an open file without checking it, including its length; may raise `OSError`."""
    file.seek(0)
    start = file.read(8)
    most = min(_MOST_BYTES, os.fstat(file.fileno()).st_size)  # `read` allocates what it is asked for
    return start + file.read(min(int.from_bytes(start, "little"), most))


def read_header(file: BinaryIO) -> Header:
    """Read and check the header of an open file.

    Raises:
        ValueError: It is not a header, or does not match the size of the file.
        OSError: It cannot be read.
    """
    return _parse(read_bytes(file), os.fstat(file.fileno()).st_size, "utf-8")


def parse_header(start: bytes, size_bytes: int) -> Header:
    """Read the header of a segment.

    Args:
        start: The first `HEADER_BYTES` of the file, or all of it if it is shorter.
        size_bytes: Size of the whole file.

    Raises:
        ValueError: It is not the header of a segment, or does not match the size of the file.
    """
    header = _parse(start[:HEADER_BYTES], size_bytes, "ascii")
    if header.metadata != FORMAT or header.tensors.keys() != {"keys", "values", "ids"}:
        raise ValueError("not a segment")
    keys, values, ids = (header.tensors[name] for name in ("keys", "values", "ids"))
    if keys.dtype not in ("F32", "BF16", "F16") or len(keys.shape) != 4 or 0 in keys.shape:
        raise ValueError("wrong dtype or shape of the keys")
    if (values.dtype, values.shape, ids.dtype, ids.shape) != (keys.dtype, keys.shape, "I32", keys.shape[2:3]):
        raise ValueError("dtypes or shapes that do not match the keys")
    if any((header.size_bytes + part.data_offsets[0]) % _BYTES[part.dtype] for part in (keys, values, ids)):
        raise ValueError("a tensor that is not aligned")
    return header


def _parse(start: bytes, size_bytes: int, encoding: str) -> Header:
    """Parse a header; its tensors must have the sizes of their shapes and fill the rest of the file."""
    if len(start) < 8:
        raise ValueError("the length is missing")
    stop = 8 + int.from_bytes(start[:8], "little")
    if stop > len(start):
        raise ValueError("the header is too long")
    fields = checks.load_json(start[8:stop], encoding)
    metadata = checks.record(fields.pop("__metadata__", None) or {}, dict[str, str])
    tensors = checks.record(fields, dict[str, Part])
    end = 0
    for part in sorted(tensors.values(), key=lambda part: part.data_offsets):
        first, last = part.data_offsets
        size = prod(part.shape) * _BYTES[part.dtype] if part.dtype in _BYTES else last - first
        if first != end or last - first != size or size < 0:
            raise ValueError("a tensor's size does not match its shape")
        end = last
    if stop + end != size_bytes:
        raise ValueError("the tensors do not fill the file")
    return Header(stop, metadata, tensors)
