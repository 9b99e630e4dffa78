"""Segments: immutable safetensors files of rows, named by a checksum of their content.

A question reads about as many bytes of segments as the cache has, so the checksum is XXH3, which is as fast
as memory. It detects corruption, not tampering. Segments of kvedit 0.2, named by SHA-256, can be read.
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
    """Write rows as a segment, and return its name.

    Args:
        folder: Folder of the segments.
        states: Raw keys and values, `[L, H, N, D]` each.
        ids: Token ids of the rows, `int64 [N]`; with them a reader can check that rows fit a text.

    Raises:
        KveditError: The disk is full, or the folder is not writable.
    """
    # The safetensors library copies every tensor twice when it writes; the format is simple enough.
    tensors = {
        "ids": torch.from_numpy(ids.astype(np.int32)),  # first, so that all start at a multiple of 4
        "keys": states.keys.cpu().contiguous(),
        "values": states.values.cpu().contiguous(),
    }
    header: dict[str, Any] = {"__metadata__": FORMAT}
    start = 0
    for key, tensor in tensors.items():
        stop = start + tensor.nbytes
        dtype = tensorfile.NAMES[tensor.dtype]
        header[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
    data += map(_bytes, tensors.values())
    name = _checksum(*data)
    path = folder / f"{name}{SUFFIX}"
    # An existing file may be mapped, and Windows cannot replace a mapped file; it has the same content.
    if not _is_intact(path, name):
        replace_file(path, *data)
    return name


def read_segment(folder: Path, name: str) -> dict[str, Tensor]:
    """Read a segment: `keys` and `values` `[L, H, N, D]`, `ids` `int32 [N]`.

    Raises:
        SessionError: It is missing or damaged, or is not a segment.
    """
    what, path = f"segment {name}", folder / f"{name}{SUFFIX}"
    with opened(path, what, LARGEST) as file, reading(path, what):
        data = tensorfile.map_file(file)
    if not _is_named(data, name):
        raise damaged(what, "does not match its checksum")
    try:
        header = parse_header(_bytes(data[:HEADER_BYTES]).tobytes(), len(data))
    except ValueError:
        raise damaged(what, "is invalid") from None
    return tensorfile.tensors(data, header)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _checksum(*data: bytes | memoryview) -> str:
    """Return the 128-bit XXH3 of the concatenated `data`."""
    checksum = xxhash.xxh3_128()
    for part in data:
        checksum.update(part)
    return checksum.hexdigest()


def _is_named(data: Tensor, name: str) -> bool:
    """Return whether a mapped file's content matches its name; release its pages afterwards."""
    named = _checksum(_bytes(data)) == name or digest(_bytes(data)) == name
    tensorfile.release(data)
    return named


def _is_intact(path: Path, name: str) -> bool:
    try:
        with opened(path, "", LARGEST) as file, reading(path, ""):
            return _is_named(tensorfile.map_file(file), name)
    except SessionError:
        return False
