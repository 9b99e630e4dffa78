"""Slow and simple reference computations for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvedit.cache.kv import KVCache, States
from kvedit.checkpoint.opening import open_stock
from kvedit.model.model import Model
from kvedit.repair.refresh import prefill_
from kvedit.repair.working import WorkingCache
from kvedit.session.session import Session
from kvedit.session.state import State
from kvedit.store.store import Store
from kvedit.text.document import Document


def load_session(home: Path, model: Model, text: str, name: str = "document") -> Session:
    """Load a text with an open model."""
    return Session.load(Document(text), model=model, name=name, home=home, force=True)


def working_cache(session: Session) -> KVCache:
    """Return the shifted cache as a new process computes it."""
    session._state.read_segments()
    working = WorkingCache(session.model)
    working.reserve(len(session.rows))
    working.gather_(session.rows, working.differing(session.rows), session._state.segments.states)
    return working.cache


def prefill_states(model: Model, ids: Any) -> States:
    """Return the raw states of a clean prefill."""
    cache = model.new_cache(len(ids))
    return States.concatenate(list(prefill_(model, cache, torch.from_numpy(np.asarray(ids)))))


def stock_network(model: Model) -> Any:
    """Return the network that transformers reads from a model's folder."""
    return open_stock(model.directory, device="cpu").network


def stock_greedy(
    model: Model, ids: Any, count: int
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Return logits of the last row and greedy ids, of kvedit's walk and of transformers' forward pass."""
    tensor = torch.from_numpy(np.asarray(ids, dtype=np.int64))
    cache = model.new_cache(len(ids) + count)
    hidden = None
    for first in range(0, len(ids), 128):
        part = tensor[first : first + 128]
        hidden = model.walk(part, slice(first, first + len(part)), cache).hidden
    assert hidden is not None
    own = model.logits(hidden[-1:])[0]
    own_ids = [int(own.argmax())]
    for row in range(len(ids), len(ids) + count - 1):
        hidden = model.walk(torch.tensor(own_ids[-1:]), slice(row, row + 1), cache).hidden
        own_ids.append(int(model.logits(hidden)[0].argmax()))
    network = stock_network(model)
    with torch.no_grad():
        output = network(tensor[None], use_cache=True, logits_to_keep=1)
        stock, stock_ids = output.logits[0, -1].float(), [int(output.logits[0, -1].argmax())]
        for _ in range(count - 1):
            output = network(torch.tensor([stock_ids[-1:]]), cache=output.cache, use_cache=True)
            stock_ids.append(int(output.logits[0, -1].argmax()))
    return own, stock, own_ids, stock_ids


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder of sessions, except locks and their holders."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("holder.json", "lock")
    }


def read_whole(store: Store, model: Model) -> Session:
    """Open a session and read everything that an answer needs."""
    session = Session(State(store))
    session.use_model(model)
    session._state.read_segments()
    return session
