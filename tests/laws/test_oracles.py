"""Named faults of other tools, and random edits, against the two oracles of `oracles.py`.

Where positions are kept by adding up, or ids by patching, these are what goes wrong without a word.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from rigs.oracles import (
    QUESTION,
    a_text,
    by_prefill,
    check_context_free,
    check_full_budget,
    gap,
    run_scripts,
    without_context,
)
from rigs.reference import load_session, prefill_states, stock_network, working_cache
from transformers import DynamicCache

from kvedit.cache.kv import KVCache, States
from kvedit.cache.rows import Piece
from kvedit.checkpoint.compare import Stock
from kvedit.checkpoint.opening import open_model, open_stock
from kvedit.errors import UsageError
from kvedit.model.decode import prefill_question_
from kvedit.model.model import Model
from kvedit.repair.refresh import refresh_, shift_
from kvedit.session.session import Session

TEXT = a_text(30)


@pytest.fixture(scope="module")
def free_models(checkpoints: dict[str, Path]) -> dict[str, Model]:
    """Tiny models of every kind in which no layer sees another row."""
    return {kind: without_context(folder) for kind, folder in checkpoints.items()}


@pytest.fixture
def free(free_models: dict[str, Model]) -> Model:
    return free_models["qwen3"]


def test_the_context_free_oracle_notices_a_row_off_by_one(free: Model, home: Path) -> None:
    session = load_session(home, free, TEXT)
    keys, values = (part.clone() for part in next(iter(read(session).values())))
    row = Piece("only", 40, 1)
    cache = working_cache(session)
    shift_(free, cache, [(41, row)], {"only": (keys, values)})
    right, _ = by_prefill(session)
    assert gap(session) < 1e-5
    assert float((cache.keys[:, :, 41] - right[:, :, 41]).abs().max()) > 0.01


def read(session: Session) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    session._state.read_segments()
    return session._state.segments.states


@pytest.mark.parametrize("kind", ["llama", "llama-llama3", "llama-linear", "llama-yarn", "qwen2", "mistral"])
def test_two_shifts_before_any_question_are_one_shift(
    free_models: dict[str, Model], home: Path, kind: str
) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/3825."""
    twice = load_session(home / "twice", free_models[kind], TEXT)
    twice.delete("5-6")
    twice.delete("2-3")
    once = load_session(home / "once", free_models[kind], TEXT)
    once.delete("5-6", "2-3")
    assert twice.document.text == once.document.text
    for session in (twice, once):
        check_context_free(session)
    left, right = working_cache(twice), working_cache(once)
    assert torch.equal(left.keys, right.keys)
    assert torch.equal(left.values, right.values)


def test_ranges_of_one_command_count_the_original_lines(free: Model, home: Path) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/12161."""
    session = load_session(home, free, TEXT)
    session.delete("3-4", "9", "20-25")
    old = TEXT.split("\n")
    kept = [line for number, line in enumerate(old, 1) if number not in (3, 4, 9, *range(20, 26))]
    assert session.document.text == "\n".join(kept)
    check_context_free(session)


def test_any_series_of_edits_passes_both_oracles(free: Model, llama: Model, home: Path) -> None:
    done, wrong = run_scripts(free, llama, home, scripts=12, seed=1)
    assert not wrong
    assert done == 12 * 2 * 8


# --- when everything is there already ---------------------------------------------------------------


def test_a_question_asked_twice_is_evaluated_and_answered_alike(llama: Model, home: Path) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/1585."""
    session = load_session(home, llama, TEXT)
    first, again = (session.ask(QUESTION, budget="0", max_new_tokens=8) for _ in range(2))
    assert first.ids == again.ids
    for answer in (first, again):  # nothing of the document is computed, all of the question is
        assert (answer.missing, answer.refreshed) == (0, 0)
        assert answer.timings.phases["question"].tokens == len(
            session._state.prompt.question_ids(session._state.tokenizer, QUESTION)
        )


