"""One writer a session: a lock that dies with its process and says who holds it."""

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
_Word = Annotated[str, form(r"[0-9A-Za-z:.\-]{1,40}")]  # it is printed, and may be a stranger's
# What `flock` says where there are no locks, as on some network file systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class _Holder(Struct, frozen=True, forbid_unknown_fields=True):
    """Who holds the lock: the process, its command, and when that began."""

    pid: Count
    command: _Word
    since: _Word


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
        KveditError: The file system keeps no locks, or the folder cannot be written.
        SessionError: The lock's file is no plain file.
    """
    place = folder / "lock"
    check_plain(place)
    lock = FileLock(place, timeout=0, fallback_to_soft=False)
    with writing(place):
        try:
            lock.acquire()
        except Timeout:  # an OSError too
            raise LockedError(
                f"The session '{folder.name}' is being changed by {_read_holder(folder)}.",
                "Wait until that process has ended, then run the command again.",
            ) from None
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            raise KveditError(
                f"The file system of {folder} keeps no locks, so two commands could disturb each other.",
                "Set KVEDIT_HOME to a folder on a local disk.",
            ) from None
    try:
        _write_holder(folder / _HOLDER, _Holder(os.getpid(), command, since))
        yield
    finally:
        lock.release()


def _write_holder(path: Path, holder: _Holder) -> None:
    """Say who holds the lock. Nothing depends on it, so a full disk does not keep one from `remove`."""
    try:
        replace_file(path, json.dumps(to_builtins(holder)).encode())
    except KveditError:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # it would name somebody else


def _read_holder(folder: Path) -> str:
    try:
        holder = record(load_json(read_file(folder / _HOLDER, _HOLDER, _MOST_BYTES)), _Holder)
        return f"process {holder.pid} (kvedit {holder.command}, since {holder.since})"
    except (SessionError, ValueError):
        return "another process"
