"""Segments: immutable safetensors files of rows, named by a checksum of their content.

A question reads a cache's worth of them, so the checksum is XXH3, which is as fast as memory; it finds
damage, and guards against nobody who means harm. kvedit 0.2 named them by SHA-256, which is still read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from kvedit.cache.kv import States
from kvedit.errors import SessionError
from kvedit.store import tensorfile
from kvedit.store.files import LARGEST, damaged, digest, opened, reading, replace_file
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
        dtype = tensorfile.NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
    data += map(_bytes, tensors.values())
    digested = _checksum(*data)
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
    with opened(path, what, LARGEST) as file, reading(path, what):
        data = tensorfile.map_file(file)
    if not _is_named(data, name):
        raise damaged(what, "does not match its checksum")
    try:
        header = parse_header(_bytes(data[:HEADER_BYTES]).tobytes(), len(data))
    except ValueError:
        raise damaged(what, "cannot be understood") from None
    return tensorfile.tensors(data, header)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _checksum(*data: bytes | memoryview) -> str:
    """XXH3 of `data`, part after part, 128 bits of it."""
    found = xxhash.xxh3_128()
    for part in data:
        found.update(part)
    return found.hexdigest()


def _is_named(data: Tensor, name: str) -> bool:
    """Whether a mapped file's name is that of its bytes, which are let go of once they are read."""
    named = _checksum(_bytes(data)) == name or digest(_bytes(data)) == name
    tensorfile.release(data)
    return named


def _is_intact(path: Path, name: str) -> bool:
    try:
        with opened(path, "", LARGEST) as file, reading(path, ""):
            return _is_named(tensorfile.map_file(file), name)
    except SessionError:
        return False
