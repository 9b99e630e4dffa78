"""The lock that allows one writer per session; it ends with its process and names its holder."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from filelock import FileLock, Timeout
from msgspec import Struct, to_builtins

from kvedit.errors import KveditError, LockedError, SessionError
from kvedit.store.checks import Count, form, load_json, record
from kvedit.store.files import check_plain, read_file, replace_file, writing

_HOLDER = "holder.json"
_MOST_BYTES = 1000
_Word = Annotated[str, form(r"[0-9A-Za-z:.\-]{1,40}")]  # is printed and may come from elsewhere
# Errors of `flock` on file systems without locks, such as some network file systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class _Holder(Struct, frozen=True, forbid_unknown_fields=True):
    """The holder of the lock: its process, its command, and when that started."""

    pid: Count
    command: _Word
    since: _Word


@contextmanager
def write_lock(folder: Path, command: str, since: str) -> Iterator[None]:
    """Hold the write lock of the session in `folder`.

    The operating system releases the lock when its holder dies, so there are no stale locks.

    Args:
        folder: The session's folder.
        command: What the holder is doing, shown to other processes.
        since: When that started.

    Raises:
        LockedError: Another process holds the lock.
        KveditError: The file system does not support locks, or the folder is not writable.
        SessionError: The lock is not a regular file.
    """
    path = folder / "lock"
    check_plain(path)
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    with writing(path):
        try:
            lock.acquire()
        except Timeout:  # an OSError too
            raise LockedError(
                f"The session '{folder.name}' is being changed by {_read_holder(folder)}.",
                "Wait until that process has finished, then run the command again.",
            ) from None
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            raise KveditError(
                f"The file system of {folder} does not support locks, so two commands could interfere.",
                "Set KVEDIT_HOME to a folder on a local disk.",
            ) from None
    try:
        _write_holder(folder / _HOLDER, _Holder(os.getpid(), command, since))
        yield
    finally:
        lock.release()


def _write_holder(path: Path, holder: _Holder) -> None:
    """Record who holds the lock. Errors are ignored, so that `remove` works on a full disk."""
    try:
        replace_file(path, json.dumps(to_builtins(holder)).encode())
    except KveditError:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # it would name an earlier holder


def _read_holder(folder: Path) -> str:
    try:
        holder = record(load_json(read_file(folder / _HOLDER, _HOLDER, _MOST_BYTES)), _Holder)
        return f"process {holder.pid} (kvedit {holder.command}, since {holder.since})"
    except (SessionError, ValueError):
        return "another process"
