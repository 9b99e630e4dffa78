"""Natural multi-hop questions, and cases that delete a passage that no answer needs.

Based on section 4.3 of *Budgeted KV-Cache Repair for Evolving Contexts*: each source question gives
three cases that delete the same non-supporting passage from three positions. The paper does not
specify the positions; these are ours:

    early    before all other passages, so everything that remains is stale
    middle   after half of them, rounded down
    late     after three quarters of them, rounded down; directly before the last passage, a budget
             of a few per cent of the stale rows would often resolve to 0 rows

The other passages keep their order, so all three cases have the same text after the edit. Only the
number of stale rows differs.

A passage is a line with its title and a line with its text, with a blank line between passages. The
edit deletes whole lines: the passage and the blank line after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from kvedit.errors import UsageError
from kvedit.lab.case import Case
from kvedit.lab.datasets import read
from kvedit.lab.questions import Passage, Question, digest
from kvedit.lab.scoring import normalise
from kvedit.text.document import Edit

__all__ = ["cases", "deletion", "draws", "lay_out", "read", "refusal", "sift", "unfit"]

REQUEST = "Answer with a few words only."
"""Appended to the question; exact match needs a short answer."""

MAX_NEW_TOKENS = 32
"""Maximum number of answer tokens; the longest answers of the datasets take over 20."""


def unfit(question: Question) -> str | None:
    """Return why a question gives no placement cases, or `None` if it does."""
    if question.flaw is not None:
        return question.flaw
    if not any(normalise(answer, question.dataset) for answer in question.answers):
        return "none of its answers contains a word"
    if not any(passage.supporting for passage in question.passages):
        return "no passage is marked as evidence"
    if not question.deletable:
        return "every passage is evidence or contains the answer"
    if len(question.passages) < 4:
        return "it has fewer than four passages"
    return None


def sift(
    questions: Iterable[Question], unfit: Callable[[Question], str | None] = unfit
) -> tuple[list[Question], dict[str, str]]:
    """Separate the questions that qualify from the others.

    Args:
        questions: In file order.
        unfit: Returns why a question does not qualify; `kvedit.lab.location` has its own.

    Returns:
        Questions that qualify, in order; name and reason of each other question.
    """
    fit: list[Question] = []
    left_out: dict[str, str] = {}
    for question in questions:
        reason = unfit(question)
        if reason is None:
            fit.append(question)
        else:
            left_out[question.name] = reason
    return fit, left_out


def cases(questions: Iterable[Question], *, seed: int = 0, limit: int | None = None) -> Iterator[Case]:
    """Yield three cases per question: `early`, `middle` and `late`, in the questions' order.

    Args:
        questions: Questions that qualify, from `sift`.
        seed: For choosing the passage to delete, independently of other questions and `limit`.
        limit: Maximum number of questions, not of cases.

    Raises:
        UsageError: A question does not qualify; none is silently dropped.
    """
    for question in islice(questions, limit):
        if (reason := unfit(question)) is not None:
            raise refusal(question, reason)
        chosen = draws(question, seed)[0]
        others = [passage for index, passage in enumerate(question.passages) if index != chosen]
        places = {"early": 0, "middle": len(others) // 2, "late": len(others) * 3 // 4}
        for placement, place in places.items():
            passages = [*others[:place], question.passages[chosen], *others[place:]]
            yield deletion(question, passages, place, placement, {"placement": placement})


def draws(question: Question, seed: int) -> list[int]:
    """Return the indices of deletable passages, shuffled by a hash of seed, question and index."""
    return sorted(question.deletable, key=lambda index: digest(f"{seed}:{question.name}:{index}"))


def refusal(question: Question, reason: str) -> UsageError:
    """Return the error for a question that does not qualify."""
    return UsageError(f"{question.name} does not qualify: {reason}.", "Remove such questions first (`sift`).")


def deletion(
    question: Question, passages: Sequence[Passage], place: int, label: str, facts: dict[str, Any]
) -> Case:
    """Return the case that deletes one passage of a text.

    Args:
        question: The question about the remaining text.
        passages: The text before the edit, in order.
        place: Index of the passage to delete, not the last.
        label: Suffix of the case's name after that of its source.
        facts: Facts of the case, in addition to type and set.
    """
    text, spans = lay_out(passages)
    left = [passage for index, passage in enumerate(passages) if index != place]
    gold = [span for passage, span in zip(left, lay_out(left)[1], strict=True) if passage.supporting]
    return Case(
        name=f"{question.name}-{label}",
        source=question.name,
        text=text,
        edits=(Edit(spans[place][0], spans[place + 1][0]),),
        question=f"{question.question} {REQUEST}",
        answers=question.answers,
        gold=tuple(gold),
        dataset=question.dataset,
        facts={**facts, "type": question.type, "set": question.dataset},
        max_new_tokens=MAX_NEW_TOKENS,
    )


def lay_out(passages: Sequence[Passage]) -> tuple[str, list[tuple[int, int]]]:
    """Join passages into a text.

    Returns:
        The text, and the span `[start, stop)` of each passage in it: title and text, in characters,
        without the last line end.
    """
    blocks = [passage.block for passage in passages]
    spans: list[tuple[int, int]] = []
    start = 0
    for block in blocks:
        spans.append((start, start + len(block) - 1))
        start += len(block) + 1
    return "\n".join(blocks), spans
