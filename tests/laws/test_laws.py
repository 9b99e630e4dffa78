"""The laws of docs/design.md on tiny random checkpoints of every admitted kind.

Law 5 is in test_rows_select.py, law 9 in test_killed.py.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from rigs.reference import load_session, prefill_states, stock_greedy, stock_network, working_cache

from kvedit.cache.rope import rotate
from kvedit.cache.rows import runs
from kvedit.checkpoint.opening import open_stock
from kvedit.model.model import Model
from kvedit.repair.budget import Budget
from kvedit.repair.refresh import choose_executor, refresh_
from kvedit.text.document import LineRange

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()
TEXT = "".join(
    f"{number}. The {word} code is {number * 37 % 1000}. Fees for {word} are paid in {number} days.\n"
    + ("\n" if number % 3 == 0 else "")
    for number, word in enumerate(WORDS * 3, 1)
)
QUESTION = "What is the delta code?"


def lines(*ranges: str) -> list[LineRange]:
    return [LineRange.parse(text) for text in ranges]


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(left, right, atol=tolerance, rtol=tolerance)


def rotated_by_transformers(model: Model, raw: torch.Tensor, first: int) -> torch.Tensor:
    """Keys `[H, N, D]` of rows from `first` on, by the rotary module and the code of transformers."""
    network = stock_network(model)
    module = import_module(type(network).__module__)
    cos, sin = network.model.rotary_emb(raw, torch.arange(first, first + raw.shape[1])[None])
    turned = cos.shape[-1]  # all of the head, but for models that turn a part of it
    own, _ = module.apply_rotary_pos_emb(raw[None, ..., :turned], raw[None, ..., :turned], cos, sin)
    return torch.cat((own[0], raw[..., turned:]), dim=-1)


def test_law_1_full_budget_equals_loading_the_edited_file(tiny: Model, home: Path) -> None:
    session = load_session(home, tiny, TEXT)
    session.delete("3-5", "11", "20-22")
    answer = session.ask(QUESTION, budget=Budget.full(), max_new_tokens=12)

    fresh = load_session(home / "fresh", tiny, session.document.text)
    assert np.array_equal(session._state.ids, fresh._state.ids)
    repaired, clean = working_cache(session), working_cache(fresh)
    total = len(session.rows)
    close(repaired.keys[:, :, :total], clean.keys[:, :, :total])
    close(repaired.values[:, :, :total], clean.values[:, :, :total])
    assert answer.ids == fresh.ask(QUESTION, budget=Budget.parse("0"), max_new_tokens=12).ids
    assert session.rows.frontier == total
    assert answer.missing + answer.refreshed + answer.reused == answer.tokens == total


def test_law_2_shift_alone_makes_layer_0_exact(tiny: Model, home: Path) -> None:
    session = load_session(home, tiny, TEXT)
    session.delete("2-3")
    session.delete("8-9")  # twice, with no question between
    cache = working_cache(session)
    missing = np.flatnonzero(session.rows.missing)
    list(refresh_(tiny, cache, tiny.to_device(session._state.ids), missing, "packed"))
    total = len(session.rows)
    clean = prefill_states(tiny, session._state.ids)
    cos, sin = tiny.rope.angles(torch.arange(total), tiny.dtype)
    close(cache.keys[0, :, :total], rotate(clean.keys[0], cos, sin), 1e-5)
    close(cache.values[0, :, :total], clean.values[0], 1e-5)
    # The rotation itself, against the model's own rotary: the very same bits.
    assert torch.equal(rotate(clean.keys[1], cos, sin), rotated_by_transformers(tiny, clean.keys[1], 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_law_2_rotation_is_bit_exact_in_every_dtype(tiny: Model, dtype: torch.dtype) -> None:
    raw = torch.randn(2, 50, tiny.width, generator=torch.Generator().manual_seed(1)).to(dtype)
    cos, sin = tiny.rope.angles(torch.arange(7, 57), dtype)
    assert torch.equal(rotate(raw, cos, sin), rotated_by_transformers(tiny, raw, 7))


def test_law_2_without_context_every_layer_is_exact(home: Path, checkpoints: dict[str, Path]) -> None:
    stock = open_stock(checkpoints["qwen3"], device="cpu")
    model = stock.model
    for layer in stock.network.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)  # now no layer sees any other row
    session = load_session(home, model, TEXT)
    session.delete("3-4", "9", "20-25")
    session.ask(QUESTION, budget=Budget.parse("0"), max_new_tokens=1)
    repaired, total = working_cache(session), len(session.rows)
    clean = working_cache(load_session(home / "fresh", model, session.document.text))
    close(repaired.keys[:, :, :total], clean.keys[:, :, :total], 1e-5)
    close(repaired.values[:, :, :total], clean.values[:, :, :total], 1e-5)


def test_law_3_rows_before_the_frontier_never_change(llama: Model, home: Path) -> None:
    session = load_session(home, llama, TEXT)
    before = working_cache(session)
    session.delete("12-14")
    frontier = session.rows.frontier
    assert 0 < frontier < len(session.rows)
    session.ask(QUESTION, budget=Budget.parse("40%"), max_new_tokens=2)
    after = working_cache(session)
    assert torch.equal(after.keys[:, :, :frontier], before.keys[:, :, :frontier])
    assert torch.equal(after.values[:, :, :frontier], before.values[:, :, :frontier])


SUPPORTS = {
    "scattered": [40, 41, 42, 77, 78, 150, 151, 152, 153, 220],
    "alternate": list(range(41, 201, 2)),
    "one run": list(range(60, 97)),
    "one row": [99],
    "several blocks": list(range(35, 300)),
    "isolated": [43, 47, 90, 160, 200, 299],
}


@pytest.mark.parametrize("support", SUPPORTS, ids=str)
def test_law_4_packed_equals_interval_equals_the_obvious(tiny: Model, home: Path, support: str) -> None:
    session = load_session(home, tiny, TEXT)
    session.delete("2")
    rows = np.array(SUPPORTS[support], dtype=np.int64)
    ids = tiny.to_device(session._state.ids)
    caches = {}
    for executor in ("packed", "interval") + (("direct",) if sum(1 for _ in runs(rows)) == 1 else ()):
        cache = working_cache(session)
        list(refresh_(tiny, cache, ids, rows, executor))
        caches[executor] = cache
    obvious = working_cache(session)
    for row in rows.tolist():  # one row at a time through all layers: nothing to get wrong
        tiny.walk(ids[row : row + 1], slice(row, row + 1), obvious)
    for cache in caches.values():
        close(cache.keys, obvious.keys)
        close(cache.values, obvious.values)


def test_law_4_more_rows_than_one_walk_takes(
    llama: Model, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load_session(home, llama, TEXT)
    rows, ids = np.arange(40, 400, 2), llama.to_device(session._state.ids)
    whole = working_cache(session)
    list(refresh_(llama, whole, ids, rows, "packed"))
    monkeypatch.setattr("kvedit.repair.refresh.CHUNK_ROWS", 32)
    monkeypatch.setattr("kvedit.repair.refresh.PACK_ROWS", 32)
    parts = working_cache(session)
    assert len(list(refresh_(llama, parts, ids, rows, "packed"))) == 6
    close(parts.keys, whole.keys)
    close(parts.values, whole.values)


def test_law_6_ids_equal_those_of_the_present_text(llama: Model, home: Path) -> None:
    session = load_session(home, llama, "foo\n\n\nbar\n12\n34\n\n\n\n  indent\nend\n" * 9)
    generator = np.random.default_rng(3)
    while session.document.line_count > 4:
        first = int(generator.integers(1, session.document.line_count))
        session.delete(f"{first}-{min(first + 2, session.document.line_count)}")
        assert np.array_equal(
            session._state.tokens.ids, llama.tokenizer.encode_text(session.document.text).ids
        )
        assert len(session.rows) == len(session._state.ids)
    session.ask(QUESTION, budget=Budget.parse("0"), max_new_tokens=1)
    assert not session.rows.missing.any()  # seam rows were computed, on top of a budget of nothing


def test_law_7_error_does_not_grow_with_the_number_of_edits(llama: Model, home: Path) -> None:
    at_once = load_session(home / "once", llama, TEXT)
    at_once.delete("5-24")
    one_by_one = load_session(home / "many", llama, TEXT)
    for _ in range(20):
        one_by_one.delete("5")
    assert at_once.document.text == one_by_one.document.text
    errors = []
    for session in (at_once, one_by_one):
        session.ask(QUESTION, budget=Budget.parse("20%"), max_new_tokens=1)
        clean = prefill_states(llama, session._state.ids)
        cache, total = working_cache(session), len(session.rows)
        errors.append(float((cache.values[:, :, :total] - clean.values).abs().mean()))
    assert errors[1] <= errors[0] * 1.001
    # and, where the seams agree, it is the same cache bit for bit
    assert np.array_equal(at_once.rows.frontier, one_by_one.rows.frontier)


def test_law_8_asking_leaves_document_ids_and_exact_rows(llama: Model, home: Path) -> None:
    session = load_session(home, llama, TEXT)
    session.delete("9")
    text, ids, total = session.document.text, session._state.ids, len(session.rows)
    first = session.ask(QUESTION, budget=Budget.parse("0"), max_new_tokens=6)
    frontier, before = session.rows.frontier, working_cache(session)
    for question in ("Who pays?", "When?", QUESTION):
        again = session.ask(question, budget=Budget.parse("0"), max_new_tokens=6)
    assert again.ids == first.ids
    assert session.document.text == text
    assert np.array_equal(session._state.ids, ids)
    assert len(session.rows) == total  # no row of question or answer came in
    assert torch.equal(working_cache(session).keys[:, :, :frontier], before.keys[:, :, :frontier])


def test_law_11_counts_add_up_and_come_from_the_work(llama: Model, home: Path) -> None:
    session = load_session(home, llama, TEXT)
    session.delete("4-6", "13")
    for budget in ("0", "7t", "5%", "33%", "full", "5%"):
        status = session.status()
        assert status.exact + status.refreshed + status.stale + status.missing == status.tokens
        walked: list[int] = []
        original = llama.walk

        def counting(ids, rows, cache, original=original, walked=walked, **more):  # type: ignore[no-untyped-def]
            walked.append(len(ids))
            return original(ids, rows, cache, **more)

        llama.walk = counting  # type: ignore[method-assign]
        try:
            answer = session.ask(QUESTION, budget=Budget.parse(budget), max_new_tokens=1)
        finally:
            del llama.walk
        question = len(session._state.prompt.question_ids(session._state.tokenizer, QUESTION))
        assert sum(walked) == answer.missing + answer.refreshed + question
        assert answer.missing + answer.refreshed + answer.reused == answer.tokens
        assert answer.refreshed == answer.budget_rows == Budget.parse(budget).resolve(status.suffix)


def test_budgets_add_up_over_questions(llama: Model, home: Path) -> None:
    session = load_session(home, llama, TEXT)
    session.delete("4")
    suffix = session.status().suffix
    seen = []
    for _ in range(3):
        session.ask(QUESTION, budget=Budget.parse("20t"), max_new_tokens=1)
        seen.append(session.status().stale)
    assert seen[0] <= suffix - 20
    assert seen[1] <= seen[0] - 20 + 1
    assert seen[2] <= seen[1] - 20 + 1


def test_no_keep_leaves_the_session_as_it_was(llama: Model, home: Path) -> None:
    session = load_session(home, llama, TEXT)
    session.delete("4")
    revision = session._state.manifest.revision
    answer = session.ask(QUESTION, keep=False, max_new_tokens=2)
    assert not answer.kept
    assert session._state.store.read_manifest().revision == revision


def test_error_falls_with_the_budget(llama: Model, home: Path) -> None:
    errors = []
    for budget in ("0", "25%", "50%", "full"):
        session = load_session(home / budget.strip("%"), llama, TEXT)
        session.delete("5-9")
        session.ask(QUESTION, budget=Budget.parse(budget), max_new_tokens=1)
        clean, cache = prefill_states(llama, session._state.ids), working_cache(session)
        errors.append(float((cache.values[:, :, : len(session.rows)] - clean.values).abs().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-5


def test_executor_names_are_checked() -> None:
    from kvedit.errors import UsageError

    assert choose_executor("auto", np.arange(3)) == "direct"
    assert choose_executor("auto", np.array([1, 3])) == "packed"
    with pytest.raises(UsageError, match="2 runs"):
        choose_executor("direct", np.array([1, 3]))


@pytest.mark.parametrize("kind", ["llama-llama3", "qwen3", "llama-tied-biases", "stablelm", "nemotron"])
def test_parity_with_stock_transformers(kind: str, tiny_models: dict[str, Model]) -> None:
    model = tiny_models[kind]
    ids = np.concatenate([np.array(model.layout(None).head_ids), model.tokenizer.encode_text(TEXT).ids])
    own, stock, own_ids, stock_ids = stock_greedy(model, ids, 20)
    close(own, stock, 2e-4)
    assert own_ids == stock_ids
