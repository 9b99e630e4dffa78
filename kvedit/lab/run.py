"""A run: a folder with its config, one record per case, and the results.

config.json     the config; a run with a different config cannot continue in this folder
cases.jsonl     one line per case, appended when it is done; an interrupted run can be continued
summary.json    every figure of the report
report.html     tables and plots, one file
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvedit import __version__
from kvedit.errors import ContextError, KveditError, UsageError
from kvedit.lab.arms import Arm
from kvedit.lab.case import Case
from kvedit.lab.report import html
from kvedit.lab.statistics import check
from kvedit.lab.summary import summarise
from kvedit.lab.trial import Clean, run_case
from kvedit.model.model import Model
from kvedit.store.files import append_file, replace_file
from kvedit.timing import now

Record = dict[str, Any]
# What may differ when a run is continued.
_SITTING = ("created", "command", "machine")


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder.

    Attributes:
        folder: Its path.
        config: The content of `config.json`.
    """

    folder: Path
    config: Record

    @classmethod
    def start(cls, folder: Path, config: Record) -> Run:
        """Create the folder, or continue the run in it; a run without records is replaced.

        Raises:
            UsageError: The folder contains another run, or cannot be written.
        """
        path = folder / "config.json"
        config = json.loads(json.dumps(config))  # tuples become lists, as when it is read again
        if path.exists():
            held = _read(path)
            ours, theirs = (
                {key: value for key, value in part.items() if key not in _SITTING} for part in (config, held)
            )
            different = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
            if different and _holds_records(folder):
                raise UsageError(
                    f"{folder} contains a run with a different {', '.join(different)}.",
                    "Give another folder with --out, or use the options of that run.",
                )
            if not different:
                return cls(folder, held)
        elif folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty and is not a run.", "Give an empty folder with --out.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, _dump(config))
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be written: {error.strerror or error}.", "Give another folder with --out."
            ) from None
        return cls(folder, config)

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Open a run for reading; raises `UsageError` if there is none."""
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} is not a run.", "Give the folder that a bench wrote.")
        return cls(folder, _read(folder / "config.json"))

    def records(self) -> list[Record]:
        """Read the records; a last line truncated by a kill is dropped.

        Raises:
            KveditError: Any other line cannot be read.
        """
        path = self.folder / "cases.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")
        whole = lines[:-1]
        if lines[-1]:
            replace_file(path, "".join(f"{line}\n" for line in whole).encode())
        found: list[Record] = []
        for number, line in enumerate(whole, start=1):
            try:
                found.append(json.loads(line))
            except ValueError:
                raise KveditError(
                    f"Line {number} of {path} is not a record.", "Remove the line; its case runs again."
                ) from None
        return found

    def append(self, record: Record) -> None:
        """Append a case's record."""
        path = self.folder / "cases.jsonl"
        append_file(path, path.stat().st_size if path.exists() else 0, json.dumps(record).encode() + b"\n")

    def clear(self) -> None:
        """Delete the records, to measure again."""
        (self.folder / "cases.jsonl").unlink(missing_ok=True)

    def write(self, summary: Record, page: str) -> None:
        """Write summary and report."""
        replace_file(self.folder / "summary.json", _dump(summary))
        replace_file(self.folder / "report.html", page.encode())

    def finish(self) -> Record:
        """Check the records of cases, write summary and report, and return the summary.

        Raises:
            KveditError: A check of Appendix F fails.
        """
        records = self.records()
        check(records, self.config)
        summary = summarise(records)
        self.write(summary, html(self.config, records, summary))
        return summary


def execute(
    run: Run,
    model: Model,
    cases: Iterable[Case],
    arms: list[Arm],
    *,
    seed: int = 0,
    on_case: Callable[[int, Record], None] = lambda done, record: None,
    on_skip: Callable[[Case, str], None] = lambda case, why: None,
) -> None:
    """Run the cases that have no record yet, in order.

    Args:
        run: Receives one record per case.
        model: The model.
        cases: All cases of the run.
        arms: The arms to run on every case.
        seed: For random policies.
        on_case: Called with the number of cases done and the record, for old records too.
        on_skip: Called with a case that does not fit the model's context, and why.
    """
    held = {record["case"]: record for record in run.records()}
    clean: Clean | None = None
    done = 0
    for case in cases:
        record = held.get(case.name)
        if record is None:
            try:
                record, clean = run_case(model, case, arms, seed=seed, clean=clean)
            except ContextError as error:
                on_skip(case, error.fact)
                continue
            run.append(record)
        done += 1
        on_case(done, record)


def describe(bench: str, model: Model, name: str, arms: list[Arm], options: Record, command: str) -> Record:
    """Return the content of `config.json`."""
    return {
        "schema_version": 1,
        "bench": bench,
        "arms": [arm.name for arm in arms],
        "options": options,
        "model": {
            "name": name,
            "dtype": model.dtype_name,
            "device": "map" if model.spread else model.device.type,
            **model.parts,
        },
        "versions": {
            "kvedit": __version__,
            **{package: version(package) for package in ("torch", "transformers", "tokenizers", "numpy")},
        },
        "created": now(),
        "command": command,
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if model.device.type == "cuda" else None,
        },
    }


def _holds_records(folder: Path) -> bool:
    path = folder / "cases.jsonl"
    return path.exists() and path.stat().st_size > 0


def _processor() -> str:
    try:
        lines: Iterator[str] = iter(Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n"))
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _read(path: Path) -> Record:
    try:
        found: Record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise KveditError(f"{path} cannot be read: {error}.", "Give another folder.") from None
    if not isinstance(found, dict) or "bench" not in found:  # a model folder also has a config.json
        raise UsageError(f"{path.parent} is not a run.", "Give another folder.")
    return found


def _dump(record: Record) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()
