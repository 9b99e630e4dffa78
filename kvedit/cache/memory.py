"""Available memory of a device, and the refusal of what would not fit. No torch except for a GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvedit.errors import KveditError

if TYPE_CHECKING:
    import torch

_REMEDY = (
    "Close other programs, shorten the document, use 16-bit weights (`load --dtype bfloat16`), or add memory."
)
# For each version of control groups, the files for limit and usage, and the key of reclaimable file pages.
_GROUPS = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}


def check_memory(what: str, needed: int, device: torch.device) -> None:
    """Raise if something needs more memory than is available; do nothing where that is unknown.

    Args:
        what: Subject of the error message.
        needed: Bytes that will be allocated in addition to those in use.
        device: Where they will be allocated.

    Raises:
        KveditError: Not enough memory; names both numbers.
    """
    available = available_bytes(device)
    if available is not None and needed > available:
        raise KveditError(
            f"{what} needs {_megabytes(needed)} of memory in addition to the model, "
            f"but only {_megabytes(available)} is available.",
            _REMEDY,
        )


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a device; `None` if unknown.

    On Linux, this is the minimum of what the system and each control group of the process have left.
    File pages count as free, since they can be read again.
    """
    if device.type == "cuda":
        import torch

        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    return _of_system(Path("/")) if device.type == "cpu" else None


@contextmanager
def allocating() -> Iterator[None]:
    """Turn a failed allocation into a `KveditError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        names = ("MemoryError", "OutOfMemoryError")
        if type(error).__name__ not in names and "allocate memory" not in str(error):
            raise
        reason = (str(error).strip() or "an allocation failed").splitlines()[0]
        raise KveditError(f"There is not enough memory ({reason[:160]}).", _REMEDY) from None


def _of_system(root: Path) -> int | None:
    """Return the bytes that a Linux system has left, according to the files below `root`."""
    found: list[int] = []
    with suppress(OSError, ValueError, KeyError):
        found.append(_table(root / "proc/meminfo")["MemAvailable:"] * 1024)
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                found += _of_groups(root / "sys/fs/cgroup", path, 2)
            elif "memory" in controllers.split(","):
                found += _of_groups(root / "sys/fs/cgroup/memory", path, 1)
    return max(0, min(found)) if found else None


def _of_groups(top: Path, path: str, version: int) -> list[int]:
    """Return the bytes that a control group and its ancestors have left, where they have a limit.

    Inside a container the path may refer to the host; then the container's own group is the top.
    """
    limit, used, files = _GROUPS[version]
    inner = top / path.strip("/")
    found: list[int] = []
    for folder in (inner, *inner.parents):
        if not folder.is_relative_to(top):
            break
        with suppress(OSError, ValueError):  # no such group, or `max`, meaning no limit
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            stat = _table(folder / "memory.stat")
            found.append(left + sum(stat.get(name, 0) for name in files))
    return found


def _table(path: Path) -> dict[str, int]:
    """Read lines that each have a name and a number."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines()) if words}


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def trim() -> None:
    """Return freed memory to the system; glibc otherwise keeps it between live allocations."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
