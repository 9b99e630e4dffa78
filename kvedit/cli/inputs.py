"""Inputs of the `bench` commands: comma-separated lists, question files, texts, a model."""

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
    """Split a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def names_of(what: str, text: str, known: Iterable[str]) -> list[str]:
    """Read comma-separated names; raises `UsageError` if one is unknown or there are none."""
    names = split(text) or [""]
    for name in names:
        check_one_of(what, name, known)
    return names


def lengths_of(text: str) -> tuple[int, int]:
    """Read a token range such as 1000-2000; raises `UsageError` if it is invalid."""
    low, _, high = text.partition("-")
    try:
        lengths = int(low), int(high or low)
    except ValueError:
        lengths = (0, 0)
    if not 200 <= lengths[0] <= lengths[1]:
        raise UsageError(f"Invalid token range '{text}'.", "Write A-B, at least 200, such as 1000-2000.")
    return lengths


def read_questions(
    files: list[str], unfit: Callable[[Question], str | None], limit: int
) -> tuple[list[list[Question]], dict[str, str]]:
    """Read data sets; return the usable questions, one list per file, and why others are unusable."""
    from kvedit.lab.datasets import read
    from kvedit.lab.qa import sift

    usable: list[list[Question]] = []
    left: dict[str, str] = {}
    for name in files:
        fit, reasons = sift(read(here.path(name)), unfit)
        usable.append(fit[:limit])
        left |= reasons
    return usable, left


def say_left(left: dict[str, str]) -> None:
    """Print how many questions were left out, and why."""
    for reason, number in Counter(left.values()).most_common():
        output.say(f"Left out: {output.count(number, 'question')}, because {reason}.")


def numbers_of(option: str, text: str) -> list[int]:
    """Read comma-separated positive integers; raises `UsageError` if one is invalid."""
    try:
        numbers = [int(part) for part in split(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{option} cannot be '{text}'.", "Write positive integers, such as 1000,2000.")
    return numbers


def texts_of(place: str | None) -> list[str]:
    """Read texts: one file, all files of a folder in name order, or the built-in text."""
    from kvedit.lab.haystack import built_in
    from kvedit.text.document import Document

    if place is None:
        return [built_in()]
    path = here.path(place)
    paths = sorted(part for part in path.iterdir() if part.is_file()) if path.is_dir() else [path]
    if not paths:
        raise UsageError(f"{path} contains no files.", "Name a text file, or a folder of text files.")
    return [Document.read(part).text for part in paths]


def open_model(name: str, device: str, dtype: str) -> Model:
    """Find, open and check a model as `load` does, and show progress."""
    check_place(device, dtype)
    with working("Loading the model") as say:
        from kvedit.checkpoint import opening
        from kvedit.checkpoint.resolve import resolve

        return opening.open_model(resolve(name, say), device=device, dtype=dtype)
