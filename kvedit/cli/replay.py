"""Replay a script: run its commands, check its expectations, and record each result."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from kvedit import __version__
from kvedit.cli import output
from kvedit.cli.command import Reply
from kvedit.cli.repl.line import is_open, run_line
from kvedit.cli.workspace import here
from kvedit.errors import KveditError, UsageError
from kvedit.timing import clock, now

_FORMS = (
    "Write `expect answer contains TEXT`, `expect answer lacks TEXT`, `expect stale below 5%`, "
    "`expect refreshed equals 64`, `expect missing equals 0` or `expect exit equals 2`."
)


def replay_script(script: str, *, keep_going: bool, jsonl: str | None) -> Reply:
    """Run a script; exit with the code of the first failed command, or 1 for a failed expectation.

    Args:
        script: Path, or `-`.
        keep_going: Continue after a failure.
        jsonl: File for the records.

    Raises:
        UsageError: The script cannot be read, or OUT cannot be written.
    """
    lines = _lines(here.document(script).text)
    for number, line in enumerate(lines, start=1):  # find mistakes before the first prefill
        if _is_expectation(line):
            _expectation(line, number)
    before = here.folder, here.warm, here.quiet
    records = _open(here.path(jsonl)) if jsonl is not None else None
    here.warm, here.quiet = True, not here.streams  # with --json only the totals are printed
    if script != "-":
        here.folder = here.path(script).parent
    try:
        return _Run(lines, keep_going, records).run()
    finally:
        here.folder, here.warm, here.quiet = before
        if records is not None:
            records.close()


def _lines(text: str) -> list[str]:
    """Split a script; join lines within an open quotation mark and leave empty lines in their place."""
    lines, first = text.split("\n"), 0
    for number in range(1, len(lines)):
        if is_open(lines[first]):
            lines[first], lines[number] = f"{lines[first]}\n{lines[number]}", ""
        else:
            first = number
    return lines


class _Run:
    """One run of a script."""

    def __init__(self, lines: list[str], keep_going: bool, records: TextIO | None) -> None:
        self._lines, self._keep_going, self._records = lines, keep_going, records
        self._code = self._commands = self._expectations = self._failed = 0
        self._last: dict[str, Any] = {}
        self._exit = 0

    def run(self) -> Reply:
        start = clock()
        for number, line in enumerate(self._lines, start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            tested = number < len(self._lines) and self._wants_exit(number)
            code = self._expect(text, number) if _is_expectation(text) else self._command(text, number)
            failed = code != 0 and not (tested and not _is_expectation(text))
            if failed:
                self._failed += 1
                self._code = self._code or code
                if not self._keep_going or code == 130:
                    break
        totals = {
            "commands": self._commands,
            "expectations": self._expectations,
            "failed": self._failed,
            "seconds": clock() - start,
            "exit_code": self._code,
        }
        here.failure = None
        return Reply(totals, lambda: self._say_totals(totals), self._code)

    def _wants_exit(self, number: int) -> bool:
        """Whether the line after `number` expects an exit code."""
        for line in self._lines[number:]:
            text = line.strip()
            if text and not text.startswith("#"):
                return _is_expectation(text) and shlex.split(text)[1:2] == ["exit"]
        return False

    def _command(self, text: str, number: int) -> int:
        if not here.quiet:
            output.say(f"> {text}")
        start = clock()
        self._exit = run_line(text)
        self._commands += 1
        self._last = here.record or {}
        self._write(number, text, clock() - start)
        return self._exit

    def _expect(self, text: str, number: int) -> int:
        self._expectations += 1
        what, holds = _expectation(text, number)
        problem = holds(self._last, self._exit)
        if self._records is not None:
            record = {"event": "expect", "line": number, "expect": what, "held": problem is None}
            _dump(self._records, {**record, "found": problem})
        if problem is None:
            return 0
        output.say(output.one_line(f"Line {number}: expected {what}, and {problem}."))
        return 1

    def _write(self, number: int, text: str, seconds: float) -> None:
        if self._records is None:
            return
        session = here.held
        model = session.manifest.model if session is not None else None
        failure = here.failure
        _dump(
            self._records,
            {
                "schema_version": 1,
                "event": "command",
                "line": number,
                "command": text,
                "exit_code": self._exit,
                "seconds": seconds,
                "result": here.record,
                "error": {"fact": failure.fact, "remedy": failure.remedy} if failure else None,
                "seed": (here.record or {}).get("seed"),
                "at": now(),
                "versions": _versions(),
                "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
                "model": {"name": model.name, "dtype": model.dtype, **model.parts} if model else None,
            },
        )

    def _say_totals(self, totals: dict[str, Any]) -> None:
        checked = output.count(totals["expectations"], "expectation")
        failed = f"{totals['failed']} failed" if totals["failed"] else "all held"
        output.say(
            f"{output.count(totals['commands'], 'command')} and {checked} in "
            f"{output.seconds(totals['seconds'])}; {failed}."
        )


Holds = Callable[[dict[str, Any], int], str | None]
"""Checks the last command's record and exit code; returns the problem, or `None`."""


def _is_expectation(line: str) -> bool:
    return line.strip().partition(" ")[0] == "expect"


def _expectation(line: str, number: int) -> tuple[str, Holds]:
    """Read an `expect` line.

    Raises:
        UsageError: It has an unknown form.
    """
    try:
        words = shlex.split(line)[1:]
    except ValueError:
        words = []
    what = line.strip().partition(" ")[2].strip()
    if len(words) == 3:
        subject, relation, value = words
        if subject == "answer" and relation in ("contains", "lacks"):
            return what, _answer(value, relation == "contains")
        if (subject, relation) == ("stale", "below") and re.fullmatch(
            r"\d{1,3}(\.\d{1,6})?%", value, re.ASCII
        ):
            return what, _stale(float(value[:-1]))
        counted = ("refreshed", "missing", "exit", "lines", "tokens")
        if subject in counted and relation == "equals" and re.fullmatch(r"\d{1,12}", value, re.ASCII):
            return what, _count(subject, int(value))
    raise UsageError(f"Line {number} has an unknown expectation: '{what}'.", _FORMS)


def _answer(value: str, contains: bool) -> Holds:
    def holds(record: dict[str, Any], code: int) -> str | None:
        if "answer" not in record:
            return "there was no answer"
        return None if (value in record["answer"]) == contains else f"it was: {record['answer'].strip()}"

    return holds


def _stale(percent: float) -> Holds:
    def holds(record: dict[str, Any], code: int) -> str | None:
        if here.held is None:
            return "there is no session"
        rows = here.held.rows
        share = 100 * int((rows.stale | rows.missing).sum()) / max(1, len(rows))
        return None if share < percent else f"{share:.2f}% of the rows are stale or missing"

    return holds


def _count(subject: str, wanted: int) -> Holds:
    def holds(record: dict[str, Any], code: int) -> str | None:
        if subject == "exit":
            number: Any = code
        elif subject in ("refreshed", "missing") and isinstance(record.get("rows"), dict):
            number = record["rows"][subject]
        else:
            number = record.get(subject)
        if not isinstance(number, int):
            return f"the last command reported no {subject}"
        return None if number == wanted else f"it was {number}"

    return holds


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "tokenizers")
    return {
        "kvedit": __version__,
        "python": sys.version.split()[0],
        **{name: version(name) for name in names},
    }


def _open(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise KveditError(
            f"{path} cannot be written: {error.strerror or error}.", "Choose a file that you can write."
        ) from None


def _dump(records: TextIO, record: dict[str, Any]) -> None:
    records.write(json.dumps(record) + "\n")
    records.flush()