def test_a_deleted_tail_does_not_affect_answers(llama: Model, home: Path) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/6705: the cached prompt is longer than the new one."""
    session = load_session(home, llama, TEXT)
    session.ask(QUESTION, max_new_tokens=2)  # warm, so that the rows of the tail are in memory
    session.delete(f"{session.document.line_count - 3}-")
    answer = session.ask(QUESTION, budget="0", max_new_tokens=8)
    fresh = load_session(home / "fresh", llama, session.document.text)
    assert answer.ids == fresh.ask(QUESTION, budget="0", max_new_tokens=8).ids
    check_full_budget(session, home / "full")


def test_a_question_without_words_is_answered(llama: Model, home: Path) -> None:
    session = load_session(home, llama, TEXT)
    session.delete("4")
    first, again = (session.ask("", budget="0", max_new_tokens=4) for _ in range(2))
    assert first.ids == again.ids
    assert first.timings.phases["question"].tokens


def test_questions_leave_document_and_files_as_they_were(llama: Model, home: Path) -> None:
    """https://github.com/MemTensor/MemOS/issues/2301: an answer is appended to the stored cache."""
    session = load_session(home, llama, TEXT)
    first = session.ask(QUESTION, max_new_tokens=6)
    before, status, held = files(session), session.status(), working_cache(session)
    for question in ("Who pays?", "When is it?", "Which item is last?"):
        session.ask(question, max_new_tokens=6)
    assert (session.status(), files(session)) == (status, before)
    assert session.ask(QUESTION, max_new_tokens=6).ids == first.ids
    assert torch.equal(working_cache(session).keys, held.keys)
    session.delete("2")
    assert files(session) != before


def files(session: Session) -> dict[str, str]:
    return {
        str(path.relative_to(session._state.store.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in session._state.store.folder.rglob("*")
        if path.is_file() and path.name not in ("holder.json", "lock")
    }


# --- lengths that do not agree ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        (5, slice(60, 61)),
        (1, slice(60, 65)),
        (1, torch.arange(60, 65)),
        (3, torch.tensor([60, 62])),
        (2, torch.tensor([62, 60])),
        (2, torch.tensor([60, 60])),
        (1, slice(64, 65)),
        (1, torch.tensor([64])),
        (1, torch.tensor([-1])),
    ],
    ids=str,
)
def test_ids_that_do_not_match_their_rows_are_refused(
    llama: Model, ids: int, rows: slice | torch.Tensor
) -> None:
    """https://github.com/huggingface/transformers/issues/36151: other positions, and no word of it."""
    cache = llama.new_cache(64)
    llama.walk(torch.arange(60), slice(0, 60), cache)
    before = cache.clone()
    with pytest.raises(ValueError, match="rows"):
        llama.walk(torch.arange(ids), rows, cache)
    assert torch.equal(cache.keys, before.keys)
    assert cache.length == before.length


def test_an_answer_that_outgrows_its_cache_is_refused(llama: Model) -> None:
    cache = llama.new_cache(12)
    llama.walk(torch.arange(12), slice(0, 12), cache)
    with pytest.raises(ValueError, match="rows"):
        prefill_question_(llama, cache, torch.tensor([5]))


def test_rows_are_not_gathered_beyond_the_cache(llama: Model) -> None:
    cache = llama.new_cache(12)
    states = prefill_states(llama, np.arange(8))
    with pytest.raises(ValueError, match="rows"):
        shift_(llama, cache, [(12, Piece("only", 0, 1))], {"only": (states.keys, states.values)})


def test_states_of_unequal_lengths_are_refused() -> None:
    some = torch.zeros(2, 1, 3, 4)
    with pytest.raises(ValueError, match="rows"):
        States(torch.arange(2), some, some)
    with pytest.raises(ValueError, match="rows"):
        States(torch.arange(3), some, some[:, :, :2])


# --- packed rows ------------------------------------------------------------------------------------

