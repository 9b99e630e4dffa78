"""The executors: the same numbers by every way, and what a bench counts and times of them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.tiny import KINDS, tiny_config
from torch.nn import functional

from kvedit.cache.kv import KVCache, States
from kvedit.cache.rows import Piece, runs
from kvedit.checkpoint.adapt import from_transformers
from kvedit.checkpoint.opening import open_model
from kvedit.errors import ContextError, UsageError
from kvedit.lab import numerics as numerics_room
from kvedit.lab.executor import (
    counted,
    layer_errors,
    pairs,
    shapes,
    spread,
    summarise_executor,
    sweep,
    token_layers,
)
from kvedit.lab.numerics import Path as Way
from kvedit.lab.numerics import numerics, summarise_numerics
from kvedit.lab.recovery import GONE_ROWS, HEAD_ROWS, Edited, recover
from kvedit.model import attention
from kvedit.model.attention import BLOCK_ROWS, cut, share
from kvedit.model.decode import prefill_question_
from kvedit.model.model import Model
from kvedit.repair.refresh import choose_executor, refresh_, shift_
from kvedit.tokens.prompt import Prompt

CONTEXT = 420
IDS = np.arange(600) * 37 % 500 + 3


@cache
def edited(model: Model) -> Edited:
    return Edited.of(model, IDS, CONTEXT)


def shifted(work: Edited) -> KVCache:
    held = work.model.new_cache(CONTEXT)
    shift_(work.model, held, work.rows.placed(), work.segments)
    return held


def refreshed(model: Model, rows: Any, executor: Any) -> KVCache:
    work = edited(model)
    held = shifted(work)
    list(refresh_(model, held, model.to_device(work.ids), np.asarray(rows, dtype=np.int64), executor))
    return held


def close(left: KVCache, right: KVCache, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(left.keys, right.keys, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(left.values, right.values, atol=tolerance, rtol=tolerance)


def uncompiled(function: Any) -> Any:
    return function


SUPPORTS = {
    "one row": [99],
    "first row": [HEAD_ROWS],
    "last row": [CONTEXT - 1],
    "all rows": list(range(HEAD_ROWS, CONTEXT)),
    "two runs side by side but for one row": [*range(50, 90), *range(91, 130)],
    "early rows and a late one": [*range(20, 60), CONTEXT - 1],
    "every other row": list(range(17, CONTEXT, 2)),
}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("support", SUPPORTS)
def test_every_executor_gives_what_interval_gives(
    kind: str, support: str, tiny_models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_compiled", uncompiled)
    model, rows = tiny_models[kind], SUPPORTS[support]
    slow = refreshed(model, rows, "interval")
    close(refreshed(model, rows, "packed"), slow)
    close(refreshed(model, rows, "custom"), slow)
    if sum(1 for _ in runs(rows)) == 1:
        close(refreshed(model, rows, "direct"), slow)


@pytest.mark.parametrize("kind", ["llama-llama3", "qwen3"])
@pytest.mark.parametrize("executor", ["packed", "interval"])
def test_no_number_is_read_back_from_the_device(kind: str, executor: Any) -> None:
    """A meta tensor has no numbers, so what would wait for one from a GPU fails."""
    config = tiny_config(kind)
    with torch.device("meta"):
        network = KINDS[kind][1](config)
    network.model.rotary_emb = type(network.model.rotary_emb)(config)  # its frequencies are read once
    model = Model(Path(), from_transformers(network), "", (), {}, lambda system: Prompt((), "", "", ""))
    held, ids = model.new_cache(CONTEXT), model.to_device(IDS[:CONTEXT])
    with pytest.raises(RuntimeError):
        ids[-1].item()
    stored = torch.zeros(model.layers, model.heads, CONTEXT, model.width)
    shift_(model, held, [(0, Piece("text", 0, CONTEXT))], {"text": (stored, stored)})
    for rows in SUPPORTS.values():
        found = States.concatenate(list(refresh_(model, held, ids, np.array(rows), executor)))
        assert found.keys.device.type == "meta"
        assert found.rows.tolist() == rows
    assert held.length == CONTEXT
    assert model.walk(ids[:1], slice(9, 10), held).hidden.device.type == "meta"


@given(rows=st.sets(st.integers(HEAD_ROWS, CONTEXT - 1), min_size=1), seed=st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_support_is_refreshed_the_same(rows: set[int], seed: bool, tiny_models: dict[str, Model]) -> None:
    model, support = tiny_models["llama" if seed else "qwen3"], sorted(rows)
    close(refreshed(model, support, "packed"), refreshed(model, support, "interval"))


@given(rows=st.sets(st.integers(0, 30_000), min_size=1), width=st.integers(1, 200))
def test_blocks_hold_all_rows_once_in_order_and_waste_little(rows: set[int], width: int) -> None:
    place = sorted(row + more for row in rows for more in range(width))
    place = sorted(set(place))
    blocks = cut(place)
    assert [first for first, _ in blocks] == [0, *(last for _, last in blocks[:-1])]
    assert blocks[-1][1] == len(place)
    for first, last in blocks:
        assert 1 <= last - first <= BLOCK_ROWS
        seen = (last - first) * (place[last - 1] + 1)
        needed = sum(row + 1 for row in place[first:last])
        assert seen - needed <= max(8192, needed // 4)


def test_adjacent_rows_share_blocks_of_128_and_far_rows_do_not() -> None:
    assert cut(list(range(1000, 1300))) == [(0, 128), (128, 256), (256, 300)]
    assert cut([*range(10, 110), 30_000]) == [(0, 100), (100, 101)]


@given(limit=st.integers(1, 40_000), wanted=st.integers(1, 70))
def test_shares_of_keys_begin_at_equal_steps_up_to_the_limit(limit: int, wanted: int) -> None:
    parts, step = share(limit, wanted)
    length = limit - (parts - 1) * step
    assert 1 <= parts <= wanted
    assert parts == 1 or step >= 512
    assert step <= length < step + parts


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("limit", [1024, 1700, 4601])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_keys_that_threads_share_are_attended_to_once(
    count: int,
    threads: int,
    limit: int,
    dtype: torch.dtype,
    rounding: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = torch.Generator().manual_seed(limit)
    held = KVCache(2, 3, limit + 9, 16, dtype=dtype, device=torch.device("cpu"))
    held.keys.normal_(generator=source)
    held.values.normal_(generator=source)
    query = torch.randn(6, count, 16, generator=source).to(dtype)
    place = torch.arange(limit - count, limit)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    kernels = []
    shared = attention._shared
    monkeypatch.setattr(attention, "_shared", lambda *given: kernels.append(given[-2]) or shared(*given))
    mixed = attention.masked(held, place, 0.3)(1, query)
    assert mixed.dtype == dtype
    assert kernels == [] if threads == 1 else kernels[0] == min(threads, limit // 512)
    for head, row in itertools.product(range(6), range(count)):
        seen = slice(limit - count + row + 1)
        keys, values = (part[1, head // 2, seen].float() for part in (held.keys, held.values))
        wanted = torch.softmax(0.3 * keys @ query[head, row].float(), dim=0) @ values
        found = mixed[row, 16 * head : 16 * (head + 1)].float()
        torch.testing.assert_close(found, wanted, atol=rounding, rtol=10 * rounding)


def test_rows_that_do_not_see_all_shares_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(attention, "_shared", None)
    held = KVCache(1, 3, 1100, 16, dtype=torch.float32, device=torch.device("cpu"))
    held.values.fill_(2)
    mixed = attention.masked(held, torch.tensor([540, 1090]), 0.3)(0, torch.ones(3, 2, 16))
    torch.testing.assert_close(mixed, torch.full((2, 48), 2.0))


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 300])
def test_flex_attention_uncompiled_equals_masked(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_compiled", uncompiled)
    generator = torch.Generator().manual_seed(count)
    held = KVCache(2, 2, 320, 16, dtype=torch.float32, device=torch.device("cpu"))
    held.keys.normal_(generator=generator)
    held.values.normal_(generator=generator)
    place = torch.randperm(310, generator=generator)[:count].sort().values
    query = torch.randn(6, count, 16, generator=generator)
    wanted = attention.masked(held, place, 0.3)(1, query)
    torch.testing.assert_close(attention._flex(held, place, 0.3)(1, query), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attention._plain(held, place, 0.3)(1, query), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_the_custom_executor_compiles_and_agrees(tiny_models: dict[str, Model]) -> None:
    for rows in ([99], SUPPORTS["every other row"], SUPPORTS["early rows and a late one"]):
        close(
            refreshed(tiny_models["llama"], rows, "custom"), refreshed(tiny_models["llama"], rows, "packed")
        )
    for layer in layer_errors(edited(tiny_models["qwen3"]), np.array(SUPPORTS["every other row"])):
        assert layer["keys_max"] < 1e-4
        assert layer["values_relative"] < 1e-4


@pytest.mark.slow
def test_without_a_compiler_the_custom_executor_says_so(tmp_path: Path) -> None:
    program = """
