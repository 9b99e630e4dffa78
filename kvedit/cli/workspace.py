"""What one process keeps between commands: the settings, the last record, and a warm session."""

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
    """The state of a process that runs commands: one from the shell, or many.

    Attributes:
        settings: The defaults that hold here.
        warm: Keep session and model in memory between commands.
        as_json: Print records instead of text.
        quiet: Print no result at all, as a replay with `--json` does for its commands.
        streams: Whether the present command's text goes to stdout as it comes.
        folder: Where relative paths count from; the working directory if `None`.
        name: The session to use where none is named; else the current one.
        record: What the last command reported.
        failure: The error with which it ended, if it did.
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
        """Open a session, or take the warm one and read what another process has changed."""
        from kvedit.session.session import Session
        from kvedit.store.home import Home

        home, asked = Home.default(), name or self.name
        store = home.current() if asked is None else home.store(asked)
        held = self._session
        if held is not None and held.folder.absolute() == store.folder.absolute():
            held.update()
            return held
        session = Session.open(store.name)
        if self.warm and name is None:  # one that is named is for this command alone
            self._remember_model()
            self._session = session
        return session

    def ready(self, session: Session, model: str | None = None) -> None:
        """Give a session its model, the warm one if that is the one it was computed with.

        Args:
            session: Gets it.
            model: The session's model, at another place.
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
        """Keep a session that was just loaded warm."""
        if self.warm:
            self._session, self.name = session, None

    def drop(self) -> None:
        """Let the warm session go; its model stays."""
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
        """Give the path that a command names."""
        return (self.folder or Path()) / file

    def _remember_model(self) -> None:
        if self._session is not None and self._session.has_model:
            self._model = self._session.model


here = Workspace()
"""The workspace of this process."""
