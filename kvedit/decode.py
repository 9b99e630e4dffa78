"""Decode: the question's prefill, and a stream of tokens after it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvedit.cache import KVCache
from kvedit.model import CHUNK_ROWS, Model
from kvedit.tokenizer import Tokenizer

_BYTES_OF_A_CHARACTER = 4


def prefill_question_(model: Model, cache: KVCache, question: Tensor) -> Tensor:
    """Take the question's ids through the layers after the cached rows.

    Args:
        model: The model.
        cache: Gets the question's rows after its `length`.
        question: `int64 [Nq]`, not empty.

    Returns:
        Logits of the last row, `float32 [vocabulary]`.
    """
    hidden: Tensor | None = None
    start = cache.length
    for first in range(0, len(question), CHUNK_ROWS):
        part = question[first : first + CHUNK_ROWS]
        hidden = model.walk(part, slice(start + first, start + first + len(part)), cache).hidden
    if hidden is None:
        raise ValueError("a question has at least one id")
    return model.logits(hidden[-1:])[0]


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


def decode_(model: Model, cache: KVCache, logits: Tensor, sampler: Sampler, limit: int) -> Iterator[int]:
    """Give up to `limit` ids, one at a time, stopping before an id that ends the answer.

    Args:
        model: The model.
        cache: Gets the answer's rows after its `length`.
        logits: Of the row before the answer, `float32 [vocabulary]`.
        sampler: Chooses each id.
        limit: Ids at most.
    """
    for count in range(limit):
        token = sampler(logits)
        if token in model.stop_ids:
            return
        yield token
        if count + 1 < limit:
            logits = prefill_question_(model, cache, torch.tensor([token], device=model.device))


class TextStream:
    """Turn ids into text as they come, holding back a character whose bytes are not all there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._first = 0
        self._text = ""

    def push(self, token: int) -> str:
        """Add an id; give the text that it completes, possibly none."""
        self._ids.append(token)
        text = self._decode()
        held = len(self._ids) - self._first
        if text.endswith("\ufffd") and held <= _BYTES_OF_A_CHARACTER:
            return ""
        fresh = text[len(self._text) :]
        # The next ids are decoded after these, since some decoders drop a leading space.
        self._first, self._text = len(self._ids) - 1, self._tokenizer.decode(self._ids[-1:])
        if self._text.endswith("\ufffd"):
            self._first, self._text = len(self._ids), ""
        return fresh

    def finish(self) -> str:
        """Give what was held back when the stream was cut."""
        return self._decode()[len(self._text) :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids[self._first :])
