"""Evidence before or after the edit: the same passages, exchanged around a deleted one.

Based on Appendix D of *Budgeted KV-Cache Repair for Evolving Contexts*, whose exact texts and rules
are not public. Known is that the exchange keeps the geometry of the edit and the length of the
suffix, and changes the order and recency of the evidence, while the tail contrast changes filler,
amount of stale state and distance from evidence to question at once. This gives:

    side     tail     text, with the deleted passage as X
    before   short    evidence    X  distractors
    after    short    distractors X  evidence
    before   long     evidence    X  distractors  filler
    after    long     distractors X  evidence     filler

So if the evidence is after the edit, it is the tail of the suffix in `short` and its head in `long`.

    evidence      all supporting passages, in the order of the file
    X             a passage that is not evidence and does not contain the answer: the first of
                  `kvedit.lab.qa.draws` for which the other groups exist
    distractors   of the other such passages, those whose total length is closest to that of the
                  evidence. If it differs by more than a tenth, the question does not qualify. No
                  passage is truncated, so the lengths of prefix and suffix match only that closely
    filler        the remaining such passages, at least one

Passages that contain the answer but are not evidence are left out of all four.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvedit.lab.case import Case
from kvedit.lab.qa import deletion, draws, lay_out, refusal
from kvedit.lab.qa import unfit as unfit_for_placement
from kvedit.lab.questions import Passage, Question

MISMATCH = 0.1
"""Maximum length difference of the two groups, as a fraction of the evidence."""


def unfit(question: Question) -> str | None:
    """Return why a question gives no location cases, or `None` if it does; independent of the seed."""
    reason = unfit_for_placement(question)
    if reason is None and _groups(question, seed=0) is None:
        return "no distractors match the length of its evidence and leave a filler"
    return reason


def cases(questions: Iterable[Question], *, seed: int = 0, limit: int | None = None) -> Iterator[Case]:
    """Yield four cases per question: `before` and `after`, each `short` and `long`.

    The facts of a case are `type`, `set`, `side`, `tail` and `mismatch`: by which fraction the suffix
    of `before` is longer than that of `after`, without filler.

    Args:
        questions: Questions that qualify, from `kvedit.lab.qa.sift(questions, unfit)`.
        seed: For choosing the passage to delete.
        limit: Maximum number of questions, not of cases.

    Raises:
        UsageError: A question does not qualify; none is silently dropped.
    """
    for question in islice(questions, limit):
        if (reason := unfit(question)) is not None:
            raise refusal(question, reason)
        groups = _groups(question, seed)
        assert groups is not None  # checked by `unfit`
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
    """Return the passage to delete, evidence, distractors and filler, if the two groups match."""
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
    """Return indices, not all, whose lengths sum to nearly `target`; of equal sums the first found."""
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
    """Return the number of characters of passages, with a blank line after each."""
    return len(lay_out(passages)[0]) + 1
