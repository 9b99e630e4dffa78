"""Write files so that a reader finds the old one or the new one whole, whatever happens.

Files of a session are opened here only. A session may come from a stranger, so no link is followed,
nothing but a plain file is read or written, and a size is looked at before memory is taken.
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
"""Bytes of a file that is mapped or copied, and not read into memory."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
# What a file system says that cannot flush a folder, or does not let one open it.
_UNFLUSHABLE = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES)
# Not followed, if a link took its place meanwhile; not waited on, if a pipe did; not translated on Windows.
_CAREFUL = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_CLOEXEC"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the failures of the file system while `path` is written into errors for the user."""
    try:
        yield
    except FileNotFoundError:
        raise KveditError(
            f"{path} cannot be written: it is gone, or its folder is.",
            "Run `kvedit sessions list` to see what is there, then run the command again.",
        ) from None
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


def replace_file(path: Path, *data: bytes | memoryview) -> None:
    """Write `data`, part after part, beside `path`, flush it to the disk, then put it in place at once.

    Raises:
        KveditError: The disk is full, or the folder cannot be written.
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
    """Write `data` after the first `size_bytes` of a file, in place of all that follows, and flush it.

    Raises:
        KveditError: The disk is full, or the file cannot be written, or has not so many bytes.
        SessionError: It is no plain file.
    """
    check_plain(path)
    with writing(path):
        new = not size_bytes and not path.exists()
        # A file that has bytes is there: one that has gone is not made anew.
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
    """Copy a file to where none is, or its first `size_bytes`, and flush it."""
    with opened(source, source.name, LARGEST) as old, writing(target), _open(target, _NEW, "wb") as new:
        left = os.fstat(old.fileno()).st_size if size_bytes is None else size_bytes
        while left and (part := old.read(min(left, 1 << 20))):
            new.write(part)
            left -= len(part)
        _flush(new)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, if need be."""
    with writing(path):
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            flush_folder(path.parent)


def read_file(path: Path, what: str, most_bytes: int) -> bytes:
    """Read a file of a session.

    Args:
        path: The file.
        what: What to call it in a message.
        most_bytes: A larger one is not read.

    Raises:
        SessionError: It is not there, is no plain file, is too large or cannot be read.
    """
    with opened(path, what, most_bytes) as file, reading(path, what):
        return file.read(os.fstat(file.fileno()).st_size)  # it takes the memory before it reads


@contextmanager
def opened(path: Path, what: str, most_bytes: int) -> Iterator[BinaryIO]:
    """Open a file of a session for reading; see `read_file`."""
    check_plain(path)
    with reading(path, what):
        file = _open(path, os.O_RDONLY, "rb")
    with file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise damaged(what, f"has {size} bytes, and at most {most_bytes} are read")
        yield file


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn the failures of the file system while `path` is read into errors for the user."""
    try:
        yield
    except PermissionError as error:
        raise SessionError(
            f"{path} cannot be read: {error.strerror}.",
            "Check whose it is and its permissions, or set KVEDIT_HOME to another folder.",
        ) from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise damaged(what, f"cannot be read ({getattr(error, 'strerror', None) or error})") from None


def check_plain(path: Path, *, folder: bool = False) -> None:
    """Refuse what is there and is no plain file, or no plain folder: a link may lead anywhere.

    Raises:
        SessionError: It is a link, a pipe, a device or the like.
    """
    kind = kind_of(path)
    if kind not in ("nothing", "unknown", "a folder" if folder else "a file"):
        raise SessionError(
            f"{path} is {kind}, and kvedit takes only plain files and folders for a session's.",
            "Take it away, or remove the session (`kvedit sessions remove`) and load the document again "
            "with `kvedit load FILE`.",
        )


def kind_of(path: Path) -> str:
    """Say what is at a path: `a file`, `a folder`, `a link`, `nothing`, `unknown` or something else."""
    try:
        found = os.lstat(path)
    except PermissionError:
        return "unknown"  # opening it says why
    except OSError:
        return "nothing"
    # A junction of Windows is a link that its mode does not show.
    if stat.S_ISLNK(found.st_mode) or getattr(found, "st_reparse_tag", False):
        return "a link"
    for is_kind, name in ((stat.S_ISREG, "a file"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe")):
        if is_kind(found.st_mode):
            return name
    return "a device or a socket"


def size_of(path: Path) -> int:
    """Return the bytes of what is at a path itself, not of where a link leads; 0 for nothing."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def damaged(what: str, how: str) -> SessionError:
    """Make the error for a session whose files are not as they were written."""
    return SessionError(
        f"The session is damaged: {what} {how}.",
        "Load the document again with `kvedit load FILE --force`.",
    )


def digest(*data: bytes | memoryview) -> str:
    """SHA-256 of `data`, part after part; the first half, which names a file by its content."""
    found = hashlib.sha256()
    for part in data:
        found.update(part)
    return found.hexdigest()[:32]


def flush_folder(path: Path) -> None:
    """Bring a folder's names to the disk, where the file system can."""
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
            raise OSError(errno.EINVAL, "it is no plain file")
        return os.fdopen(handle, mode)  # type: ignore[return-value]
    except BaseException:
        os.close(handle)
        raise


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
