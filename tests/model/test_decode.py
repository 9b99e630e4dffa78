"""Decoding with guesses from the text: the ids, rows and draws of decoding without."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvedit.cache.kv import KVCache, States
from kvedit.checkpoint.opening import open_model
from kvedit.model import attention
from kvedit.model.decode import Lookup, Sampler, decode_, prefill_question_
from kvedit.model.model import Model

IDS = np.concatenate([np.arange(40) * 7 % 300, np.arange(40) * 7 % 300, [5, 12, 19]])


class Counted(Lookup):
    """A lookup that tells what it guessed."""

    guesses: list[int]

    def guess(self, most: int) -> list[int]:
        found = super().guess(most)
        self.guesses = [*getattr(self, "guesses", []), len(found)]
        return found


def decoded(
    model: Model, limit: int, lookup: Lookup | None, temperature: float = 0.0, take: int | None = None
) -> tuple[list[int], list[States], KVCache]:
    cache = model.new_cache(len(IDS) + limit)
    logits, _ = prefill_question_(model, cache, torch.from_numpy(IDS))
    walked: list[States] = []
    ids = decode_(model, cache, logits, Sampler(temperature, 3), limit, walked, lookup)
    return list(islice(ids, take)), walked, cache


@pytest.mark.parametrize("temperature", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("limit", [1, 2, 7, 60])
def test_guesses_change_neither_ids_nor_rows(tiny: Model, limit: int, temperature: float) -> None:
    lookup = Counted(IDS, limit)
    ids, walked, cache = decoded(tiny, limit, lookup, temperature)
    wanted, plain, reference = decoded(tiny, limit, None, temperature)
    assert ids == wanted
    assert cache.length == reference.length
    used = slice(0, cache.length)
    torch.testing.assert_close(cache.keys[:, :, used], reference.keys[:, :, used], atol=1e-4, rtol=1e-4)
    assert [part.rows.tolist() for part in walked] == [part.rows.tolist() for part in plain]
    for ours, theirs in zip(walked, plain, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_that_share_the_keys_give_the_same_rows(
    checkpoints: dict[str, Path], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(checkpoints["qwen3"], device="cpu", dtype=dtype)
    _, _, alone = decoded(model, 20, Lookup(IDS, 20))
    shares = []
    shared = attention._shared
    monkeypatch.setattr(attention, "_PART_KEYS", 16)
    monkeypatch.setattr(attention, "_shared", lambda *given: shares.append(given[-2]) or shared(*given))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    _, _, beside = decoded(model, 20, Lookup(IDS, 20))
    assert set(shares) == {6 // model.heads}
    known = slice(0, len(IDS) + 1)  # what follows may be another id, after another rounding
    rounding = 1e-4 if dtype == "float32" else 0.1
    for ours, theirs in ((beside.keys, alone.keys), (beside.values, alone.values)):
        torch.testing.assert_close(ours[:, :, known], theirs[:, :, known], atol=rounding, rtol=rounding)


class Quoting:
    """Says what the text says from its start, whatever the logits are."""

    def __init__(self) -> None:
        self.ids = iter(IDS[:40].tolist())

    def __call__(self, logits: torch.Tensor) -> int:
        return next(self.ids)


def test_an_answer_that_quotes_takes_few_walks(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "stop_ids", frozenset())
    walks = []
    walk = llama.walk
    monkeypatch.setattr(
        llama, "walk", lambda ids, *rest, **more: walks.append(len(ids)) or walk(ids, *rest, **more)
    )
    cache = llama.new_cache(len(IDS) + 40)
    logits, _ = prefill_question_(llama, cache, torch.from_numpy(IDS))
    walks.clear()
    walked: list[States] = []
    ids = list(decode_(llama, cache, logits, Quoting(), 40, walked, Lookup(IDS, 40)))  # type: ignore[arg-type]
    assert ids == IDS[:40].tolist()
    assert walks == [1, 3, 17, 17, 1]  # the end of the first copy agrees with five ids
    assert len(walked) == 39


@pytest.mark.parametrize("take", [1, 2, 3, 10, 11, 30])
def test_a_truncated_answer_has_rows_for_all_ids_but_the_last(llama: Model, take: int) -> None:
    ids, walked, cache = decoded(llama, 60, Lookup(IDS, 60), take=take)
    taken = min(take, len(decoded(llama, 60, None)[0]))
    assert len(ids) == taken
    assert [int(part.rows) for part in walked[: taken - 1]] == [*range(len(IDS), len(IDS) + taken - 1)]
    assert len(walked) == taken - 1
    assert cache.length == len(IDS) + taken - 1


def slow_guess(ids: list[int], most: int) -> list[int]:
    """What follows the last of those places that agree with the end over most ids, up to five.

    Nothing where more than half of those places go on with another id.
    """
    places: dict[int, list[int]] = {}
    for end in range(2, len(ids)):
        agreeing = 0
        while agreeing < min(5, end) and ids[end - 1 - agreeing] == ids[len(ids) - 1 - agreeing]:
            agreeing += 1
        places.setdefault(agreeing, []).append(end)
    best = max(places, default=0)
    if best < 2 or most < 1:
        return []
    place = places[best][-1]
    alike = [end for end in places[best] if ids[end] == ids[place]]
    if len(alike) < len(places[best]) / 2:
        return []
    return ids[place : place + min(most, 2 ** (best - 1))]


@given(
    ids=st.lists(st.integers(0, 3), max_size=40),
    said=st.lists(st.integers(0, 3), max_size=10),
    most=st.integers(-1, 20),
)
def test_a_guess_is_the_continuation_of_the_longest_match(ids: list[int], said: list[int], most: int) -> None:
    lookup = Lookup(np.array(ids, dtype=np.int64), len(said))
    push_all(lookup, said)
    assert lookup.guess(most) == slow_guess([*ids, *said], most)


def push_all(lookup: Lookup, ids: Iterable[int]) -> None:
    for token in ids:
        lookup.push(token)


def test_a_wrong_guess_requires_a_longer_match() -> None:
    text = np.array([1, 2, 3, 9, 1, 2, 4, 9, 7, 1, 2])
    lookup = Lookup(text, 20)
    assert lookup.guess(5) == [4, 9]  # two ids agree
    lookup.push(8)  # it was wrong
    lookup.push(1)
    lookup.push(2)
    assert lookup.guess(5) == []  # two are too few now
    for token in (3, 9, 1, 2):
        lookup.push(token)
    assert lookup.guess(5) == [4, 9, 7, 1, 2]  # here five agree
    right = Lookup(text, 20)
    assert right.guess(5)[0] == 4
    right.push(4)  # it was right
    assert right.guess(5) == [9, 7, 1, 2]
