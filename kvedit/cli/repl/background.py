"""Heal in the background while the REPL waits for a line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvedit.cli.workspace import here
from kvedit.errors import KveditError, LockedError
from kvedit.timing import clock

if TYPE_CHECKING:
    from kvedit.session.heal import Healing

_PIECE_S = 0.1  # target time of a step; steps must stay below twice that
_KEEP_ROWS = 256  # few, so that keeping them is a short step too
_QUIET_S = 0.5  # pause after a key press
_LOCKED_S = 1.0  # pause while another process is writing
_LOOK_S = 1.0  # between checks for changes by other processes
_POLL_S = 0.02


class _Yielded(Exception):
    """A key was pressed during a step; the step is discarded."""


class Healer:
    """A thread that makes rows of the warm session exact, one short step at a time.

    Attributes:
        problem: Why it stopped, until the next command.
        longest_s: The longest step so far.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self.longest_s = 0.0
        self._quiet_until = self._look_at = 0.0
        self._healing: Healing | None = None
        self._working = threading.Lock()  # held during a step, and while a command runs
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="healer", daemon=True)
        self._thread.start()

    def touched(self) -> None:
        """Pause because a key was pressed."""
        self._quiet_until = clock() + _QUIET_S

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep healed rows, and pause while a command runs."""
        self.touched()  # ends the current step
        with self._working:
            try:
                self._keep()
                self.problem = None
                yield
            finally:
                self._healing = None
                self.touched()

    def end(self) -> None:
        """Stop, and keep healed rows."""
        self._ended.set()
        self._thread.join()
        self._keep()

    def stale_share(self) -> float:
        """Return the share of the warm session's rows that are stale or missing and not just healed."""
        session, healing = here.held, self._healing
        if session is None or not len(session.rows):
            return 0.0
        inexact = session.rows.stale | session.rows.missing
        if healing is not None and healing.current:
            inexact[: healing.frontier] = False
        return float(inexact.mean())

    def _run(self) -> None:
        while not self._ended.wait(_POLL_S):
            while self._is_free() and self._working.acquire(blocking=False):
                start = clock()
                try:
                    if not self._piece():
                        break
                except _Yielded:
                    pass
                except KveditError as error:
                    self._healing, self.problem = None, error.fact
                except Exception as error:  # otherwise the thread would die silently
                    self._healing, self.problem = None, f"{type(error).__name__}: {error}"
                finally:
                    self._working.release()
                self.longest_s = max(self.longest_s, clock() - start)

    def _is_free(self) -> bool:
        idle = clock() >= self._quiet_until and not self._ended.is_set()
        return idle and here.settings.heal and self.problem is None

    def _piece(self) -> bool:
        """Do one step; return whether there was anything to do."""
        session = here.held
        if session is None or not session.has_model:
            return False
        if clock() >= self._look_at:
            self._look_at = clock() + _LOOK_S
            session.update()
        if self._healing is None or not self._healing.current:
            if session.rows.frontier == len(session.rows):
                return False
            self._healing = session.healing()
        healing = self._healing
        if healing.unkept >= _KEEP_ROWS or (not healing.left and healing.unkept):
            self._keep()
            return True
        if not healing.left:
            return False
        healing.step(_KEEP_ROWS - healing.unkept, _PIECE_S, self._check_quiet)
        return True

    def _check_quiet(self, layer: int) -> None:
        if not self._is_free():
            raise _Yielded

    def _keep(self) -> None:
        healing, session = self._healing, here.held
        if healing is None or session is None or not healing.unkept:
            return
        try:
            healing.keep_locked()
        except LockedError:  # another process is writing: retry later, and compute nothing meanwhile
            self._quiet_until = clock() + _LOCKED_S
            return
        except KveditError as error:
            self.problem = error.fact
        if healing.unkept:
            self._healing = None
