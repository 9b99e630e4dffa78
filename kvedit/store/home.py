"""The folder that holds the sessions."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from msgspec.structs import replace

from kvedit.errors import SessionError, UsageError
from kvedit.store import files
from kvedit.store.store import Store
from kvedit.timing import iso, now

_NAME = re.compile(r"[\w][\w.\-]{0,63}")


@dataclass(frozen=True, slots=True)
class Overview:
    """A session in a list.

    Attributes:
        name: Its name.
        current: Whether commands use it if no session is named.
        lines, tokens, stale, missing: Counts at the current revision.
        size_bytes: Size on disk.
        created: When the document was loaded.
        damage: What is wrong with it, or `None` if it is readable.
    """

    name: str
    current: bool
    lines: int
    tokens: int
    stale: int
    missing: int
    size_bytes: int
    created: str
    damage: str | None


@dataclass(frozen=True, slots=True)
class Home:
    """The folder that holds the sessions.

    The methods that change a session take its lock and raise `LockedError` while another process
    holds it.
    """

    folder: Path

    @classmethod
    def default(cls) -> Home:
        """Return `KVEDIT_HOME` if it is set, else `.kvedit` in the working directory."""
        return cls(Path(os.environ.get("KVEDIT_HOME") or ".kvedit").expanduser())

    def store(self, name: str) -> Store:
        """Return the store of a session by its name, whether it exists or not.

        Raises:
            UsageError: The name is not a valid session name.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"'{name}' is not a valid session name.",
                "Use letters, digits, '.', '-' and '_', at most 64, not starting with '.' or '-'.",
            )
        return Store(self.folder / name)

    def new_store(self, name: str, force: bool) -> Store:
        """Return the store of a session to load.

        Raises:
            UsageError: A session has that name, and `force` is false.
        """
        store = self.store(name)
        if not force:
            _check_free(store, "Use --force to replace it, or --session NAME for another name.")
        return store

    def stores(self) -> Sequence[Store]:
        """Return the stores of all sessions, sorted by name.

        Raises:
            SessionError: The folder cannot be read.
        """
        try:
            names = sorted(name for name in os.listdir(self.folder) if _NAME.fullmatch(name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise SessionError(
                f"{self.folder} cannot be read: {error.strerror}.",
                "Check its owner and permissions, or set KVEDIT_HOME to another folder.",
            ) from None
        return [store for store in map(self.store, names) if store.exists()]

    def current(self) -> Store:
        """Return the store of the session that was loaded or chosen last.

        Raises:
            SessionError: No session exists, or none is readable.
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
                f"None of the sessions in {self.folder} can be read.",
                "Name one with --session to see why, or load a document with `kvedit load FILE --force`.",
            )
        return max(used, key=lambda item: item[:2])[2]

    def list(self) -> Sequence[Overview]:
        """List the sessions by name, including damaged ones."""
        try:
            current = self.current().name
        except SessionError:
            current = ""
        return [_overview(store, store.name == current) for store in self.stores()]

    def use(self, name: str) -> None:
        """Make a session the current one."""
        store = self.store(name)
        store.read_manifest()
        with store.lock("use", now()):
            used = self.next_use()
            store.write_manifest(replace(store.read_manifest(), used=used))

    def copy(self, name: str, new: str) -> None:
        """Copy a session; the copies share the files of their segments.

        Raises:
            UsageError: A session with the new name already exists.
        """
        store, target = self.store(name), self.store(new)
        store.read_manifest()
        _check_free(target)
        with target.lock("copy", now(), new=True):
            _check_free(target)
            store.copy(target)

    def rename(self, name: str, new: str) -> None:
        """Rename a session; raises as `copy` does."""
        store, target = self.store(name), self.store(new)
        store.read_manifest()
        _check_free(target)
        if os.path.lexists(target.folder):
            raise UsageError(f"The folder {target.folder} already exists.", "Choose another name.")
        with store.lock("rename", now()):
            store.rename(target)

    def remove(self, name: str) -> int:
        """Remove a session, damaged or not; return the bytes freed."""
        store = self.store(name)
        with store.lock("remove", now()):
            size = store.size_bytes()
            store.remove()
        return size

    def next_use(self) -> str:
        """Return a time to record as `used` now: the present time, but later than that of any session.

        So the session used last is the current one even if the clock was set back meanwhile.
        """
        latest = now()
        for store in self.stores():
            with suppress(SessionError):
                used = store.read_manifest().used
                if used >= latest:
                    latest = iso(datetime.fromisoformat(used) + timedelta(microseconds=1))
        return latest

    def keep_out_of_version_control(self) -> None:
        """Write a `.gitignore` that excludes the sessions."""
        path = self.folder / ".gitignore"
        if files.kind_of(path) == "nothing" or (files.kind_of(path) == "a file" and not path.stat().st_size):
            files.replace_file(path, b"*\n")


def _overview(store: Store, current: bool) -> Overview:
    size = store.size_bytes()
    try:
        manifest, journal = store.read()
        entry = journal.entry(manifest.revision)
    except SessionError as error:
        return Overview(store.name, current, 0, 0, 0, 0, size, "", error.fact)
    counts = (entry.lines, entry.tokens, entry.stale, entry.missing)
    return Overview(store.name, current, *counts, size, manifest.created, None)


def _check_free(target: Store, remedy: str = "Choose another name.") -> None:
    if target.exists():
        raise UsageError(f"A session '{target.name}' already exists.", remedy)
