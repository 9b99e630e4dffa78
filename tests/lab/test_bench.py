"""The laboratory's rooms: arms, staged cases, trials, made cases, evidence, and runs that go on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.reference import prefill_states
from rigs.schema import check_case, check_config, check_summary

from kvedit.errors import ContextError, KveditError, UsageError
from kvedit.lab import niah, qa, run, trial
from kvedit.lab.arms import Arm
from kvedit.lab.case import Case
from kvedit.lab.evidence import precision, summarise_precision
from kvedit.lab.haystack import Haystack, built_in
from kvedit.lab.questions import Passage, Question
from kvedit.lab.run import Run, describe, execute
from kvedit.lab.staged import Staged
from kvedit.lab.trial import NOTICE, Clean, Trial, run_case
from kvedit.model.model import Model
from kvedit.names import SUPPORTS
from kvedit.policies.registry import POLICIES, policy_class
from kvedit.repair.budget import Budget
from kvedit.repair.options import Options
from kvedit.text.document import Document, Edit

approx = pytest.approx
LINES = [f"Line {number}: the fees of item {number} are {number * 37}.\n" for number in range(1, 15)]
TEXT = "".join(LINES)
STARTS = np.cumsum([0, *map(len, LINES)]).tolist()


def make_case(name: str = "fees", **changes: Any) -> Case:
    """Line 3 is deleted, and the fees of item 12 are asked for, whose line is the evidence."""
    case = Case(
        name=name,
        source=name,
        text=TEXT,
        edits=(Edit(STARTS[2], STARTS[3]),),
        question="What are the fees of item 12?",
        answers=("444",),
        stale="111",
        opening="The fees are",
        gold=(span("Line 12"),),
        max_new_tokens=6,
    )
    return replace(case, **changes)


def edited(case: Case) -> str:
    return Document(case.text).apply(list(case.edits)).text


def span(label: str) -> tuple[int, int]:
    """Where a line stands once line 3 is gone."""
    left = "".join(LINES[:2] + LINES[3:])
    start = left.index(label)
    return start, left.index("\n", start)


# Line 3 is worded anew, so that some rows of the edited text have no state.
REWORDED = make_case(
    "reworded", edits=(Edit(STARTS[2], STARTS[3], "It is free, the third item.\n"),), gold=()
)


def arms(*names: str) -> list[Arm]:
    return [Arm.parse(name) for name in names]


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    held = json.loads(json.dumps(record))
    for arm in held["arms"].values():
        arm["seconds"] = sorted(arm["seconds"])
    return held


# --- arms --------------------------------------------------------------------------------------


def test_shift_and_reprefill_are_arms_without_a_policy():
    ends = {name: Arm.parse(name) for name in ("shift", "replay", "reprefill", "erratum")}
    assert {arm.policy for arm in ends.values()} == {None}
    resolved = {name: arm.budget and arm.budget.resolve(70) for name, arm in ends.items()}
    assert resolved == {"shift": 0, "replay": 70, "reprefill": None, "erratum": None}


@pytest.mark.parametrize("rule", [None, *SUPPORTS])
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(("budget", "rows"), [("2%", 14), ("0.5%", 3), ("64t", 64), ("full", 700), ("0", 0)])
def test_every_policy_is_an_arm_with_every_rule_and_budget(rule, copies, budget, rows):
    for policy in POLICIES:
        name = f"{policy}{f'/{rule}' if rule else ''}{'+copy' if copies else ''}@{budget}"
        arm = Arm.parse(name)
        assert (arm.name, arm.policy, arm.support, arm.copies) == (name, policy, rule, copies)
        assert arm.budget is not None
        assert arm.budget.resolve(700) == rows
        options = arm.options(seed=3)
        assert (options.policy, options.support, options.budget) == (policy, rule, arm.budget)
        assert options.seed == 3


@pytest.mark.parametrize(
    ("name", "fact", "remedy"),
    [
        ("nonsense", "'nonsense' is not an arm.", "POLICY@BUDGET"),
        ("sur", "'sur' is not an arm.", "sur@2%"),
        ("sur@", "'sur@' is not an arm.", "reprefill"),
        ("@5%", "'@5%' is not an arm.", "erratum"),
        ("", "'' is not an arm.", "shift"),
        ("sur/@5%", "'sur/@5%' is not an arm.", "POLICY/SUPPORT@BUDGET"),
        ("Sur@5%", "'Sur@5%' is not an arm.", "POLICY@BUDGET"),
        ("sur@5% ", "'sur@5% ' is not an arm.", "POLICY@BUDGET"),
        ("sur+copies@5%", "'sur+copies@5%' is not an arm.", "POLICY@BUDGET"),
        ("sur+copy/units@5%", "'sur+copy/units@5%' is not an arm.", "POLICY@BUDGET"),
        ("best@5%", "Unknown policy 'best'.", "units-bm25"),
        ("shift@5%", "Unknown policy 'shift'.", "sur"),
        ("sur/lines@5%", "Unknown support 'lines'.", "rows, window, units"),
        ("sur@much", "'much' is not a budget.", "128t"),
        ("sur@5", "'5' is not a budget.", "5%"),
        ("sur@120%", "The budget 120% is outside 0% to 100%.", "full"),
        ("sur@-1%", "The budget -1% is outside 0% to 100%.", "full"),
    ],
)
def test_an_invalid_arm_is_refused_with_a_valid_form(name, fact, remedy):
    with pytest.raises(UsageError) as raised:
        Arm.parse(name)
    assert raised.value.fact == fact
    assert remedy in raised.value.remedy


# --- staged ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [make_case(), REWORDED], ids=lambda case: case.name)
def test_a_staged_case_knows_the_old_place_of_each_row(llama, case):
    staged, head = Staged.of(llama, case), list(llama.layout(None).head_ids)
    old, new = llama.tokenizer.encode_text(case.text), llama.tokenizer.encode_text(edited(case))
    assert staged.ids.tolist() == head + new.ids.tolist()
    assert staged.past.ids.tolist() == head + old.ids.tolist()
    held = np.flatnonzero(staged.past.source >= 0)
    assert staged.past.ids[staged.past.source[held]].tolist() == staged.ids[held].tolist()
    assert (staged.past.source < 0).tolist() == staged.rows.missing.tolist()
    assert np.all(np.diff(staged.past.source[held]) > 0)
    # Rows before the first id that is another one are as they were; the others can be selected.
    place = next(
        at for at, pair in enumerate(zip(staged.past.ids, staged.ids, strict=False)) if pair[0] != pair[1]
    )
    assert staged.past.source[:place].tolist() == list(range(place))
    assert not staged.rows.suffix[:place].any()
    assert staged.rows.suffix[place:].tolist() == (~staged.rows.missing[place:]).tolist()
    assert (staged.unit[: len(head)] == -1).all()
    assert staged.unit[len(head)] == 0
    nothing = staged.repair(llama, llama.new_cache(0), new.ids[:0]).select(Options(budget=Budget.parse("0")))
    assert nothing.evidence.units == staged.unit[-1] + 1 >= 13


def test_a_reworded_line_has_rows_without_a_state(llama):
    assert Staged.of(llama, REWORDED).rows.missing.sum() >= 10
    assert not Staged.of(llama, make_case()).rows.missing.any()


def test_gold_rows_spell_the_evidence_after_the_edit(llama):
    case = make_case(gold=(span("Line 1:"), span("Line 8"), span("Line 12")))
    staged, text, head = Staged.of(llama, case), edited(case), len(llama.layout(None).head_ids)
    tokens = llama.tokenizer.encode_text(text)
    gold = np.flatnonzero(staged.gold) - head
    pieces = np.split(gold, np.flatnonzero(np.diff(gold) > 1) + 1)
    spelt = [text[tokens.starts[piece[0]] : tokens.stops[piece[-1]]] for piece in pieces]
    assert [piece.strip() for piece in spelt] == [LINES[7].strip(), LINES[11].strip()]
    assert not Staged.of(llama, replace(case, gold=())).gold.any()


# --- trials ------------------------------------------------------------------------------------


def walked(model: Model, cache: Any, start: int, ids: Any) -> torch.Tensor:
    """Log-probabilities after each id, which goes through the layers alone; a slow reference."""
    found = []
    for row, one in enumerate(np.asarray(ids).tolist(), start):
        hidden = model.walk(torch.tensor([one]), slice(row, row + 1), cache).hidden
        found.append(torch.log_softmax(model.logits(hidden)[0], dim=-1))
    return torch.stack(found)


def slow_view(model: Model, case: Case, cache: Any, start: int) -> dict[str, Any]:
    """What `Trial` measures, token by token, each answer on a cache of its own."""
    encode = model.tokenizer.encode_text
    question = model.layout(None).question_ids(model.tokenizer, case.question)
    asked = np.concatenate([question, encode(case.opening).ids])

    def each(answer: str) -> list[float]:
        ids = encode(f" {answer}").ids
        after = walked(model, cache.clone(), start, np.concatenate([asked, ids]))[len(asked) - 1 :]
        return [float(row[one]) for row, one in zip(after, ids, strict=False)]

    mine = cache.clone()
    first = row = walked(model, mine, start, asked)[-1]
    said: list[int] = []
    while len(said) < case.max_new_tokens and int(row.argmax()) not in model.stop_ids:
        said.append(int(row.argmax()))
        row = walked(model, mine, start + len(asked) + len(said) - 1, said[-1:])[-1]
    right, wrong = each(case.answers[0]), each(str(case.stale))
    margin = sum(right) / len(right) - sum(wrong) / len(wrong)
    return {"logp": sum(right), "margin": margin, "first": first, "ids": said}


def slow_clean(model: Model, ids: Any) -> Any:
    cache = model.new_cache(len(ids) + 128)
    walked(model, cache, 0, ids)
    return cache


def roomy(model: Model, cache: Any, rows: int) -> Any:
    """The first rows of a cache, with room for a question behind them."""
    held = model.new_cache(rows + 128)
    held.keys[:, :, :rows], held.values[:, :, :rows] = cache.keys[:, :, :rows], cache.values[:, :, :rows]
    return held


@pytest.fixture(params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tiny_models: dict[str, Model]) -> Model:
    return tiny_models[request.param]


def test_figures_equal_those_of_a_walk_token_by_token(model):
    agreements = set()
    for case in (make_case(), make_case(question="Which line is last?", opening="", answers=("Line 14",))):
        tried = Trial(model, case)
        count = len(tried.ids)
        shift = tried.run(Arm.parse("shift"))
        clean = slow_view(model, case, slow_clean(model, tried.ids), count)
        mine = slow_view(model, case, roomy(model, tried.cache, count), count)
        if not case.opening:  # the answer then begins without a space
            for name in ("logp", "margin"):
                mine.pop(name), clean.pop(name)
        kl = torch.nn.functional.kl_div(mine["first"], clean["first"], reduction="sum", log_target=True)
        same = 0
        while same < min(len(clean["ids"]), len(mine["ids"])) and clean["ids"][same] == mine["ids"][same]:
            same += 1
        assert shift["kl"] == approx(float(kl), abs=1e-5)
        assert shift["kl"] > 1e-3
        assert shift["top1"] == (int(mine["first"].argmax()) == int(clean["first"].argmax()))
        assert shift["agreement"] == same / len(clean["ids"])
        assert shift["answer"] == model.tokenizer.decode(mine["ids"])
        agreements.add(shift["agreement"])
        if case.opening:
            assert shift["logp"] == approx(mine["logp"], abs=1e-4)
            assert shift["margin"] == approx(mine["margin"], abs=1e-4)
            assert shift["logp_change"] == approx(mine["logp"] - clean["logp"], abs=1e-4)
            assert abs(shift["logp_change"]) > 1e-2
    assert len(agreements) > 1


def test_a_replay_equals_a_reprefill(model):
    for case in (make_case(), REWORDED):
        tried = Trial(model, case)
        replay, clean = (tried.run(arm) for arm in arms("replay", "reprefill"))
        assert replay["logp"] == approx(clean["logp"], abs=1e-3)
        assert (clean["logp_change"], clean["kl"]) == (0, 0)
        assert replay["kl"] == approx(0, abs=1e-5)
        assert (replay["answer"], replay["agreement"], replay["top1"]) == (clean["answer"], 1, True)
        suffix = int(tried.rows.suffix.sum())
        assert (replay["refreshed"], replay["rows"], clean["refreshed"], clean["rows"]) == (
            *(suffix, suffix),
            *(0, None),
        )


def test_shift_refreshes_nothing_and_is_not_the_clean_answer(model):
    shift = Trial(model, make_case()).run(Arm.parse("shift"))
    assert (shift["refreshed"], shift["rows"], shift["runs"], sum(shift["where"])) == (0, 0, 0, 0)
    assert shift["gold_recall"] is shift["gold_precision"] is None
    assert abs(shift["logp_change"]) > 1e-2
    assert "refresh" in shift["seconds"]


@pytest.mark.parametrize("case", [make_case(), REWORDED], ids=lambda case: case.name)
@pytest.mark.parametrize("rule", [None, *SUPPORTS])
def test_every_arm_refreshes_exactly_its_budget_and_cleans_up(llama, case, rule):
    tried = Trial(llama, case)
    count, suffix = len(tried.ids), int(tried.rows.suffix.sum())
    keys, values = tried.cache.keys[:, :, :count].clone(), tried.cache.values[:, :, :count].clone()
    for policy, budget in product(POLICIES, ("7%", "13t")):
        name = f"{policy}{f'/{rule}' if rule else ''}@{budget}"
        arm = tried.run(Arm.parse(name))
        wanted = 13 if budget == "13t" else suffix * 7 // 100
        assert (arm["rows"], arm["refreshed"], sum(arm["where"])) == (wanted,) * 3, name
        assert arm["runs"] <= wanted
        assert torch.equal(tried.cache.keys[:, :, :count], keys), name
        assert torch.equal(tried.cache.values[:, :, :count], values), name


def test_the_order_of_arms_changes_nothing(model):
    names = ["shift", "sur@10%", "oracle/rows+copy@20%", "replay", "erratum", "infoflow@10%", "reprefill"]
    for case in (make_case(), REWORDED):
        one, _ = run_case(model, case, arms(*names))
        other, _ = run_case(model, case, arms(*reversed(names)))
        assert list(one["arms"]) == names
        assert without_times(one) == without_times(other)
        check_case(one)


def test_copies_of_all_rows_are_the_clean_cache(llama, monkeypatch):
    seen = []
    view = trial.Asked.view

    def kept(asked, cache, start, timings, *, notice=False):
        seen.append(cache.clone())
        return view(asked, cache, start, timings, notice=notice)

    monkeypatch.setattr(trial.Asked, "view", kept)
    for case in (make_case(), REWORDED):
        seen.clear()
        tried = Trial(llama, case)
        held, count = np.flatnonzero(tried.rows.suffix), len(tried.ids)
        clean, mine = prefill_states(llama, tried.ids), tried.clean.cache
        arm = tried.run(Arm.parse("oracle/rows+copy@100%"))
        copied = seen[-1]
        assert torch.equal(copied.keys[:, :, held], mine.keys[:, :, held])
        assert torch.equal(copied.values[:, :, held], mine.values[:, :, held])
        # Rows without a state are computed where the copies can be seen.
        assert torch.allclose(copied.values[:, :, :count], clean.values, atol=1e-5)
        assert arm["logp_change"] == approx(0, abs=1e-4)
        half = tried.run(Arm.parse("oracle/rows+copy@50%"))
        assert half["refreshed"] == len(held) // 2


def test_a_copy_is_not_a_refresh(llama):
    tried = Trial(llama, make_case())
    copied, refreshed = (tried.run(arm) for arm in arms("recency+copy@20%", "recency@20%"))
    assert copied["where"] == refreshed["where"]
    assert abs(copied["logp"] - refreshed["logp"]) > 1e-4


def test_erratum_is_a_shift_with_a_changed_question(model):
    case = make_case()
    record, _ = run_case(model, case, arms("shift", "erratum", "reprefill"))
    told, _ = run_case(model, replace(case, question=NOTICE + case.question), arms("shift"))
    shift, erratum = record["arms"]["shift"], record["arms"]["erratum"]
    for name in ("logp", "margin", "answer", "refreshed"):
        assert erratum[name] == told["arms"]["shift"][name]
    assert erratum["logp"] != shift["logp"]
    # What it is compared with is the clean answer to the plain question.
    assert erratum["logp_change"] == erratum["logp"] - record["arms"]["reprefill"]["logp"]
    assert (erratum["budget"], erratum["rows"], erratum["refreshed"]) == (None, None, 0)


def test_recall_and_precision_of_the_evidence_by_hand(llama):
    tried = Trial(llama, make_case(gold=(span("Line 14"), span("Line 1:"))))
    suffix = np.flatnonzero(tried.rows.suffix)
    gold = np.flatnonzero(tried.staged.gold)  # line 14 alone: line 1 cannot be selected
    assert 10 < len(gold) < 30
    for budget in (5, 12, 60):
        last = suffix[-budget:]
        hit = len(set(last.tolist()) & set(gold.tolist()))
        arm = tried.run(Arm.parse(f"recency@{budget}t"))
        assert arm["gold_recall"] == hit / len(gold)
        assert arm["gold_precision"] == hit / budget
        tenths = [int(10 * place / len(suffix)) for place in range(len(suffix) - budget, len(suffix))]
        assert arm["where"] == [tenths.count(tenth) for tenth in range(10)]
        assert arm["runs"] == 1
    nowhere = Trial(llama, make_case(gold=(span("Line 1:"),))).run(Arm.parse("recency@5t"))
    assert nowhere["gold_recall"] is nowhere["gold_precision"] is None


def test_an_answer_is_scored_and_the_old_one_is_looked_for(llama):
    case = make_case()
    said = Trial(llama, case).run(Arm.parse("reprefill"))["answer"]
    assert said.strip()
    told = replace(case, answers=("never", said), dataset="musique", stale=said[:2])
    arm = Trial(llama, told).run(Arm.parse("reprefill"))
    assert (arm["em"], arm["f1"], arm["stale_shown"]) == (True, 1, True)
    other = Trial(llama, replace(told, answers=("never",), stale="never")).run(Arm.parse("reprefill"))
    assert (other["em"], other["f1"], other["stale_shown"]) == (False, 0, False)
    none = Trial(llama, replace(case, stale=None)).run(Arm.parse("shift"))
    assert none["stale_shown"] is none["margin"] is None


def passages(count: int = 6) -> list[Passage]:
    texts = [f"Passage {number} says that item {number} costs {number * 37}." for number in range(count)]
    return [Passage(f"Title {n}", text, n in (1, 3), n in (1, 3)) for n, text in enumerate(texts)]


def make_question(name: str = "q") -> Question:
    asked = f"What does item 3 cost, asks {name}?"
    return Question(name, "hotpotqa", "bridge", asked, ("111",), tuple(passages()))


def count_prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    lengths: list[int] = []
    prefill = trial.prefill_

    def counted(model, cache, ids, *more):
        lengths.append(len(ids))
        return prefill(model, cache, ids, *more)

    monkeypatch.setattr(trial, "prefill_", counted)
    return lengths


def test_three_placements_of_a_question_share_one_clean_prefill(llama, monkeypatch):
    lengths = count_prefills(monkeypatch)
    clean, found = None, []
    for case in qa.cases([make_question(), make_question("r")]):
        record, clean = run_case(llama, case, arms("shift", "reprefill"), clean=clean)
        found.append(record)
    # Of each question three texts before the edit, and one behind it.
    assert len(lengths) == 2 * (3 + 1)
    for three in (found[:3], found[3:]):
        assert len({record["arms"]["reprefill"]["logp"] for record in three}) == 1
        assert len({record["arms"]["shift"]["logp"] for record in three}) == 3
        assert [record["suffix"] for record in three] == sorted(
            (record["suffix"] for record in three), reverse=True
        )


@pytest.mark.parametrize(
    "change",
    [
        {"question": "What are the fees of item 13?"},
        {"opening": "They are"},
        {"answers": ("481",)},
        {"stale": "37"},
        {"max_new_tokens": 5},
        {"edits": (Edit(STARTS[3], STARTS[4]),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_case_with_another_ending_gets_its_own_clean_prefill(llama, change):
    first = Trial(llama, make_case())
    other = Trial(llama, make_case(**change), clean=first.clean)
    assert other.clean is not first.clean
    alone = Trial(llama, make_case(**change))
    assert other.run(Arm.parse("reprefill"))["logp"] == alone.run(Arm.parse("reprefill"))["logp"]
    again = Trial(llama, make_case(name="again", gold=()), clean=first.clean)
    assert again.clean is first.clean


def test_a_case_that_exceeds_the_context_is_refused(llama):
    long = make_case("long", text=TEXT * 5)
    with pytest.raises(ContextError, match=r"Case long needs \d+ tokens, but the model's context has 1024"):
        Trial(llama, long)
    assert isinstance(Trial(llama, make_case()).clean, Clean)


# --- niah --------------------------------------------------------------------------------------

STRAW = " ".join(f"This is sentence {word}." for word in ("".join(w) for w in product("abcdefgh", repeat=3)))


@pytest.fixture
def hay(llama: Model) -> Haystack:
    """512 sentences, each of them once."""
    return Haystack(STRAW, llama.tokenizer)


def make(hay: Haystack, variant: str, **more: Any) -> list[Case]:
    return list(niah.cases([hay], variant=variant, **{"count": 30, "tokens": (300, 900), **more}))


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text.strip())


def needles(text: str) -> list[str]:
    return [line for line in sentences(text) if not line.startswith("This is sentence")]


@pytest.mark.parametrize("variant", niah.VARIANTS)
def test_an_edit_removes_the_old_value_and_keeps_the_answer(hay, variant):
    for case in make(hay, variant):
        after = edited(case)
        ((start, stop),) = case.gold
        assert len(case.edits) == 1
        assert case.answers[0] in after[start:stop]
        assert case.answers[0] != case.stale
        assert not after[start:stop].startswith((" ", "\n"))
        assert after.count(case.answers[0]) == 1
        assert case.edits[0].stop <= len(case.text)
        assert "  " not in after
        if variant != "derived":  # where the old value stays under its own alias
            assert str(case.stale) not in after
            assert str(case.stale) in case.text


@pytest.mark.parametrize("variant", ["same-key", "derived", "injection"])
def test_an_edit_takes_one_whole_sentence_and_nothing_else(hay, variant):
    for case in make(hay, variant):
        before, after = sentences(case.text), sentences(edited(case))
        gone = case.text[case.edits[0].start : case.edits[0].stop]
        assert gone.strip() in before
        before.remove(gone.strip())
        assert after == before
        assert len(needles(edited(case))) == {"same-key": 1, "derived": 3, "injection": 1}[variant]


def test_same_key_leaves_the_second_needle_of_its_template(hay):
    for number, case in enumerate(make(hay, "same-key")):
        form = niah.TEMPLATES[("plain", "ruler")[number % 2]]
        assert case.facts["template"] == ("plain", "ruler")[number % 2]
        key = re.search(r"for (\S+)", case.question)[1]
        wanted = [form.needle.replace("KEY", key).replace("VALUE", v) for v in (case.stale, *case.answers)]
        assert needles(case.text) == wanted
        assert needles(edited(case)) == wanted[1:]
        assert (case.question, case.opening) == (
            form.question.replace("KEY", key),
            form.opening.replace("KEY", key),
        )
        assert len(case.answers[0]) == len(str(case.stale)) == form.digits


def test_templates_can_be_one_alone(hay):
    assert {case.facts["template"] for case in make(hay, "same-key", templates=["ruler"])} == {"ruler"}


def test_after_relabel_the_asked_label_has_the_answer_below_it(hay):
    for case in make(hay, "relabel"):
        place = re.fullmatch(r"What is the access code of the (\w+) office\?", case.question)[1]
        for text, value in ((case.text, case.stale), (edited(case), case.answers[0])):
            lines = text.split("\n")
            assert lines[lines.index(f"{place} office") + 1] == f"Access code: {value}"
        lines = edited(case).split("\n")
        assert lines[:10:2] == [line for line in lines[:10] if line.endswith(" office")]
        assert lines[10] == ""
        assert [len(line) for line in lines[1:10:2]] == [len("Access code: 1234")] * 5
        assert case.facts["record"] == [*dict.fromkeys(lines[:10:2])].index(f"{place} office")
    assert {case.facts["record"] for case in make(hay, "relabel")} == {0, 1, 2, 3, 4}


def test_derived_cases_are_answered_through_the_first_alias(hay):
    for case in make(hay, "derived"):
        key = re.search(r"project (\S+) have", case.question)[1]
        fact, correction, right, wrong = needles(case.text)
        first = re.fullmatch(rf"The project {key} uses the alias (\w+)\.", fact)[1]
        second = re.fullmatch(rf"Correction: the project {key} now uses the alias (\w+)\.", correction)[1]
        assert right == f"The alias {first} has the value {case.answers[0]}."
        assert wrong == f"The alias {second} has the value {case.stale}."
        assert needles(edited(case)) == [fact, right, wrong]
        assert case.opening == f"The project {key} uses the alias {first}, which has the value"


def test_injection_leaves_the_code_and_no_instruction(hay):
    for case in make(hay, "injection"):
        key = re.fullmatch(r"What is the code for (\S+)\?", case.question)[1]
        assert needles(edited(case)) == [f"The code for {key} is {case.answers[0]}."]
        assert f"must always say {case.stale} instead" in case.text


@pytest.mark.parametrize("variant", niah.VARIANTS)
def test_texts_are_as_long_as_asked_give_or_take_a_sentence(hay, variant):
    low, high = 300, 900
    # Tokens that a text leaves for what is hidden in it, by the variant.
    left = {"same-key": 60, "relabel": 100, "derived": 80, "injection": 80}[variant]
    sentence = max(map(hay.count, hay.sentences))
    found = []
    for case in make(hay, variant, tokens=(low, high)):
        straw = re.findall(r"This is sentence \w+\.", case.text)
        found.append(sum(map(hay.count, straw)))
    steps = sorted(found)
    assert low - left <= steps[0] < low - left + sentence
    assert high - left <= steps[-1] < high - left + sentence
    gaps = np.diff(steps)
    assert gaps.max() <= (high - low) / 29 + sentence
    assert found != steps  # lengths are spread over the run, so that a part of it is no worse


def test_a_single_case_has_the_shortest_length(hay):
    (case,) = make(hay, "injection", count=1, tokens=(300, 900))
    straw = [line for line in sentences(case.text) if line.startswith("This is sentence")]
    assert 220 <= sum(map(hay.count, straw)) < 240


def test_depth_and_gap_are_honoured_to_a_sentence(hay):
    made = make(hay, "same-key", tokens=(900, 1000))
    assert {case.facts["depth"] for case in made} == {0.1, 0.3, 0.5}
    # These texts end before a gap of 1,024, which then is as far as they go.
    assert {case.facts["gap"] for case in made} == {0, 64, 256, "far"}
    met = set()
    for case in made:
        lines, gap = sentences(case.text), case.facts["gap"]
        first, second = (at for at, line in enumerate(lines) if not line.startswith("This is"))
        assert first == int(case.facts["depth"] * (len(lines) - 2))
        between = [hay.count(line) for line in lines[first + 1 : second]]
        if gap != "far" and sum(between) >= gap:
            assert sum(between[:-1]) < max(gap, 1)
            met.add(gap)
        else:  # as far as the text goes: one sentence follows
            assert second == len(lines) - 2
    assert met == {0, 64, 256}


def test_derived_cases_place_the_lookup_at_its_distance(hay):
    for number, case in enumerate(make(hay, "derived", tokens=(900, 1000))):
        distance = (0, 250, "far")[number % 3]
        assert case.facts["distance"] == distance
        lines = sentences(case.text)
        _, erased, lookup, _ = (at for at, line in enumerate(lines) if not line.startswith("This is"))
        between = [hay.count(line) for line in lines[erased + 1 : lookup]]
        if distance == "far":
            assert lookup == len(lines) - 2  # the lookup is two sentences, and ends the text
        else:
            assert sum(between[:-1]) < max(distance, 1) <= max(sum(between), 1)


@pytest.mark.parametrize("variant", niah.VARIANTS)
def test_dev_and_test_share_no_key_no_value_and_no_sentence(hay, variant):
    held = {}
    for split in niah.SPLITS:
        words, values, straw = set(), set(), set()
        for seed in range(4):
            for case in make(hay, variant, split=split, seed=seed):
                values |= set(re.findall(r"\d{4,7}", case.text))
                words |= set(re.findall(r"[a-z]+-[a-z]+", case.text))
                words |= set(re.findall(r"alias (\w+)|(\w+) office", case.text))
                straw |= {line for line in sentences(case.text) if line.startswith("This is sentence")}
        held[split] = words, values, straw
    for dev, test in zip(held["dev"], held["test"], strict=True):
        assert len(dev) > 8
        assert len(test) > 8
        assert not dev & test
    assert len(held["test"][2]) > 350  # all of its part is in use
    assert len(held["dev"][2]) > 100


@pytest.mark.parametrize("variant", niah.VARIANTS)
def test_equal_arguments_give_equal_cases(hay, variant):
    one, again, other = (make(hay, variant, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert all(mine.text != theirs.text for mine, theirs in zip(one, other, strict=True))
    assert len({case.name for case in one}) == len({case.text for case in one}) == 30
    assert one[0].name == f"{variant}-test-000"


def test_haystacks_are_used_in_turn(llama, hay):
    twin = Haystack(STRAW.replace("This is", "That was"), llama.tokenizer)
    made = list(niah.cases([hay, twin], count=4, tokens=(200, 200)))
    assert ["That was" in case.text for case in made] == [False, True, False, True]
    assert ["This is" in case.text for case in made] == [True, False, True, False]


def test_the_built_in_haystack_is_stable_and_long_enough(llama):
    text = built_in()
    assert text == built_in()
    assert len(Haystack(text, llama.tokenizer).sentences) > 3000
    assert not re.search(r"\d", text)


def test_a_short_haystack_is_refused(llama):
    with pytest.raises(UsageError, match=r"has 39 sentences; at least 40 are needed\. Give a longer text"):
        Haystack("It is so. " * 39, llama.tokenizer)
    assert len(Haystack("It is so. " * 40, llama.tokenizer).sentences) == 40


# --- evidence ----------------------------------------------------------------------------------


def test_the_share_of_bought_rows_in_the_evidence_by_hand(llama):
    made = [make_case("a"), make_case("b", gold=(span("Line 14"),), dataset="iirc")]
    nowhere = make_case("c", gold=(span("Line 1:"),))
    found = list(precision(llama, [*made, nowhere], arms("recency@5t", "recency@30t", "recency@0")))
    assert [record["case"] for record in found] == ["a", "b"]  # c has no evidence that can be selected
    for record, case in zip(found, made, strict=True):
        check_case(record, "evidence")
        staged = Staged.of(llama, case)
        suffix = np.flatnonzero(staged.rows.suffix)
        assert (record["suffix"], record["gold"]) == (len(suffix), staged.gold.sum())
        for budget in (5, 30):
            hit = int(staged.gold[suffix[-budget:]].sum())
            assert record["arms"][f"recency@{budget}t"] == {"rows": budget, "hit": hit}
        assert record["arms"]["recency@0"] == {"rows": 0, "hit": 0}
    assert found[0]["arms"]["recency@5t"]["hit"] == 0
    assert found[1]["arms"]["recency@5t"]["hit"] >= 4
    summary = summarise_precision(found)
    assert list(summary) == ["iirc", "niah"]
    shares = found[1]["arms"]["recency@30t"]
    assert summary["iirc"]["arms"]["recency@30t"]["value"] == approx(shares["hit"] / 30)
    assert summary["iirc"]["cases"] == 1
    assert summary["niah"]["arms"]["recency@0"] is None


def test_a_mean_share_is_over_cases_and_not_over_rows():
    records = [
        {"dataset": "niah", "source": name, "arms": {"sur@5%": {"rows": rows, "hit": hit}}}
        for name, rows, hit in (("a", 10, 10), ("b", 100, 0), ("c", 0, 0), ("d", 4, 1))
    ]
    found = summarise_precision(records)["niah"]
    assert found["cases"] == 4
    assert found["arms"]["sur@5%"]["value"] == approx((1 + 0 + 0.25) / 3)
    assert found["arms"]["sur@5%"]["low"] >= 0
    assert found["arms"]["sur@5%"]["high"] <= 1


def test_evidence_refuses_arms_that_need_a_forward_pass(llama):
    for name in (
        "shift",
        "replay",
        "reprefill",
        "erratum",
        *(f"{policy}@5%" for policy in POLICIES if policy_class(policy).reads_cache),
    ):
        with pytest.raises(UsageError, match=r"needs a forward pass to select rows\. Leave it out") as raised:
            list(precision(llama, [make_case()], arms(name)))
        assert name in raised.value.fact
    others = [f"{policy}@5%" for policy in POLICIES if not policy_class(policy).reads_cache]
    assert len(others) >= 8
    (record,) = precision(llama, [make_case()], arms(*others))
    rows = {arm["rows"] for arm in record["arms"].values()}
    assert rows == {record["suffix"] * 5 // 100}


# --- runs --------------------------------------------------------------------------------------

NAMES = ("shift", "sur@10%", "reprefill")


def made_cases(count: int = 4) -> list[Case]:
    return [
        make_case(f"fees-{number}", question=f"What are the fees of item {number}?")
        for number in range(8, 8 + count)
    ]


def start(folder: Path, model: Model, seed: int = 0, names: tuple[str, ...] = NAMES) -> Run:
    return Run.start(folder, describe("niah", model, "tiny", arms(*names), {"seed": seed}, "kvedit bench"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tiny_models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four cases that was not disturbed."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    held = start(folder, tiny_models["llama"])
    execute(held, tiny_models["llama"], made_cases(), arms(*NAMES))
    held.finish()
    return folder


def lines(folder: Path) -> list[str]:
    return (folder / "cases.jsonl").read_text().splitlines(keepends=True)


def copied(finished: Path, folder: Path, kept: str) -> Path:
    """The same run with other lines."""
    folder.mkdir()
    (folder / "config.json").write_bytes((finished / "config.json").read_bytes())
    (folder / "cases.jsonl").write_text(kept)
    return folder


def test_a_run_writes_what_its_schema_says(finished):
    assert sorted(files(finished)) == ["cases.jsonl", "config.json", "report.html", "summary.json"]
    check_config(json.loads((finished / "config.json").read_bytes()))
    for line in lines(finished):
        check_case(json.loads(line))
    check_summary(json.loads((finished / "summary.json").read_bytes()))


@pytest.mark.parametrize("whole", [0, 1, 3, 4])
@pytest.mark.parametrize("cut", [0, 1, 300, -1])
def test_an_interrupted_run_resumes_and_ends_like_a_whole_one(
    finished, llama, tmp_path, monkeypatch, whole, cut
):
    kept = lines(finished)
    partly = kept[whole][:cut] if whole < 4 else ""
    folder = copied(finished, tmp_path / "cut", "".join(kept[:whole]) + partly)
    ran: list[str] = []
    run_one = run.run_case

    def noted(model, case, *more, **named):
        ran.append(case.name)
        return run_one(model, case, *more, **named)

    monkeypatch.setattr(run, "run_case", noted)
    again, told = start(folder, llama), []
    execute(
        again, llama, made_cases(), arms(*NAMES), on_case=lambda done, record: told.append((done, record))
    )
    assert ran == [case.name for case in made_cases()[whole:]]
    assert [done for done, _ in told] == [1, 2, 3, 4]
    assert [record["case"] for _, record in told] == [case.name for case in made_cases()]
    assert lines(folder)[:whole] == kept[:whole]
    found = [without_times(json.loads(line)) for line in lines(folder)]
    assert found == [without_times(json.loads(line)) for line in kept]
    assert again.finish()["cases"] == 4


def test_a_run_with_another_config_in_the_folder_is_refused(finished, llama, tmp_path):
    folder = copied(finished, tmp_path / "run", "".join(lines(finished)))
    before = files(folder)
    for named, more in (
        ("options", {"seed": 1}),
        ("arms", {"names": ("shift", "reprefill")}),
    ):
        with pytest.raises(
            UsageError, match=f"contains a run with a different {named}. Give another folder"
        ) as raised:
            start(folder, llama, **more)
        assert raised.value.exit_code == 2
    assert files(folder) == before
    assert len(start(folder, llama).records()) == 4


def test_another_model_is_another_config(finished, tiny_models, tmp_path):
    folder = copied(finished, tmp_path / "run", "".join(lines(finished)))
    with pytest.raises(UsageError, match="a different model"):
        start(folder, tiny_models["qwen3"])


def test_a_run_without_records_is_replaced(llama, tmp_path):
    start(tmp_path / "run", llama)
    other = start(tmp_path / "run", llama, seed=1)
    assert json.loads((tmp_path / "run" / "config.json").read_bytes()) == other.config
    assert other.config["options"] == {"seed": 1}


def test_a_run_resumes_on_another_day_and_machine(finished, llama, tmp_path):
    folder = copied(finished, tmp_path / "run", "".join(lines(finished)[:2]))
    held = json.loads((folder / "config.json").read_bytes())
    held |= {"created": "1999", "command": "other", "machine": {"gpu": "none"}}
    (folder / "config.json").write_text(json.dumps(held))
    again = start(folder, llama)
    assert again.config == held
    execute(again, llama, made_cases(), arms(*NAMES))
    assert len(again.records()) == 4


def test_a_folder_with_something_else_is_refused(llama, tmp_path):
    (tmp_path / "letter.txt").write_text("Dear Sir")
    with pytest.raises(UsageError, match="is not empty and is not a run"):
        start(tmp_path, llama)
    assert files(tmp_path) == {"letter.txt": b"Dear Sir"}
    with pytest.raises(UsageError, match="is not a run"):
        Run.open(tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        start(tmp_path / "letter.txt" / "run", llama)


def test_a_models_folder_is_refused_and_keeps_its_config(llama, checkpoints, tmp_path):
    config = (checkpoints["llama"] / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    for opened in (Run.open, lambda place: start(place, llama)):
        with pytest.raises(UsageError, match="is not a run"):
            opened(tmp_path)
    assert files(tmp_path) == {"config.json": config}


def test_an_empty_folder_is_accepted(llama, tmp_path):
    (tmp_path / "run").mkdir()
    assert start(tmp_path / "run", llama).records() == []


@pytest.mark.parametrize("damage", ["{\n", "nonsense\n", "\n", '{"case": \n'])
def test_a_damaged_line_is_reported_with_its_number(finished, llama, tmp_path, damage):
    kept = lines(finished)
    folder = copied(finished, tmp_path / "run", "".join([*kept[:2], damage, *kept[3:]]))
    before = files(folder)
    with pytest.raises(KveditError, match=r"Line 3 of .*cases.jsonl is not a record. Remove the line"):
        execute(start(folder, llama), llama, made_cases(), arms(*NAMES))
    assert files(folder) == before
    # And the remedy helps.
    (folder / "cases.jsonl").write_text("".join([*kept[:2], *kept[3:]]))
    execute(start(folder, llama), llama, made_cases(), arms(*NAMES))
    found = {record["case"]: without_times(record) for record in Run.open(folder).records()}
    assert found == {record["case"]: without_times(record) for record in map(json.loads, kept)}


def test_a_damaged_config_is_reported(finished, llama, tmp_path):
    folder = copied(finished, tmp_path / "run", "")
    (folder / "config.json").write_text("{")
    for opened in (Run.open, lambda place: start(place, llama)):
        with pytest.raises(KveditError, match=r"config.json cannot be read"):
            opened(folder)


def test_a_case_that_does_not_fit_is_reported_and_left_out(llama, tmp_path):
    held, left = start(tmp_path / "run", llama), []
    first, last = made_cases(2)
    long = make_case("long", text=TEXT * 5)
    execute(
        held,
        llama,
        [first, long, last],
        arms(*NAMES),
        on_skip=lambda case, why: left.append((case.name, why)),
    )
    assert [record["case"] for record in held.records()] == [first.name, last.name]
    assert [name for name, _ in left] == ["long"]
    assert "1024" in left[0][1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda record: record["arms"].pop("sur@10%"), r"Case fees-10 lacks sur@10%"),
        (
            lambda record: record["arms"]["sur@10%"].update(refreshed=1),
            r"Case fees-10 has 1 refreshed in sur",
        ),
        (lambda record: record["arms"]["shift"].update(kl=float("nan")), r"Case fees-10 has nan"),
        (lambda record: record.update(case="fees-8"), r"Case fees-8 occurs 2 times"),
    ],
)
def test_an_incomplete_run_gets_no_report(finished, tmp_path, wrong, message):
    kept = [json.loads(line) for line in lines(finished)]
    wrong(kept[2])
    folder = copied(finished, tmp_path / "run", "".join(f"{json.dumps(record)}\n" for record in kept))
    with pytest.raises(KveditError, match=message):
        Run.open(folder).finish()
    assert sorted(files(folder)) == ["cases.jsonl", "config.json"]


def test_a_run_without_cases_gets_no_report(llama, tmp_path):
    with pytest.raises(KveditError, match="has no cases"):
        start(tmp_path / "run", llama).finish()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda record: record.pop("suffix"), "suffix"),
        (lambda record: record.update(more=1), "more"),
        (lambda record: record["arms"]["shift"].update(em=1), "em"),
        (lambda record: record["arms"]["shift"].update(refreshed=True), "refreshed"),
        (lambda record: record["arms"]["shift"].update(kl="0"), "kl"),
        (lambda record: record["arms"]["shift"].update(answer=None), "answer"),
        (lambda record: record["arms"]["shift"]["where"].append(0), "where"),
        (lambda record: record["arms"]["shift"]["seconds"].update(decode=None), "decode"),
        (lambda record: record.update(schema_version=2), "schema_version"),
    ],
)
def test_the_schema_rejects_invalid_records(finished, change, where):
    record = json.loads(lines(finished)[0])
    check_case(record)
    change(record)
    with pytest.raises(AssertionError, match=where):
        check_case(record)
