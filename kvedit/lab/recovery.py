"""A recovery: everything between an edit and the question, as a bench repeats it.

Shift, selection and refresh as in `ask`, but with any selected rows, on the bench's own cache, and
optionally selecting while the shift runs (Appendix G.3 and G.4 of Budgeted KV-Cache Repair).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit.cache.kv import KVCache, States
from kvedit.cache.rows import Piece, RowTable
from kvedit.errors import ContextError, UsageError
from kvedit.model.model import Model
from kvedit.policies.evidence import Past
from kvedit.policies.registry import policy_class
from kvedit.repair.budget import Budget
from kvedit.repair.options import Options
from kvedit.repair.pipeline import Repair
from kvedit.repair.refresh import prefill_, shift_
from kvedit.timing import Timings, waiter

HEAD_ROWS = 16
"""Number of rows before the edit in `Edited.of`."""
GONE_ROWS = 32
"""Number of rows that the edit removes."""
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Edited:
    """An edited document before its repair.

    Attributes:
        model: The model.
        ids: Ids of all rows, `int64 [T]`.
        rows: The row table.
        segments: Raw keys and values `[L, H, N, D]` by name.
        unit: Unit of each row, `int64 [T]`; -1 before the body.
        query_ids: Ids of the bare question, `int64 [Nq]`.
        past: The rows before the edit.
    """

    model: Model
    ids: IntArray
    rows: RowTable
    segments: Mapping[str, tuple[Tensor, Tensor]]
    unit: IntArray
    query_ids: IntArray
    past: Past

    @classmethod
    def of(cls, model: Model, ids: IntArray, context: int, unit_rows: int = 32) -> Edited:
        """Prefill ids with a passage near their start, and delete that passage.

        Args:
            model: The model.
            ids: Repeated if there are too few, `int64 [N]`.
            context: T, rows after the edit.
            unit_rows: Rows per unit.

        Raises:
            ContextError: The model does not support that many rows.
            UsageError: There is nothing after the edit, or there are no ids.
        """
        if not len(ids) or context <= HEAD_ROWS:
            raise UsageError(
                f"A sweep over {context} rows of a text of {len(ids)} tokens has nothing to refresh.",
                f"Give a text, and more than {HEAD_ROWS} rows.",
            )
        if context + GONE_ROWS > model.context_length:
            raise ContextError(
                f"{context} rows and {GONE_ROWS} deleted ones do not fit the model's context of "
                f"{model.context_length}.",
                "Use a shorter context.",
            )
        before = np.resize(ids, context + GONE_ROWS).astype(np.int64)
        cache = model.new_cache(len(before))
        states = States.concatenate(list(prefill_(model, cache, model.to_device(before))))
        after = HEAD_ROWS + GONE_ROWS
        pieces = [Piece("text", 0, HEAD_ROWS), Piece("text", after, context - HEAD_ROWS)]
        unit = np.arange(context) - HEAD_ROWS
        return cls(
            model,
            np.delete(before, np.s_[HEAD_ROWS:after]),
            RowTable.from_pieces(pieces, frontier=HEAD_ROWS),
            {"text": (states.keys, states.values)},
            np.where(unit < 0, -1, unit // unit_rows),
            before[context // 2 : context // 2 + 12],
            Past(lambda: before, np.delete(np.arange(len(before)), np.s_[HEAD_ROWS:after])),
        )

    @property
    def suffix(self) -> IntArray:
        """Return the S eligible rows, sorted."""
        return np.flatnonzero(self.rows.suffix)


@dataclass(frozen=True, slots=True)
class Recovery:
    """A repaired cache, before any question is asked.

    Attributes:
        cache: The cache.
        support: The selected rows, `int64 [B]`.
        computed: The recomputed rows: selected and missing ones.
        states: Raw states of the rows computed.
        timings: `shift`, `selection` and `refresh`; with overlap `preparation` and `refresh`.
    """

    cache: KVCache
    support: IntArray
    computed: IntArray
    states: States
    timings: Timings


def recover(
    edited: Edited,
    cache: KVCache,
    budget: int,
    *,
    policy: str = "sur",
    executor: str = "auto",
    support: IntArray | None = None,
    overlap: bool = False,
) -> Recovery:
    """Shift, select and refresh, as `ask` does before it prefills the question.

    Args:
        edited: The document.
        cache: Cache to fill; must hold all rows and, for policies that probe, the question.
        budget: B, the number of rows to refresh.
        policy: Name of the policy.
        executor: As for `ask`.
        support: Rows to refresh instead of the selected ones, sorted `int64`.
        overlap: Score and select while the shift runs, in another thread and, on CUDA, another
            stream (section G.3). The result is bit-identical. Only for benches: on a CPU both need
            the same cores, and nothing is saved.

    Raises:
        UsageError: A name is not valid, or `overlap` is used with a policy that reads the cache.
    """
    model, rows = edited.model, edited.rows
    options = Options(budget=Budget.parse(f"{budget}t"), policy=policy, executor=executor)
    if overlap and policy_class(policy).reads_cache:
        raise UsageError(
            f"The policy {policy} reads the shifted cache, so it cannot overlap with the shift.",
            "Do not overlap, or use a policy without a probe, such as sur.",
        )
    timings = Timings(waiter(model.device.type))
    repair = Repair(
        model=model,
        cache=cache,
        ids=edited.ids,
        rows=rows,
        unit=edited.unit,
        query_ids=edited.query_ids,
        past=lambda: edited.past,
        timings=timings,
    )

    def shift(stream: Any = None) -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            shift_(model, cache, rows.placed(), edited.segments)
        cache.length = len(rows)

    if overlap:
        with timings.measure("preparation"), _beside(model.device, shift):
            # With overlap, the preparation is timed as a whole.
            selected = replace(repair, timings=Timings()).select(options).rows
    else:
        with timings.measure("shift"):
            shift()
        selected = repair.select(options).rows
    selected = selected if support is None else support
    computed = np.union1d(selected, repair.missing)
    _, parts = repair.refresh(computed, executor)
    return Recovery(cache, selected, computed, States.concatenate(parts), timings)


@contextmanager
def _beside(device: torch.device, shift: Callable[[Any], None]) -> Iterator[None]:
    """Run `shift` in another thread, and on CUDA in another stream, while the block runs."""
    stream: Any = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    if stream is not None:  # fill the cache only after it was created
        stream.wait_stream(torch.cuda.current_stream())
    with ThreadPoolExecutor(1) as beside:
        shifting = beside.submit(shift, stream)
        yield
        shifting.result()
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
