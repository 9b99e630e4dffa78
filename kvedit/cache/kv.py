"""The working cache: keys and values in memory, rotated to their positions, one entry per row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a tensor to a device; a tensor that is already there is returned unchanged.

    On CUDA the copy does not block: the host's memory has been read when the call returns, so the
    caller need not wait for the copy or for earlier work of the device. MPS does not guarantee that.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


@dataclass(frozen=True, slots=True)
class States:
    """Keys before RoPE and values of some rows, as a segment stores them.

    Attributes:
        rows: Row numbers, sorted, `int64 [N]`, on the host.
        keys: Before RoPE, `[L, H, N, D]`.
        values: `[L, H, N, D]`.
    """

    rows: Tensor
    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        if self.keys.shape != self.values.shape or self.keys.shape[2] != len(self.rows):
            raise ValueError(f"{self.keys.shape}, {self.values.shape}, {len(self.rows)} rows")

    def part(self, first: int, last: int) -> States:
        """Return the states `[first, last)`, by index in this object; a view."""
        return States(self.rows[first:last], self.keys[:, :, first:last], self.values[:, :, first:last])

    @classmethod
    def concatenate(cls, parts: list[States]) -> States:
        """Join states of ascending rows."""
        return cls(
            torch.cat([part.rows for part in parts]),
            torch.cat([part.keys for part in parts], dim=2),
            torch.cat([part.values for part in parts], dim=2),
        )

    @classmethod
    def merged(cls, parts: list[States], size: int) -> list[States]:
        """Join small parts into larger ones, so that many short runs do not become many small segments.

        Args:
            parts: States of ascending rows.
            size: Maximum number of rows in a joined part, unless a single part has more.
        """
        groups: list[list[States]] = []
        held = size
        for part in parts:
            if held + len(part.rows) > size:
                groups.append([])
                held = 0
            groups[-1].append(part)
            held += len(part.rows)
        return [group[0] if len(group) == 1 else cls.concatenate(group) for group in groups]


class KVCache:
    """Rotated keys and values of up to `capacity` rows.

    All layers share one tensor and one length, so no layer can be shorter or longer than another.

    Attributes:
        keys: After RoPE, `[L, H, capacity, D]`.
        values: `[L, H, capacity, D]`.
        length: Rows in use.
    """

    def __init__(
        self, layers: int, heads: int, capacity: int, width: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, heads, capacity, width)
        self.keys, self.values = (_zeros(shape, dtype, device) for _ in range(2))
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def check_rows(self, first: int, last: int) -> None:
        """Reject rows `first..last` that lie outside the cache.

        torch would silently truncate a slice beyond the end, and rows would be lost.

        Raises:
            ValueError: Names the rows and the capacity.
        """
        if not 0 <= first <= last < self.capacity:
            raise ValueError(f"rows {first} to {last} of a cache of {self.capacity} rows")

    def scatter_(self, layer: int, rows: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Write rotated keys and values, each `[H, N, D]`, of one layer at `rows`."""
        if isinstance(rows, slice):
            self.keys[layer, :, rows] = keys
            self.values[layer, :, rows] = values
        else:
            self.keys[layer].index_copy_(1, rows, keys)
            self.values[layer].index_copy_(1, rows, values)

    def clone(self) -> KVCache:
        """Copy the cache, for a probe or an experiment that must leave it untouched."""
        twin = KVCache.__new__(KVCache)
        twin.keys, twin.values, twin.length = self.keys.clone(), self.values.clone(), self.length
        return twin


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros; on a CPU its pages are allocated when they are first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, dtype=f"i{dtype.itemsize}")).view(dtype).to(device)
