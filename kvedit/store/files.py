"""Read and write files safely; a write is atomic.

Only this module opens the files of a session. A session may come from an untrusted source, so links are not
followed, only regular files are read or written, and sizes are checked before memory is allocated.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvedit.errors import KveditError, SessionError

TEMPORARY = ".tmp"
LARGEST = 1 << 40
"""Largest size in bytes of a file that is mapped or copied instead of read into memory."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
# Errors of file systems that cannot flush a folder or do not allow opening it.
_UNFLUSHABLE = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES)
# If a link or pipe replaced the file meanwhile, do not follow it or wait for it. Windows: no text mode.
_CAREFUL = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_CLOEXEC"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `KveditError` for file system errors while `path` is written."""
    try:
        yield
    except FileNotFoundError:
        raise KveditError(
            f"{path} cannot be written: it or its folder no longer exists.",
            "Run `kvedit sessions list` to see which sessions exist, then run the command again.",
        ) from None
    except OSError as error:
        if error.errno in _FULL:
            raise KveditError(
                f"The disk is full: {path} cannot be written.",
                "Free some space and run the command again; the session is unchanged.",
            ) from None
        raise KveditError(
            f"{path} cannot be written: {error.strerror or error}.",
            "Check the permissions of that folder, or set KVEDIT_HOME to another one.",
        ) from None


def replace_file(path: Path, *data: bytes | memoryview) -> None:
    """Write the concatenated `data` to a temporary file, flush it, and rename it to `path`.

    Raises:
        KveditError: The disk is full, or the folder is not writable.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}")
    with writing(path):
        try:
            with _open(temporary, _NEW, "wb") as file:
                for part in data:
                    file.write(part)
                _flush(file)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        flush_folder(path.parent)


def append_file(path: Path, size_bytes: int, data: bytes) -> None:
    """Truncate a file to `size_bytes`, append `data` and flush it; create the file if that is 0.

    Raises:
        KveditError: The disk is full, or the file is not writable or is shorter than `size_bytes`.
        SessionError: It is not a regular file.
    """
    check_plain(path)
    with writing(path):
        new = not size_bytes and not path.exists()
        # A file that should have bytes must exist: if it is gone, do not create it again.
        with _open(path, os.O_RDWR | (0 if size_bytes else os.O_CREAT), "r+b") as file:
            if os.fstat(file.fileno()).st_size < size_bytes:
                raise OSError(errno.EIO, f"it has lost some of its first {size_bytes} bytes")
            file.truncate(size_bytes)
            try:
                file.seek(size_bytes)
                file.write(data)
                _flush(file)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), size_bytes)
                raise
        if new:
            flush_folder(path.parent)


def copy_file(source: Path, target: Path, size_bytes: int | None = None) -> None:
    """Copy a file, or its first `size_bytes`, to a path that does not exist yet, and flush it."""
    with opened(source, source.name, LARGEST) as old, writing(target), _open(target, _NEW, "wb") as new:
        left = os.fstat(old.fileno()).st_size if size_bytes is None else size_bytes
        while left and (part := old.read(min(left, 1 << 20))):
            new.write(part)
            left -= len(part)
        _flush(new)


def make_folder(path: Path) -> None:
    """Create a folder and its parents if they do not exist."""
    with writing(path):
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            flush_folder(path.parent)


def read_file(path: Path, what: str, most_bytes: int) -> bytes:
    """Read a file of a session.

    Args:
        path: The file.
        what: What messages call it.
        most_bytes: Largest size to read.

    Raises:
        SessionError: It is missing, not a regular file, too large or not readable.
    """
    with opened(path, what, most_bytes) as file, reading(path, what):
        return file.read(os.fstat(file.fileno()).st_size)  # `read` allocates as much as it is asked for


@contextmanager
def opened(path: Path, what: str, most_bytes: int) -> Iterator[BinaryIO]:
    """Open a file of a session for reading; see `read_file`."""
    check_plain(path)
    with reading(path, what):
        file = _open(path, os.O_RDONLY, "rb")
    with file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise damaged(what, f"has {size} bytes, but at most {most_bytes} are allowed")
        yield file


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Raise `SessionError` for file system errors while `path` is read."""
    try:
        yield
    except PermissionError as error:
        raise SessionError(
            f"{path} cannot be read: {error.strerror}.",
            "Check its owner and permissions, or set KVEDIT_HOME to another folder.",
        ) from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise damaged(what, f"cannot be read ({getattr(error, 'strerror', None) or error})") from None


def check_plain(path: Path, *, folder: bool = False) -> None:
    """Refuse anything that exists and is not a regular file or, if `folder`, not a folder.

    Raises:
        SessionError: It is, for example, a link, a pipe or a device.
    """
    kind = kind_of(path)
    if kind not in ("nothing", "unknown", "a folder" if folder else "a file"):
        raise SessionError(
            f"{path} is {kind}, but a session may contain only regular files and folders.",
            "Delete it, or remove the session (`kvedit sessions remove`) and load the document again "
            "with `kvedit load FILE`.",
        )


def kind_of(path: Path) -> str:
    """Return what is at a path: `a file`, `a folder`, `a link`, `nothing`, `unknown` or another kind."""
    try:
        status = os.lstat(path)
    except PermissionError:
        return "unknown"  # the error on opening it will tell
    except OSError:
        return "nothing"
    # A Windows junction is a link, but its mode does not show that.
    if stat.S_ISLNK(status.st_mode) or getattr(status, "st_reparse_tag", False):
        return "a link"
    for is_kind, name in ((stat.S_ISREG, "a file"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe")):
        if is_kind(status.st_mode):
            return name
    return "a device or a socket"


def size_of(path: Path) -> int:
    """Return the size of a path in bytes without following links; 0 if nothing exists there."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def damaged(what: str, how: str) -> SessionError:
    """Return the error for a damaged session; `what` is the part and `how` completes the sentence."""
    return SessionError(
        f"The session is damaged: {what} {how}.",
        "Load the document again with `kvedit load FILE --force`.",
    )


def digest(*data: bytes | memoryview) -> str:
    """Return the first half of the SHA-256 of the concatenated `data`; it names files by content."""
    checksum = hashlib.sha256()
    for part in data:
        checksum.update(part)
    return checksum.hexdigest()[:32]


def flush_folder(path: Path) -> None:
    """Flush a folder's entries to disk, if the file system can."""
    if os.name == "nt":  # folders cannot be opened there
        return
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _UNFLUSHABLE:
            raise


def _open(path: Path, flags: int, mode: str) -> BinaryIO:
    handle = os.open(path, flags | _CAREFUL, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.fdopen(handle, mode)  # type: ignore[return-value]
    except BaseException:
        os.close(handle)
        raise


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
