"""Behaviour on the default model and real text: which support brings the clean answer back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.niah import CASES, Arms, make_case

from kvedit.model.model import Model

ARMS = {"sur": "2%", "tokens": "2%", "units-random": "2%"}


@pytest.mark.model
@pytest.mark.shared
def test_units_recover_what_shift_loses_and_tokens_do_not(default_model: Model, haystack: Path) -> None:
    losses: dict[str, list[float]] = {"shift": [], **{name: [] for name in ARMS}}
    for seed in range(CASES):
        arms = Arms(make_case(seed, haystack, default_model), default_model, seed)
        losses["shift"].append(arms.loss(None))
        for name, budget in ARMS.items():
            losses[name].append(arms.loss(name, budget))
    mean = {name: float(np.mean(values)) for name, values in losses.items()}
    recovered = {name: 1 - mean[name] / mean["shift"] for name in ARMS}
    print(f"mean change of log p: {mean}; recovered of Shift's: {recovered}")
    assert mean["shift"] > 0.5  # there is something to recover
    assert recovered["sur"] >= 0.80, recovered
    assert recovered["tokens"] <= 0.30, recovered
    assert recovered["units-random"] <= 0.15, recovered
