"""What the `bench` commands are given: lists with commas, files of questions, texts, a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvedit.cli import output
from kvedit.cli.options import check_place
from kvedit.cli.progress import working
from kvedit.cli.workspace import here
from kvedit.errors import UsageError, check_one_of

if TYPE_CHECKING:
    from kvedit.lab.questions import Question
    from kvedit.model.model import Model


def split(text: str) -> list[str]:
    """Cut a list at its commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def names_of(what: str, text: str, known: Iterable[str]) -> list[str]:
    """Read names with commas between; raises `UsageError` when one is not known, or there is none."""
    found = split(text) or [""]
    for name in found:
        check_one_of(what, name, known)
    return found


def lengths_of(text: str) -> tuple[int, int]:
    """Read a range of tokens such as 1000-2000; raises `UsageError` when it is none."""
    low, _, high = text.partition("-")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 200 <= found[0] <= found[1]:
        raise UsageError(f"'{text}' is no range of tokens.", "Write A-B, at least 200, such as 1000-2000.")
    return found


def read_questions(
    files: list[str], unfit: Callable[[Question], str | None], limit: int
) -> tuple[list[list[Question]], dict[str, str]]:
    """Read data sets; give the questions that qualify, a list a file, and why others do not."""
    from kvedit.lab.datasets import read
    from kvedit.lab.qa import sift

    found: list[list[Question]] = []
    left: dict[str, str] = {}
    for name in files:
        fit, reasons = sift(read(here.path(name)), unfit)
        found.append(fit[:limit])
        left |= reasons
    return found, left


def say_left(left: dict[str, str]) -> None:
    """Say how many questions give no case, and why."""
    for reason, number in Counter(left.values()).most_common():
        output.say(f"Left out: {output.count(number, 'question')}, because {reason}.")


def numbers_of(option: str, text: str) -> list[int]:
    """Read whole numbers with commas between; raises `UsageError` when one is none."""
    try:
        found = [int(part) for part in split(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(f"{option} cannot be '{text}'.", "Write whole numbers, such as 1000,2000.")
    return found


def texts_of(place: str | None) -> list[str]:
    """Read texts: one file, all files of a folder in the order of their names, or the built-in one."""
    from kvedit.lab.haystack import built_in
    from kvedit.text.document import Document

    if place is None:
        return [built_in()]
    path = here.path(place)
    paths = sorted(part for part in path.iterdir() if part.is_file()) if path.is_dir() else [path]
    if not paths:
        raise UsageError(f"{path} holds no file.", "Name a text, or a folder of texts.")
    return [Document.read(part).text for part in paths]


def open_model(name: str, device: str, dtype: str) -> Model:
    """Find and open a model, and check it as `load` does; show that this goes on."""
    check_place(device, dtype)
    with working("Loading the model") as say:
        from kvedit.checkpoint import opening
        from kvedit.checkpoint.resolve import resolve

        return opening.open_model(resolve(name, say), device=device, dtype=dtype)
