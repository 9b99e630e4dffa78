"""The long text in which Erasing-NIAH hides its needles."""

from __future__ import annotations

import re

import numpy as np

from kvedit.errors import UsageError
from kvedit.tokens.tokenizer import Tokenizer

_DEV_SHARE = 0.25  # of the haystack


class Haystack:
    """Sentences to hide needles in.

    Args:
        text: Any prose; its white space is made even.
        tokenizer: Counts tokens.

    Raises:
        UsageError: It has too few sentences.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self.sentences = re.split(r"(?<=[.!?]) ", " ".join(text.split()))
        self._tokenizer = tokenizer
        if len(self.sentences) < 40:
            raise UsageError(
                f"The haystack has {len(self.sentences)} sentences; at least 40 are needed.",
                "Give a longer text with --haystack, or leave it out to use the built-in one.",
            )

    def cut(self, random: np.random.Generator, split: str, tokens: int) -> list[str]:
        """Return successive sentences of about `tokens` tokens from a random place in the split's part."""
        middle = int(len(self.sentences) * _DEV_SHARE)
        part = self.sentences[:middle] if split == "dev" else self.sentences[middle:]
        at, held, found = int(random.integers(0, len(part))), 0, list[str]()
        while held < tokens:
            found.append(part[at % len(part)])
            held += self.count(found[-1])
            at += 1
        return found

    def count(self, sentence: str) -> int:
        """Return the number of tokens of a sentence within a text."""
        return len(self._tokenizer.encode_text(" " + sentence))


def built_in() -> str:
    """Return a haystack that needs no file: plain sentences of simple words, drawn with a fixed seed."""
    random = np.random.default_rng(0)
    who = "The baker|A young clerk|My neighbour|The old captain|Her cousin|The night guard|A tall student"
    did = "carried|painted|counted|repaired|forgot|borrowed|sold|wrapped|washed|described|followed|measured"
    what = "the blue chairs|a box of nails|the morning papers|two bicycles|the garden gate|a heavy parcel"
    when = "before breakfast|on a rainy evening|near the station|after the concert|with great patience"
    why = "because the road was closed|while the kettle boiled|although nobody had asked|as he always did"
    parts = [column.split("|") for column in (who, did, what, when, why)]
    drawn = ([part[int(random.integers(len(part)))] for part in parts] for _ in range(4000))
    return " ".join(dict.fromkeys(" ".join(words) + "." for words in drawn))  # the splits share none
