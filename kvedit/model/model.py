"""The model, and the walk of rows through its layers.

The walk serves prefill, refresh, probe and decode. In each layer it projects the given rows, records their
raw keys and values, rotates keys and queries, writes keys and values into the cache, and attends to the cache
up to each row. Prefill walks adjacent rows, packed refresh scattered ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit.cache.kv import KVCache, States, sent
from kvedit.cache.memory import allocating
from kvedit.cache.rope import Rope, rotate
from kvedit.model.attention import Attend, choose, masked
from kvedit.model.network import TABLE_ROWS, Layer, Network
from kvedit.store.tensorfile import release
from kvedit.tokens.prompt import Prompt
from kvedit.tokens.tokenizer import Tokenizer

CHUNK_ROWS = 256
"""Most adjacent rows of one walk; bounds the memory in addition to weights and cache."""
PACK_ROWS = 2048
"""Most scattered rows of one walk; more than adjacent ones, so that most repairs are a single pass."""


@dataclass(frozen=True, slots=True)
class Walked:
    """The result of a walk.

    Attributes:
        states: Raw keys and values of the rows walked.
        hidden: Output of the last layer, before the final norm, of the last `outputs` rows,
            `[outputs, hidden]`.
    """

    states: States
    hidden: Tensor


class Model:
    """A checkpoint in memory, ready to walk; `kvedit.open_model` opens one.

    Args:
        directory: Folder of the checkpoint.
        network: Its network.
        tokenizer: Its tokenizer, or the JSON of that.
        stop_ids: Ids that end an answer.
        parts: Fingerprints by name of the part.
        layout: Returns the layout of the prompt in the checkpoint's chat template, given a system text.

    Attributes:
        directory, network, stop_ids, parts, layout: As given.
        layers, heads, groups, width, scaling, context_length, tied: As in `kvedit.model.network.Sizes`.
        dtype, device, spread: As in `kvedit.model.network.Network`; inputs and outputs are on `device`.
        vocabulary: Number of ids that have an embedding.
    """

    def __init__(
        self,
        directory: Path,
        network: Network,
        tokenizer: Tokenizer | str,
        stop_ids: Iterable[int],
        parts: dict[str, str],
        layout: Callable[[str | None], Prompt],
    ) -> None:
        sizes = network.sizes
        self.directory, self.network, self.parts, self.layout = directory, network, parts, layout
        self._tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.layers, self.heads, self.groups, self.width = (
            sizes.layers,
            sizes.heads,
            sizes.groups,
            sizes.width,
        )
        self.scaling, self.context_length, self.tied = sizes.scaling, sizes.context_length, sizes.tied
        self.vocabulary = len(network.table)
        self.dtype, self.device, self.spread = network.dtype, network.device, network.spread
        frequencies = torch.tensor(sizes.inverse_frequencies, dtype=torch.float32)
        self.rope = Rope(frequencies.to(self.device), sizes.attention_scaling)
        self._reduced: dict[str, Model] = {}

    def reduced(self, weights: str | None) -> Model:
        """Return the model with lower-precision weights, for decoding only; itself for `None`.

        Args:
            weights: A name from `kvedit.names.DECODE_WEIGHTS`.

        Raises:
            UsageError: The name is unknown, or this model or machine cannot use such weights.
            KveditError: The copy does not fit into memory.
        """
        if weights is None:
            return self
        if weights not in self._reduced:
            from kvedit.model.reduced import reduce

            twin = copy.copy(self)
            with allocating():
                twin.network = reduce(self.network, weights)
            self._reduced = {weights: twin}  # keep only the last one, to save memory
        return self._reduced[weights]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, built on first use: most questions use the session's."""
        return Tokenizer(self._tokenizer) if isinstance(self._tokenizer, str) else self._tokenizer

    @cached_property
    def mean_embedding(self) -> Tensor:
        """The mean input embedding of the vocabulary, `float32 [hidden]`."""
        table = self.network.table
        # In parts, because summing in another dtype copies the input.
        sums = [part.sum(dim=0, dtype=torch.float32) for part in torch.split(table, TABLE_ROWS)]
        release(table)
        return torch.stack(sums).sum(dim=0) / len(table)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def to_device(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Send ids `int64 [N]` to the model's device."""
        return sent(torch.from_numpy(ids), self.device)

    @allocating()
    def new_cache(self, capacity: int) -> KVCache:
        """Create an empty cache for `capacity` rows; raise `KveditError` if memory is short."""
        return KVCache(self.layers, self.heads, capacity, self.width, dtype=self.dtype, device=self.device)

    def cache_bytes(self, rows: int) -> int:
        """Return the bytes that the keys and values of `rows` rows take."""
        return 2 * self.layers * self.heads * self.width * self.dtype.itemsize * rows

    def walk_bytes(self, rows: int) -> int:
        """Estimate the bytes that a walk of `rows` rows needs in addition to the cache.

        This counts the raw keys and values of all layers and, for one layer, the hidden states, queries and
        states inside the MLP.
        """
        sizes, rows = self.network.sizes, min(rows, PACK_ROWS)
        wide = 4 * sizes.hidden + 3 * sizes.intermediate + 3 * self.groups * self.heads * self.width
        return self.cache_bytes(rows) + wide * self.dtype.itemsize * rows

    def embed(self, ids: Tensor) -> Tensor:
        """Look up the frozen input embeddings of ids `int64 [N]`, `[N, hidden]`."""
        return self.network.table[ids].to(self.dtype)

    @torch.no_grad()
    @allocating()
    def walk(
        self,
        ids: Tensor,
        rows: slice | Tensor,
        cache: KVCache,
        *,
        outputs: int = 1,
        layers: int | None = None,
        attend: Attend | None = None,
        on_layer: Callable[[int], None] = lambda layer: None,
        on_query: Callable[[int, Tensor], None] = lambda layer, query: None,
    ) -> Walked:
        """Walk rows through the layers, writing their keys and values into the cache.

        Row i attends to every cached row up to itself, whatever its state, and to the new states of earlier
        rows of this walk (sections A.1 and G.2 of Budgeted KV-Cache Repair). Layers of a spread model run on
        their own devices; attention runs on the model's.

        Args:
            ids: `int64 [N]`, on the model's device.
            rows: A slice of adjacent rows, or sorted `int64 [N]`; on the host, so that reading them does
                not wait for the device.
            cache: Changed at `rows`, in every layer.
            outputs: Number of rows at the end that need an output; the others skip the rest of the last
                layer once their keys and values are in the cache.
            layers: Number of layers to walk, for a probe; all by default.
            attend: A kind of attention from `kvedit.model.attention`; the fastest by default.
            on_layer: Called after each layer with the number of layers done.
            on_query: Called in each layer with its index and the rotated queries `[Hq, N, D]`, after the
                keys of the rows are written to the cache.

        Raises:
            ValueError: Ids and rows differ in number, or rows are unsorted, repeated or out of range.
            KveditError: An allocation fails.
        """
        _check_rows(len(ids), rows, cache)
        walk = _Walk(self, rows, cache, attend, self.layers if layers is None else layers)
        hidden = walk.run(self.embed(ids), outputs, on_layer, on_query)
        cache.length = max(cache.length, int(walk.rows[-1]) + 1)
        return Walked(States(walk.rows, walk.keys, walk.values), hidden)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Turn outputs of the last layer `[N, hidden]` into logits `float32 [N, vocabulary]`."""
        return self.network.head(self.network.norm(hidden)).float().to(self.device)


class _Walk:
    """One walk: its rows, their angles, and their new states.

    Attributes:
        rows: `int64 [N]`, on the host.
        keys, values: Raw states of the layers walked, `[layers, H, N, D]`.
    """

    def __init__(
        self, model: Model, rows: slice | Tensor, cache: KVCache, attend: Attend | None, layers: int
    ) -> None:
        self.rows = rows if isinstance(rows, Tensor) else torch.arange(rows.start, rows.stop)
        sent_rows, count = sent(self.rows, model.device), len(self.rows)
        self._model, self._cache, self._attend = model, cache, attend
        self._target = rows if isinstance(rows, slice) else sent_rows
        self._cos, self._sin = (part[:, None] for part in model.rope.angles(sent_rows, model.dtype))
        prepare = choose(rows, count, model.device) if attend is None else attend
        self._mix = prepare(cache, self.rows, model.scaling)
        shape = (layers, model.heads, count, model.width)
        self.keys = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.values = torch.empty_like(self.keys)

    def run(
        self,
        hidden: Tensor,
        outputs: int,
        on_layer: Callable[[int], None],
        on_query: Callable[[int, Tensor], None],
    ) -> Tensor:
        """Walk the layers; return the hidden states of the last `outputs` rows, `[outputs, hidden]`."""
        done, last = len(self.rows) - outputs, len(self.keys) - 1
        for index, layer in enumerate(self._model.network.layers[: last + 1]):
            query = self._project_(index, layer, hidden)
            if index == last and done > 0:
                hidden, query = hidden[done:], query[:, done:]
                if not outputs:
                    break
                self._mix = (self._attend or masked)(self._cache, self.rows[done:], self._model.scaling)
            on_query(index, query)
            hidden = layer.finish(hidden, self._mix(index, query))
            on_layer(index + 1)
        return hidden

    def _project_(self, index: int, layer: Layer, hidden: Tensor) -> Tensor:
        """Write a layer's keys and values; return its rotated queries, `[Hq, N, D]`."""
        model = self._model
        turning, values = (part.to(model.device) for part in layer.project(hidden, model.network.sizes))
        turned = rotate(turning, self._cos, self._sin).transpose(0, 1)
        queries = model.groups * model.heads
        self.keys[index], self.values[index] = turning[:, queries:].transpose(0, 1), values.transpose(0, 1)
        self._cache.scatter_(index, self._target, turned[queries:], self.values[index])
        return turned[:queries]


def _check_rows(count: int, rows: slice | Tensor, cache: KVCache) -> None:
    """Reject rows that broadcasting would silently accept at wrong positions."""
    ends = [rows.start, rows.stop - 1] if isinstance(rows, slice) else rows[[0, -1]].tolist()
    length = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    if length != count:
        raise ValueError(f"{count} ids for {length} rows")
    if isinstance(rows, Tensor) and not bool((rows[1:] > rows[:-1]).all()):
        raise ValueError("rows that are not sorted, or not unique")
    cache.check_rows(*ends)
