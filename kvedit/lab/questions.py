"""Multi-hop questions with their passages, and the fields of a record that one is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from kvedit.lab.scoring import holds

_NAMES = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}
_Kind = TypeVar("_Kind", str, list[Any], dict[str, Any], bool)


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of a context, with white space normalized to single spaces.

    Attributes:
        title: Title; may be empty.
        text: Text, on one line.
        supporting: Whether the dataset marks it as evidence.
        has_answer: Whether a right answer occurs in it.
    """

    title: str
    text: str
    supporting: bool
    has_answer: bool

    @property
    def block(self) -> str:
        """Return its lines, each with its line end."""
        return "".join(f"{line}\n" for line in (self.title, self.text) if line)


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its context.

    Attributes:
        id: Id in the dataset.
        dataset: A name in `kvedit.lab.scoring.DATASETS`.
        type: Kind of question in the dataset; may be empty.
        question: Text of the question.
        answers: All right answers.
        passages: In file order.
        flaw: Why its record allows no case, if so.
    """

    id: str
    dataset: str
    type: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    flaw: str | None = None

    @property
    def name(self) -> str:
        """Return the source name of its cases: dataset and id, unless the id contains the dataset."""
        return f"{self.dataset}-{self.id.removeprefix(f'{self.dataset}-')}"

    @property
    def deletable(self) -> list[int]:
        """Return the indices of passages that are not evidence and contain no answer; "yes" is in none."""
        closed = all(answer.lower() in ("yes", "no") for answer in self.answers)
        return [
            index
            for index, passage in enumerate(self.passages)
            if not passage.supporting and (closed or not passage.has_answer)
        ]


class WrongRecord(Exception):
    """What is wrong with a record; the caller adds its position in the file."""


def take(record: Any, key: str, kind: type[_Kind], default: _Kind | None = None) -> _Kind:
    """Return a field of that kind; raises `WrongRecord`."""
    if not isinstance(record, dict):
        raise WrongRecord("an object was expected")
    value = record.get(key, default)
    if not isinstance(value, kind):
        raise WrongRecord(f"'{key}' is missing or not {_NAMES[kind]}")
    return value


def strings(values: list[Any], what: str) -> list[str]:
    """Check that each value is a string; raises `WrongRecord`."""
    for value in values:
        if not isinstance(value, str):
            raise WrongRecord(f"{what} contains something that is not a string")
    return values


def passage_of(title: str, text: str, supporting: bool, has_answer: bool) -> Passage:
    """Make a passage, its white space reduced; raises `WrongRecord` for an empty one."""
    passage = Passage(" ".join(title.split()), " ".join(text.split()), supporting, has_answer)
    if not passage.block:
        raise WrongRecord("a passage is empty")
    return passage


def question_of(
    name: str,
    dataset: str,
    type_: str,
    question: str,
    answers: Sequence[str],
    parts: Sequence[tuple[str, str, bool]],
    flaw: str | None,
) -> Question:
    """Return a question from passages (title, text, supporting), and look for the answer in them."""
    passages = [
        passage_of(title, text, supporting, holds(f"{title} {text}", answers, dataset))
        for title, text, supporting in parts
    ]
    return Question(name, dataset, type_, question, tuple(dict.fromkeys(answers)), tuple(passages), flaw)


def digest(text: str) -> str:
    """Return a hash, used to sort in an order unrelated to content."""
    return sha256(text.encode()).hexdigest()
