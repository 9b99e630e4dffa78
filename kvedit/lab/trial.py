"""A trial: one case on one model. Every arm starts from the same shifted cache, with the same question.

This module ensures that arms are compared fairly: the same B, the same rows in every layer, the same
question, probes that restore the cache, and separate times for selection and refresh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit.cache.kv import KVCache, States
from kvedit.cache.rows import runs
from kvedit.errors import ContextError
from kvedit.lab.arms import Arm
from kvedit.lab.case import Case
from kvedit.lab.scoring import exact_match, f1
from kvedit.lab.staged import DIRTY, Staged
from kvedit.model.decode import Sampler, decode_, prefill_question_
from kvedit.model.model import Model
from kvedit.names import AUTO
from kvedit.repair.pipeline import Repair
from kvedit.repair.refresh import prefill_, shift_
from kvedit.timing import Timings, waiter

IntArray = npt.NDArray[np.int64]
NOTICE = "Note: a passage was removed from the text above. Do not rely on it. "
"""Text that `erratum` puts before the question; it does not repeat what was removed."""
TENTHS = 10


@dataclass(frozen=True, slots=True)
class View:
    """The answer from a cache.

    Attributes:
        logp: Log-probability of the right answer after the opening, summed over its ids.
        margin: Mean log-probability of the right answer's ids minus that of the stale answer's.
        first: Log-probabilities at the first answer token, `float32 [vocabulary]`.
        ids: Ids of the greedy answer.
        text: Its text.
    """

    logp: float
    margin: float | None
    first: Tensor
    ids: tuple[int, ...]
    text: str


class Clean:
    """A clean prefill of an edited text, and its answer; shared by cases with the same edited text."""

    def __init__(self, model: Model, case: Case, ids: IntArray) -> None:
        self.key = clean_key(case, ids)
        self.timings = Timings(waiter(model.device.type))
        asked = Asked(model, case)
        self.cache = model.new_cache(len(ids) + asked.room)
        with self.timings.measure("prefill", len(ids)):
            for _ in prefill_(model, self.cache, model.to_device(ids)):
                pass
        self.view = asked.view(self.cache, len(ids), self.timings)


def clean_key(case: Case, ids: IntArray) -> tuple[Any, ...]:
    """Return a key that is equal for cases that can share a clean prefill."""
    return ids.tobytes(), case.question, case.opening, case.answers[0], case.stale, case.max_new_tokens


class Asked:
    """A case's question and answers as ids."""

    def __init__(self, model: Model, case: Case) -> None:
        encode, prompt = model.tokenizer.encode_text, model.layout(None)
        self.model, self.case = model, case
        self.query_ids = encode(case.question).ids
        space = " " if case.opening else ""
        self.answer = encode(space + case.answers[0]).ids
        self.stale = None if case.stale is None else encode(space + case.stale).ids
        opening = encode(case.opening).ids if case.opening else np.zeros(0, dtype=np.int64)
        self._ids, self._noticed = (
            np.concatenate([prompt.question_ids(model.tokenizer, text), opening])
            for text in (case.question, NOTICE + case.question)
        )
        longest = max(case.max_new_tokens, len(self.answer), 0 if self.stale is None else len(self.stale))
        self.room = len(self._noticed) + longest

    def view(self, cache: KVCache, start: int, timings: Timings, *, notice: bool = False) -> View:
        """Ask after the first `start` rows, which do not change."""
        model, case = self.model, self.case
        ids = model.to_device(self._noticed if notice else self._ids)
        cache.length = start
        with timings.measure("question", len(ids)):
            logits, _ = prefill_question_(model, cache, ids)
        asked = cache.length
        logp = self._log_probabilities(cache, asked, logits, self.answer)
        margin = None
        if self.stale is not None:
            wrong = self._log_probabilities(cache, asked, logits, self.stale)
            margin = float(logp.mean() - wrong.mean())
        cache.length = asked
        with timings.measure("decode"):
            said = list(decode_(model, cache, logits, Sampler(0.0, 0), case.max_new_tokens, []))
        cache.length = start
        text = model.tokenizer.decode(said)
        first = torch.log_softmax(logits, dim=-1)
        return View(float(logp.sum()), margin, first, tuple(said), text)

    def _log_probabilities(self, cache: KVCache, start: int, logits: Tensor, ids: IntArray) -> Tensor:
        """Return the log-probability of each id, given those before it. `float32 [N]`."""
        model, place = self.model, self.model.to_device(ids)
        rows = logits[None]
        if len(ids) > 1:
            stop = start + len(ids) - 1
            hidden = model.walk(place[:-1], slice(start, stop), cache, outputs=len(ids) - 1).hidden
            rows = torch.cat([rows, model.logits(hidden)])
        cache.length = start
        return torch.log_softmax(rows, dim=-1).gather(1, place[:, None])[:, 0]


