"""Every policy on tiny models: what they all must keep, and each formula against slow, obvious loops."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rigs.reference import stock_network
from support.staged import LINES, staged

from kvedit.errors import UsageError
from kvedit.model.model import Model
from kvedit.names import SUPPORTS
from kvedit.policies import attention, cacheblend, cachecraft
from kvedit.policies.evidence import Evidence, Past
from kvedit.policies.registry import POLICIES, policy_named
from kvedit.policies.scores import Scores, Share
from kvedit.policies.seam import nearness, origins
from kvedit.policies.structural import _delimiters, _delimits
from kvedit.repair.select import select

KINDS = ["llama", "qwen3"]


@pytest.fixture(params=KINDS)
def evidence(request: pytest.FixtureRequest, stock_models: dict[str, Model]) -> Evidence:
    return staged(stock_models[request.param])[0]


def stale_of(evidence: Evidence) -> np.ndarray:
    return evidence.suffix & (evidence.past.source >= 0)


# --- what all policies keep --------------------------------------------------------------------


@pytest.mark.parametrize("rule", [None, *SUPPORTS])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_and_rule_buys_exactly_the_budget(name, rule, evidence):
    policy = policy_named(name)
    scores, stale, suffix = policy.score(evidence), stale_of(evidence), evidence.suffix
    assert 0 < stale.sum() < suffix.sum() < len(suffix)
    for budget in (0, 1, 7, 40, int(stale.sum()), int(suffix.sum())):
        support = select(scores, evidence.unit, stale, suffix, budget, rule or policy.support)
        assert support.tolist() == sorted(set(support.tolist()))
        assert len(support) == budget
        assert suffix[support].all()


def parts(scores: Scores) -> list[np.ndarray]:
    first = [] if scores.first is None else [scores.first.rows]
    return [scores.rows, scores.units, *([] if scores.unit is None else [scores.unit]), *first]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_scores_repeatably_and_changes_nothing(name, evidence):
    held, past = evidence.cache, evidence.past
    before, length = held.clone(), held.length
    arrays = [evidence.ids, evidence.unit, evidence.suffix, evidence.query_ids, past.ids, past.source]
    copies = [array.copy() for array in arrays]
    found, again = (parts(policy_named(name).score(evidence)) for _ in range(2))
    assert torch.equal(held.keys, before.keys)
    assert torch.equal(held.values, before.values)
    assert held.length == length
    assert all(np.array_equal(one, other) for one, other in zip(arrays, copies, strict=True))
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))
    assert all(np.isfinite(part).all() for part in found)
    assert [part.dtype for part in found[:2]] == [np.float32, np.float32]
    assert len(found[0]) == len(evidence.ids)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_scores_without_past_question_or_suffix(name, llama):
    whole = staged(llama)[0]
    nothing = np.zeros(0, dtype=np.int64)
    for changed in (
        replace(whole, past=None),
        replace(whole, query_ids=nothing),
        replace(whole, suffix=np.zeros_like(whole.suffix)),
    ):
        scores = policy_named(name).score(changed)
        assert all(np.isfinite(part).all() for part in parts(scores))
        suffix = changed.suffix
        count = min(9, int(suffix.sum()))
        support = select(scores, changed.unit, suffix, suffix, count, policy_named(name).support)
        assert len(support) == count


@pytest.mark.parametrize("name", ["cacheblend", "cachecraft"])
def test_a_walk_in_many_chunks_gives_the_same_scores(name, evidence, monkeypatch):
    whole = policy_named(name).score(evidence)
    monkeypatch.setattr(cacheblend, "CHUNK_ROWS", 16)
    monkeypatch.setattr(cachecraft, "CHUNK_ROWS", 24)
    monkeypatch.setattr(cachecraft, "_BLOCK_ROWS", 10)
    before = evidence.cache.clone()
    parted = policy_named(name).score(evidence)
    np.testing.assert_allclose(parted.rows, whole.rows, rtol=2e-4, atol=1e-7)
    np.testing.assert_allclose(parted.units, whole.units, rtol=2e-4, atol=1e-7)
    assert torch.equal(evidence.cache.keys, before.keys)


# --- each formula, slowly ----------------------------------------------------------------------


def turned(vector: torch.Tensor, position: int, model: Model) -> torch.Tensor:
    """Rotate one head's query or key, one pair of coordinates after the other."""
    half, out = len(vector) // 2, vector.clone()
    for pair in range(half):
        angle = position * float(model.rope.inverse_frequencies[pair])
        a, b = float(vector[pair]), float(vector[pair + half])
        out[pair] = a * math.cos(angle) - b * math.sin(angle)
        out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