JUMPS = [3, 4, 5, 40, 41, 90]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_packed_rows_attend_to_all_rows_before_them(
    checkpoints: dict[str, Path], home: Path, kind: str, attention: str
) -> None:
    """https://github.com/huggingface/transformers/pull/39194: jumps in positions taken for sequences."""
    stock = open_stock(checkpoints[kind], device="cpu")
    stock.network.set_attn_implementation(attention)
    model = stock.model
    session = load_session(home, model, TEXT)
    session.move("2-3", after=0)  # so that what stands in the cache is stale
    rows, ids = np.array(JUMPS), model.to_device(session._state.ids)
    cache = working_cache(session)
    list(refresh_(model, cache, ids, np.flatnonzero(session.rows.missing), "packed"))
    packed, apart = cache.clone(), cache.clone()
    list(refresh_(model, packed, ids, rows, "packed"))
    list(refresh_(model, apart, ids, rows, "interval"))
    for left, right in ((packed.keys, apart.keys), (packed.values, apart.values)):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
    keys, values = by_explicit_mask(stock, cache, ids, JUMPS)
    torch.testing.assert_close(packed.keys[:, :, rows], keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed.values[:, :, rows], values, atol=1e-5, rtol=1e-5)
    assert float((packed.values - cache.values)[:, :, rows].abs().max()) > 1e-3  # they did change


