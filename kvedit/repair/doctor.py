"""Doctor: test a model with a probe of 64 tokens, and report how it runs on this machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvedit.cache.kv import KVCache, States
from kvedit.cache.rows import Piece
from kvedit.checkpoint.compare import Stock
from kvedit.checkpoint.opening import admit
from kvedit.model.decode import prefill_question_
from kvedit.model.model import Model
from kvedit.names import Executor
from kvedit.repair.deviation import TOLERANCE, deviation
from kvedit.repair.pipeline import follow_greedy
from kvedit.repair.refresh import prefill_, refresh_, shift_
from kvedit.timing import clock, waiter

PROBE = 64
_GAP = slice(20, 27)  # rows of the probe that the edit deletes
_SEAM = 3  # rows before and after it that count as new text
_ANSWER = 8
_TIMED = 256
_EXACT = 1e-4  # in float32, for one layer (law 2) and for two executors (law 4)
_TEXT = (
    "The fees are paid within thirty days of the invoice, and the customer may cancel at any time. "
    "Notices are sent in writing. The code for the amber anchor is 4471, and it changes every month.\n"
)


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison of two results that must agree.

    Attributes:
        name: What is compared.
        passed: Whether they agree within `limit`.
        figure: The difference.
        limit: The largest difference that rounding can cause; 0 requires equal bits or ids.
    """

    name: str
    passed: bool
    figure: float
    limit: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated seconds of a load of `tokens` tokens."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Machine:
    """How the model runs on this machine.

    Attributes:
        device, dtype: Where and in which precision it computes.
        threads: Threads that torch uses on the CPU.
        prefill_tokens_per_s: Measured on a prefill of `timed_tokens`.
        timed_tokens: Tokens of that prefill.
        estimates: Load times extrapolated from that prefill, for sizes that fit the context.
        weights_bytes: Size of all parameters.
        cache_bytes: Size of the cache of 1,000 tokens.
        context_length: Number of positions that the model supports.
    """

    device: str
    dtype: str
    threads: int
    prefill_tokens_per_s: float
    timed_tokens: int
    estimates: tuple[Estimate, ...]
    weights_bytes: int
    cache_bytes: int
    context_length: int


@dataclass(frozen=True, slots=True)
class Health:
    """The result of the doctor."""

    checks: tuple[Check, ...]
    machine: Machine

    @property
    def passed(self) -> bool:
        """Return whether all checks passed."""
        return all(check.passed for check in self.checks)


def examine(stock: Stock) -> Health:
    """Check the laws on a short probe, and measure a prefill.

    Args:
        stock: A checkpoint read with transformers. If the model agrees with its forward pass, the
            other checks use the model as later commands open it.

    Raises:
        ModelError: The walk does not work with its layers.
    """
    likeness = stock.compare()
    checks = [
        _check("forward pass", likeness.forward, likeness.limit),
        _check("end of context", likeness.far, likeness.limit),
        _check("rotation", likeness.rotation, likeness.rotation_limit),
    ]
    parameters = list(stock.network.parameters())
    model = admit(stock) if all(check.passed for check in checks) else stock.model
    return Health((*checks, *_check_edit(model)), _measure(model, parameters))


def _check(name: str, figure: float, limit: float) -> Check:
    return Check(name, figure <= limit, figure, limit)  # a NaN does not pass


