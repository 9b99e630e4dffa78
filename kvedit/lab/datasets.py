"""Files of multi-hop questions, each in the layout of its data set."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvedit.errors import UsageError
from kvedit.lab.questions import Question, WrongRecord, digest, passage_of, question_of, strings, take
from kvedit.lab.scoring import DATASETS
from kvedit.text.encoding import decode, read_bytes

_IIRC_PASSAGES = 8
_Read = TypeVar("_Read")


def read(path: str | Path) -> list[Question]:
    """Read the questions of a file, in its order.

    The layout is told by the file itself:

        HotpotQA, 2Wiki   a JSON list of `_id`, `question`, `answer`, `supporting_facts`,
                          `context`; 2Wiki has `evidences` too
        MuSiQue           JSON lines of `id`, `question`, `answer`, `answer_aliases`, `paragraphs`
                          with `title`, `paragraph_text`, `is_supporting`
        IIRC              a JSON list of articles with `title`, `text` and `questions`; see below
        any               JSON lines of `id`, `dataset`, `type`, `question`, `answers`,
                          `paragraphs` with `title`, `text`, `supporting`, `has_answer`

    In HotpotQA and 2Wiki, evidence is named by title, so all passages of that title count as such.
    IIRC's `dev.json` has no linked articles, only snippets of them. So the context is ours: the
    article's own passage and the snippets of the question's evidence are supporting; snippets of
    other questions on that article and, up to eight passages, the articles that follow in the
    file are not; a hash sets their order. Its layout is known to us from programs that read it.

    Raises:
        UsageError: It cannot be read, or is not in one of these layouts.
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
        raise UsageError(f"{path} contains no questions.", "Give a file of questions with their passages.")
    seen: set[str] = set()
    # MuSiQue-Full has each question again without its evidence; such a twin gives no case.
    for question in (question for question in questions if question.flaw is None):
        if question.name in seen:
            raise UsageError(f"{path} contains the question {question.id} twice.", "Use each id once.")
        seen.add(question.name)
    return questions


def _parse(text: str, path: str | Path, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}, line {line or error.lineno}: invalid JSON: {error.msg}, column {error.colno}.",
            "Give the file in its data set's format: a JSON list, or one object per line.",
        ) from None


def _at(place: str, reader: Callable[[Any], _Read], record: Any) -> _Read:
    """Read a record; say where it stands if it is wrong."""
    try:
        return reader(record)
    except WrongRecord as error:
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


def _line(record: Any) -> Question:
    """Read a line: MuSiQue's own, or one whose passages say what is needed."""
    paragraphs = take(record, "paragraphs", list)
    if any(isinstance(one, dict) and "paragraph_text" in one for one in paragraphs):
        return _musique(record)
    dataset = take(record, "dataset", str)
    if dataset not in DATASETS:
        raise WrongRecord(f"the data set '{dataset}' is not one of {', '.join(DATASETS)}")
    answers = strings(take(record, "answers", list), "'answers'")
    passages = [
        passage_of(
            take(one, "title", str),
            take(one, "text", str),
            take(one, "supporting", bool),
            take(one, "has_answer", bool),
        )
        for one in paragraphs
    ]
    return Question(
        take(record, "id", str),
        dataset,
        take(record, "type", str, ""),
        take(record, "question", str),
        tuple(answers),
        tuple(passages),
    )


def _musique(record: Any) -> Question:
    name = take(record, "id", str)
    aliases = strings(take(record, "answer_aliases", list, []), "'answer_aliases'")
    parts = [
        (take(one, "title", str), take(one, "paragraph_text", str), take(one, "is_supporting", bool))
        for one in take(record, "paragraphs", list)
    ]
    answerable = take(record, "answerable", bool, True)
    return question_of(
        name,
        "musique",
        name.partition("__")[0],
        take(record, "question", str),
        [take(record, "answer", str), *aliases],
        parts,
        None if answerable else "it is unanswerable",
    )


def _hotpot(record: Any) -> Question:
    """Read a record of HotpotQA or 2Wiki."""
    facts = take(record, "supporting_facts", list)
    context = take(record, "context", list)
    parts: list[tuple[str, str, bool]] = []
    try:
        gold = {title for title, _ in facts}
        for title, sentences in context:
            name, *lines = strings([title, *sentences], "a passage of 'context'")
            parts.append((name, " ".join(lines), name in gold))
    except (TypeError, ValueError):
        raise WrongRecord("'supporting_facts' or 'context' is not a list of pairs") from None
    return question_of(
        take(record, "_id", str),
        "2wikimultihopqa" if "evidences" in record else "hotpotqa",
        take(record, "type", str, ""),
        take(record, "question", str),
        [take(record, "answer", str)],
        parts,
        None if gold <= {title for title, _, _ in parts} else "its context lacks a passage of the evidence",
    )


# --- IIRC --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Article:
    title: str
    text: str
    questions: list[Any]


def _article(record: Any) -> _Article:
    return _Article(
        take(record, "title", str, ""), take(record, "text", str), take(record, "questions", list)
    )


def _iirc(articles: Sequence[_Article]) -> list[Question]:
    """Read the questions of the first article; the others fill contexts up."""
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
        name = take(record, "qid", str, digest(f"{first.text}:{number}")[:12])
        type_, answers, flaw = _iirc_answer(take(record, "answer", dict))
        # The article comes first by its making; nothing may follow from where evidence stands.
        parts.sort(key=lambda part: digest(f"{name}:{part[0]}:{part[1]}"))
        questions.append(
            question_of(name, "iirc", type_, take(record, "question", str), answers, parts, flaw)
        )
    return questions


def _snippets(question: Any) -> dict[str, dict[str, None]]:
    """Return the evidence outside the article: the snippets of each linked title, without duplicates."""
    found: dict[str, dict[str, None]] = {}
    for span in take(question, "context", list):
        title, text = take(span, "passage", str), take(span, "text", str)
        if title != "main" and text.strip():
            found.setdefault(title, {})[text] = None
    return found


def _iirc_answer(answer: dict[str, Any]) -> tuple[str, list[str], str | None]:
    """Return the type, the correct answers, and why the question cannot be used, if so."""
    type_ = take(answer, "type", str)
    if type_ == "span":
        spans = [take(span, "text", str).strip() for span in take(answer, "answer_spans", list)]
        return type_, spans, "its answer is several spans" if len(spans) > 1 else None
    if type_ == "value":
        value, unit = (
            take(answer, "answer_value", str).strip(),
            take(answer, "answer_unit", str, "").strip(),
        )
        return type_, [value, f"{value} {unit}"] if unit else [value], None
    if type_ == "binary":
        return type_, [take(answer, "answer_value", str).strip()], None
    if type_ == "none":
        return type_, ["none"], "it is unanswerable"
    return type_, [], f"its answer is of the type '{type_}'"