def by_explicit_mask(
    stock: Stock, cache: KVCache, ids: torch.Tensor, rows: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' keys and values by stock transformers: they are appended, and a 4-D mask says who sees whom.

    Each row sees the stored rows before it that are not computed, and the computed ones up to itself.
    """
    model, total, count = stock.model, len(ids), len(rows)
    held = DynamicCache(config=stock.network.config)
    for layer in range(model.layers):
        held.update(cache.keys[None, layer, :, :total], cache.values[None, layer, :, :total], layer)
    mask = torch.full((1, 1, count, total + count), torch.finfo(model.dtype).min)
    for at, row in enumerate(rows):
        for other in range(row):
            if other not in rows:
                mask[0, 0, at, other] = 0
        for later, other in enumerate(rows):
            if other <= row:
                mask[0, 0, at, total + later] = 0
    place = torch.tensor(rows)
    with torch.no_grad():
        stock.network(ids[place][None], position_ids=place[None], attention_mask=mask, cache=held)
    parts = [(layer.keys[0, :, total:], layer.values[0, :, total:]) for layer in held.layers]
    return torch.stack([keys for keys, _ in parts]), torch.stack([values for _, values in parts])


# --- budgets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_error_of_every_layer_falls_with_the_budget(
    tiny_models: dict[str, Model], home: Path, kind: str
) -> None:
    """https://github.com/LMCache/LMCache-Ascend/issues/277: worse the more is computed, but for 0 and all."""
    errors = []
    for budget in ("0", "5%", "25%", "50%", "75%", "100%"):
        session = load_session(home, tiny_models[kind], TEXT)
        session.delete("14-17")  # in the middle, so that a prefix is kept
        assert session.rows.frontier > 100
        answer = session.ask(QUESTION, budget=budget, max_new_tokens=1)
        assert answer.refreshed == answer.budget_rows
        cache, (_, clean) = working_cache(session), by_prefill(session)
        errors.append(
            (cache.values[:, :, : len(session.rows)] - clean).square().sum(dim=(1, 2, 3)).sqrt().numpy()
        )
        assert errors[-1][0] < 1e-4  # layer 0 sees no context, whichever rows were refreshed
    for fewer, more in pairwise(errors):
        assert (more <= fewer * 1.02 + 1e-4).all()
    assert (errors[0][1:] > 0.1).all()
    assert (errors[-1] < 1e-3).all()


@pytest.mark.parametrize("budget", ["5%", "25%", "50%", "75%"])
def test_refreshed_rows_land_on_their_own_positions(free: Model, home: Path, budget: str) -> None:
    session = load_session(home, free, TEXT)
    session.delete("14-17")
    session.ask(QUESTION, budget=budget, max_new_tokens=1)
    assert session.rows.refreshed.any()
    assert gap(session) < 1e-5


# --- cold, warm, and in any order -------------------------------------------------------------------

QUESTIONS = (QUESTION, "Who pays for beta?", "Which code has item 12?")


def answers(session: Session, questions: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return {asked: session.ask(asked, budget="0", max_new_tokens=10).ids for asked in questions}


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_answer_is_the_same_cold_warm_and_after_a_reload(
    checkpoints: dict[str, Path], home: Path, dtype: str, threads: int
) -> None:
    """https://github.com/vllm-project/vllm/issues/40896."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = open_model(checkpoints["llama"], device="cpu", dtype=dtype)
        session = load_session(home, model, TEXT)
        session.delete("5-8")
        session.ask(QUESTION, budget="full", max_new_tokens=1)
        warm = answers(session, QUESTIONS)
        assert answers(session, QUESTIONS) == warm  # warm
        assert answers(session, QUESTIONS[::-1]) == warm  # in another order
        reloaded = Session.open(home=home)  # cold: every row comes from the files
        reloaded.use_model(open_model(checkpoints["llama"], device="cpu", dtype=dtype))
        assert answers(reloaded, QUESTIONS[1:]) | answers(reloaded, QUESTIONS[:1]) == warm
        fresh = load_session(home / "fresh", model, session.document.text)
        if dtype == "float32":  # in 16 bits other chunks round otherwise: `verify` says by how much
            assert answers(fresh, QUESTIONS) == warm
    finally:
        torch.set_num_threads(before)


def test_one_thread_and_four_give_the_same_tokens(llama: Model, home: Path) -> None:
    session = load_session(home, llama, TEXT)
    before, found = torch.get_num_threads(), []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        try:
            found.append(answers(session, QUESTIONS))
        finally:
            torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize("budget", ["0", "full"])
def test_verify_says_where_answers_differ_and_by_how_much(llama: Model, home: Path, budget: str) -> None:
    session = load_session(home, llama, TEXT)
    session.delete("5-8")
    found = session.verify(QUESTION, budget=budget, max_new_tokens=12).comparison
    assert found is not None
    asked = session._state.prompt.question_ids(session._state.tokenizer, QUESTION)
    said = list[int]()
    network = stock_network(llama)
    leads = []  # the slow way: the whole prompt through stock transformers for every token
    while len(said) < 12:
        with torch.no_grad():
            ids = torch.from_numpy(np.array([*session._state.ids, *asked, *said]))
            logits = network(ids[None], use_cache=False).logits[0, -1].float()
        first, second = logits.sort(descending=True).values[:2].tolist()
        leads.append(first - second)
        if int(logits.argmax()) in llama.stop_ids:
            break
        said.append(int(logits.argmax()))
    assert found.clean_answer == session._state.tokenizer.decode(said)
    assert found.tie_gap == pytest.approx(min(leads), abs=1e-3)
    if budget == "full":
        assert (found.agreement, found.differs_at, found.differs_gap) == (1.0, None, None)
    else:
        assert found.differs_at is not None
        assert found.differs_gap == pytest.approx(leads[found.differs_at], abs=1e-3)
        assert found.agreement <= 1 - 1 / len(leads)
        own = session.ask(QUESTION, budget="0", max_new_tokens=12, keep=False).ids
        assert list(own[: found.differs_at]) == said[: found.differs_at]
        assert found.differs_at == len(said) or own[found.differs_at] != said[found.differs_at]


def test_verify_asks_for_at_least_one_token(llama: Model, home: Path) -> None:
    with pytest.raises(UsageError, match="max-new-tokens must be at least 1"):
        load_session(home, llama, TEXT).verify(QUESTION, max_new_tokens=0)
