"""Ask: the steps from a question to an answer. Shift, select, refresh, question, decode, keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvedit.cache import KVCache, States
from kvedit.decode import Sampler, TextStream, decode_, prefill_question_
from kvedit.errors import ModelError, UsageError
from kvedit.model import Model
from kvedit.policies import Evidence, Policy, policy_named
from kvedit.prompt import check_context
from kvedit.refresh import EXECUTORS, choose_executor, refresh_, shift_
from kvedit.reports import Answer
from kvedit.rows import runs
from kvedit.select import Budget, select
from kvedit.timing import Timings, waiter
from kvedit.units import unit_of_rows

if TYPE_CHECKING:
    from kvedit.session import Session

DEFAULT_NEW_TOKENS = 256
IntArray = npt.NDArray[np.int64]


class Asking:
    """One question to one session.

    Args:
        session: With its model.
        timings: Gets the phases.
        on_phase: Gets the name of each phase as it begins.
    """

    def __init__(self, session: Session, timings: Timings, on_phase: Callable[[str], None]) -> None:
        if session.model is None:
            raise ModelError("The session has no model yet.", "Call Session.use_model first.")
        self.session = session
        self.model: Model = session.model
        self.timings = timings
        self.timings.synchronize = waiter(self.model.device.type)
        self.on_phase = on_phase

    def run(
        self,
        question: str,
        budget: Budget,
        policy_name: str,
        executor_name: str,
        max_new_tokens: int | None,
        temperature: float,
        seed: int,
        keep: bool,
        on_text: Callable[[str], None],
    ) -> Answer:
        """Answer; see `Session.ask`."""
        session, model, timings = self.session, self.model, self.timings
        policy = check_options(policy_name, executor_name, max_new_tokens, temperature, seed)
        question_ids = session.prompt.question_ids(session.tokenizer, question)
        limit = self._limit(len(question_ids), max_new_tokens)
        total, suffix = len(session.rows), int(session.rows.suffix.sum())
        replay_s = session.replay_s

        cache = model.new_cache(total + len(question_ids) + limit)
        self._shift(cache)
        budget_rows = budget.resolve(suffix)
        support = self._select(cache, policy, question, budget_rows, seed)
        missing = np.flatnonzero(session.rows.missing)
        rows = np.union1d(support, missing)
        executor, parts = self._refresh(cache, rows, executor_name)
        self.on_phase("question")
        with timings.measure("question", len(question_ids)):
            logits = prefill_question_(model, cache, model.to_device(question_ids))
        ids, text, reason = self._decode(cache, logits, Sampler(temperature, seed), limit, on_text)
        kept = keep and bool(parts)
        if kept:
            self.on_phase("save")
            with timings.measure("save", len(rows)):
                session.keep(parts)
        return Answer(
            text=text,
            ids=tuple(ids),
            finish_reason=reason,
            policy=policy_name,
            executor=executor,
            seed=seed,
            temperature=temperature,
            budget=budget.text,
            budget_rows=budget_rows,
            suffix=suffix,
            missing=len(missing),
            refreshed=len(support),
            reused=total - len(rows),
            runs=sum(1 for _ in runs(rows)),
            tokens=total,
            timings=timings,
            first_token_s=timings.seconds("shift", "selection", "refresh", "question"),
            replay_s=replay_s,
            kept=kept,
        )

    def _limit(self, question: int, max_new_tokens: int | None) -> int:
        """Say how many ids the answer may have, or refuse."""
        tokens, context = len(self.session.rows), self.model.context_length
        if max_new_tokens is None:
            check_context(tokens, question + 1, "the question with one token of answer", context)
            return min(DEFAULT_NEW_TOKENS, context - tokens - question)
        check_context(tokens, question + max_new_tokens, "question and answer", context)
        return max_new_tokens

    def _shift(self, cache: KVCache) -> None:
        self.on_phase("shift")
        session = self.session
        session.read_segments()
        with self.timings.measure("shift"):
            gathered = shift_(self.model, cache, session.rows.pieces(), session.segments)
        self.timings.add("shift", 0.0, gathered)

    def _select(self, cache: KVCache, policy: Policy, question: str, budget: int, seed: int) -> IntArray:
        self.on_phase("selection")
        session = self.session
        head, suffix = len(session.manifest.head_ids), session.rows.suffix
        with self.timings.measure("selection", int(suffix.sum())):
            body_unit = unit_of_rows(session.document.text, session.tokens.starts)
            evidence = Evidence(
                model=self.model,
                cache=cache,
                ids=session.ids,
                unit=np.concatenate([np.full(head, -1), body_unit]),
                units=int(body_unit[-1]) + 1 if len(body_unit) else 0,
                query_ids=session.tokenizer.encode_text(question).ids,
                suffix=suffix,
                seed=seed,
            )
            if not budget:
                return np.zeros(0, dtype=np.int64)
            scores = policy.score(evidence)
            stale = session.rows.stale
            return select(scores.rows, scores.units, evidence.unit, stale, suffix, budget, policy.rule)

    def _refresh(self, cache: KVCache, rows: IntArray, name: str) -> tuple[str, list[States]]:
        self.on_phase("refresh")
        if not len(rows):
            self.timings.add("refresh", 0.0, 0)
            return "none", []
        executor = choose_executor(name, rows)
        ids = self.model.to_device(self.session.ids)
        with self.timings.measure("refresh", len(rows)):
            return executor, list(refresh_(self.model, cache, ids, rows, executor))

    def _decode(
        self, cache: KVCache, logits: Tensor, sampler: Sampler, limit: int, on_text: Callable[[str], None]
    ) -> tuple[list[int], str, str]:
        """Stream the answer; an interrupt ends it and keeps what was said."""
        self.on_phase("decode")
        stream, ids, texts = TextStream(self.session.tokenizer), list[int](), list[str]()

        def say(text: str) -> None:
            if text:
                texts.append(text)
                on_text(text)

        with self.timings.measure("decode"):
            reason = "stop"
            try:
                for token in decode_(self.model, cache, logits, sampler, limit):
                    ids.append(token)
                    say(stream.push(token))
                if len(ids) == limit:
                    reason = "length"
            except KeyboardInterrupt:
                reason = "interrupted"
            say(stream.finish())
        self.timings.add("decode", 0.0, len(ids))
        return ids, "".join(texts), reason


def check_options(
    policy: str, executor: str, max_new_tokens: int | None, temperature: float, seed: int
) -> Policy:
    """Make the policy and check the other options; needs no model.

    Raises:
        UsageError: One of them has no meaning.
    """
    if executor not in EXECUTORS:
        raise UsageError(f"There is no executor '{executor}'.", f"Choose one of {', '.join(EXECUTORS)}.")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise UsageError(f"An answer of {max_new_tokens} tokens was asked for.", "Ask for at least 1.")
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"The temperature {temperature} has no meaning.", "Use 0 or a positive number.")
    if not 0 <= seed < 2**63:
        raise UsageError(f"The seed {seed} has no meaning.", "Use a whole number from 0 to 2^63 - 1.")
    return policy_named(policy)
