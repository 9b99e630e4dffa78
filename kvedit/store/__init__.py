"""A session on disk. docs/session-format.md describes the files.

`session.json` is replaced, the journal grows, and all other files are immutable and named by
their content. A writer adds to them and then replaces `session.json`; killed at any instant, the
session is the old one or the new one. The only room that reads or writes session files. Loads
no torch until a segment is touched.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvedit import files
from kvedit.errors import SessionError, UsageError
from kvedit.store.journal import Journal
from kvedit.store.lock import write_lock
from kvedit.store.records import (
    Entry,
    JournalRecord,
    Manifest,
    ModelRecord,
    Revision,
    dump_manifest,
    parse_manifest,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kvedit.cache import States

__all__ = ["Entry", "Home", "Journal", "JournalRecord", "Manifest", "ModelRecord", "Revision", "Store"]

_KINDS = ("tokenizers", "segments")
_NAME = re.compile(r"[\w][\w.\-]{0,63}")


@dataclass(frozen=True, slots=True)
class Home:
    """The folder that holds the sessions."""

    folder: Path

    @classmethod
    def default(cls) -> Home:
        """`KVEDIT_HOME` where it is set, else `.kvedit` of the working directory."""
        return cls(Path(os.environ.get("KVEDIT_HOME") or ".kvedit").expanduser())

    def store(self, name: str) -> Store:
        """Give the store of a session by its name, whether it exists or not.

        Raises:
            UsageError: The name cannot be that of a session.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"'{name}' cannot name a session.",
                "Use letters, digits, '.', '-' and '_', at most 64, not starting with '.' or '-'.",
            )
        return Store(self.folder / name)

    def stores(self) -> list[Store]:
        """Give the stores of all sessions, by name."""
        return [Store(path.parent) for path in sorted(self.folder.glob("[!.]*/session.json"))]

    def current(self) -> Store:
        """Give the store of the session that was loaded or chosen last.

        Raises:
            SessionError: There is none, or none that can be read.
        """
        stores = self.stores()
        if not stores:
            raise SessionError(
                f"There is no session in {self.folder}.", "Load a document first: `kvedit load FILE`."
            )
        used: list[tuple[str, str, Store]] = []
        for store in stores:
            try:
                used.append((store.read_manifest().used, store.name, store))
            except SessionError:
                if len(stores) == 1:
                    raise
        if not used:
            raise SessionError(
                f"No session in {self.folder} can be read.",
                "Name one with --session to see why, or load a document with `kvedit load FILE --force`.",
            )
        return max(used, key=lambda item: item[:2])[2]

    def keep_out_of_version_control(self) -> None:
        """Tell git to leave the sessions alone."""
        path = self.folder / ".gitignore"
        if not path.exists() or not path.stat().st_size:
            with files.writing(path):
                path.write_text("*\n", encoding="utf-8")


