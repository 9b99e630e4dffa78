"""A session on disk. docs/session-format.md specifies the files.

`session.json` is replaced, the journal is append-only, and all other files are immutable and named by their
content. A writer adds files and then replaces `session.json`, so a command that is killed at any moment
leaves the old session or the new one. Only this package reads or writes session files. torch is imported
only to read or write segments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvedit.errors import KveditError, SessionError
from kvedit.store import checks, files
from kvedit.store.journal import Journal
from kvedit.store.lock import write_lock
from kvedit.store.records import Manifest, Revision, dump_manifest, parse_manifest

if TYPE_CHECKING:
    from torch import Tensor

    from kvedit.cache.kv import States

_KINDS = {"tokenizers": "json", "segments": "safetensors"}
_LEFT_OVER = re.compile(r".+\.[0-9]+\.[0-9a-f]+" + re.escape(files.TEMPORARY))
_MANIFEST_BYTES = 1 << 22
_TOKENIZER_BYTES = 1 << 27


class Store:
    """The files of one session.

    Attributes:
        folder: Folder of the session.
        written_bytes: Bytes written through this object.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written_bytes = 0

    @property
    def name(self) -> str:
        return self.folder.name

    def exists(self) -> bool:
        """Return whether the folder holds a session, damaged or not."""
        return files.kind_of(self.folder / "session.json") != "nothing"

    @contextmanager
    def lock(self, command: str, since: str, *, new: bool = False) -> Iterator[None]:
        """Hold the session's write lock, and remove temporary files of killed writers.

        Args:
            command: What the holder is doing, one word.
            since: When that started.
            new: Create the session's folder if it does not exist.

        Raises:
            LockedError: Another process holds the lock.
            SessionError: The folder does not exist or is a link.
        """
        if new:
            files.make_folder(self.folder)
        elif files.kind_of(self.folder) == "nothing":
            raise self._no_session()
        with write_lock(self._inside(), command, since):
            for folder in self._folders():
                for name in _names(folder):
                    if _LEFT_OVER.fullmatch(name):
                        _discard(folder / name)
            yield

    def read_manifest(self) -> Manifest:
        """Read `session.json`.

        Raises:
            SessionError: The session does not exist or is damaged.
        """
        if not self.exists():
            raise self._no_session()
        data = files.read_file(self._inside() / "session.json", "session.json", _MANIFEST_BYTES)
        try:
            return parse_manifest(data)
        except ValueError:
            raise files.damaged("session.json", "is invalid") from None

    def _no_session(self) -> SessionError:
        return SessionError(
            f"There is no session '{self.name}' in {self.folder.parent}.",
            "Load a document first: `kvedit load FILE`.",
        )

    def _inside(self, kind: str | None = None) -> Path:
        """Return the session's folder, or a subfolder; raise `SessionError` if it is a link."""
        files.check_plain(self.folder, folder=True)
        if kind is None:
            return self.folder
        files.check_plain(self.folder / kind, folder=True)
        return self.folder / kind

    def _folders(self) -> list[Path]:
        """Return the session's folder and its subfolders, except those that are missing or links."""
        folders = (self.folder, *(self.folder / kind for kind in _KINDS))
        return [folder for folder in folders if files.kind_of(folder) == "a folder"]

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace `session.json` atomically; this is when a command takes effect."""
        data = dump_manifest(manifest)
        if len(data) > _MANIFEST_BYTES:
            raise KveditError(
                f"session.json would be larger than {_MANIFEST_BYTES} bytes.",
                "Load the document again with a shorter --system.",
            )
        files.replace_file(self._inside() / "session.json", data)
        self.written_bytes += len(data)

    def read(self) -> tuple[Manifest, Journal]:
        """Read the manifest and its journal; raise `SessionError` if one is damaged."""
        manifest = self.read_manifest()
        while True:
            try:
                journal = Journal(self._inside(), manifest.journal)
                break
            except SessionError:
                # Another process may have replaced the journal meanwhile.
                before, manifest = manifest, self.read_manifest()
                if manifest.journal.name == before.journal.name:
                    raise
        if max(manifest.revision, *manifest.undone, 0) >= len(journal):
            raise files.damaged("session.json", "names a revision that is not in the journal")
        return manifest, journal

    def append(self, journal: Journal, revision: Revision) -> None:
        """Append a revision to the session's journal."""
        self.written_bytes += len(journal.append(revision))

    def read_tokenizer(self, name: str) -> str:
        """Read the tokenizer's JSON; raise `SessionError` if it is damaged."""
        path = self._inside("tokenizers") / f"{name}.json"
        data = files.read_file(path, "the tokenizer", _TOKENIZER_BYTES)
        if files.digest(data) != name:
            raise files.damaged("the tokenizer", "does not match its checksum")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise files.damaged("the tokenizer", "is invalid") from None

    def write_tokenizer(self, serialized: str) -> str:
        """Write the tokenizer's JSON, and return its name."""
        data = serialized.encode("utf-8")
        name = files.digest(data)
        folder = self._inside("tokenizers")
        files.make_folder(folder)
        files.replace_file(folder / f"{name}.json", data)
        self.written_bytes += len(data)
        return name

    def read_segment(self, name: str) -> dict[str, Tensor]:
        """Read the tensors of a segment; see `kvedit.store.segments.read_segment`."""
        from kvedit.store.segments import read_segment

        return read_segment(self._inside("segments"), name)

    def write_segment(self, states: States, ids: npt.NDArray[np.int64]) -> str:
        """Write rows as a segment, and return its name."""
        from kvedit.store.segments import SUFFIX, write_segment

        folder = self._inside("segments")
        files.make_folder(folder)
        name = write_segment(folder, states, ids)
        self.written_bytes += (folder / f"{name}{SUFFIX}").stat().st_size
        return name

    def size_bytes(self) -> int:
        """Return the size of the session on disk."""
        return sum(map(files.size_of, self._files()))

    def sweep(self, manifest: Manifest | None, journal: Journal | None) -> int:
        """Remove every session file that no revision of the journal uses; all of them if it is `None`.

        Files that do not have the name of a session file are left alone.

        Returns:
            Bytes freed.

        Raises:
            SessionError: A folder of the session is a link, or the journal is invalid.
        """
        for kind in _KINDS:
            self._inside(kind)  # raises for a link, which may be intentional and is not removed
        kept = {self.folder / "session.json"}
        if manifest is not None and journal is not None:
            kept |= {
                self.folder / manifest.journal.name,
                self.folder / "tokenizers" / f"{manifest.tokenizer}.json",
                *(self.folder / "segments" / f"{name}.safetensors" for name in journal.segments()),
            }
        freed = 0
        for path in self._files():
            if path not in kept:
                size = files.size_of(path)
                with files.writing(path):
                    _discard(path)
                freed += size
        return freed

    def copy(self, target: Store) -> None:
        """Copy the session into `target`, whose lock the caller holds; segments are hard links.

        The copy does not become the current session.
        """
        manifest, journal = self.read()
        names = {"tokenizers": [manifest.tokenizer], "segments": sorted(journal.segments())}
        for kind, suffix in _KINDS.items():
            old, new = self._inside(kind), target._inside(kind)
            files.make_folder(new)
            for name in names[kind]:
                _share(old / f"{name}.{suffix}", new / f"{name}.{suffix}")
        record = manifest.journal
        _discard(target.folder / record.name)
        files.copy_file(self.folder / record.name, target.folder / record.name, record.size_bytes)
        target.write_manifest(replace(manifest, used=""))

    def remove(self) -> None:
        """Remove the session; the caller holds its lock. If killed midway, the session is gone.

        Other files in the folder stay, and then so does the folder.
        """
        _discard(self.folder / "session.json")
        for path in self._files():
            _discard(path)
        with suppress(OSError):
            for name in ("holder.json", "lock"):
                (self.folder / name).unlink(missing_ok=True)
            for folder in reversed(self._folders()):
                folder.rmdir()

    def rename(self, target: Store) -> None:
        """Rename the session; the caller holds its lock."""
        with files.writing(target.folder):
            self.folder.rename(target.folder)
        self.folder = target.folder

    def _files(self) -> Iterator[Path]:
        """Yield the session's files except `lock` and `holder.json`; `session.json` comes last."""
        for kind, suffix in _KINDS.items():
            folder = self.folder / kind
            if files.kind_of(folder) in ("a folder", "nothing"):
                yield from (folder / name for name in _names(folder) if _is_ours(name, suffix))
            else:
                yield folder  # a link: its target does not belong to the session
        yield from (self.folder / name for name in _names(self.folder) if checks.JOURNAL.fullmatch(name))
        if self.exists():
            yield self.folder / "session.json"


def _is_ours(name: str, suffix: str) -> bool:
    stem, _, end = name.partition(".")
    return end == suffix and checks.NAME.fullmatch(stem) is not None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder)) if files.kind_of(folder) == "a folder" else []
    except OSError:
        return []


def _discard(path: Path) -> None:
    """Remove a file, a link without its target, or an empty folder."""
    with files.writing(path):
        if files.kind_of(path) == "a folder":
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def _share(source: Path, target: Path) -> None:
    """Hard-link `source` at `target`, or copy it if that is not possible."""
    files.check_plain(source)
    _discard(target)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        files.copy_file(source, target)