def _ids(model: Model, count: int) -> Tensor:
    """Return the first `count` ids of a prompt with the repeated probe text, `int64 [count]`."""
    head = list(model.layout(None).head_ids)
    text = model.tokenizer.encode_text(_TEXT).ids.tolist()
    ids = (head + text * (1 + count // len(text)))[:count]
    return model.to_device(np.array(ids, dtype=np.int64))


def _check_edit(model: Model) -> list[Check]:
    """Delete rows of a loaded probe, and compare the repaired cache with a prefill of the edited ids."""
    whole = _ids(model, PROBE)
    kept = torch.cat((whole[: _GAP.start], whole[_GAP.stop :]))
    total, room = len(kept), len(kept) + _ANSWER
    clean = model.new_cache(room)
    list(prefill_(model, clean, kept))
    first, last = _GAP.start - _SEAM, _GAP.start + _SEAM
    before = States.concatenate(list(prefill_(model, model.new_cache(PROBE), whole)))
    pieces = [(0, Piece("probe", 0, first)), (last, Piece("probe", _GAP.stop + _SEAM, total - last))]

    def repaired(rows: np.ndarray, executor: Executor) -> KVCache:
        """Shift the remaining rows, and compute `rows`."""
        cache = model.new_cache(room)
        shift_(model, cache, pieces, {"probe": (before.keys, before.values)})
        cache.length = total
        list(refresh_(model, cache, kept, rows, executor))
        return cache

    seam = np.arange(first, last)
    some = np.union1d(seam, np.arange(last + 1, total, 4))
    shifted, packed = repaired(seam, "packed"), repaired(some, "packed")
    full = repaired(np.arange(first, total), "packed")
    off, tie = _greedy(model, full, clean, total)
    tolerance = TOLERANCE[model.dtype]
    exact = _EXACT if model.dtype == torch.float32 else tolerance
    return [
        _check("shift", _distance(shifted, clean, total, layers=1), exact),
        _check("full budget", _distance(full, clean, total), tolerance),
        Check("greedy tokens", not off or tie, off, 0.0),
        _check("packed, interval", _distance(packed, repaired(some, "interval"), total), exact),
    ]


def _distance(left: KVCache, right: KVCache, total: int, layers: int | None = None) -> float:
    """Return the largest relative deviation of a row's keys or values, in the first `layers` layers."""
    return max(
        float(deviation(ours[:layers], theirs[:layers], total)[1].max())
        for ours, theirs in ((left.keys, right.keys), (left.values, right.values))
    )


def _greedy(model: Model, held: KVCache, clean: KVCache, total: int) -> tuple[int, bool]:
    """Follow the clean cache's greedy tokens on both caches.

    Returns:
        How many tokens differ, and whether all of them are ties. In 16 bits rounding can change the
        order of two logits that are as close as the limit of the forward pass; in float32 nothing
        counts as a tie.

    """
    held.length = clean.length = total
    start = _ids(model, 1)
    first = prefill_question_(model, clean, start)[0], prefill_question_(model, held, start)[0]
    off, tie = 0, True
    for token, theirs, ours in follow_greedy(model, clean, held, first, _ANSWER, ()):
        if int(ours.argmax()) != token:
            off += 1
            gap = float(theirs.max() - theirs[ours.argmax()]) / max(float(theirs.std()), 1e-6)
            tie = tie and model.dtype != torch.float32 and gap <= TOLERANCE[model.dtype]
    return off, tie


def _measure(model: Model, parameters: list[Tensor]) -> Machine:
    """Time a prefill, and estimate from its number of multiplications how long others take."""
    count = min(_TIMED, model.context_length)
    ids, wait = _ids(model, count), waiter(model.device.type)
    wait()  # the checks have warmed up the device
    start = clock()
    list(prefill_(model, model.new_cache(count), ids))
    wait()
    seconds = clock() - start
    table = model.network.table.numel()
    # Multiplications per token with the layers' weights, and per pair of rows in attention.
    weights: int = sum(part.numel() for part in parameters) - table * (1 if model.tied else 2)
    pairs = model.layers * model.heads * model.groups * model.width

    def work(tokens: int) -> float:
        return weights * tokens + pairs * tokens * tokens

    return Machine(
        device=model.device.type,
        dtype=model.dtype_name,
        threads=torch.get_num_threads(),
        prefill_tokens_per_s=count / seconds,
        timed_tokens=count,
        estimates=tuple(
            Estimate(tokens, seconds * work(tokens) / work(count))
            for tokens in (1000, 4000)
            if tokens <= model.context_length
        ),
        weights_bytes=sum(part.numel() * part.element_size() for part in parameters),
        cache_bytes=model.cache_bytes(1000),
        context_length=model.context_length,
    )