class Trial:
    """One case: its stale cache, shifted to the edited text, and the clean prefill for comparison.

    Args:
        model: The model.
        case: The case.
        seed: For random policies.
        executor: How rows are recomputed.
        clean: The clean prefill of the previous case, reused if the text is the same.

    Raises:
        ContextError: Text and answer do not fit the model's context.
    """

    def __init__(
        self,
        model: Model,
        case: Case,
        *,
        seed: int = 0,
        executor: str = AUTO,
        clean: Clean | None = None,
    ) -> None:
        self.model, self.case, self.seed, self.executor = model, case, seed, executor
        self.asked = Asked(model, case)
        self.staged = Staged.of(model, case)
        self.ids, self.rows = self.staged.ids, self.staged.rows
        longest = max(len(self.staged.past.ids), len(self.ids)) + self.asked.room
        if longest > model.context_length:
            raise ContextError(
                f"Case {case.name} needs {longest} tokens, but the model's context has "
                f"{model.context_length}.",
                "Use shorter cases, or choose a model with a longer context.",
            )
        self.timings = Timings(waiter(model.device.type))
        self._shift(self.staged.past.ids)
        if clean is None or clean.key != clean_key(case, self.ids):
            clean = Clean(model, case, self.ids)
        self.clean = clean

    def run(self, arm: Arm) -> dict[str, Any]:
        """Run an arm; return its record for `cases.jsonl`."""
        if arm.name == "reprefill":
            return self._record(arm, self.clean.view, self.clean.timings, None)
        timings = Timings(self.timings.synchronize, {"shift": self.timings.phases["shift"]})
        repair = self.staged.repair(
            self.model, self.cache, self.asked.query_ids, clean=self.clean.cache, timings=timings
        )
        selected = self._select(repair, arm)
        computed = np.union1d(selected, repair.missing)
        try:
            if arm.copies:
                with timings.measure("refresh"):
                    self._put(self.clean.cache, selected)
            # Missing rows are computed afterwards, so they see the copies as they would see refreshed rows.
            repair.refresh(repair.missing if arm.copies else computed, self.executor)
            view = self.asked.view(self.cache, len(self.ids), timings, notice=arm.name == "erratum")
        finally:
            self._put(self._shifted, computed)
        return self._record(arm, view, timings, selected)

    def _select(self, repair: Repair, arm: Arm) -> IntArray:
        if arm.policy is not None:
            return repair.select(arm.options(self.seed, self.executor)).rows
        suffix = self.rows.suffix
        budget = 0 if arm.budget is None else arm.budget.resolve(int(suffix.sum()))
        return np.flatnonzero(suffix) if budget else np.zeros(0, dtype=np.int64)

    def _shift(self, old_ids: IntArray) -> None:
        """Prefill the text before the edit, and shift its rows to their new positions."""
        model = self.model
        dirty = model.new_cache(len(old_ids))
        states = States.concatenate(list(prefill_(model, dirty, model.to_device(old_ids))))
        self.cache = model.new_cache(len(self.ids) + self.asked.room)
        with self.timings.measure("shift"):
            shift_(model, self.cache, self.rows.placed(), {DIRTY: (states.keys, states.values)})
        self.cache.length = len(self.ids)
        self._shifted = self.cache.clone()

    def _put(self, source: KVCache, rows: IntArray) -> None:
        """Copy rows of another cache into the working cache."""
        place = torch.from_numpy(rows).to(self.model.device)
        self.cache.keys[:, :, place] = source.keys[:, :, place]
        self.cache.values[:, :, place] = source.values[:, :, place]

    def _record(self, arm: Arm, view: View, timings: Timings, support: IntArray | None) -> dict[str, Any]:
        case, clean, suffix = self.case, self.clean.view, np.flatnonzero(self.rows.suffix)
        gold = self.staged.gold
        chosen = np.zeros(0, dtype=np.int64) if support is None else support
        hit = int(gold[chosen].sum())
        place = np.searchsorted(suffix, chosen) * TENTHS // max(len(suffix), 1)
        same = next(
            (at for at, pair in enumerate(zip(clean.ids, view.ids, strict=False)) if pair[0] != pair[1]),
            min(len(clean.ids), len(view.ids)),
        )
        divergence = (clean.first.exp() * (clean.first - view.first)).nan_to_num(0.0).sum()
        return {
            "policy": arm.policy,
            "support": arm.support,
            "budget": None if arm.budget is None else arm.budget.text,
            "rows": None if arm.budget is None else arm.budget.resolve(len(suffix)),
            "refreshed": len(chosen),
            "runs": sum(1 for _ in runs(chosen)),
            "em": exact_match(view.text, case.answers, case.dataset),
            "f1": f1(view.text, case.answers, case.dataset),
            "stale_shown": None if case.stale is None else case.stale in view.text,
            "answer": view.text,
            "logp": view.logp,
            "logp_change": view.logp - clean.logp,
            "margin": view.margin,
            "kl": float(divergence),
            "top1": int(view.first.argmax()) == int(clean.first.argmax()),
            "agreement": same / len(clean.ids) if clean.ids else float(not view.ids),
            "seconds": {name: phase.seconds for name, phase in timings.phases.items()},
            "gold_recall": hit / int(gold.sum()) if gold.any() and len(chosen) else None,
            "gold_precision": hit / len(chosen) if gold.any() and len(chosen) else None,
            "where": np.bincount(place, minlength=TENTHS).tolist(),
        }


def run_case(
    model: Model, case: Case, arms: list[Arm], *, seed: int = 0, clean: Clean | None = None
) -> tuple[dict[str, Any], Clean]:
    """Run every arm on a case; return its record, and the clean prefill for the next case."""
    trial = Trial(model, case, seed=seed, clean=clean)
    record = {
        "schema_version": 1,
        "case": case.name,
        "source": case.source,
        "dataset": case.dataset,
        "facts": case.facts,
        "tokens": len(trial.ids),
        "suffix": int(trial.rows.suffix.sum()),
        "stale_answer": case.stale is not None,
        "arms": {arm.name: trial.run(arm) for arm in arms},
    }
    return record, trial.clean
