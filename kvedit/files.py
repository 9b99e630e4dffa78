"""Write files so that a reader finds the old one or the new one whole, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvedit.errors import KveditError, SessionError

TEMPORARY = ".tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the failures of the file system while `path` is written into errors for the user."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise KveditError(
                f"There is no room left on the disk to write {path}.",
                "Free some space and run the command again; the session is as it was before.",
            ) from None
        raise KveditError(
            f"{path} cannot be written: {error.strerror or error}.",
            "Check the permissions of that folder, or set KVEDIT_HOME to another one.",
        ) from None


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to the disk, then put it in place at once.

    Raises:
        KveditError: The disk is full, or the folder cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _flush_folder(path.parent)


def append_file(path: Path, size_bytes: int, data: bytes) -> None:
    """Write `data` after the first `size_bytes` of a file, in place of all that follows, and flush it.

    Raises:
        KveditError: The disk is full, or the file cannot be written.
    """
    with writing(path):
        new = not path.exists()
        with path.open("ab") as file:
            file.truncate(size_bytes)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            _flush_folder(path.parent)


def truncate_file(path: Path, size_bytes: int) -> None:
    """Cut a file to its first bytes and flush it."""
    with writing(path), path.open("r+b") as file:
        file.truncate(size_bytes)
        os.fsync(file.fileno())


def make_folder(path: Path) -> None:
    """Make a folder and its parents, if need be."""
    with writing(path):
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            _flush_folder(path.parent)


def read_file(path: Path, what: str) -> bytes:
    """Read a file of a session.

    Args:
        path: The file.
        what: What to call it in a message.

    Raises:
        SessionError: It is not there or cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise damaged(what, error.strerror or str(error)) from None


def damaged(what: str, how: str) -> SessionError:
    """Make the error for a session whose files are not as they were written."""
    return SessionError(
        f"The session is damaged: {what} {how}.",
        "Load the document again with `kvedit load FILE --force`.",
    )


def digest(data: bytes | mmap.mmap) -> str:
    """SHA-256 of `data`, the first half, which names a file by its content."""
    return hashlib.sha256(data).hexdigest()[:32]


def _flush_folder(path: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
