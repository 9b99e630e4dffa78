"""Schemas of the files of a run: `config.json`, lines of `cases.jsonl`, `summary.json`.

They use no test library, so that `benchmarks/smoke.py` can check files too. A shape is

    a type            a value of that type; `float` includes integers, and numbers exclude true and false
    None              null
    (a, b)            one of several shapes
    [shape]           a list of such values
    {str: shape}      an object with any keys
    {"key": shape}    an object with exactly these keys
    {}                any object
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def each(shape: Any, *names: str) -> dict[str, Any]:
    """Return an object shape in which several keys have the same shape."""
    return {name: shape for name in names}


INTERVAL = {"value": (None, float), "low": (None, float), "high": (None, float)}
SPREAD = {"median": float, "min": float, "max": float}
TRANSITIONS = {"repaired": int, "regressed": int, "both_right": int, "both_wrong": int}
WITH_CASES = ("niah", "qa", "location", "geometry")

CONFIG = {
    "schema_version": int,
    "bench": str,
    "arms": [str],
    "options": {},
    "model": {
        "name": str,
        "dtype": str,
        "device": str,
        "config": str,
        "weights": str,
        "tensor_samples": str,
        "tokenizer": str,
        "chat_template": str,
    },
    "versions": {"kvedit": str, "torch": str, "transformers": str, "tokenizers": str, "numpy": str},
    "created": str,
    "command": str,
    "machine": {"platform": str, "processor": str, "cpus": int, "threads": int, "gpu": (None, str)},
}

ARM = {
    "policy": (None, str),
    "support": (None, str),
    "budget": (None, str),
    "rows": (None, int),
    "refreshed": int,
    "runs": int,
    "em": bool,
    "f1": float,
    "stale_shown": (None, bool),
    "answer": str,
    "logp": float,
    "logp_change": float,
    "margin": (None, float),
    "kl": float,
    "top1": bool,
    "agreement": float,
    "seconds": {str: float},
    "gold_recall": (None, float),
    "gold_precision": (None, float),
    "where": [int],
}
CASE = {
    "schema_version": int,
    "case": str,
    "source": str,
    "dataset": str,
    "facts": {},
    "tokens": int,
    "suffix": int,
    "stale_answer": bool,
    "arms": {str: ARM},
}
LINES: dict[str, Any] = {
    **each(CASE, *WITH_CASES),
    "executor": {
        "schema_version": int,
        **each(str, "budget", "executor"),
        **each(int, "context", "suffix", "rows", "runs", "round"),
        **each(float, "shift_s", "selection_s", "refresh_s", "recovery_s"),
        **each(int, "token_layers", "pairs", "replay_token_layers", "replay_pairs"),
    },
    "numerics": {
        "schema_version": int,
        **each(int, "context", "case", "chunk", "threads", "positions"),
        **each(str, "name", "dtype", "executor", "reference"),
        **each(float, "logit_max", "logit_mean", "exact_disagreement", "argmax_disagreement"),
        "sequence_differs": bool,
        "first_difference": (None, int),
    },
    "evidence": {
        "schema_version": int,
        **each(str, "case", "source", "dataset"),
        **each(int, "suffix", "gold"),
        "arms": {str: {"rows": int, "hit": int}},
    },
}

DIFFERENCE = {
    **each(INTERVAL, "em", "f1", "kl", "agreement", "logp_change", "latency_ratio"),
    "transitions": TRANSITIONS,
}
ARM_SUMMARY = {
    **each((None, str), "policy", "support", "budget"),
    "cases": int,
    "em": {"right": int, "cases": int, **INTERVAL},
    **each(INTERVAL, "logp_change", "recovery", "margin_recovery", "latency_ratio"),
    "stale_shown": {"shown": int, "cases": int},
    "top1": float,
    **each(float, "f1", "kl", "agreement", "refreshed", "runs"),
    **each((None, float), "rows", "gold_recall", "gold_precision"),
    "latency_s": float,
    "seconds": {str: float},
    "where": [int],
    "against": {str: DIFFERENCE},
}
TABLE = {"cases": int, "sources": int, "arms": {str: ARM_SUMMARY}}
SUMMARIES: dict[str, Any] = {
    **each({"draws": int, "seed": int, **TABLE}, *WITH_CASES),
    "executor": {
        "shapes": [
            {
                "budget": str,
                **each(int, "context", "rows", "runs", "suffix", "token_layers", "pairs"),
                **each(float, "token_layers_share", "pairs_share"),
                **each(
                    {str: SPREAD}, "refresh_s", "recovery_s", "refresh_over_packed", "recovery_over_packed"
                ),
            }
        ]
    },
    "numerics": {
        "paths": [
            {
                **each(str, "name", "reference"),
                "cases": int,
                **each(float, "logit_max", "logit_mean", "exact_disagreement"),
                **each(float, "argmax_disagreement", "sequence_disagreement"),
                "first_difference": (None, int),
            }
        ]
    },
    "evidence": {"datasets": {str: {"cases": int, "arms": {str: (None, INTERVAL)}}}},
}
COMPARISON = {
    "schema_version": int,
    "cases": int,
    "sources": int,
    **each([str], "cases_only_in_first", "cases_only_in_second", "arms_only_in_first", "arms_only_in_second"),
    "arms": {str: DIFFERENCE},
}


def check_case(record: Any, bench: str = "niah") -> None:
    """Check a line of `cases.jsonl`; raise `AssertionError` with the path of a wrong value."""
    _check(record, LINES[bench], "record")
    assert record["schema_version"] == 1, "record.schema_version is not 1"
    if bench in WITH_CASES:
        for name, arm in record["arms"].items():
            assert len(arm["where"]) == 10, f"{name}: where has {len(arm['where'])} parts"
            assert sum(arm["where"]) == arm["refreshed"], f"{name}: where and refreshed differ"


def check_config(config: Any) -> None:
    """Check `config.json`; raise `AssertionError` with the path of a wrong value."""
    _check(config, CONFIG, "config")
    assert config["schema_version"] == 1, "config.schema_version is not 1"


def check_summary(summary: Any, bench: str = "niah") -> None:
    """Check `summary.json`; raise `AssertionError` with the path of a wrong value."""
    shape = {"schema_version": int, **SUMMARIES[bench]}
    splits = {"datasets": {str: TABLE}, "places": {str: TABLE}, "exchanged": {str: {str: DIFFERENCE}}}
    shape |= {name: of for name, of in splits.items() if bench in WITH_CASES and name in summary}
    _check(summary, shape, "summary")
    assert summary["schema_version"] == 1, "summary.schema_version is not 1"


def check_comparison(found: Any) -> None:
    """Check the output of `kvedit bench compare --json`."""
    _check(found, COMPARISON, "comparison")


def check_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Check all files of a run's folder; return its config, records and summary."""
    config = json.loads((folder / "config.json").read_bytes())
    records = [json.loads(line) for line in (folder / "cases.jsonl").read_bytes().splitlines()]
    summary = json.loads((folder / "summary.json").read_bytes())
    page = (folder / "report.html").read_text(encoding="utf-8")
    check_config(config)
    assert records, "cases.jsonl is empty"
    for record in records:
        check_case(record, config["bench"])
    check_summary(summary, config["bench"])
    assert page.startswith("<!doctype html>"), "report.html is no page"
    assert page.rstrip().endswith("</html>"), "report.html is cut"
    return config, records, summary


def _check(value: Any, shape: Any, where: str) -> None:
    if isinstance(shape, tuple):
        assert any(_fits(value, one) for one in shape), f"{where} is {value!r}"
    elif shape is None:
        assert value is None, f"{where} is {value!r}, not null"
    elif isinstance(shape, list):
        assert isinstance(value, list), f"{where} is {value!r}, no list"
        for at, part in enumerate(value):
            _check(part, shape[0], f"{where}[{at}]")
    elif isinstance(shape, dict):
        assert isinstance(value, dict), f"{where} is {value!r}, no object"
        if str not in shape and shape:
            assert set(value) == set(shape), f"{where} differs in {sorted(set(value) ^ set(shape))}"
        for key, part in value.items():
            if shape:
                _check(part, shape[str if str in shape else key], f"{where}.{key}")
    else:
        kinds = (int, float) if shape is float else (shape,)
        right = isinstance(value, kinds) and (shape is bool or not isinstance(value, bool))
        assert right, f"{where} is {value!r}, no {shape.__name__}"


def _fits(value: Any, shape: Any) -> bool:
    try:
        _check(value, shape, "")
    except AssertionError:
        return False
    return True
