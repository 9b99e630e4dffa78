"""Segments: immutable safetensors files of rows, named by a checksum of their content."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

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
    data = safetensors.torch.save(
        {
            "keys": states.keys.cpu().contiguous(),
            "values": states.values.cpu().contiguous(),
            "ids": torch.from_numpy(ids.astype(np.int32)),
        },
        metadata=FORMAT,
    )
    name = digest(data)
    path = folder / f"{name}{SUFFIX}"
    # One that is there may be mapped, and Windows lets nobody replace it; it is the same anyway.
    if not _is_intact(path, name):
        replace_file(path, data)
    return name


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
    # Mapped, not read: the pages are the file's own, and go when memory runs short.
    return safetensors.torch.load_file(path)


def _mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _is_intact(path: Path, name: str) -> bool:
    try:
        with opened(path, "", LARGEST) as file, reading(path, ""), _mapped(file) as data:
            return digest(data) == name
    except SessionError:
        return False
