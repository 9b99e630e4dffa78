"""State that a process keeps between commands: settings, the last record, a warm session."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvedit.cli.progress import working
from kvedit.cli.settings import Settings
from kvedit.errors import KveditError

if TYPE_CHECKING:
    from kvedit.model.model import Model
    from kvedit.session.session import Session
    from kvedit.text.document import Document


@dataclass(slots=True)
class Workspace:
    """The state of a process that runs one command or many.

    Attributes:
        settings: The settings of this process.
        warm: Keep session and model in memory between commands.
        as_json: Print records instead of text.
        quiet: Print no results, as for the commands of a replay with `--json`.
        streams: Whether the current command prints text on stdout as it is produced.
        folder: Base of relative paths; the working directory if `None`.
        name: The session to use if a command names none; the current session if `None`.
        record: The record of the last command.
        failure: The error that ended it, if any.
    """

    settings: Settings = field(default_factory=Settings)
    warm: bool = False
    as_json: bool = False
    quiet: bool = False
    streams: bool = True
    folder: Path | None = None
    name: str | None = None
    record: dict[str, Any] | None = None
    failure: KveditError | None = None
    _session: Session | None = None
    _model: Model | None = None

    def session(self, name: str | None = None) -> Session:
        """Open a session, or return the warm one after reading changes by other processes."""
        from kvedit.session.session import Session
        from kvedit.store.home import Home

        home, wanted = Home.default(), name or self.name
        store = home.current() if wanted is None else home.store(wanted)
        warm = self._session
        if warm is not None and warm.folder.absolute() == store.folder.absolute():
            warm.update()
            return warm
        session = Session.open(store.name)
        if self.warm and name is None:  # a named session is used for one command only
            self._remember_model()
            self._session = session
        return session

    def ready(self, session: Session, model: str | None = None) -> None:
        """Set a session's model, using the warm one if it created the session.

        Args:
            session: The session.
            model: Name or path to open the session's model from instead.
        """
        if session.has_model and model is None:
            return
        self._remember_model()
        warm, kept = self._model, session.manifest.model
        if model is None and warm is not None and (warm.parts, warm.dtype_name) == (kept.parts, kept.dtype):
            session.use_model(warm)
            return
        with working("Loading the model") as report:
            session.use_model(model, report)

    def hold(self, session: Session) -> None:
        """Keep a newly loaded session warm."""
        if self.warm:
            self._session, self.name = session, None

    def drop(self) -> None:
        """Drop the warm session, but keep its model."""
        self._remember_model()
        self._session = None

    @property
    def held(self) -> Session | None:
        """The warm session."""
        return self._session

    def document(self, file: str, encoding: str | None = None) -> Document:
        """Read a user's file, or standard input for `-`."""
        from kvedit.text.document import Document

        if file == "-":
            return Document.decode(sys.stdin.buffer.read(), "-", "Standard input", encoding)
        return Document.read(self.path(file), encoding)

    def path(self, file: str) -> Path:
        """Return the path of a file named in a command."""
        return (self.folder or Path()) / file

    def _remember_model(self) -> None:
        if self._session is not None and self._session.has_model:
            self._model = self._session.model


here = Workspace()
"""The workspace of this process."""
