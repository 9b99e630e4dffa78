"""Segments: immutable safetensors files of rows, named by a checksum of their content."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit import mapped
from kvedit.cache import States
from kvedit.errors import SessionError
from kvedit.files import LARGEST, damaged, digest, opened, reading, replace_file
from kvedit.store.header import FORMAT, HEADER_BYTES, parse_header

SUFFIX = ".safetensors"


def write_segment(folder: Path, states: States, ids: npt.NDArray[np.int64]) -> str:
    """Write rows; give the segment's name.

    Args:
        folder: Where segments live.
        states: Raw keys and values, `[L, H, N, D]` each.
        ids: The rows' token ids, `int64 [N]`, kept so that a reader can tell rows from others.
    """
    # The library's own writer copies every tensor twice; the file is little more than its bytes.
    tensors = {
        "ids": torch.from_numpy(ids.astype(np.int32)),  # first, so that all begin at a multiple of 4
        "keys": states.keys.cpu().contiguous(),
        "values": states.values.cpu().contiguous(),
    }
    header: dict[str, Any] = {"__metadata__": FORMAT}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        dtype = mapped.NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
    data += [tensor.view(-1).view(torch.uint8).numpy().data for tensor in tensors.values()]
    digested = digest(*data)
    path = folder / f"{digested}{SUFFIX}"
    # One that is there may be mapped, and Windows lets nobody replace it; it is the same anyway.
    if not _is_intact(path, digested):
        replace_file(path, *data)
    return digested


def read_segment(folder: Path, name: str) -> dict[str, Tensor]:
    """Read a segment: `keys` and `values` `[L, H, N, D]`, `ids` `int32 [N]`.

    Raises:
        SessionError: It is not there, its bytes are not those that were written, or they are none of
            a segment.
    """
    what, path = f"segment {name}", folder / f"{name}{SUFFIX}"
    with opened(path, what, LARGEST) as file, reading(path, what), _mapped(file) as data:
        intact, start, size = digest(data) == name, data[:HEADER_BYTES], len(data)
    if not intact:
        raise damaged(what, "does not match its checksum")
    try:
        parse_header(start, size)
    except ValueError:
        raise damaged(what, "cannot be understood") from None
    return mapped.tensors(path)


def _mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _is_intact(path: Path, name: str) -> bool:
    try:
        with opened(path, "", LARGEST) as file, reading(path, ""), _mapped(file) as data:
            return digest(data) == name
    except SessionError:
        return False
