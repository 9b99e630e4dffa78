"""Figures of a run: intervals, transitions and checks against slow loops; the report as one plain file."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from kvedit.errors import KveditError, UsageError
from kvedit.lab import charts, report
from kvedit.lab.executor import summarise_executor
from kvedit.lab.statistics import Bootstrap, allowance, check, transitions
from kvedit.lab.summary import compare, summarise
from kvedit.repair.budget import Budget

POLICIES = ("sur", "tokens", "window", "infoflow/units")
BUDGETS = ("2%", "5%", "64t")
ARMS = ("shift", *(f"{policy}@{budget}" for policy in POLICIES for budget in BUDGETS), "replay", "reprefill")
PHASES = ("shift", "selection", "refresh", "question", "decode")


def make_arm(random: np.random.Generator, name: str, suffix: int, wrong: bool) -> dict:
    policy, _, budget = name.partition("@")
    policy, _, support = policy.partition("/")
    budget = {"shift": "0", "replay": "full", "reprefill": None, "erratum": None}.get(name, budget)
    rows = None if budget is None else Budget.parse(budget).resolve(suffix)
    skill = {"sur": 0.85, "infoflow": 0.7, "window": 0.5, "tokens": 0.1, "shift": 0.0}.get(policy, 1.0)
    harm = 0.0 if name == "reprefill" else abs(random.normal(0, 0.4)) * (1 - skill) + 1e-3
    seconds = {phase: float(random.uniform(0.01, 0.1)) for phase in PHASES[0 if budget else 3 :]}
    if budget:
        seconds["refresh"] += (rows or 0) / 1000
    else:
        seconds["prefill"] = suffix / 1000
    return {
        "policy": policy if "@" in name else None,
        "support": support or None,
        "budget": budget,
        "rows": rows,
        "refreshed": rows or 0,
        "runs": min(rows or 0, int(random.integers(1, 6))),
        "em": bool(random.random() < 0.3 + 0.6 * skill),
        "f1": float(random.random()),
        "stale_shown": bool(random.random() < 0.2) if wrong else None,
        "answer": "8205",
        "logp": float(-harm - 0.1),
        "logp_change": float(-harm),
        "margin": float(5 - 4 * harm) if wrong else None,
        "kl": float(harm / 10),
        "top1": bool(random.random() < 0.9),
        "agreement": float(random.random()),
        "seconds": seconds,
        "gold_recall": float(random.random()) if rows else None,
        "gold_precision": float(random.random()) if rows else None,
        "where": random.multinomial(rows or 0, [0.1] * 10).tolist(),
    }


def make_records(*, seed: int = 0, sources: int = 12, datasets=("niah",), placements: int = 2, arms=ARMS):
    random = np.random.default_rng(seed)
    records = []
    for dataset in datasets:
        for source in range(sources):
            for placement in range(placements):
                suffix, wrong = int(random.integers(900, 1500)), bool(source % 3)
                records.append(
                    {
                        "schema_version": 1,
                        "case": f"{dataset}-{source:03}-{placement}",
                        "source": f"{source:03}",  # the same names in each dataset, on purpose
                        "dataset": dataset,
                        "facts": {"placement": placement},
                        "tokens": suffix + 200,
                        "suffix": suffix,
                        "stale_answer": wrong,
                        "arms": {name: make_arm(random, name, suffix, wrong) for name in arms},
                    }
                )
    return records


CONFIG = {"bench": "niah", "arms": list(ARMS), "model": {"name": "tiny", "device": "cpu"}}


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return make_records()


@pytest.fixture(scope="module")
def summary(records) -> dict:
    return summarise(records)


def by_loops(sources, top, bottom, draws, seed):
    """The same draws, one source after the other."""
    names = list(dict.fromkeys(sources))
    found = []
    for drawn in np.random.default_rng(seed).integers(len(names), size=(draws, len(names))).tolist():
        above = below = 0.0
        for number in drawn:
            for source, one, other in zip(sources, top, bottom, strict=True):
                if source == names[number] and not math.isnan(one + other):
                    above, below = above + one, below + other
        if below:
            found.append(above / below)
    return np.percentile(found, [2.5, 97.5])


def values_of(records, arm, field):
    return [math.nan if (value := record["arms"][arm][field]) is None else value for record in records]


def approx(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12)


# --- intervals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 7])
def test_an_interval_equals_a_loop_that_draws_whole_sources(seed):
    random = np.random.default_rng(3)
    sources = ["a", "b", "b", "c", "c", "c", "d", "e", "f", "a"]
    top, bottom = random.normal(size=(10, 2)), random.uniform(0.5, 1, size=(10, 2))
    top[4, 1] = bottom[0, 1] = math.nan
    bootstrap = Bootstrap(sources, draws=400, seed=seed)
    for at, estimate in enumerate(bootstrap.ratios(top, bottom)):
        known = ~np.isnan(top[:, at] + bottom[:, at])
        assert estimate.value == approx(top[known, at].sum() / bottom[known, at].sum())
        low, high = by_loops(sources, top[:, at], bottom[:, at], 400, seed)
        assert (estimate.low, estimate.high) == (approx(low), approx(high))
    for at, estimate in enumerate(bootstrap.means(top)):
        low, high = by_loops(sources, top[:, at], np.ones(10), 400, seed)
        assert estimate.value == approx(np.nanmean(top[:, at]))
        assert (estimate.low, estimate.high) == (approx(low), approx(high))


def test_an_interval_of_independent_cases_matches_the_textbook():
    values = np.random.default_rng(0).normal(5, 2, size=(400, 1))
    estimate = Bootstrap(range(400)).means(values)[0]
    aside = 1.96 * values.std() / math.sqrt(400)
    assert estimate.low == pytest.approx(values.mean() - aside, abs=0.1 * aside)
    assert estimate.high == pytest.approx(values.mean() + aside, abs=0.1 * aside)


def test_placements_that_repeat_their_source_add_no_certainty():
    values = np.random.default_rng(0).normal(size=(40, 1))
    alone = Bootstrap(range(40)).means(values)[0]
    tripled = Bootstrap(np.repeat(range(40), 3).tolist()).means(np.repeat(values, 3, axis=0))[0]
    loose = Bootstrap(range(120)).means(np.repeat(values, 3, axis=0))[0]
    assert (tripled.low, tripled.high) == (approx(alone.low), approx(alone.high))
    assert loose.high - loose.low < 0.7 * (alone.high - alone.low)


def test_unknown_values_and_intervals_stay_empty():
    one = Bootstrap(["a", "a"]).means(np.array([[1.0], [2.0]]))[0]
    assert (one.value, one.low, one.high) == (1.5, None, None)  # one source says nothing of others
    none = Bootstrap(["a", "b"]).means(np.full((2, 1), math.nan))[0]
    assert (none.value, none.low) == (None, None)
    bottom = np.array([[5.0], [-4.0], [-3.0], [4.0]])
    wild = Bootstrap("abcd").ratios(np.ones((4, 1)), bottom)[0]
    assert (wild.value, wild.low) == (2.0, None)  # the denominator may as well be zero


# --- transitions and checks ----------------------------------------------------------------------


def test_transitions_add_up_to_the_change_in_right_answers():
    random = np.random.default_rng(5)
    before, after = random.random(50) < 0.5, random.random(50) < 0.7
    found = transitions(before, after)
    slow = {"repaired": 0, "regressed": 0, "both_right": 0, "both_wrong": 0}
    for was, is_now in zip(before, after, strict=True):
        if was:
            slow["both_right" if is_now else "regressed"] += 1
        else:
            slow["repaired" if is_now else "both_wrong"] += 1
    assert found == slow
    assert min(found.values()) > 0
    assert found["repaired"] - found["regressed"] == after.sum() - before.sum()


@pytest.mark.parametrize("budget", ["0", "2%", "2.5%", "29%", "100%", "64t", "2000t", "full"])
def test_the_checker_counts_an_allowance_as_the_budget_does(budget):
    for suffix in (0, 1, 49, 50, 99, 100, 1290):
        assert allowance(budget, suffix) == Budget.parse(budget).resolve(suffix)


def test_an_allowance_is_exact_despite_floating_point():
    assert 0.29 * 100 < 29
    assert allowance("29%", 100) == 29


def test_a_whole_run_passes_its_checks(records):
    check(records, CONFIG)
    check(make_records(datasets=("hotpotqa", "iirc"), placements=3), CONFIG)


SPOILED = {
    "lacks tokens@5%": lambda r: r[3]["arms"].pop("tokens@5%"),
    "has extra": lambda r: [record["arms"].update(extra=record["arms"]["shift"]) for record in r],
    "refreshed in sur@2%": lambda r: r[3]["arms"]["sur@2%"].update(refreshed=1),
    "rows in sur@5%": lambda r: r[3]["arms"]["sur@5%"].update(rows=1),
    "rows in replay": lambda r: r[3]["arms"]["replay"].update(rows=1),
    "occurs 2 times": lambda r: r.append(copy.deepcopy(r[0])),
    "has 1 cases": lambda r: r.pop(),
    "has nan at arms.shift.kl": lambda r: r[3]["arms"]["shift"].update(kl=math.nan),
    "has -inf at arms.replay.logp": lambda r: r[3]["arms"]["replay"].update(logp=-math.inf),
    "schema version 2": lambda r: r[3].update(schema_version=2),
    "no cases": lambda r: r.clear(),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_run_with_a_fault_fails_its_check_and_says_where(records, what):
    spoiled = copy.deepcopy(records)
    SPOILED[what](spoiled)
    with pytest.raises(KveditError, match=re.escape(what)) as error:
        check(spoiled, CONFIG)
    assert error.value.remedy


def test_a_source_with_two_cases_of_one_placement_is_found(records):
    spoiled = copy.deepcopy(records)
    spoiled[1]["facts"]["placement"] = 0
    with pytest.raises(KveditError, match=r"Source 000 of niah|Source 001 of niah"):
        check(spoiled, CONFIG)


# --- summary -------------------------------------------------------------------------------------


def test_the_summary_of_an_arm_equals_plain_loops(records, summary):
    held, arms = summary["arms"]["sur@5%"], [record["arms"]["sur@5%"] for record in records]
    right = sum(arm["em"] for arm in arms)
    assert (held["em"]["right"], held["em"]["cases"]) == (right, 24)
    assert held["em"]["value"] == approx(right / 24)
    shown = [arm["stale_shown"] for arm in arms if arm["stale_shown"] is not None]
    assert held["stale_shown"] == {"shown": sum(shown), "cases": 16}
    for field in ("f1", "kl", "agreement", "rows", "refreshed", "runs", "gold_recall", "gold_precision"):
        assert held[field] == approx(sum(arm[field] for arm in arms) / 24)
    assert held["top1"] == approx(sum(arm["top1"] for arm in arms) / 24)
    totals = [sum(arm["seconds"].values()) for arm in arms]
    clean = [sum(record["arms"]["reprefill"]["seconds"].values()) for record in records]
    assert held["latency_s"] == approx(sorted(totals)[11] / 2 + sorted(totals)[12] / 2)
    assert held["latency_ratio"]["value"] == approx(sum(totals) / sum(clean))
    assert held["seconds"]["refresh"] == approx(np.median([arm["seconds"]["refresh"] for arm in arms]))
    assert held["where"] == [sum(arm["where"][tenth] for arm in arms) for tenth in range(10)]
    assert list(summary["arms"]["reprefill"]["seconds"]) == ["question", "decode", "prefill"]


def test_recovery_and_its_interval_equal_plain_loops(records, summary):
    sources = [record["source"] for record in records]
    harm, shifted = (np.abs(values_of(records, arm, "logp_change")) for arm in ("tokens@2%", "shift"))
    held = summary["arms"]["tokens@2%"]["recovery"]
    assert held["value"] == approx(1 - harm.sum() / shifted.sum())
    low, high = by_loops(sources, harm, shifted, 10_000, 0)
    assert (held["low"], held["high"]) == (approx(1 - high), approx(1 - low))


def test_margins_are_pooled_over_cases_with_a_stale_answer(records, summary):
    known = [record for record in records if record["stale_answer"]]
    assert 0 < len(known) < len(records)
    arm, shifted, clean = (
        sum(values_of(known, name, "margin")) for name in ("window@2%", "shift", "reprefill")
    )
    held = summary["arms"]["window@2%"]["margin_recovery"]
    assert held["value"] == approx((arm - shifted) / (clean - shifted))
    assert held["low"] < held["value"] < held["high"]


def test_shift_recovers_nothing_and_reprefill_everything(summary):
    for field in ("recovery", "margin_recovery"):
        assert summary["arms"]["shift"][field] == {"value": 0, "low": 0, "high": 0}
        assert summary["arms"]["reprefill"][field] == {"value": 1, "low": 1, "high": 1}
    assert summary["arms"]["reprefill"]["latency_ratio"]["value"] == 1


def test_arms_are_compared_with_shift_reprefill_and_controls(records, summary):
    bases = {name: list(arm["against"]) for name, arm in summary["arms"].items()}
    assert bases["sur@2%"] == ["shift", "reprefill", "tokens@2%", "window@2%"]
    assert bases["tokens@2%"] == ["shift", "reprefill"]
    assert (bases["shift"], bases["reprefill"]) == (["reprefill"], ["shift"])
    held = summary["arms"]["sur@2%"]["against"]["tokens@2%"]
    ours, base = (np.abs(values_of(records, arm, "logp_change")) for arm in ("sur@2%", "tokens@2%"))
    assert held["logp_change"]["value"] == approx((ours - base).mean())
    low, high = by_loops([record["source"] for record in records], ours - base, np.ones(24), 10_000, 0)
    assert (held["logp_change"]["low"], held["logp_change"]["high"]) == (approx(low), approx(high))
    right = [np.array(values_of(records, arm, "em"), dtype=bool) for arm in ("tokens@2%", "sur@2%")]
    assert held["transitions"] == transitions(*right)
    assert held["em"]["value"] == approx((right[1].sum() - right[0].sum()) / 24)


def test_equal_source_names_in_two_datasets_stay_apart():
    records = make_records(datasets=("hotpotqa", "iirc"), placements=3, sources=5)
    summary = summarise(records)
    assert (summary["cases"], summary["sources"]) == (30, 10)
    alone = summarise([record for record in records if record["dataset"] == "iirc"])
    assert summary["datasets"]["iirc"]["arms"] == alone["arms"]
    assert "datasets" not in alone
    pooled = [part["arms"]["sur@2%"]["em"]["right"] for part in summary["datasets"].values()]
    assert summary["arms"]["sur@2%"]["em"]["right"] == sum(pooled)


def test_a_summary_is_plain_json_and_the_same_each_time(records, summary):
    text = json.dumps(summary, allow_nan=False)
    assert json.loads(text) == summary
    assert json.dumps(summarise(records)) == text


def test_a_run_without_shift_and_reprefill_has_a_summary():
    summary = summarise(make_records(arms=("sur@2%", "tokens@2%")))
    assert summary["arms"]["sur@2%"]["recovery"]["value"] is None
    assert summary["arms"]["sur@2%"]["latency_ratio"]["value"] is None
    assert list(summary["arms"]["sur@2%"]["against"]) == ["tokens@2%"]


# --- two runs ------------------------------------------------------------------------------------


def test_two_runs_are_paired_by_case_and_arm_in_any_order(records):
    other = [record for record in make_records(seed=9) if record["case"] != "niah-000-0"][::-1]
    for record in other:
        record["arms"]["new@2%"] = record["arms"].pop("tokens@2%")
    found = compare(records[:-1], other)
    assert found["cases"] == 22
    assert (found["cases_only_in_first"], found["cases_only_in_second"]) == (["niah-000-0"], ["niah-011-1"])
    assert (found["arms_only_in_first"], found["arms_only_in_second"]) == (["tokens@2%"], ["new@2%"])
    assert "tokens@2%" not in found["arms"]
    theirs = {record["case"]: record["arms"]["sur@2%"] for record in other}
    pairs = [(record["arms"]["sur@2%"], theirs[record["case"]]) for record in records[1:-1]]
    held = found["arms"]["sur@2%"]
    assert held["f1"]["value"] == approx(sum(b["f1"] - a["f1"] for a, b in pairs) / 22)
    assert held["transitions"]["repaired"] == sum(b["em"] and not a["em"] for a, b in pairs)
    assert held["transitions"]["regressed"] == sum(a["em"] and not b["em"] for a, b in pairs)


def test_a_run_does_not_differ_from_itself(records):
    for held in compare(records, records)["arms"].values():
        assert held["logp_change"] == {"value": 0, "low": 0, "high": 0}
        assert held["latency_ratio"]["value"] == 1
        assert held["transitions"]["repaired"] == held["transitions"]["regressed"] == 0


def test_runs_that_share_nothing_cannot_be_compared(records):
    with pytest.raises(UsageError, match="have no case in common"):
        compare(records, make_records(datasets=("iirc",)))
    with pytest.raises(UsageError, match="have no arm in common"):
        compare(records, make_records(arms=("other@2%",)))
    with pytest.raises(KveditError, match="no cases"):
        compare(records, [])


# --- the page ------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects the tags and the text of a page, and fails where tags do not close in order."""

    VOID = frozenset({"meta", "circle", "line", "rect", "polygon"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in self.VOID
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def measured(context: int, rows: int, runs: int, executor: str, refresh_s: float) -> list[dict]:
    """Three rounds of one measurement of the executor bench, the middle one as given."""
    return [
        {
            "context": context,
            "rows": rows,
            "runs": runs,
            "budget": f"{rows}t",
            "executor": executor,
            "suffix": 90,
            "token_layers": 3,
            "pairs": 30,
            "replay_token_layers": 30,
            "replay_pairs": 90,
            "round": number,
            "refresh_s": refresh_s * part,
            "recovery_s": 1.0,
        }
        for number, part in enumerate((0.9, 1.0, 1.1))
    ]


EXECUTORS = [
    record
    for context, scale in ((1000, 1.0), (2000, 3.0))
    for runs in (1, 8, 64)
    for executor, took in (
        ("interval", 0.11 * runs),
        ("packed", 0.1 * scale),
        *([("direct", 0.05)] * (runs == 1)),
    )
    for record in measured(context, 64, runs, executor, took)
]


MANY = ("shift", *(f"p{letter}/rows@2%" for letter in "abcdefghi"))
PAGES = {
    "niah": {},
    "natural": {"datasets": ("hotpotqa", "iirc"), "placements": 3},
    "bare": {"sources": 1, "arms": ("sur@2%",)},
    "many": {"arms": MANY},
}


def page_of(name: str) -> str:
    if name == "executor":
        return report.executor_html({"bench": name}, EXECUTORS, {"shapes": summarise_executor(EXECUTORS)})
    records = make_records(**{"sources": 3, **PAGES[name]})
    return report.html({**CONFIG, "bench": name}, records, summarise(records))


@pytest.mark.parametrize("name", [*PAGES, "executor"])
def test_a_page_is_well_formed_and_self_contained(name):
    text = page_of(name)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "image", "use"} & set(page.tags)
    assert not {"src", "href", "srcset"} & {key for key, _ in page.attributes}
    assert not re.search(r"https?:|//|url\(|@import|\bon\w+=", text)
    assert "svg" in page.tags
    assert not re.search(r"\bnan\b|\binf\b|None", text)


@pytest.mark.parametrize("name", ARMS)
def test_a_page_names_every_arm_in_each_table_of_arms(records, summary, name):
    text = report.html(CONFIG, records, summary)
    assert text.count(f"<th scope='row'>{name}</th>") >= 2


def test_a_page_shows_counts_before_percent(records, summary):
    held = summary["arms"]["sur@2%"]["em"]
    text = report.html(CONFIG, records, summary)
    assert f"<td>{held['right']}/24 · {100 * held['right'] / 24:.1f} %<small>[" in text


def test_all_text_is_escaped():
    evil = "<b>&\"'"
    records = make_records(sources=3, arms=("shift", f"{evil}@2%"))
    config = {"bench": evil, "model": {"name": evil}, "options": {evil: evil}}
    text = report.html(config, records, summarise(records))
    assert "<b>" not in text
    assert Page(text).text.count(evil) > 8
    shapes = summarise_executor([*measured(99, 8, 1, evil, 1.0), *measured(99, 8, 1, "packed", 1.0)])
    assert "<b>" not in report.executor_html({"bench": "executor"}, [], {"shapes": shapes})


def test_the_executors_page_keeps_contexts_apart():
    text = Page(page_of("executor")).text
    assert "1,000 tokens, 64 rows: 70.40 ×" in text  # 64 runs
    assert "2,000 tokens, 64 rows: 23.47 ×" in text
    assert "1,000 tokens, 64 rows: 1.10 ×" in text  # one run
    assert "7,040.0" in text  # the middle of three rounds, in ms
    assert "16.1 ×" in text
    assert "33.3 %" in text  # of a replay's pairs


def make_exchanged() -> list[dict]:
    """Records of the location bench: four of each question."""
    records = make_records(datasets=("hotpotqa", "iirc"), placements=4, sources=5)
    for record in records:
        number = record["facts"]["placement"]
        record["facts"] = {"side": ("before", "after")[number % 2], "tail": ("short", "long")[number // 2]}
    return records


def test_places_and_exchanged_pairs_equal_plain_loops():
    records = make_exchanged()
    summary = summarise(records)
    assert len(summary["places"]) == 4
    place = summary["places"]["after the edit, long tail"]
    alone = [record for record in records if record["facts"] == {"side": "after", "tail": "long"}]
    assert place == {name: summarise(alone)[name] for name in ("cases", "sources", "arms")}
    for tail in ("short", "long"):
        gaps = []
        for before, after in itertools.product(records, repeat=2):
            twins = all(before[name] == after[name] for name in ("dataset", "source"))
            sides = (before["facts"], after["facts"])
            if twins and sides == ({"side": "before", "tail": tail}, {"side": "after", "tail": tail}):
                harms = [abs(one["arms"]["sur@2%"]["logp_change"]) for one in (before, after)]
                gaps.append(harms[0] - harms[1])
        assert len(gaps) == 10
        found = summary["exchanged"][tail]["sur@2%"]["logp_change"]
        assert found["value"] == approx(np.mean(gaps))
        assert found["low"] < found["value"] < found["high"]
    text = Page(report.html({**CONFIG, "bench": "location"}, records, summary)).text
    assert "after the edit, long tail" in text
    assert "Exchanged" in text


def test_a_run_of_one_place_has_no_places():
    summary = summarise(make_records(placements=1))
    assert "places" not in summary
    assert "exchanged" not in summary


def test_surplus_policies_get_another_chart_with_equal_axes():
    arms = ("shift", *(f"p{chr(97 + at)}@2%" for at in range(charts.STYLES + 1)), "replay", "reprefill")
    records = make_records(sources=4, arms=arms)
    text = report.html(CONFIG, records, summarise(records))
    drawn = re.findall(r"Exact match by budget \(\d of 2\)</figcaption>\n(.*?)</svg>", text, re.DOTALL)
    assert len(drawn) == 2
    axes = [re.findall(r'class="tick"[^>]*>([^<]*)<', chart) for chart in drawn]
    assert axes[0] == axes[1]


@pytest.mark.parametrize(
    ("values", "first", "last"),
    [
        ([0, 1], 0, 1),
        ([0.219, 0.95], 0.2, 1),
        ([0.56, 0.58], 0.56, 0.58),
        ([-0.3, 1], -0.5, 1),
        ([5, 5], 5, 6),
    ],
)
def test_a_linear_axis_has_round_ticks_around_its_values(values, first, last):
    axis = charts.linear("", values, percent=True)
    assert (axis.low, axis.high) == (approx(first), approx(last))
    assert axis.ticks[0][0] == axis.low
    assert 2 <= len(axis.ticks) <= 8
    for value, text in axis.ticks:  # the texts do not round
        assert float(re.sub("[ %,]", "", text).replace(charts.MINUS, "-")) == approx(100 * value)


@pytest.mark.parametrize("values", [[1, 1], [37, 420], [0.9, 80_000], [1000, 1000]])
def test_a_logarithmic_axis_covers_its_values_with_few_ticks(values):
    axis = charts.logarithmic("", values)
    assert axis.low <= min(values) <= max(values) <= axis.high
    assert 2 <= len(axis.ticks) <= 8
    assert axis.place(axis.low, 10, 90) == approx(10)
    assert axis.place(math.sqrt(axis.low * axis.high), 10, 90) == approx(50)
    assert axis.place(axis.high * 2, 10, 90) == approx(90)


def test_labels_of_bars_and_ticks_stay_apart_and_inside():
    names = ["a" * 60, "infoflow/units@5%"]
    drawn = charts.bars("", [(name, (3, 0, 5)) for name in names], [("x", "c0"), ("y", "c1"), ("z", "c2")])
    assert "…" in drawn
    rows = re.findall(r'<rect class="\S+" x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn)
    assert len(rows) == 4  # nothing is drawn for a zero
    assert max(float(x) + float(width) for x, width in rows) == pytest.approx(charts.WIDTH)
    assert min(float(x) for x, _ in rows) >= charts.WIDTH / 2


def test_a_point_beyond_an_axis_is_drawn_hollow_at_its_end():
    series = [charts.Series("one", 0, [charts.Point(0, -3.0), charts.Point(1, 0.5)])]
    drawn = charts.plot("", series, charts.categories("", ["a", "b"]), charts.linear("", [-1, 1]))
    marks = re.findall(r'<circle class="c0 mark( hollow)?" cx="[\d.]+" cy="([\d.]+)"', drawn)
    bottom = charts.HEIGHT - charts.BOTTOM
    assert [(bool(hollow), float(y) == bottom) for hollow, y in marks] == [(True, True), (False, False)]
