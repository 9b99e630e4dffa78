"""Evidence before or after the edit: the same passages, exchanged around a deleted one.

After Appendix D of *Budgeted KV-Cache Repair for Evolving Contexts*, whose exact texts and rules
are not public. What is known of them: the exchange keeps the geometry of the edit and the length
of the suffix, and changes the order and recency of the evidence; the tail contrast changes
filler, amount of stale state and distance from evidence to question at once. Built on that:

    side     tail     text, with the deleted passage as X
    before   short    evidence    X  distractors
    after    short    distractors X  evidence
    before   long     evidence    X  distractors  filler
    after    long     distractors X  evidence     filler

So with evidence behind the edit, it is the tail of the suffix in `short` and its head in `long`.

    evidence      all supporting passages, in the order of the file
    X             a passage that is no evidence and does not hold the answer: the first that
                  `kvedit.lab.qa.draws` gives which leaves the other groups possible
    distractors   of the other such passages, those whose characters together come closest to the
                  evidence's. They must come within a tenth, or the question does not qualify; no
                  passage is cut, so the lengths of prefix and suffix are fixed to that much
    filler        what is left of such passages, at least one

Passages that hold the answer without being evidence are left out of all four.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvedit.lab.case import Case
from kvedit.lab.qa import deletion, draws, lay_out, refusal
from kvedit.lab.qa import unfit as unfit_for_placement
from kvedit.lab.questions import Passage, Question

MISMATCH = 0.1
"""Difference of the two groups at most, as a part of the evidence."""


def unfit(question: Question) -> str | None:
    """Say why a question gives no location cases, or `None` if it does, whatever the seed."""
    reason = unfit_for_placement(question)
    if reason is None and _groups(question, seed=0) is None:
        return "no distractors are as long as its evidence and leave a filler"
    return reason


def cases(questions: Iterable[Question], *, seed: int = 0, limit: int | None = None) -> Iterator[Case]:
    """Make four cases of each question: `before` and `after`, each `short` and `long`.

    The facts of a case are `side`, `tail` and `mismatch`, by which part the suffix of `before` is
    longer than that of `after` without filler, besides `type` and `set`.

    Args:
        questions: Of which all qualify; `kvedit.lab.qa.sift(questions, unfit)` gives them.
        seed: Of the draw of the passage to delete.
        limit: Questions at most, not cases.

    Raises:
        UsageError: A question does not qualify; none is dropped without a word.
    """
    for question in islice(questions, limit):
        if (reason := unfit(question)) is not None:
            raise refusal(question, reason)
        groups = _groups(question, seed)
        assert groups is not None  # `unfit` has looked
        removed, evidence, distractors, filler = groups
        mismatch = round(_length(distractors) / _length(evidence) - 1, 3)
        for tail, more in (("short", []), ("long", filler)):
            for side, first, second in (
                ("before", evidence, distractors),
                ("after", distractors, evidence),
            ):
                yield deletion(
                    question,
                    [*first, removed, *second, *more],
                    len(first),
                    f"{side}-{tail}",
                    {"side": side, "tail": tail, "mismatch": mismatch},
                )


def _groups(
    question: Question, seed: int
) -> tuple[Passage, list[Passage], list[Passage], list[Passage]] | None:
    """Give the passage to delete, evidence, distractors and filler, if the two groups match."""
    evidence = [passage for passage in question.passages if passage.supporting]
    for removed in draws(question, seed):
        rest = [question.passages[index] for index in question.deletable if index != removed]
        chosen = _closest([_length([passage]) for passage in rest], _length(evidence))
        if chosen is not None:
            distractors = [rest[index] for index in chosen]
            filler = [passage for index, passage in enumerate(rest) if index not in chosen]
            return question.passages[removed], evidence, distractors, filler
    return None


def _closest(lengths: Sequence[int], target: int) -> tuple[int, ...] | None:
    """Choose indices, not all, whose lengths sum to nearly `target`; of equals the first found."""
    most = round(target * (1 + MISMATCH))
    sums: dict[int, tuple[int, ...]] = {0: ()}
    for index, length in enumerate(lengths):
        for total, chosen in list(sums.items()):
            if total + length <= most:
                sums.setdefault(total + length, (*chosen, index))
    near = [total for total, chosen in sums.items() if len(chosen) < len(lengths)]
    best = min(near, key=lambda total: abs(total - target), default=0)
    return sums[best] if abs(best - target) <= target * MISMATCH else None


def _length(passages: Sequence[Passage]) -> int:
    """Characters of passages below each other, with the blank line behind them."""
    return len(lay_out(passages)[0]) + 1
