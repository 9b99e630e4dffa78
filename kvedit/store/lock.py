"""One writer a session: a lock that dies with its process and says who holds it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kvedit.errors import LockedError
from kvedit.files import TEMPORARY, replace_file, writing

_HOLDER = "holder.json"


@contextmanager
def write_lock(folder: Path, command: str, since: str) -> Iterator[None]:
    """Hold the session in `folder` for writing.

    The operating system frees the lock when its holder dies, so no stale lock can stay behind.

    Args:
        folder: The session's folder.
        command: What the holder is doing, for others to read.
        since: When it began.

    Raises:
        LockedError: Another process holds it.
    """
    lock = FileLock(folder / "lock", timeout=0)
    with writing(folder / "lock"):
        try:
            lock.acquire()
        except Timeout:  # an OSError too
            raise LockedError(
                f"The session '{folder.name}' is being changed by {_read_holder(folder)}.",
                "Wait until that process has ended, then run the command again.",
            ) from None
    try:
        for left_over in folder.rglob(f"*{TEMPORARY}"):
            left_over.unlink(missing_ok=True)
        holder = {"pid": os.getpid(), "command": command, "since": since}
        replace_file(folder / _HOLDER, json.dumps(holder).encode())
        yield
    finally:
        lock.release()


def _read_holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / _HOLDER).read_text(encoding="utf-8"))
        return f"process {holder['pid']} (kvedit {holder['command']}, since {holder['since']})"
    except (OSError, ValueError, KeyError):
        return "another process"
