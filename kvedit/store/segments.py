"""Segments: immutable safetensors files of rows, named by a checksum of their content."""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit.cache import States
from kvedit.errors import SessionError
from kvedit.files import LARGEST, damaged, digest, opened, reading, replace_file
from kvedit.store.header import FORMAT, HEADER_BYTES, parse_header

SUFFIX = ".safetensors"
_KINDS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I32": torch.int32}
_NAMES = {dtype: name for name, dtype in _KINDS.items()}
_MADV_DONTNEED = 4  # of Linux


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
        dtype = _NAMES[tensor.dtype]
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
    return _tensors(path)


def release(tensor: Tensor) -> None:
    """Let go of the pages of a segment's file, which count as this process's; they come back when read.

    Without it a cache that is gathered from all its segments would be resident twice.
    """
    storage = tensor.untyped_storage()
    if sys.platform == "linux" and not storage.resizable():  # resizable storage is no file's
        place, size = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
        ctypes.CDLL(None).madvise(place, size, _MADV_DONTNEED)


def _tensors(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a safetensors file that is known to be whole, all of one storage.

    Mapped, not read: the pages are the file's own. No file stays open.
    """
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    return {
        name: data[start:][slice(*part["data_offsets"])].view(_KINDS[part["dtype"]]).view(part["shape"])
        for name, part in header.items()
        if name != "__metadata__"
    }


def _mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _is_intact(path: Path, name: str) -> bool:
    try:
        with opened(path, "", LARGEST) as file, reading(path, ""), _mapped(file) as data:
            return digest(data) == name
    except SessionError:
        return False