import torch
from kvedit.cache.kv import KVCache, States
from kvedit.errors import UsageError
from kvedit.model.attention import compiled
cache = KVCache(1, 2, 9, 8, dtype=torch.float32, device=torch.device("cpu"))
try:
    compiled(cache, torch.tensor([3, 5]), 0.1)(0, torch.randn(4, 2, 8))
except UsageError as error:
    print(error.fact, error.remedy)
"""
    none = {"CXX": str(tmp_path / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    args = [sys.executable, "-c", program]
    done = subprocess.run(args, env=os.environ | none, capture_output=True, text=True, check=True)
    assert "cannot be compiled on this machine" in done.stdout
    assert "Install a C++ compiler" in done.stdout


def test_a_failed_compilation_is_one_sentence_and_a_remedy(
    llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def fail(function: Any) -> Any:
        raise TorchDynamoException("no compiler\nand much more")

    monkeypatch.setattr(attention, "_compiled", fail)
    with pytest.raises(UsageError, match=r"\(no compiler\)") as refused:
        refreshed(llama, [50, 60], "custom")
    assert "packed" in refused.value.remedy


def test_auto_never_chooses_the_custom_executor() -> None:
    chosen = {choose_executor("auto", np.array(rows)) for rows in SUPPORTS.values()}
    assert chosen == {"direct", "packed"}
    assert choose_executor("custom", np.arange(3)) == "custom"
    with pytest.raises(UsageError, match="Unknown executor 'flex'"):
        choose_executor("flex", np.arange(3))


def test_layer_errors_name_the_layer_behind_a_wrong_attention(
    llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(held: KVCache, place: torch.Tensor, scaling: float) -> Any:
        right = attention.masked(held, place, scaling)
        return lambda layer, query: right(layer, query) + (0.01 if layer == 1 else 0)

    rows = np.array(SUPPORTS["every other row"])
    same = layer_errors(edited(llama), rows, "packed", "packed")
    assert all(value == 0 for layer in same for name, value in layer.items() if name != "layer")
    monkeypatch.setattr("kvedit.repair.refresh.compiled", wrong)
    errors = layer_errors(edited(llama), rows)
    assert [layer["layer"] for layer in errors] == [0, 1, 2]
    assert errors[1]["keys_max"] == errors[1]["values_max"] == 0
    results = []  # the obvious: the last layer's values, one pass each
    for executor in ("custom", "packed"):
        results.append(refreshed(llama, rows, executor).values[2][:, rows])
    gap = results[0] - results[1]
    assert errors[2]["values_max"] == pytest.approx(float(gap.abs().max()))
    shares = gap.pow(2).sum(-1).sqrt() / results[1].pow(2).sum(-1).sqrt()
    assert errors[2]["values_relative"] == pytest.approx(float(shares.max()), rel=1e-4)


@pytest.mark.parametrize("policy", ["sur", "units-bm25", "window"])
def test_selecting_beside_the_shift_gives_the_same_bits(llama: Model, policy: str) -> None:
    work, done = edited(llama), []
    question = llama.to_device(work.query_ids)
    for overlap in (False, True):
        held = llama.new_cache(CONTEXT + len(question))
        found = recover(work, held, 41, policy=policy, overlap=overlap)
        repaired = held.keys.clone(), held.values.clone()
        logits, _ = prefill_question_(llama, held, question)
        done.append((found, repaired, logits))
    (serial, one, first), (beside, other, second) = done
    assert len(serial.support) == 41
    assert np.array_equal(serial.support, beside.support)
    assert np.array_equal(serial.computed, beside.computed)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert torch.equal(serial.states.keys, beside.states.keys)
    assert torch.equal(first, second)
    assert set(serial.timings.phases) == {"shift", "selection", "refresh"}
    assert set(beside.timings.phases) == {"preparation", "refresh"}


def test_a_policy_that_probes_cannot_run_beside_the_shift(llama: Model) -> None:
    with pytest.raises(UsageError, match="reads the shifted cache"):
        recover(edited(llama), llama.new_cache(CONTEXT), 10, policy="infoflow", overlap=True)


@pytest.mark.parametrize("executor", ["packed", "interval"])
@pytest.mark.parametrize("support", ["one row", "early rows and a late one", "every other row"])
def test_counts_are_the_formulas_and_what_the_masks_let_through(
    llama: Model, executor: str, support: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, rows = edited(llama), np.array(SUPPORTS[support])
    seen = 0
    original = functional.scaled_dot_product_attention

    def counting(query: Any, keys: Any, values: Any, attn_mask: Any = None, scale: float = 1.0) -> Any:
        nonlocal seen
        batch, heads, rows_in_hand, _ = query.shape
        every = rows_in_hand * keys.shape[2]
        visible = every if attn_mask is None else int((attn_mask == 0).sum())
        # Query heads that share keys come as a batch under one mask, or as rows with a mask each.
        seen += visible * batch * heads // (llama.groups * llama.heads)
        return original(query, keys, values, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counting)
    tally = counted(work, shifted(work), rows, executor)
    assert tally.token_layers == token_layers(rows, llama.layers) == len(rows) * llama.layers
    assert tally.pairs == pairs(rows, llama.layers) == seen
    assert tally.pairs == sum(row + 1 for row in rows.tolist()) * (llama.layers - 1)


def test_a_replay_of_adjacent_rows_is_counted_alike(llama: Model) -> None:
    work = edited(llama)
    tally = counted(work, shifted(work), work.suffix, "direct")
    assert tally.token_layers == len(work.suffix) * llama.layers
    assert tally.pairs == pairs(work.suffix, llama.layers)


@pytest.mark.parametrize(("percent", "rows"), [(2, 200), (5, 500)])
def test_a_budget_takes_at_most_twice_its_share_of_the_pairs(percent: int, rows: int) -> None:
    suffix = np.arange(10_000)  # section G.1
    worst = suffix[-rows:]
    assert rows == len(suffix) * percent // 100
    assert token_layers(worst, 30) / token_layers(suffix, 30) == percent / 100
    assert pairs(worst, 30) / pairs(suffix, 30) <= 2 * percent / 100
    assert pairs(spread(suffix, rows, 8), 30) < pairs(worst, 30)


@given(suffix=st.integers(1, 400), rows=st.integers(0, 400), first=st.integers(0, 50))
def test_every_shape_has_its_rows_and_its_runs(suffix: int, rows: int, first: int) -> None:
    place, rows = np.arange(first, first + suffix), min(rows, suffix)
    counts = shapes(rows, suffix)
    assert (counts[:1] == [1]) == (rows > 0)
    assert all(count & (count - 1) == 0 for count in counts[:-1])
    for count in counts:
        support = spread(place, rows, count)
        assert len(np.unique(support)) == rows
        assert sum(1 for _ in runs(support)) == count
        assert support[0] >= first
        assert support[-1] < first + suffix


def test_more_runs_than_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="9 runs"):
        spread(np.arange(12), 9, 9)
    assert shapes(8, 100) == [1, 2, 4, 8]
    assert shapes(20, 100) == [1, 2, 4, 8, 16, 20]


def test_requested_run_counts_are_tried_while_they_fit() -> None:
    assert shapes(20, 100, [64, 5, 1, 5]) == [1, 5]
    assert shapes(90, 100, [16, 1]) == [1]  # ten rows are left for gaps
    assert shapes(0, 100, [1]) == []


def test_an_edited_document_holds_the_shifted_old_prefill(llama: Model) -> None:
    work = edited(llama)
    old = IDS[: CONTEXT + GONE_ROWS]
    kept = np.r_[0:HEAD_ROWS, HEAD_ROWS + GONE_ROWS : len(old)]
    assert np.array_equal(work.ids, old[kept])
    assert len(work.suffix) == CONTEXT - HEAD_ROWS
    clean = llama.new_cache(len(old))
    llama.walk(llama.to_device(old), slice(0, len(old)), clean)
    held = shifted(work)
    torch.testing.assert_close(held.values, clean.values[:, :, kept], atol=1e-4, rtol=1e-4)
    assert torch.equal(held.keys[:, :, :HEAD_ROWS], clean.keys[:, :, :HEAD_ROWS])
    with pytest.raises(ContextError):
        Edited.of(llama, IDS, llama.context_length)
    with pytest.raises(UsageError, match="nothing to refresh"):
        Edited.of(llama, IDS, HEAD_ROWS)


def test_a_sweep_records_each_shape_executor_and_round(llama: Model) -> None:
    assert {record["runs"] for record in sweep(llama, IDS, [100], ["10%"], runs=[3], rounds=1)} == {3}
    records = list(sweep(llama, IDS, [100, 200], ["10%"], rounds=2))
    assert json.loads(json.dumps(records)) == records
    for context, rows in ((100, 8), (200, 18)):
        mine = [record for record in records if record["context"] == context]
        counts = shapes(rows, context - HEAD_ROWS)
        wanted = {(count, name) for count in counts for name in ("packed", "interval")} | {(1, "direct")}
        assert {(record["runs"], record["executor"]) for record in mine} == wanted
        assert len(mine) == 2 * len(wanted)
        assert [record["round"] for record in mine] == [1] * len(wanted) + [2] * len(wanted)
        for record in mine:
            support = spread(np.arange(HEAD_ROWS, context), rows, record["runs"])
            assert record["rows"] == rows
            assert record["token_layers"] == rows * llama.layers
            assert record["pairs"] == pairs(support, llama.layers)
            parts = [record[f"{phase}_s"] for phase in ("shift", "selection", "refresh")]
            assert record["recovery_s"] == pytest.approx(sum(parts))
            assert min(parts) > 0


def test_the_summary_takes_ratios_within_rounds() -> None:
    base = {
        "context": 100,
        "suffix": 84,
        "budget": "5%",
        "rows": 4,
        "runs": 2,
        "token_layers": 12,
        "pairs": 300,
    }
    base |= {"replay_token_layers": 252, "replay_pairs": 9000}
    times = {"packed": (1.0, 2.0, 4.0), "interval": (3.0, 4.0, 20.0)}
    records = [
        {**base, "executor": name, "round": at, "refresh_s": time, "recovery_s": time + 1}
        for name, row in times.items()
        for at, time in enumerate(row, 1)
    ]
    (row,) = summarise_executor(reversed(records))
    assert row["refresh_s"]["packed"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert row["refresh_over_packed"] == {"interval": {"median": 3.0, "min": 2.0, "max": 5.0}}
    assert row["recovery_over_packed"]["interval"]["median"] == 2.0
    assert row["token_layers_share"] == pytest.approx(12 / 252)
    alone = summarise_executor(record for record in records if record["executor"] == "interval")
    assert alone[0]["refresh_over_packed"] == {}


def test_numerics_report_a_dtype_change_but_not_a_repeat(llama: Model) -> None:
    ids, question = IDS[:150], IDS[200:220]
    paths = [Way("reference"), Way("again"), Way("chunks", chunk=40), Way("packed", executor="packed")]
    paths += [Way("one thread", threads=1), Way("half", dtype="bfloat16")]
    threads = torch.get_num_threads()
    records = {record["name"]: record for record in numerics(llama, ids, question, paths)}
    assert torch.get_num_threads() == threads
    assert list(records) == [path.name for path in paths[1:]]
    assert json.loads(json.dumps(records)) == records
    assert records["again"]["logit_max"] == records["again"]["exact_disagreement"] == 0
    assert not records["again"]["sequence_differs"]
    for name in ("chunks", "packed"):
        assert records[name]["logit_max"] < 1e-3  # may be nothing: the kernels share their order
        assert records[name]["argmax_disagreement"] == 0
    half = records["half"]
    assert half["exact_disagreement"] == 1
    # The obvious: all logits of both models at once.
    both, logits = torch.from_numpy(np.concatenate([ids, question])), []
    for model in (llama, open_model(llama.directory, device="cpu", dtype="bfloat16")):
        hidden = model.walk(both, slice(0, 170), model.new_cache(170), outputs=170).hidden
        logits.append(model.logits(hidden))
    gap = (logits[0] - logits[1]).abs()
    assert half["positions"] == 170
    assert half["logit_max"] == pytest.approx(float(gap.max()), rel=0.2)
    assert half["logit_mean"] == pytest.approx(float(gap.mean()), rel=0.1)
    moved = (logits[0].argmax(-1) != logits[1].argmax(-1)).float().mean()
    assert half["argmax_disagreement"] == pytest.approx(float(moved), abs=0.05)


def test_answers_are_compared_to_the_first_token_that_differs(llama: Model) -> None:
    hidden = torch.zeros(3, 64)
    outcomes = [numerics_room._Outcome(llama, hidden, answer) for answer in ([5, 6, 7], [5, 6], [5, 6, 7])]
    shorter = numerics_room._compare(outcomes[0], outcomes[1])
    assert shorter["sequence_differs"]
    assert shorter["first_difference"] == 2
    assert numerics_room._compare(outcomes[0], outcomes[2])["first_difference"] is None


def test_numerics_refuses_what_it_cannot_compare(llama: Model) -> None:
    with pytest.raises(UsageError, match="at least two paths"):
        list(numerics(llama, IDS[:20], IDS[:4], [Way("alone")]))
    with pytest.raises(ContextError):
        list(numerics(llama, np.resize(IDS, 1020), IDS[:4]))


def test_numerics_are_summed_up_over_cases() -> None:
    base = {"name": "half", "reference": "float32", "argmax_disagreement": 0.0, "exact_disagreement": 1.0}
    records = [
        {**base, "logit_max": 0.5, "logit_mean": 0.1, "sequence_differs": True, "first_difference": 7},
        {**base, "logit_max": 0.2, "logit_mean": 0.3, "sequence_differs": False, "first_difference": None},
    ]
    (row,) = summarise_numerics(records)
    assert row["cases"] == 2
    assert row["logit_max"] == 0.5
    assert row["logit_mean"] == pytest.approx(0.2)
    assert row["sequence_disagreement"] == 0.5
    assert row["first_difference"] == 7
