"""Are the selected rows in the evidence? Needs no forward pass, so hundreds of cases are fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvedit.errors import UsageError
from kvedit.lab.arms import Arm
from kvedit.lab.case import Case
from kvedit.lab.staged import Staged
from kvedit.lab.statistics import Bootstrap
from kvedit.model.model import Model
from kvedit.policies.registry import policy_class

IntArray = npt.NDArray[np.int64]
Record = dict[str, Any]


def precision(model: Model, cases: Iterable[Case], arms: Sequence[Arm], *, seed: int = 0) -> Iterator[Record]:
    """Select rows for each case, and count those in a supporting passage.

    Args:
        model: Provides embeddings and tokenizer.
        cases: Cases with evidence in the suffix; others are skipped.
        arms: Arms with policies that run no probe.
        seed: For random policies.

    Raises:
        UsageError: An arm needs a forward pass.
    """
    for arm in arms:
        if arm.policy is None or policy_class(arm.policy).reads_cache:
            raise UsageError(f"{arm.name} needs a forward pass to select rows.", "Leave it out.")
    for case in cases:
        staged = Staged.of(model, case)
        if not staged.gold.any():
            continue
        repair = staged.repair(model, model.new_cache(0), model.tokenizer.encode_text(case.question).ids)
        yield {
            "schema_version": 1,
            "case": case.name,
            "source": case.source,
            "dataset": case.dataset,
            "suffix": int(staged.rows.suffix.sum()),
            "gold": int(staged.gold.sum()),
            "arms": {arm.name: _arm(repair.select(arm.options(seed)).rows, staged) for arm in arms},
        }


def _arm(selected: IntArray, staged: Staged) -> Record:
    return {"rows": len(selected), "hit": int(staged.gold[selected].sum())}


def summarise_precision(records: Sequence[Record]) -> Record:
    """Return, by dataset and arm, the mean share of selected rows in the evidence, with its interval.

    Cases in which the budget resolves to 0 rows do not count.
    """
    found: Record = {}
    for dataset in sorted({record["dataset"] for record in records}):
        held = [record for record in records if record["dataset"] == dataset]
        found[dataset] = {"cases": len(held), "arms": {}}
        for arm in held[0]["arms"]:
            with_rows = [record for record in held if record["arms"][arm]["rows"]]
            shares = [record["arms"][arm]["hit"] / record["arms"][arm]["rows"] for record in with_rows]
            sources = [(record["dataset"], record["source"]) for record in with_rows]
            found[dataset]["arms"][arm] = (
                Bootstrap(sources).means(np.array(shares)[:, None])[0].record() if with_rows else None
            )
    return found
