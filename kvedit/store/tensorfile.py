"""Tensors mapped from a safetensors file: their pages are the file's own, and come in when they are read."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

_KINDS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I32": torch.int32}
NAMES = {dtype: name for name, dtype in _KINDS.items()}
"""What the format calls the dtypes that can be mapped."""
_MADV_DONTNEED = 4  # of Linux


def tensors(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a file that is known to be whole, all of one storage. No file stays open.

    One of another dtype, or that does not stand at a multiple of its dtype's size, is left out.
    """
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    found: dict[str, Tensor] = {}
    for name, part in header.items():
        dtype, (first, last) = _KINDS.get(part["dtype"]), part["data_offsets"]
        if dtype is not None and not (start + first) % dtype.itemsize:
            found[name] = data[start + first : start + last].view(dtype).view(part["shape"])
    return found


def release(tensor: Tensor) -> None:
    """Let go of the pages of a mapped tensor's file, which count as this process's; they come back when read.

    Without it a cache that is gathered from all its segments would be resident twice.
    """
    storage = tensor.untyped_storage()
    if sys.platform == "linux" and not storage.resizable():  # resizable storage is no file's
        place, size = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
        ctypes.CDLL(None).madvise(place, size, _MADV_DONTNEED)
