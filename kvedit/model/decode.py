"""Decoding: prefill of the question, and the stream of tokens that answers it."""

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
_LEAST = 2  # matching ids that a guess requires at first
_SURE = 5  # a longer match does not make a guess more reliable


def prefill_question_(model: Model, cache: KVCache, question: Tensor) -> tuple[Tensor, States]:
    """Walk the question's ids through the layers after the cached rows.

    Args:
        model: The model.
        cache: Changed: the question's rows are written after its `length`.
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
    """Choose the next id: the most likely one at temperature 0, otherwise a seeded random draw."""

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """Choose an id from logits, `float32 [vocabulary]`."""
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.cpu() / self.temperature, dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


class Lookup:
    """Guess the next ids from earlier text (prompt lookup decoding).

    An answer about a document often quotes it. If the last ids occur earlier, what followed the most recent
    occurrence is guessed, unless most of the other occurrences continue differently; a longer match gives a
    longer guess. One walk checks how much of the guess the model would have chosen (speculative decoding,
    arXiv 2211.17192; guesses from the prompt as in LLMA, arXiv 2304.04487). A wrong guess costs a little, so
    after a guess whose first id is wrong, a longer match is required.

    Args:
        ids: All ids before the answer, `int64 [T + Nq]`.
        capacity: Maximum number of ids that will be pushed.
    """

    def __init__(self, ids: IntArray, capacity: int) -> None:
        self._ids = np.concatenate([ids, np.zeros(capacity, dtype=np.int64)])
        self._count = len(ids)
        self._least = _LEAST
        self._guess: list[int] = []
        self._guessed_at = self._count

    def push(self, token: int) -> None:
        """Add an id of the answer."""
        self._ids[self._count] = token
        self._count += 1

    def guess(self, most: int) -> list[int]:
        """Return a guess of up to `most` ids; it is empty if the last ids do not occur earlier."""
        ids, last = self._ids, self._count - 1
        if self._guess:
            right = ids[self._guessed_at] == self._guess[0] and self._guessed_at < self._count
            self._least = _LEAST if right else min(self._least + 1, _SURE)
            self._guess = []
        if most < 1 or last < 2:
            return []
        matches = 1 + np.flatnonzero((ids[1:last] == ids[last]) & (ids[: last - 1] == ids[last - 1]))
        if not len(matches):
            return []
        length = 2
        while length < _SURE:
            longer = matches[matches >= length]
            longer = longer[ids[longer - length] == ids[last - length]]
            if not len(longer):
                break
            matches, length = longer, length + 1
        if length < self._least:
            return []
        after = int(matches[-1]) + 1
        if 2 * np.count_nonzero(ids[matches + 1] == ids[after]) < len(matches):
            return []
        self._guess = ids[after : min(after + min(most, 1 << (length - 1)), last + 1)].tolist()
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
    """Yield up to `limit` ids, one at a time, stopping before an id that ends the answer.

    Args:
        model: The model.
        cache: Changed: the answer's rows are written after its `length`.
        logits: Logits of the row before the answer, `float32 [vocabulary]`.
        sampler: Chooses each id.
        limit: Maximum number of ids.
        walked: Changed: the raw states of each id that was walked are appended; the last of `limit`
            ids is not walked.
        lookup: Guesses ids, so that one walk can yield several. The ids are the same as without it: the
            sampler sees the logits of each row in turn, and the rest of a guess is dropped at the first
            id that it does not choose.
    """
    guess: list[int] = []
    index = 0  # of the current id in the last walk
    for yielded in range(1, limit + 1):
        token = sampler(logits)
        if token in model.stop_ids:
            return
        yield token
        if yielded == limit:
            return
        if lookup is not None:
            lookup.push(token)
        index += 1
        if index > len(guess) or token != guess[index - 1]:
            guess = [] if lookup is None else lookup.guess(limit - yielded - 1)
            start, index, count = cache.length, 0, 1 + len(guess)
            ids = model.to_device(np.array([token, *guess], dtype=np.int64))
            walk = model.walk(ids, slice(start, start + count), cache, outputs=count)
            walk_logits = model.logits(walk.hidden)
        walked.append(walk.states.part(index, index + 1))
        cache.length = start + index + 1
        logits = walk_logits[index]


# Up to three bytes at the end can still become a character; some decoders mark each of them.
_LAST_BYTES = re.compile("\ufffd{1,3}\\Z")


class TextStream:
    """Turn a stream of ids into text, holding back characters whose bytes are incomplete.

    Ids are decoded together with those of the previous piece of text, since some decoders drop a leading
    space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = 0  # index of the first id of the previous piece
        self._after = 0  # index of the first id after it
        self._sent = 0  # characters already returned, counted from `_before`

    def push(self, token: int) -> str:
        """Add an id, and return the text that it completes, which can be empty."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._before :])
        complete = _LAST_BYTES.sub("", text)
        fresh = complete[self._sent :]
        self._sent = max(self._sent, len(complete))
        if complete == text:
            self._before, self._after = self._after, len(self._ids)
            self._sent = len(self._tokenizer.decode(self._ids[self._before :]))
        return fresh

    def finish(self) -> str:
        """Return the text that is still held back when the stream ends."""
        return self._tokenizer.decode(self._ids[self._before :])[self._sent :]
