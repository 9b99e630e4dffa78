"""Map the tensors of a safetensors file; pages are loaded when they are read.

A file is checked and mapped through the same descriptor, so it cannot be swapped in between.
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
"""Names of the dtypes that can be mapped, in the format's spelling."""
_MADV_DONTNEED = 4  # on Linux


def map_file(file: BinaryIO) -> Tensor:
    """Map all bytes of an open file, `uint8 [size]`; the file can be closed afterwards.

    Raises:
        OSError: It cannot be mapped.
        ValueError: It is empty.
    """
    number, size = file.fileno(), os.fstat(file.fileno()).st_size
    if not size:
        raise ValueError("it is empty")
    alias = f"/dev/fd/{number}"  # the open file, whatever its path now points to
    if not os.path.exists(alias):  # the fallback keeps the file open
        return torch.frombuffer(mmap.mmap(number, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    try:
        return torch.from_file(alias, shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from None


def tensors(data: Tensor, header: Header) -> dict[str, Tensor]:
    """Return the tensors of a mapped file by name, as views of its bytes.

    Tensors whose dtype torch lacks are left out. Tensors that are not aligned to their dtype are copies.
    """
    views: dict[str, Tensor] = {}
    for name, part in header.tensors.items():
        if dtype := _KINDS.get(part.dtype):
            first, last = (header.size_bytes + offset for offset in part.data_offsets)
            span = data[first:last].clone() if first % dtype.itemsize else data[first:last]
            views[name] = span.view(dtype).view(part.shape)
    return views


def release(tensor: Tensor) -> None:
    """Drop the pages of a mapped file from this process's memory; reading loads them again.

    Otherwise a cache gathered from all its segments would be resident twice.
    """
    storage = tensor.untyped_storage()
    if sys.platform == "linux" and not storage.resizable():  # the storage of a mapped file is not
        address, size = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
        ctypes.CDLL(None).madvise(address, size, _MADV_DONTNEED)
