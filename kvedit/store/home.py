"""The folder that holds the sessions."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from kvedit.errors import SessionError, UsageError
from kvedit.store import files
from kvedit.store.store import Store
from kvedit.timing import iso, now

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
        """Give the stores of all sessions, by name; raises `SessionError` where they cannot be listed."""
        try:
            names = sorted(name for name in os.listdir(self.folder) if _NAME.fullmatch(name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise SessionError(
                f"{self.folder} cannot be read: {error.strerror}.",
                "Check whose it is and its permissions, or set KVEDIT_HOME to another folder.",
            ) from None
        return [store for store in map(self.store, names) if store.exists()]

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

    def next_use(self) -> str:
        """Give the time for a session that is loaded or chosen now: later than that of all others.

        So the last one is the current one, though the clock was set back in between.
        """
        latest = now()
        for store in self.stores():
            with suppress(SessionError):
                used = store.read_manifest().used
                if used >= latest:
                    latest = iso(datetime.fromisoformat(used) + timedelta(microseconds=1))
        return latest

    def keep_out_of_version_control(self) -> None:
        """Tell git to leave the sessions alone."""
        path = self.folder / ".gitignore"
        if files.kind_of(path) == "nothing" or (files.kind_of(path) == "a file" and not path.stat().st_size):
            files.replace_file(path, b"*\n")
