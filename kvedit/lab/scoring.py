"""Answer-only exact match and F1, by the rules of each dataset's own evaluation script.

    dataset           script                                                  rules
    hotpotqa          hotpotqa/hotpot: hotpot_evaluate_v1.py                  SQuAD, yes/no
    2wikimultihopqa   Alab-NII/2wikimultihop: 2wikimultihop_evaluate_v1.1.py  SQuAD, yes/no
    musique           StonyBrookNLP/musique: metrics/answer.py                SQuAD
    iirc              jferguson144/IIRC-baseline: numnet_plus/drop_eval.py    DROP
    niah              ours                                                    first number or words

SQuAD: lower case, without ASCII punctuation, "a", "an" and "the"; white space becomes one space.
    Exact match compares the result. F1 counts the words that both have, with repetitions.
yes/no: if either side is "yes", "no" or "noanswer", F1 is 0 unless both sides are the same.
    MuSiQue's script has no such rule.
DROP: words end at spaces and hyphens. A word that Python reads as a number becomes that number
    ("7" and "7.0" agree) and keeps its punctuation; any other is treated as above. F1 compares sets
    of words, is 0 unless a number of the answer is in the output, and has two decimals. The script
    pairs the spans of an answer with several spans; answers here have one. It does not score units of
    measurement: if the file names one, answers are listed with and without it. An unanswerable
    question has the answer "none".
niah: if the answer is a whole number, the first word of the output that is one; otherwise as many of
    its first words as the answer has. Punctuation around words and thousands commas are removed. F1
    equals exact match.

Two sides without words agree in exact match; F1 is 1 then in MuSiQue and IIRC, 0 in the others.
With several right answers, the best score counts. 2Wiki's script also reads aliases from a separate
file, and MuSiQue's from each record; they belong in `answers`. Outputs are not truncated first: text
after the answer counts against it, as in the scripts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from kvedit.errors import UsageError

DATASETS = ("hotpotqa", "2wikimultihopqa", "musique", "iirc", "niah")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_CLOSED = ("yes", "no", "noanswer")


def normalise(text: str, dataset: str) -> str:
    """Return `text` as the dataset's script compares it: words separated by one space.

    Raises:
        UsageError: Unknown dataset.
    """
    if dataset not in DATASETS:
        raise UsageError(f"Unknown data set '{dataset}'.", f"Use one of {', '.join(DATASETS)}.")
    if dataset == "niah":
        words = _THOUSANDS.sub("", text.lower()).split()
        return " ".join(word for word in (word.strip(string.punctuation) for word in words) if word)
    if dataset == "iirc":
        parts = (_drop_word(part) for part in re.split("[ -]", text.lower()))
        return " ".join(part for part in parts if part)
    return _squad(text.lower())


def exact_match(text: str, answers: Sequence[str], dataset: str) -> bool:
    """Return whether an output equals one of the answers.

    Args:
        text: The model's output.
        answers: Right answers.
        dataset: One of `DATASETS`.

    Raises:
        UsageError: Unknown dataset.
    """
    said = normalise(text, dataset)
    wanted = [normalise(answer, dataset) for answer in answers]
    if dataset == "niah":
        return any(answer == _first_like(answer, said) for answer in wanted)
    return said in wanted


def f1(text: str, answers: Sequence[str], dataset: str) -> float:
    """Return the F1 score of an output's words for the best answer, from 0 to 1.

    Arguments and errors are those of `exact_match`.
    """
    if dataset == "niah":
        return float(exact_match(text, answers, dataset))
    said = normalise(text, dataset)
    return max((_overlap(said, normalise(answer, dataset), dataset) for answer in answers), default=0.0)


def holds(text: str, answers: Sequence[str], dataset: str) -> bool:
    """Return whether one of the answers occurs in `text` as whole words, both normalized."""
    inside = f" {normalise(text, dataset)} "
    wanted = (normalise(answer, dataset) for answer in answers)
    return any(f" {answer} " in inside for answer in wanted if answer)


def _squad(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.translate(_PUNCTUATION)).split())


def _drop_word(word: str) -> str:
    number = _number(word)
    if number is None:
        number = _number(stripped := word.translate(_PUNCTUATION))
        return _squad(stripped) if number is None else str(number)
    return str(number)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _first_like(answer: str, said: str) -> str:
    """Return the first number of an output, or as many of its words as `answer` has."""
    words = said.split()
    if answer.isdecimal():
        return next((word for word in words if word.isdecimal()), "")
    return " ".join(words[: max(len(answer.split()), 1)])


def _overlap(said: str, answer: str, dataset: str) -> float:
    have, want = Counter(said.split()), Counter(answer.split())
    if dataset == "iirc":
        have, want = Counter(set(have)), Counter(set(want))
        numbers = {word for word in want if _number(word) is not None}
        if numbers and not numbers & set(have):
            return 0.0
    elif dataset != "musique" and said != answer and (said in _CLOSED or answer in _CLOSED):
        return 0.0
    if dataset in ("musique", "iirc") and not (have and want):
        return float(have == want)
    both = (have & want).total()
    if not both:
        return 0.0
    precision, recall = both / have.total(), both / want.total()
    score = 2 * precision * recall / (precision + recall)
    return round(score, 2) if dataset == "iirc" else score
