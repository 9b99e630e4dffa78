"""Verify: compare the working cache with a clean prefill of the same ids."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvedit.cache.kv import KVCache
from kvedit.cache.memory import check_memory
from kvedit.model.decode import Sampler, decode_, prefill_question_
from kvedit.model.model import CHUNK_ROWS
from kvedit.repair.deviation import TOLERANCE, deviation
from kvedit.repair.options import Options
from kvedit.repair.pipeline import follow_greedy
from kvedit.repair.refresh import prefill_
from kvedit.repair.reports import Comparison, Verification
from kvedit.session.asking import Asking
from kvedit.session.state import State
from kvedit.timing import Timings
from kvedit.tokens.prompt import check_context


def verify(
    session: State,
    question: str | None,
    options: Options,
    max_new_tokens: int,
    progress: Callable[[int, int], None],
) -> Verification:
    """Compare the two caches; see `Session.verify`. Nothing is kept."""
    model, ids = session.model, session.ids
    asking = Asking(session, options, Timings(), lambda name: None)
    # Without --continue a question sees only head and document, so both caches stop there.
    seen = len(asking.rows)
    question_ids = None
    capacity = seen
    if question is not None:
        encoded = asking.question_ids(question)
        capacity += len(encoded) + max_new_tokens
        check_context(seen, capacity - seen, "question and answer", model.context_length)
        question_ids = model.to_device(encoded)
    both = model.cache_bytes(capacity) + session.working.wanting(capacity)
    check_memory(f"Verifying {seen:,} tokens", both + model.walk_bytes(min(seen, CHUNK_ROWS)), model.device)
    clean = model.new_cache(capacity)
    for states in prefill_(model, clean, model.to_device(ids[:seen])):
        progress(int(states.rows[-1]) + 1, len(ids))
    asking.shift(capacity)
    repair = asking.repair(question or "")
    selected = repair.select(options).rows if question is not None else np.zeros(0, dtype=np.int64)
    computed = np.union1d(selected, repair.missing)
    repair.refresh(computed, "packed")
    working = session.working
    keys, key_heat = deviation(working.cache.keys, clean.keys, seen)
    values, value_heat = deviation(working.cache.values, clean.values, seen)
    heat = np.maximum(key_heat, value_heat)
    frontier, tolerance = min(asking.rows.frontier, seen), TOLERANCE[model.dtype]
    comparison = None
    if question_ids is not None:
        working.forget(np.arange(seen, working.cache.capacity))
        comparison = _compare(session, working.cache, clean, seen, question_ids, max_new_tokens)
    return Verification(
        tokens=seen,
        frontier=frontier,
        computed=len(computed),
        keys=keys,
        values=values,
        heat=heat,
        exact_deviation=float(heat[:, :frontier].max(initial=0.0)),
        tolerance=tolerance,
        exact=bool(heat.max(initial=0.0) <= tolerance),
        comparison=comparison,
    )


def _compare(
    session: State, cache: KVCache, clean: KVCache, total: int, question: Tensor, limit: int
) -> Comparison:
    """Answer on both caches, and compare the predictions along the clean answer."""
    model = session.model
    cache.length = clean.length = total
    repaired, _ = prefill_question_(model, cache, question)
    reference, _ = prefill_question_(model, clean, question)
    log_p, log_q = (torch.log_softmax(logits.double(), dim=-1) for logits in (reference, repaired))
    clean_ids, agreed, gaps = list[int](), list[bool](), list[float]()
    stops = model.stop_ids
    for token, on_clean, on_cache in follow_greedy(model, clean, cache, (reference, repaired), limit, stops):
        first, second = on_clean.topk(2).values.tolist()
        agreed.append(int(on_cache.argmax()) == token)
        gaps.append(first - second)
        if token not in stops:
            clean_ids.append(token)
    cache.length = total + len(question)
    ids = list(decode_(model, cache, repaired, Sampler(0.0, 0), limit, []))
    differs_at = agreed.index(False) if False in agreed else None
    return Comparison(
        kl=float((log_p.exp() * (log_p - log_q)).sum()),
        agreement=sum(agreed) / len(agreed),
        tie_gap=min(gaps),
        differs_at=differs_at,
        differs_gap=None if differs_at is None else gaps[differs_at],
        answer=session.tokenizer.decode(ids),
        clean_answer=session.tokenizer.decode(clean_ids),
    )
