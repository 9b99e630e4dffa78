"""Multi-hop questions with their passages, read from the datasets' own files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from kvedit.errors import UsageError
from kvedit.lab.scoring import DATASETS, holds
from kvedit.text.encoding import decode, read_bytes

_IIRC_PASSAGES = 8
_NAMES = {str: "string", list: "list", dict: "object", bool: "true or false"}
_Kind = TypeVar("_Kind", str, list[Any], dict[str, Any], bool)
_Read = TypeVar("_Read")


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
        """Return the indices of passages without evidence or an answer; "yes" counts as in none."""
        closed = all(answer.lower() in ("yes", "no") for answer in self.answers)
        return [
            index
            for index, passage in enumerate(self.passages)
            if not passage.supporting and (closed or not passage.has_answer)
        ]


class _Wrong(Exception):
    """What is wrong with a record; the caller adds its position in the file."""


def read(path: str | Path) -> list[Question]:
    """Read the questions of a file, in order.

    The layout is detected from the content:

        HotpotQA, 2Wiki   a JSON list of `_id`, `question`, `answer`, `supporting_facts`,
                          `context`; 2Wiki has `evidences` too
        MuSiQue           JSON lines of `id`, `question`, `answer`, `answer_aliases`, `paragraphs`
                          with `title`, `paragraph_text`, `is_supporting`
        IIRC              a JSON list of articles with `title`, `text` and `questions`; see below
        any               JSON lines of `id`, `dataset`, `type`, `question`, `answers`,
                          `paragraphs` with `title`, `text`, `supporting`, `has_answer`

    HotpotQA and 2Wiki name evidence by title, so all passages with that title count as evidence.
    IIRC's `dev.json` has only snippets of linked articles, so the context is our own. The article's
    passage and the snippets of the question's evidence are supporting. Snippets of other questions on
    that article and, up to eight passages, the next articles in the file are not. A hash determines
    their order. We know the layout of the file from programs that read it.

    Raises:
        UsageError: The file cannot be read, or has none of these layouts.
    """
    text, _ = decode(read_bytes(path), str(path))
    if text.lstrip().startswith("["):
        questions = _read_list(_parse(text, path), path)
    else:
        questions = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                questions.append(_at(f"{path}, line {number}", _line, _parse(line, path, number)))
    if not questions:
        raise UsageError(f"{path} holds no question.", "Give a file of questions with their passages.")
    seen: set[str] = set()
    # MuSiQue-Full repeats each question without its evidence; the repetition gives no case.
    for question in (question for question in questions if question.flaw is None):
        if question.name in seen:
            raise UsageError(f"{path} has the question {question.id} twice.", "Give each id once.")
        seen.add(question.name)
    return questions


def _parse(text: str, path: str | Path, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}, line {line or error.lineno}: no JSON: {error.msg}, column {error.colno}.",
            "Give the file as its data set has it: a JSON list, or one object a line.",
        ) from None


def _at(place: str, reader: Callable[[Any], _Read], record: Any) -> _Read:
    """Read a record; add its position to the error if it is wrong."""
    try:
        return reader(record)
    except _Wrong as error:
        raise UsageError(
            f"{place}: {error}.",
            "Give a HotpotQA, 2WikiMultihopQA, MuSiQue or IIRC file, or lines with id, dataset, question, "
            "answers and paragraphs.",
        ) from None


def _read_list(records: Any, path: str | Path) -> list[Question]:
    if records and isinstance(records[0], dict) and "questions" in records[0]:
        articles = [
            _at(f"{path}, article {number}", _article, record) for number, record in enumerate(records, 1)
        ]
        return [
            question
            for number in range(len(articles))
            for question in _at(f"{path}, article {number + 1}", _iirc, articles[number:] + articles[:number])
        ]
    return [_at(f"{path}, record {number}", _hotpot, record) for number, record in enumerate(records, 1)]


def _take(record: Any, key: str, kind: type[_Kind], default: _Kind | None = None) -> _Kind:
    """Return a field, checked to be of type `kind`."""
    if not isinstance(record, dict):
        raise _Wrong("an object was expected")
    value = record.get(key, default)
    if not isinstance(value, kind):
        raise _Wrong(f"'{key}' is missing or no {_NAMES.get(kind, 'value')}")
    return value


def _strings(values: list[Any], what: str) -> list[str]:
    for value in values:
        if not isinstance(value, str):
            raise _Wrong(f"{what} holds something that is no string")
    return values


def _passage(title: str, text: str, supporting: bool, has_answer: bool) -> Passage:
    passage = Passage(" ".join(title.split()), " ".join(text.split()), supporting, has_answer)
    if not passage.block:
        raise _Wrong("a passage is empty")
    return passage


def _line(record: Any) -> Question:
    """Read a line, in the layout of MuSiQue or in the general one."""
    paragraphs = _take(record, "paragraphs", list)
    if any(isinstance(one, dict) and "paragraph_text" in one for one in paragraphs):
        return _musique(record)
    dataset = _take(record, "dataset", str)
    if dataset not in DATASETS:
        raise _Wrong(f"the data set '{dataset}' is not one of {', '.join(DATASETS)}")
    answers = _strings(_take(record, "answers", list), "'answers'")
    passages = [
        _passage(
            _take(one, "title", str),
            _take(one, "text", str),
            _take(one, "supporting", bool),
            _take(one, "has_answer", bool),
        )
        for one in paragraphs
    ]
    return Question(
        _take(record, "id", str),
        dataset,
        _take(record, "type", str, ""),
        _take(record, "question", str),
        tuple(answers),
        tuple(passages),
    )


def _musique(record: Any) -> Question:
    name = _take(record, "id", str)
    aliases = _strings(_take(record, "answer_aliases", list, []), "'answer_aliases'")
    parts = [
        (_take(one, "title", str), _take(one, "paragraph_text", str), _take(one, "is_supporting", bool))
        for one in _take(record, "paragraphs", list)
    ]
    answerable = _take(record, "answerable", bool, True)
    return _question(
        name,
        "musique",
        name.partition("__")[0],
        _take(record, "question", str),
        [_take(record, "answer", str), *aliases],
        parts,
        None if answerable else "it is unanswerable",
    )


def _hotpot(record: Any) -> Question:
    """Read a record of HotpotQA or 2Wiki."""
    facts = _take(record, "supporting_facts", list)
    context = _take(record, "context", list)
    parts: list[tuple[str, str, bool]] = []
    try:
        gold = {title for title, _ in facts}
        for title, sentences in context:
            strings = _strings([title, *sentences], "a passage of 'context'")
            parts.append((strings[0], " ".join(strings[1:]), title in gold))
    except (TypeError, ValueError):
        raise _Wrong("'supporting_facts' or 'context' is no list of pairs") from None
    return _question(
        _take(record, "_id", str),
        "2wikimultihopqa" if "evidences" in record else "hotpotqa",
        _take(record, "type", str, ""),
        _take(record, "question", str),
        [_take(record, "answer", str)],
        parts,
        None if gold <= {title for title, _, _ in parts} else "its context lacks a passage of the evidence",
    )


def _question(
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
        _passage(title, text, supporting, holds(f"{title} {text}", answers, dataset))
        for title, text, supporting in parts
    ]
    return Question(name, dataset, type_, question, tuple(dict.fromkeys(answers)), tuple(passages), flaw)


# --- IIRC --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Article:
    title: str
    text: str
    questions: list[Any]


def _article(record: Any) -> _Article:
    return _Article(
        _take(record, "title", str, ""), _take(record, "text", str), _take(record, "questions", list)
    )


def _iirc(articles: Sequence[_Article]) -> list[Question]:
    """Read the questions of the first article; the others fill up contexts."""
    first = articles[0]
    linked = [_snippets(question) for question in first.questions]
    questions: list[Question] = []
    for number, record in enumerate(first.questions):
        parts = [(first.title, first.text, True)]
        parts += [(title, " ".join(texts), True) for title, texts in linked[number].items()]
        siblings: dict[str, dict[str, None]] = {}
        for snippets in linked:
            for title, texts in snippets.items():
                if title not in linked[number]:
                    siblings.setdefault(title, {}).update(texts)
        parts += [(title, " ".join(texts), False) for title, texts in siblings.items()]
        missing = max(_IIRC_PASSAGES - len(parts), 0)
        parts += [(other.title, other.text, False) for other in articles[1 : 1 + missing]]
        name = _take(record, "qid", str, digest(f"{first.text}:{number}")[:12])
        type_, answers, flaw = _iirc_answer(_take(record, "answer", dict))
        # Shuffle: the article is listed first, and the position of evidence must reveal nothing.
        parts.sort(key=lambda part: digest(f"{name}:{part[0]}:{part[1]}"))
        questions.append(_question(name, "iirc", type_, _take(record, "question", str), answers, parts, flaw))
    return questions


def _snippets(question: Any) -> dict[str, dict[str, None]]:
    """Return the evidence outside the article: the distinct snippets of each linked title."""
    found: dict[str, dict[str, None]] = {}
    for span in _take(question, "context", list):
        title, text = _take(span, "passage", str), _take(span, "text", str)
        if title != "main" and text.strip():
            found.setdefault(title, {})[text] = None
    return found


def _iirc_answer(answer: dict[str, Any]) -> tuple[str, list[str], str | None]:
    """Return the type, the right answers, and why the question cannot be asked, if so."""
    type_ = _take(answer, "type", str)
    if type_ == "span":
        spans = [_take(span, "text", str).strip() for span in _take(answer, "answer_spans", list)]
        return type_, spans, "its answer is several spans" if len(spans) > 1 else None
    if type_ == "value":
        value, unit = (
            _take(answer, "answer_value", str).strip(),
            _take(answer, "answer_unit", str, "").strip(),
        )
        return type_, [value, f"{value} {unit}"] if unit else [value], None
    if type_ == "binary":
        return type_, [_take(answer, "answer_value", str).strip()], None
    if type_ == "none":
        return type_, ["none"], "it is unanswerable"
    return type_, [], f"its answer is of the type '{type_}'"


def digest(text: str) -> str:
    """Return a hash, used to sort in an order unrelated to content."""
    return sha256(text.encode()).hexdigest()