class Store:
    """The files of one session.

    Attributes:
        folder: Where they are.
        written_bytes: Bytes that this store has written to files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written_bytes = 0

    @property
    def name(self) -> str:
        return self.folder.name

    def exists(self) -> bool:
        """Whether a session was ever completed here."""
        return (self.folder / "session.json").is_file()

    def lock(self, command: str, since: str) -> AbstractContextManager[None]:
        """Hold the session for writing; raises `LockedError` when another process does."""
        files.make_folder(self.folder)
        return write_lock(self.folder, command, since)

    def read_manifest(self) -> Manifest:
        """Read `session.json`.

        Raises:
            SessionError: There is no session, or it is damaged.
        """
        if not self.exists():
            raise SessionError(
                f"There is no session '{self.name}' in {self.folder.parent}.",
                "Load a document first: `kvedit load FILE`.",
            )
        data = files.read_file(self.folder / "session.json", "session.json")
        try:
            return parse_manifest(data)
        except (ValueError, KeyError, TypeError):
            raise files.damaged("session.json", "cannot be understood") from None

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace `session.json` at once: the moment at which a command takes effect."""
        data = dump_manifest(manifest)
        files.replace_file(self.folder / "session.json", data)
        self.written_bytes += len(data)

    def read(self) -> tuple[Manifest, Journal]:
        """Read the manifest with its journal; raises `SessionError` when one is damaged."""
        manifest = self.read_manifest()
        while True:
            try:
                return manifest, Journal(self.folder, manifest.journal)
            except SessionError:
                # Another process may have put a new journal in the old one's place meanwhile.
                before, manifest = manifest, self.read_manifest()
                if manifest.journal.name == before.journal.name:
                    raise

    def append(self, journal: Journal, revision: Revision) -> None:
        """Write a revision into the session's journal."""
        self.written_bytes += len(journal.append(revision))

    def read_tokenizer(self, name: str) -> str:
        """Read the tokenizer's JSON; raises `SessionError` when it is damaged."""
        data = files.read_file(self.folder / "tokenizers" / f"{name}.json", "the tokenizer")
        if files.digest(data) != name:
            raise files.damaged("the tokenizer", "does not match its checksum")
        return data.decode("utf-8")

    def write_tokenizer(self, serialized: str) -> str:
        """Write the tokenizer's JSON; give its name."""
        data = serialized.encode("utf-8")
        name = files.digest(data)
        files.make_folder(self.folder / "tokenizers")
        files.replace_file(self.folder / "tokenizers" / f"{name}.json", data)
        self.written_bytes += len(data)
        return name

    def read_segment(self, name: str) -> dict[str, Tensor]:
        """Read the tensors of a segment; raises `SessionError` when it is damaged."""
        from kvedit.store.segments import read_segment

        return read_segment(self.folder / "segments", name)

    def write_segment(self, states: States, ids: npt.NDArray[np.int64]) -> str:
        """Write rows as a segment; give its name."""
        from kvedit.store.segments import SUFFIX, write_segment

        folder = self.folder / "segments"
        files.make_folder(folder)
        name = write_segment(folder, states, ids)
        self.written_bytes += (folder / f"{name}{SUFFIX}").stat().st_size
        return name

    def size_bytes(self) -> int:
        """Bytes that the session takes on disk."""
        return sum(path.stat().st_size for path in self._files())

    def sweep(self, manifest: Manifest | None, journal: Journal | None) -> int:
        """Remove every file that no revision of the journal reaches; all of them without one.

        Returns:
            Bytes that were freed.
        """
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
                freed += path.stat().st_size
                path.unlink(missing_ok=True)
        return freed

    def copy(self, target: Store) -> None:
        """Copy the session into `target`, whose lock the caller holds; segments are shared.

        The copy never is the current session by itself.
        """
        manifest, journal = self.read()
        for kind in _KINDS:
            files.make_folder(target.folder / kind)
        names = [f"segments/{name}.safetensors" for name in journal.segments()]
        for name in (f"tokenizers/{manifest.tokenizer}.json", *names, manifest.journal.name):
            _link(self.folder / name, target.folder / name, share="/" in name)
        files.truncate_file(target.folder / manifest.journal.name, manifest.journal.size_bytes)
        target.write_manifest(replace(manifest, used=""))

    def remove(self) -> None:
        """Remove the session; the caller holds its lock. Killed midway, it is gone all the same."""
        with files.writing(self.folder):
            (self.folder / "session.json").unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)

    def rename(self, target: Store) -> None:
        """Give the session another name; the caller holds its lock."""
        with files.writing(target.folder):
            self.folder.rename(target.folder)
        self.folder = target.folder

    def _files(self) -> Iterator[Path]:
        """The session's files, but for lock and holder; `session.json` comes last."""
        for kind in _KINDS:
            yield from (self.folder / kind).glob("*")
        yield from self.folder.glob("journal-*")
        with suppress(OSError):
            if self.exists():
                yield self.folder / "session.json"


def _link(source: Path, target: Path, *, share: bool) -> None:
    """Make a file appear at `target`: as the same file where that can be shared, else as a copy."""
    with files.writing(target):
        target.unlink(missing_ok=True)
        if share:
            with suppress(OSError):  # another file system, or one without hard links
                os.link(source, target)
                return
        shutil.copyfile(source, target)
