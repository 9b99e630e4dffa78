"""Tensors mapped from a safetensors file: their pages are the file's own, and come in when they are read.

A file is opened once: what was checked through a descriptor is mapped through it, too, so no other file
can take its place in between.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import BinaryIO

import torch
from torch import Tensor

from kvedit.store.header import Header

_KINDS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_KINDS |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool}
_KINDS |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in _KINDS.items()}
"""What the format calls the dtypes that can be mapped."""
_MADV_DONTNEED = 4  # of Linux


def map_file(file: BinaryIO) -> Tensor:
    """Map all bytes of an open file; the file can be closed after it.

    Raises:
        OSError: It cannot be mapped.
        ValueError: It is empty.
    """
    number, size = file.fileno(), os.fstat(file.fileno()).st_size
    if not size:
        raise ValueError("it is empty")
    again = f"/dev/fd/{number}"  # the same file, whatever its path leads to now
    if not os.path.exists(again):  # a mapping of Python's keeps the file open
        return torch.frombuffer(mmap.mmap(number, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    try:
        return torch.from_file(again, shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from None


def tensors(data: Tensor, header: Header) -> dict[str, Tensor]:
    """Return the tensors of a mapped file by name, views of its bytes.

    One of a dtype that torch cannot map is left out; one that does not stand at a multiple of its
    dtype's size is a copy.
    """
    found: dict[str, Tensor] = {}
    for name, part in header.tensors.items():
        if dtype := _KINDS.get(part.dtype):
            first, last = (header.size_bytes + offset for offset in part.data_offsets)
            span = data[first:last].clone() if first % dtype.itemsize else data[first:last]
            found[name] = span.view(dtype).view(part.shape)
    return found


def release(tensor: Tensor) -> None:
    """Let go of the pages of a mapped tensor's file, which count as this process's; they come back when read.

    Without it a cache that is gathered from all its segments would be resident twice.
    """
    storage = tensor.untyped_storage()
    if sys.platform == "linux" and not storage.resizable():  # resizable storage is no file's
        place, size = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
        ctypes.CDLL(None).madvise(place, size, _MADV_DONTNEED)
