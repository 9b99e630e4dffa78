"""Decode: the question's prefill, and a stream of tokens after it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit.cache.kv import KVCache, States
from kvedit.model.model import CHUNK_ROWS, Model
from kvedit.tokens.tokenizer import Tokenizer

IntArray = npt.NDArray[np.int64]
_LEAST = 2  # ids that must agree for a guess, to begin with
_SURE = 5  # so many ids that agree are as good as any more


def prefill_question_(model: Model, cache: KVCache, question: Tensor) -> tuple[Tensor, States]:
    """Take the question's ids through the layers after the cached rows.

    Args:
        model: The model.
        cache: Gets the question's rows after its `length`.
        question: `int64 [Nq]`, not empty.

    Returns:
        Logits of the last row, `float32 [vocabulary]`, and the rows' raw states.
    """
    parts: list[States] = []
    hidden = torch.empty(0)
    start = cache.length
    for first in range(0, len(question), CHUNK_ROWS):
        part = question[first : first + CHUNK_ROWS]
        walked = model.walk(part, slice(start + first, start + first + len(part)), cache)
        parts.append(walked.states)
        hidden = walked.hidden
    return model.logits(hidden)[0], parts[0] if len(parts) == 1 else States.concatenate(parts)


class Sampler:
    """Choose the next id: the likeliest at temperature 0, a seeded draw otherwise."""

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """Choose from `float32 [vocabulary]`."""
        if self.temperature == 0:
            return int(logits.argmax())
        chances = torch.softmax(logits.cpu() / self.temperature, dim=-1)
        return int(torch.multinomial(chances, 1, generator=self._generator))


class Lookup:
    """Guess what comes next from what was said before: prompt lookup decoding.

    An answer about a document often repeats it. Where the last ids stand in the text already, what
    follows at the last such place is guessed, unless most of the others go on with another id; the
    longer the part that agrees, the more of it. One walk then tells how much of the guess the model
    would have said itself (speculative decoding, arXiv 2211.17192; guesses from the prompt, as in
    LLMA, arXiv 2304.04487). A guess costs a little even where it is wrong, so after one that was
    wrong from its first id a longer part must agree.

    Args:
        ids: All ids before the answer, `int64 [T + Nq]`.
        room: Ids that will be pushed at most.
    """

    def __init__(self, ids: IntArray, room: int) -> None:
        self._ids = np.concatenate([ids, np.zeros(room, dtype=np.int64)])
        self._count = len(ids)
        self._least = _LEAST
        self._guess: list[int] = []
        self._guessed_at = self._count

    def push(self, token: int) -> None:
        """Add an id that was said."""
        self._ids[self._count] = token
        self._count += 1

    def guess(self, most: int) -> list[int]:
        """Guess up to `most` ids; none where the last ids stand nowhere before."""
        ids, last = self._ids, self._count - 1
        if self._guess:
            right = ids[self._guessed_at] == self._guess[0] and self._guessed_at < self._count
            self._least = _LEAST if right else min(self._least + 1, _SURE)
            self._guess = []
        if most < 1 or last < 2:
            return []
        places = 1 + np.flatnonzero((ids[1:last] == ids[last]) & (ids[: last - 1] == ids[last - 1]))
        if not len(places):
            return []
        agreeing = 2
        while agreeing < _SURE:
            longer = places[places >= agreeing]
            longer = longer[ids[longer - agreeing] == ids[last - agreeing]]
            if not len(longer):
                break
            places, agreeing = longer, agreeing + 1
        if agreeing < self._least:
            return []
        after = int(places[-1]) + 1
        if 2 * np.count_nonzero(ids[places + 1] == ids[after]) < len(places):
            return []
        self._guess = ids[after : min(after + min(most, 1 << (agreeing - 1)), last + 1)].tolist()
        self._guessed_at = self._count
        return self._guess


def decode_(
    model: Model,
    cache: KVCache,
    logits: Tensor,
    sampler: Sampler,
    limit: int,
    walked: list[States],
    lookup: Lookup | None = None,
) -> Iterator[int]:
    """Give up to `limit` ids, one at a time, stopping before an id that ends the answer.

    Args:
        model: The model.
        cache: Gets the answer's rows after its `length`.
        logits: Of the row before the answer, `float32 [vocabulary]`.
        sampler: Chooses each id.
        limit: Ids at most.
        walked: Gets the raw states of each id that was followed by another look at the model;
            the last of `limit` ids has none.
        lookup: Guesses ids, so that one walk can give several. The ids are those that are chosen
            without it: the sampler sees each row's logits in turn, and a guess that it did not
            choose is dropped with all after it.
    """
    guess: list[int] = []
    at = 0  # place of the id in hand among those of the last walk
    for said in range(1, limit + 1):
        token = sampler(logits)
        if token in model.stop_ids:
            return
        yield token
        if said == limit:
            return
        if lookup is not None:
            lookup.push(token)
        at += 1
        if at > len(guess) or token != guess[at - 1]:
            guess = [] if lookup is None else lookup.guess(limit - said - 1)
            start, at, count = cache.length, 0, 1 + len(guess)
            ids = model.to_device(np.array([token, *guess], dtype=np.int64))
            found = model.walk(ids, slice(start, start + count), cache, outputs=count)
            every = model.logits(found.hidden)
        walked.append(found.states.part(at, at + 1))
        cache.length = start + at + 1
        logits = every[at]


# Up to three bytes at the end may yet become a character; some decoders mark each of them.
_LAST_BYTES = re.compile("\ufffd{1,3}\\Z")


class TextStream:
    """Turn ids into text as they come, holding back a character whose bytes are not all there.

    Ids are decoded together with those that completed the text before them, since some decoders
    drop a leading space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = 0  # first id of the part of the text that was completed last
        self._after = 0  # first id after it
        self._said = 0  # characters said, of the text from `_before` on

    def push(self, token: int) -> str:
        """Add an id; give the text that it completes, possibly none."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._before :])
        whole = _LAST_BYTES.sub("", text)
        fresh = whole[self._said :]
        self._said = max(self._said, len(whole))
        if whole == text:
            self._before, self._after = self._after, len(self._ids)
            self._said = len(self._tokenizer.decode(self._ids[self._before :]))
        return fresh

    def finish(self) -> str:
        """Give what was held back when the stream was cut."""
        return self._tokenizer.decode(self._ids[self._before :])[self._said :]
