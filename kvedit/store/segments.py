"""Segments: immutable safetensors files of rows, named by a checksum of their content."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from kvedit.cache import States
from kvedit.files import damaged, digest, replace_file

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
        metadata={"format": "kvedit-segment-1"},
    )
    name = digest(data)
    replace_file(folder / f"{name}{SUFFIX}", data)
    return name


def read_segment(folder: Path, name: str) -> dict[str, Tensor]:
    """Read a segment: `keys` and `values` `[L, H, N, D]`, `ids` `int32 [N]`.

    Raises:
        SessionError: It is not there, or its bytes are not those that were written.
    """
    what = f"segment {name}"
    path = folder / f"{name}{SUFFIX}"
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            intact = digest(data) == name
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise damaged(what, f"cannot be read ({error})") from None
    if not intact:
        raise damaged(what, "does not match its checksum")
    # Mapped, not read: the pages are the file's own, and go when memory runs short.
    return safetensors.torch.load_file(path)
