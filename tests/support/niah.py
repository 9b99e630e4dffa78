"""Erasing-NIAH, same-key deletion: two needles with one key, and the earlier one is deleted.

Our own construction after the setting of section 4.2 of Budgeted KV-Cache Repair, whose exact
texts are not public. The haystack is cut from every evaluation text in turn; what is measured
is fidelity: how far the answer's log-probability is from that of a clean prefill.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvedit.cache.kv import KVCache
from kvedit.cache.rows import Piece, RowTable
from kvedit.model.model import Model
from kvedit.policies.evidence import Evidence
from kvedit.policies.registry import policy_named
from kvedit.repair.budget import Budget
from kvedit.repair.refresh import prefill_, refresh_, shift_
from kvedit.repair.select import select
from kvedit.text.document import Document, Edit
from kvedit.text.units import unit_of_rows
from kvedit.tokens.splice import Splice

CASES = 24
_FIRST = (
    "amber brisk calm dusty eager faint gentle hollow icy jolly keen lively "
    "mellow narrow odd plain quiet rapid silent tidy upset vivid warm young"
).split()
_SECOND = (
    "anchor badge cabin desk engine fence garden harbor island jacket kettle ladder "
    "market needle orchard pencil quarry river saddle table uniform valley window yard"
).split()
_QUESTION = "What is the code for {key} mentioned in the text?"
_OPENING = "The code for {key} mentioned in the text is"


@dataclass(frozen=True)
class Case:
    """A text, the edit that removes its first needle, a question, and the value that is left."""

    text: str
    edit: Edit
    key: str
    value: str


def make_case(seed: int, haystack: Path, model: Model) -> Case:
    """Make case `seed` of 24: 500 to 2,000 tokens, the first needle near the start."""
    random = np.random.default_rng(seed)
    key = f"{_FIRST[seed % 24]}-{_SECOND[(seed * 7 + 3) % 24]}"
    erased, kept = (f"The code for {key} is {random.integers(1000, 10000)}." for _ in range(2))
    files = sorted(haystack.iterdir())
    text = " ".join(files[seed % len(files)].read_text(encoding="utf-8").split())
    sentences = re.split(r"(?<=[.!?]) ", text)
    at, length, straw = int(random.integers(0, max(len(sentences) - 300, 1))), 0, list[str]()
    target = int(np.linspace(500, 2000, CASES)[seed % CASES]) - 60
    while length < target:
        straw.append(sentences[at])
        length += len(model.tokenizer.encode_text(" " + sentences[at]))
        at += 1
    first, second = int(random.uniform(0.02, 0.15) * len(straw)), int(random.uniform(0.45, 0.9) * len(straw))
    before = " ".join(straw[:first]) + " "
    after = " ".join([*straw[first:second], kept, *straw[second:]])
    edit = Edit(len(before), len(before) + len(erased) + 1)
    return Case(f"{before}{erased} {after}", edit, key, re.findall(r"\d{4}", kept)[-1])


class Arms:
    """One case on one model: the shifted cache of the edited text, and the clean answer."""

    def __init__(self, case: Case, model: Model, seed: int) -> None:
        self.model, self.case, self.seed = model, case, seed
        self.prompt = model.layout(None)
        head = np.array(self.prompt.head_ids, dtype=np.int64)
        old = model.tokenizer.encode_text(case.text)
        text = Document(case.text).apply([case.edit]).text
        new = model.tokenizer.encode_text(text)
        self.ids = np.concatenate([head, new.ids])
        self.unit = np.concatenate([np.full(len(head), -1), unit_of_rows(text, new.starts)])
        whole = RowTable.from_pieces([Piece("all", 0, len(head) + len(old))], len(head) + len(old))
        self.rows = whole.splice(Splice.align(old, new, [case.edit], len(case.text)), len(head), len(old))
        dirty = model.new_cache(len(whole))
        parts = list(prefill_(model, dirty, model.to_device(np.concatenate([head, old.ids]))))
        keys, values = (
            torch.cat([getattr(part, name) for part in parts], dim=2) for name in ("keys", "values")
        )
        self.shifted = self._cache()
        shift_(model, self.shifted, self.rows.placed(), {"all": (keys, values)})
        self._refresh(self.shifted, np.flatnonzero(self.rows.missing))
        clean = self._cache()
        list(prefill_(model, clean, model.to_device(self.ids)))
        self.clean = self._log_probability(clean)

    def _cache(self) -> KVCache:
        return self.model.new_cache(len(self.ids) + 128)

    def _refresh(self, cache: KVCache, rows: np.ndarray) -> None:
        list(refresh_(self.model, cache, self.model.to_device(self.ids), rows, "packed"))

    def _log_probability(self, cache: KVCache) -> float:
        """Log-probability of the value after the opening of the answer, summed over its ids."""
        encode, key = self.model.tokenizer.encode_text, self.case.key
        question = self.prompt.question_ids(self.model.tokenizer, _QUESTION.format(key=key))
        opening = np.concatenate([question, encode(_OPENING.format(key=key)).ids])
        value = encode(" " + self.case.value).ids
        ids = self.model.to_device(np.concatenate([opening, value[:-1]]))
        start = len(self.ids)
        rows = slice(start, start + len(ids))
        hidden = self.model.walk(ids, rows, cache, outputs=len(value)).hidden
        logs = torch.log_softmax(self.model.logits(hidden), dim=-1)
        cache.length = start
        return float(logs[torch.arange(len(value)), torch.from_numpy(value)].sum())

    def loss(self, policy: str | None, budget: str = "0") -> float:
        """How far the answer's log-probability is from the clean one; without a policy, Shift's."""
        cache = self.shifted.clone()
        if policy is not None:
            self._refresh(cache, self.support(policy, budget))
        return abs(self._log_probability(cache) - self.clean)

    def support(self, policy: str, budget: str) -> np.ndarray:
        """Choose rows as `ask` does."""
        suffix = self.rows.suffix
        evidence = Evidence(
            model=self.model,
            cache=self.shifted,
            ids=self.ids,
            unit=self.unit,
            units=int(self.unit[-1]) + 1,
            query_ids=self.model.tokenizer.encode_text(_QUESTION.format(key=self.case.key)).ids,
            suffix=suffix,
            seed=self.seed,
        )
        chosen = policy_named(policy)
        scores = chosen.score(evidence)
        rows = Budget.parse(budget).resolve(int(suffix.sum()))
        return select(scores, self.unit, self.rows.stale, suffix, rows, chosen.support)