@cache
def network_of(model: Model) -> Any:
    return stock_network(model)


def heads_of(module: Any, which: str, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Project one row to the heads of `q`, `k` or `v`, before RoPE."""
    layer = module.self_attn
    projected = getattr(layer, f"{which}_proj")(module.input_layernorm(hidden))
    norm = getattr(layer, f"{which}_norm", None)
    return [head if norm is None else norm(head) for head in projected.split(layer.head_dim)]


@cache
@torch.no_grad()
def question_scores(model: Model) -> list[list[list[torch.Tensor]]]:
    """Attention scores before the softmax, by layer, head and row of the question, over text and question."""
    evidence = staged(model)[0]
    total, found = len(evidence.ids), []
    hidden = [model.network.table[token] for token in evidence.query_ids]
    for layer, module in enumerate(network_of(model).model.layers):
        by_head: list[list[torch.Tensor]] = [[] for _ in range(model.heads * model.groups)]
        own = [
            [turned(key, total + at, model) for key in heads_of(module, "k", row)]
            for at, row in enumerate(hidden)
        ]
        values, after = [heads_of(module, "v", row) for row in hidden], []
        for at, row in enumerate(hidden):
            mixed = []
            for head, query in enumerate(heads_of(module, "q", row)):
                kind, query = head // model.groups, turned(query, total + at, model)
                keys = [*evidence.cache.keys[layer, kind, :total], *(own[j][kind] for j in range(at + 1))]
                score = torch.stack([query @ key for key in keys]) / math.sqrt(model.width)
                by_head[head].append(score)
                seen = [
                    *evidence.cache.values[layer, kind, :total],
                    *(values[j][kind] for j in range(at + 1)),
                ]
                mixed.append(torch.softmax(score, 0) @ torch.stack(seen))
            row = row + module.self_attn.o_proj(torch.cat(mixed))
            after.append(row + module.mlp(module.post_attention_layernorm(row)))
        hidden = after
        found.append(by_head)
    return found


def question_attention(evidence: Evidence, layer: int, *, context: bool = False) -> np.ndarray:
    """Attention to the text, `[Hq, Nq, T]`."""
    total = len(evidence.ids)
    return np.array(
        [
            [torch.softmax(row[:total] if context else row, 0)[:total].tolist() for row in rows]
            for rows in question_scores(evidence.model)[layer]
        ]
    )


def best_rows(rows: list[float], evidence: Evidence) -> list[float]:
    units = [0.0] * evidence.units
    for row, score in enumerate(rows):
        if evidence.suffix[row]:
            units[evidence.unit[row]] = max(units[evidence.unit[row]], score)
    return units


def members(evidence: Evidence) -> dict[int, list[int]]:
    """Rows that may be selected, by unit."""
    found: dict[int, list[int]] = {}
    for row in np.flatnonzero(evidence.suffix).tolist():
        found.setdefault(int(evidence.unit[row]), []).append(row)
    return found


def whole(evidence: Evidence) -> dict[int, list[int]]:
    """All rows of the units of which one may be selected, by unit."""
    units = evidence.unit.tolist()
    found = {unit: [row for row, own in enumerate(units) if own == unit] for unit in members(evidence)}
    assert any(len(rows) > len(members(evidence)[unit]) for unit, rows in found.items())
    return found


def slow_seams(evidence: Evidence) -> list[int]:
    found, last = [], None
    for row, source in enumerate(evidence.past.source.tolist()):
        if source < 0:
            continue
        if last is not None and source - last[1] != row - last[0] and evidence.suffix[row]:
            found.append(row)
        last = row, source
    return found


def slow_nearness(evidence: Evidence) -> list[float]:
    seams = slow_seams(evidence)
    assert len(seams) == 2
    total = len(evidence.ids)
    return [max([total - (row - seam) for seam in seams if seam <= row], default=0) for row in range(total)]


def of_editlocal(evidence: Evidence) -> tuple:
    rows = slow_nearness(evidence)
    return rows, best_rows(rows, evidence)


def of_epic(evidence: Evidence) -> tuple:
    """Deal the rows out: round after round, each unit in turn, the nearest first."""
    seam = slow_seams(evidence)[0]
    units = sorted(members(evidence).values(), key=lambda rows: (abs(rows[0] - seam), rows[0]))
    rows, dealt = [0.0] * len(evidence.ids), 0
    for turn in range(max(map(len, units))):
        for unit in units:
            if turn < len(unit):
                rows[unit[turn]] = int(evidence.suffix.sum()) - dealt
                dealt += 1
    return rows, best_rows(rows, evidence)


def of_structural(evidence: Evidence) -> tuple:
    total, rows = len(evidence.ids), slow_nearness(evidence)
    for row, token in enumerate(evidence.ids.tolist()):
        text = evidence.model.tokenizer.decode([token])
        if text == "" or text.strip(" ") in (".", ",", "?", ":", "-", "(", ")", "\n", "\n\n", "):", ".\n"):
            rows[row] += total + 1
    return rows, best_rows(rows, evidence)


@torch.no_grad()
def of_cacheblend(evidence: Evidence) -> tuple:
    """The stock forward pass gives what a clean prefill puts into layer 1."""
    model, rows = evidence.model, [0.0] * len(evidence.ids)
    ids = torch.from_numpy(evidence.ids)[None]
    hidden = network_of(model)(ids, output_hidden_states=True, use_cache=False).hidden_states[1][0]
    for row in np.flatnonzero(evidence.suffix).tolist():
        fresh = heads_of(network_of(model).model.layers[1], "v", hidden[row])
        for head, value in enumerate(fresh):
            rows[row] += float((value - evidence.cache.values[1, head, row]).square().sum())
    return rows, best_rows(rows, evidence)


@torch.no_grad()
def of_cachecraft(evidence: Evidence) -> tuple:
    model, past = evidence.model, evidence.past
    module = network_of(model).model.layers[0]
    hidden = [model.network.table[token] for token in past.ids]
    keys = [[turned(key, at, model) for key in heads_of(module, "k", row)] for at, row in enumerate(hidden)]
    # By hand: the deleted line and the word that was replaced; what was only computed anew is there still.
    spelled = [evidence.model.tokenizer.decode([token]) for token in past.ids.tolist()]
    origin = origins(evidence.ids, past.ids, past.source).tolist()
    lost = [at for at in range(len(past.ids)) if at not in origin]
    assert "".join(spelled[at] for at in lost) == LINES[1] + "\n" + " post"
    chunk: list[Any] = [None] * len(past.ids)
    for row, at in enumerate(origin):
        if at >= 0:
            chunk[at] = (int(evidence.unit[row]), bool(evidence.suffix[row]))
    for at in lost:
        chunk[at] = ("deleted", "post" in spelled[at])
    size = {name: chunk.count(name) for name in chunk}
    rows, units = [0.0] * len(evidence.ids), [0.0] * evidence.units
    for unit, inside in members(evidence).items():
        inside = [row for row in inside if past.source[row] >= 0]
        if not inside:
            continue
        to_lost, own, other, spread = {}, 0.0, 0.0, 0.0
        for row in inside:
            at = int(past.source[row])
            weights = torch.zeros(at + 1)
            queries = heads_of(module, "q", hidden[at])
            for head, query in enumerate(queries):
                query = turned(query, at, model)
                score = torch.stack([query @ keys[j][head // model.groups] for j in range(at + 1)])
                weights += torch.softmax(score / math.sqrt(model.width), 0) / len(queries)
            to_lost[row] = sum(float(weights[j]) for j in lost if j <= at)
            for j in range(at + 1):
                if chunk[j] == chunk[at]:
                    own += float(weights[j])
                else:
                    other += float(weights[j])
                    spread += float(weights[j]) / size[chunk[j]]
        count = len(inside)
        a, b = spread / count, own / count**2
        units[unit] = 1 / (1 + math.exp(-a / b)) * sum(to_lost.values()) / other
        for rank, row in enumerate(sorted(inside, key=lambda row: (-to_lost[row], row)), 1):
            rows[row] = units[unit] * count / rank
    return rows, units


def of_infoflow(evidence: Evidence) -> tuple:
    layers = evidence.model.layers
    band = range(round(0.69 * layers), round(0.78 * layers) + 1)
    assert list(band) == [2]
    rows = [0.0] * len(evidence.ids)
    for layer in band:
        seen = question_attention(evidence, layer)
        for row in range(len(rows)):
            heads = [sum(head[q][row] for head in seen) / len(seen) for q in range(seen.shape[1])]
            rows[row] += math.sqrt(sum(value**2 for value in heads)) / len(band)
    return rows, best_rows(rows, evidence)


def mean_over(evidence: Evidence, layers: list[int], *, context: bool = False) -> list[float]:
    seen = [question_attention(evidence, layer, context=context) for layer in layers]
    count = seen[0].shape[0] * seen[0].shape[1] * len(layers)
    return [
        sum(float(row) for layer in seen for head in layer for row in head[:, at]) / count
        for at in range(len(evidence.ids))
    ]


def of_prophetkv(evidence: Evidence) -> tuple:
    rows = mean_over(evidence, [0, 1, 2], context=True)
    return rows, best_rows(rows, evidence)


def of_snapkv(evidence: Evidence) -> tuple:
    alone = mean_over(evidence, [0, 1, 2])
    rows = [
        sum(alone[near] for near in range(row - 2, row + 3) if 0 <= near < len(alone)) / 5
        for row in range(len(alone))
    ]
    return rows, best_rows(rows, evidence)


def in_blocks(evidence: Evidence) -> tuple[list[float], list[int]]:
    first = evidence.suffix.tolist().index(True)
    return mean_over(evidence, [1]), [max((row - first) // 16, -1) for row in range(len(evidence.ids))]


def block_sums(rows: list[float], unit: list[int], evidence: Evidence) -> list[float]:
    return [
        sum(
            score for score, own, may in zip(rows, unit, evidence.suffix, strict=True) if may and own == block
        )
        for block in range(max(unit) + 1)
    ]


def of_qcfuse(evidence: Evidence) -> tuple:
    rows, unit = in_blocks(evidence)
    return rows, block_sums(rows, unit, evidence), unit


def of_neighbor(evidence: Evidence) -> tuple:
    def assumed(block: int, earlier: int) -> float:
        return 0.554 if earlier == 0 else 0.06 * (block - earlier) ** -1.25 + 0.0085

    rows, unit = in_blocks(evidence)
    seen, taken = block_sums(rows, unit, evidence), [0]
    assert len(seen) > 6
    while len(taken) < len(seen):
        gains = {}
        for block in set(range(len(seen))) - set(taken):
            got = sum(assumed(block, earlier) for earlier in taken if earlier < block)
            total = sum(assumed(block, earlier) for earlier in range(block))
            gains[block] = seen[block] * (1 + block) ** (-1 / 3) * (0.1 + got) / (0.1 + total)
        taken.append(max(sorted(gains), key=lambda block: gains[block]))
    assert taken != sorted(taken)  # the order says something
    return rows, [len(seen) - taken.index(block) for block in range(len(seen))], unit


def of_recency(evidence: Evidence) -> tuple:
    rows = [float(row) for row in range(len(evidence.ids))]
    return rows, best_rows(rows, evidence)


def of_oracle(evidence: Evidence) -> tuple:
    rows = [0.0] * len(evidence.ids)
    for layer in (1, 2):
        for name in ("keys", "values"):
            clean, held = (getattr(part, name)[layer] for part in (evidence.clean, evidence.cache))
            norms = [float(clean[:, row].norm()) for row in range(len(rows))]
            rms = math.sqrt(sum(norm**2 for norm in norms) / len(norms))
            for row in np.flatnonzero(evidence.suffix).tolist():
                rows[row] += float((clean[:, row] - held[:, row]).norm()) / rms / 2
    return rows, best_rows(rows, evidence)


def of_sur(evidence: Evidence) -> tuple:
    model, units = evidence.model, whole(evidence)
    table = model.network.table.detach()
    mean = table.mean(0)

    def match(one: int, other: int) -> float:
        return max(0.0, float(torch.cosine_similarity(table[one] - mean, table[other] - mean, dim=0))) ** 2

    query = sorted(set(evidence.query_ids.tolist()))
    best = {
        unit: [max(match(int(evidence.ids[row]), token) for row in rows) for token in query]
        for unit, rows in units.items()
    }
    weight = [
        math.log(1 + len(units) / max(0.5, sum(row[at] for row in best.values()))) ** 2
        for at in range(len(query))
    ]
    rows, scored = [0.0] * len(evidence.ids), [0.0] * evidence.units
    for unit, inside in units.items():
        scored[unit] = sum(w * b for w, b in zip(weight, best[unit], strict=True))
        for row in inside:
            token = int(evidence.ids[row])
            rows[row] = max(w * match(token, asked) for w, asked in zip(weight, query, strict=True))
    order = sorted(units)
    beside = [
        sum(scored[other] for other in (before, after) if other is not None)
        for before, after in zip([None, *order[:-1]], [*order[1:], None], strict=True)
    ]
    near = dict(zip(order, beside, strict=True))
    return rows, [score + 0.25 * near.get(unit, 0.0) for unit, score in enumerate(scored)]


def of_sur_plain(evidence: Evidence) -> tuple:
    table = evidence.model.network.table.detach()
    rows = [0.0] * len(evidence.ids)
    for row in np.flatnonzero(evidence.suffix).tolist():
        vector = table[evidence.ids[row]]
        rows[row] = max(
            float(torch.cosine_similarity(vector, table[token], dim=0)) for token in evidence.query_ids
        )
    return rows, best_rows(rows, evidence)


def of_bm25(evidence: Evidence) -> tuple:
    units = whole(evidence)
    documents = {unit: [int(evidence.ids[row]) for row in rows] for unit, rows in units.items()}
    usual = sum(map(len, documents.values())) / len(documents)
    rows, scored = [0.0] * len(evidence.ids), [0.0] * evidence.units
    for token in set(evidence.query_ids.tolist()):
        holding = sum(token in document for document in documents.values())
        rarity = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
        for unit, document in documents.items():
            count = document.count(token)
            scored[unit] += (
                rarity * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(document) / usual)) if count else 0
            )
            for row in units[unit]:
                rows[row] += rarity * (evidence.ids[row] == token)
    return rows, scored


def of_chance(evidence: Evidence) -> tuple:
    return [0.0] * len(evidence.ids), np.random.default_rng(7).random(evidence.units)


SLOWLY = {
    "sur": of_sur,
    "sur-seam": of_sur,
    "sur-plain": of_sur_plain,
    "tokens": of_sur,
    "window": of_sur,
    "units-bm25": of_bm25,
    "units-random": of_chance,
    "editlocal": of_editlocal,
    "epic": of_epic,
    "structural": of_structural,
    "cacheblend": of_cacheblend,
    "cachecraft": of_cachecraft,
    "infoflow": of_infoflow,
    "prophetkv": of_prophetkv,
    "qcfuse": of_qcfuse,
    "snapkv": of_snapkv,
    "neighbor": of_neighbor,
    "recency": of_recency,
    "oracle": of_oracle,
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_scores_what_its_formula_says(name, evidence):
    found = policy_named(name).score(evidence)
    rows, units, *unit = SLOWLY[name](evidence)
    rows, inside = np.array(rows), evidence.suffix
    assert len(np.unique(rows[inside])) > (0 if name == "units-random" else 3)
    np.testing.assert_allclose(found.rows[inside], rows[inside], rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(found.units, units, rtol=2e-4, atol=2e-6)
    assert [part.tolist() for part in [found.unit] if part is not None] == unit
    if name == "sur-seam":
        assert found.first.share == 0.15
        assert found.first.rows.tolist() == slow_nearness(evidence)
    else:
        assert found.first is None


def test_epic_buys_the_heads_of_units_and_then_the_nearest_rows(llama):
    evidence = replace(
        staged(llama)[0],
        ids=np.zeros(16, dtype=np.int64),
        unit=np.array([-1] + [0] * 3 + [1] * 4 + [2] * 2 + [3] * 6),
        units=4,
        suffix=np.arange(16) >= 2,  # the first unit is cut, and starts at row 2
        past=Past(lambda: np.zeros(20, dtype=np.int64), np.array([0, 1, *range(6, 20)])),
    )
    scores = policy_named("epic").score(evidence)
    every = evidence.suffix
    selected = [select(scores, evidence.unit, every, every, budget, "rows").tolist() for budget in (3, 4, 10)]
    assert selected == [[2, 4, 8], [2, 4, 8, 10], [2, 3, 4, 5, 6, 8, 9, 10, 11, 12]]
    # The seam is at row 8: units 2, 3, 1 and 0 are the nearest, in this order.
    further = replace(evidence, past=Past(evidence.past.read_ids, np.array([*range(8), *range(12, 20)])))
    scores = policy_named("epic").score(further)
    selected = [
        select(scores, evidence.unit, every, every, budget, "rows").tolist() for budget in (1, 2, 3, 5)
    ]
    assert selected == [[8], [8, 10], [4, 8, 10], [2, 4, 8, 9, 10]]


def test_delimiters_are_punctuation_line_ends_and_controls():
    assert all(map(_delimits, ["", "..", " . .", "\n\n", "\n \n ", ",\n,\n", "。。", "”“", "$$", "-- --"]))
    # A tokenizer may drop the blank that a text begins with; a token of one blank is still no delimiter.
    words = [" ", "\n", " .", " a", ""]
    dropping = SimpleNamespace(decode=lambda ids: "".join(words[at] for at in ids).removeprefix(" "))
    found = _delimiters(dropping, np.array([0, 1, 2, 3, 4, 1]))
    assert found.tolist() == [False, True, True, False, True, True]
    assert not any(map(_delimits, ["  ", "\t\t", "aa", "a.a.", "77", "🙂🙂", "\ufffd\ufffd", " and and"]))


def test_cacheblend_sees_no_deviation_in_a_clean_cache(evidence):
    scores = policy_named("cacheblend").score(replace(evidence, cache=evidence.clean))
    dirty = policy_named("cacheblend").score(evidence)
    assert scores.rows.max() < 1e-6 < 1e-2 < dirty.rows.max()


def test_cacheblend_needs_no_state_of_missing_rows(evidence):
    # The new rows stand before all that may be selected, as after an insertion.
    new = np.flatnonzero(~evidence.suffix & (evidence.past.source < 0) & (evidence.unit >= 0))
    after = replace(evidence, suffix=evidence.suffix & (np.arange(len(evidence.ids)) > new[-1]))
    empty = replace(after, cache=evidence.cache.clone())
    empty.cache.keys[:, :, new] = empty.cache.values[:, :, new] = 9.0
    scores, same = (policy_named("cacheblend").score(seen) for seen in (after, empty))
    assert scores.rows.any()
    np.testing.assert_allclose(same.rows, scores.rows, rtol=1e-5)


def test_the_oracle_leaves_layer_0_out(llama):
    evidence = staged(llama)[0]
    other = replace(evidence, cache=evidence.cache.clone())
    other.cache.keys[0] = other.cache.values[0] = 0
    scores, same = (policy_named("oracle").score(seen).rows for seen in (evidence, other))
    assert same.tolist() == scores.tolist()


def test_cachecraft_scores_nothing_without_a_deletion(llama):
    evidence = staged(llama)[0]
    for past in (None, Past(lambda: evidence.ids, np.arange(len(evidence.ids)))):
        scores = policy_named("cachecraft").score(replace(evidence, past=past))
        assert not scores.rows.any()
        assert not scores.units.any()


def test_cachecraft_keeps_its_proportions_at_every_budget(evidence):
    scores = policy_named("cachecraft").score(evidence)
    stale = stale_of(evidence)
    worth = {unit: max(scores.rows[rows]) for unit, rows in members(evidence).items()}
    for budget in range(1, 30):
        support = select(scores, evidence.unit, stale, stale, budget, "rows")
        part = {unit: int((evidence.unit[support] == unit).sum()) for unit in worth}
        # D'Hondt: the last row selected anywhere was worth at least what the next one elsewhere would be.
        held = {unit: int(stale[rows].sum()) for unit, rows in members(evidence).items()}
        last = min(worth[unit] / part[unit] for unit in worth if part[unit])
        nexts = [worth[unit] / (part[unit] + 1) for unit in worth if part[unit] < held[unit]]
        assert last >= max(nexts) - 1e-6


def test_the_oracle_is_refused_without_a_clean_cache(llama):
    with pytest.raises(UsageError, match="needs a clean prefill") as refused:
        policy_named("oracle").score(replace(staged(llama)[0], clean=None))
    assert refused.value.remedy


def test_layer_depths_run_from_the_first_layer_to_the_last():
    assert [attention.layer_at(depth, 30) for depth in (0, 0.5, 0.99, 1)] == [0, 15, 29, 29]


# --- seams -------------------------------------------------------------------------------------


def torn(source: list[int], suffix_from: int, missing: tuple[int, ...] = ()) -> Any:
    """As much of an evidence as a seam needs."""
    rows = np.arange(len(source))
    nothing = np.zeros(len(source), dtype=np.int64)
    return Evidence(
        model=SimpleNamespace(),
        cache=SimpleNamespace(),
        ids=nothing,
        unit=nothing,
        units=1,
        query_ids=nothing,
        suffix=(rows >= suffix_from) & ~np.isin(rows, missing),
        seed=0,
        past=Past(lambda: np.zeros(20, dtype=np.int64), np.array(source)),
    )


SEAMS = {
    "one deletion": (torn([0, 1, 2, 5, 6, 7], 3), [3]),
    "two deletions": (torn([0, 1, 4, 5, 6, 9, 10], 2), [2, 5]),
    "a deletion at the start": (torn([3, 4, 5], 0), [0]),
    "an insertion": (torn([0, 1, 2, -1, -1, 3, 4], 3, (3, 4)), [5]),
    "a move to the front": (torn([0, 5, 6, 1, 2, 3, 4, 7], 1), [1, 3, 7]),
    "rows refreshed right behind a deletion": (torn([0, 1, 2, -1, -1, 7, 8], 3), [5]),
    "rows refreshed further on": (torn([0, 1, 2, 5, 6, -1, -1, 9, 10], 3), [3]),
    "rows refreshed between two deletions": (torn([0, 1, 4, -1, 6, 9, 10], 2), [2, 5]),
    "a seam before the frontier": (torn([0, 1, 4, 5, 6, 9, 10], 4), [5]),
    "no edit": (torn([0, 1, 2, 3], 4), []),
}


@pytest.mark.parametrize("name", SEAMS)
def test_a_seam_is_where_neighbours_were_separated(name):
    evidence, seams = SEAMS[name]
    assert evidence.seams.tolist() == seams
    assert slow_seams(evidence) == seams or name == "a deletion at the start"


def test_a_replacement_of_equal_length_makes_a_seam():
    evidence = torn([0, 1, -1, -1, 4, 5], 2, (2, 3))
    assert evidence.seams.tolist() == []
    replaced = replace(evidence, ids=np.array([0, 0, 0, 9, 0, 0]))
    assert replaced.seams.tolist() == [4]


def test_without_a_past_the_first_row_serves_as_the_seam():
    evidence = replace(SEAMS["one deletion"][0], past=None)
    assert evidence.seams.tolist() == []
    assert nearness(evidence).tolist() == [0, 0, 0, 6, 5, 4]


def test_rows_behind_two_seams_grow_in_turn():
    evidence = SEAMS["two deletions"][0]
    assert nearness(evidence).tolist() == [0, 0, 7, 6, 5, 7, 6]
    every, scores = evidence.suffix, policy_named("editlocal").score(evidence)
    selected = [
        select(scores, evidence.unit, every, every, budget, "rows").tolist() for budget in (1, 2, 3, 4)
    ]
    assert selected == [[2], [2, 5], [2, 3, 5], [2, 3, 5, 6]]


def test_recomputed_rows_are_found_in_the_past():
    past = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    cases = [
        # 3 and 4 deleted, 5 and 6 computed anew behind the cut
        ([1, 2, 5, 6, 7, 8], [0, 1, -1, -1, 6, 7], [0, 1, 4, 5, 6, 7]),
        # 9 inserted after 3, which was computed anew with it
        ([1, 2, 3, 9, 4, 5, 6, 7, 8], [0, 1, -1, -1, 3, 4, 5, 6, 7], [0, 1, 2, -1, 3, 4, 5, 6, 7]),
        # 3 replaced by 9
        ([1, 2, 9, 4, 5, 6, 7, 8], [0, 1, -1, 3, 4, 5, 6, 7], [0, 1, -1, 3, 4, 5, 6, 7]),
        # 2 and 3 said once more: a past row is no two rows
        ([1, 2, 3, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, -1, -1, 3, 4, 5, 6, 7], [0, 1, 2, -1, -1, 3, 4, 5, 6, 7]),
        # the end computed anew, and nothing known at all
        ([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, -1, -1], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([1, 2], [-1, -1], [-1, -1]),
    ]
    for ids, source, found in cases:
        assert origins(np.array(ids), past, np.array(source)).tolist() == found


# --- what is spent first -----------------------------------------------------------------------


def spend(share: float, budget: int, *, stale: list[int] | None = None, rule: str = "rows") -> list[int]:
    """Twenty rows in five units: the rest is spent from the end, the first share on 4, 2, 3, 5, ..."""
    nearest = np.zeros(20, dtype=np.float32)
    nearest[[4, 2, 3, 5]] = [9, 8, 7, 7]
    scores = Scores(
        np.arange(20, dtype=np.float32), np.arange(5, dtype=np.float32), first=Share(share, nearest)
    )
    suffix = np.arange(20) >= 2
    is_stale = suffix if stale is None else np.isin(np.arange(20), stale)
    return select(scores, np.arange(20) // 4, is_stale, suffix, budget, rule).tolist()


def test_a_share_of_0_or_1_uses_one_ranking():
    assert spend(0, 6) == [14, 15, 16, 17, 18, 19]
    assert spend(1, 6) == [2, 3, 4, 5, 6, 7]  # 3 and 5 tie, and so do all others: the earlier row
    assert spend(1, 3) == [2, 3, 4]


def test_a_share_is_rounded_up_and_the_rest_follows_the_rule():
    assert spend(0.25, 6) == [2, 4, 16, 17, 18, 19]
    assert spend(0.25, 1) == [4]
    assert spend(0.25, 8, rule="units") == [2, 4, 14, 15, 16, 17, 18, 19]
    assert spend(0.25, 9, rule="window") == [2, 3, 4, 14, 15, 16, 17, 18, 19]


def test_a_row_is_bought_once_and_budgets_are_met():
    for share in (0, 0.25, 0.5, 1):
        for budget in range(19):
            for rule in SUPPORTS:
                chosen = spend(share, budget, rule=rule)
                assert len(set(chosen)) == budget
                assert not chosen or min(chosen) >= 2


def test_stale_rows_come_first_in_both_parts():
    assert spend(0.5, 4, stale=[3, 7, 8, 9, 10]) == [3, 7, 9, 10]
    assert spend(0.5, 4, stale=[9]) == [4, 9, 18, 19]
