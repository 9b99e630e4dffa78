"""A session on disk. docs/session-format.md describes the files.

Every file but `session.json` is immutable and named by its content, so a writer adds files
and then replaces that one; killed at any instant, the session is the old one or the new one.
The only room that reads or writes session files. Loads no torch until a segment is touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvedit import files
from kvedit.errors import SessionError, UsageError
from kvedit.store.lock import write_lock
from kvedit.store.records import (
    Manifest,
    ModelRecord,
    Revision,
    TextPiece,
    dump,
    parse_manifest,
    parse_revision,
    splice_text,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kvedit.cache import States

__all__ = ["Home", "Manifest", "ModelRecord", "Revision", "Store", "TextPiece", "splice_text"]

_KINDS = ("tokenizers", "revisions", "texts", "segments")
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

    def current(self) -> Store:
        """Give the store of the session that was loaded last.

        Raises:
            SessionError: There is none, or none that can be read.
        """
        stores = [Store(path.parent) for path in self.folder.glob("[!.]*/session.json")]
        if not stores:
            raise SessionError(
                f"There is no session in {self.folder}.", "Load a document first: `kvedit load FILE`."
            )
        loaded: list[tuple[str, str, Store]] = []
        for store in stores:
            try:
                loaded.append((store.read_manifest().created, store.name, store))
            except SessionError:
                if len(stores) == 1:
                    raise
        if not loaded:
            raise SessionError(
                f"No session in {self.folder} can be read.",
                "Name one with --session to see why, or load a document with `kvedit load FILE --force`.",
            )
        return max(loaded, key=lambda item: item[:2])[2]

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
        self._replace(self.folder / "session.json", dump(manifest))

    def read_revision(self, name: str) -> Revision:
        """Read a revision by name; raises `SessionError` when it is damaged."""
        data = self._read_named("revisions", name, ".json", f"revision {name}")
        try:
            return parse_revision(data)
        except (ValueError, KeyError, TypeError):
            raise files.damaged(f"revision {name}", "cannot be understood") from None

    def write_revision(self, revision: Revision) -> str:
        """Write a revision; give its name."""
        return self._write_named("revisions", dump(revision), ".json", f"{revision.number:06}-")

    def read_text(self, pieces: tuple[TextPiece, ...]) -> str:
        """Read the text that pieces point to; raises `SessionError` when it is damaged."""
        texts = {
            name: self._read_named("texts", name, ".txt", f"text {name}").decode("utf-8")
            for name in dict.fromkeys(piece.text for piece in pieces)
        }
        return "".join(texts[piece.text][piece.start : piece.stop] for piece in pieces)

    def write_text(self, text: str) -> str:
        """Write an immutable text; give its name."""
        return self._write_named("texts", text.encode("utf-8"), ".txt")

    def read_tokenizer(self, name: str) -> str:
        """Read the tokenizer's JSON; raises `SessionError` when it is damaged."""
        return self._read_named("tokenizers", name, ".json", "the tokenizer").decode("utf-8")

    def write_tokenizer(self, serialized: str) -> str:
        """Write the tokenizer's JSON; give its name."""
        return self._write_named("tokenizers", serialized.encode("utf-8"), ".json")

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

    def revisions(self, name: str) -> Iterator[tuple[str, Revision]]:
        """Walk from a revision back to the load."""
        parent: str | None = name
        while parent is not None:
            revision = self.read_revision(parent)
            yield parent, revision
            parent = revision.parent

    def size_bytes(self) -> int:
        """Bytes that the session takes on disk."""
        found = [self.folder / "session.json"]
        for kind in _KINDS:
            found += (self.folder / kind).glob("*")
        return sum(path.stat().st_size for path in found)

    def sweep(self, manifest: Manifest | None) -> None:
        """Remove every file that no revision of `manifest` reaches; all of them without one."""
        kept: set[Path] = set()
        if manifest is not None:
            kept.add(self.folder / "tokenizers" / f"{manifest.tokenizer}.json")
            for name, revision in self.revisions(manifest.revision):
                kept.add(self.folder / "revisions" / f"{name}.json")
                kept |= {self.folder / "texts" / f"{piece.text}.txt" for piece in revision.text}
                kept |= {self.folder / "segments" / f"{piece.segment}.safetensors" for piece in revision.rows}
        for kind in _KINDS:
            for path in (self.folder / kind).glob("*"):
                if path not in kept:
                    path.unlink(missing_ok=True)

    def _read_named(self, kind: str, name: str, suffix: str, what: str) -> bytes:
        data = files.read_file(self.folder / kind / f"{name}{suffix}", what)
        if files.digest(data) != name.rpartition("-")[2]:
            raise files.damaged(what, "does not match its checksum")
        return data

    def _write_named(self, kind: str, data: bytes, suffix: str, prefix: str = "") -> str:
        name = prefix + files.digest(data)
        files.make_folder(self.folder / kind)
        self._replace(self.folder / kind / f"{name}{suffix}", data)
        return name

    def _replace(self, path: Path, data: bytes) -> None:
        files.replace_file(path, data)
        self.written_bytes += len(data)
