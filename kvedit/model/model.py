"""The model: kvedit's own walk through the decoder layers, over the checkpoint's modules.

The only room that knows transformers. One walk serves prefill, refresh, probe and decode:
given ids at given rows and a cache, at each layer project, keep the raw key and value, rotate,
scatter them into the cache at their rows, attend over the cache up to each row, go on.
Prefill is a walk over adjacent rows, packed refresh one over scattered rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvedit.cache.kv import KVCache, States, sent
from kvedit.cache.memory import allocating
from kvedit.cache.rope import Rope, rotate
from kvedit.checkpoint import fingerprint, recipe
from kvedit.checkpoint.template import layout
from kvedit.errors import ModelError
from kvedit.model import network as light
from kvedit.model.attention import Attend, choose, masked
from kvedit.model.network import TABLE_ROWS
from kvedit.store.tensorfile import release
from kvedit.tokens.prompt import Prompt
from kvedit.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvedit.checkpoint.compare import Likeness

CHUNK_ROWS = 256
"""Adjacent rows that one walk takes at most; bounds the memory beside weights and cache."""
PACK_ROWS = 2048
"""Scattered rows that one walk takes at most: they are few, and one pass over all of them is the point."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Walked:
    """What a walk gives.

    Attributes:
        states: Raw keys and values of the rows walked.
        hidden: Output of the last layer, before the final norm, of the last rows for which it
            was asked, `[outputs, hidden]`.
    """

    states: States
    hidden: Tensor


class Model:
    """A checkpoint in memory, ready to walk.

    Attributes:
        directory: Where it was read from.
        layers, heads, width: L, H (KV heads) and D of its cache.
        groups: Query heads for each KV head.
        scaling: What attention scores are multiplied with.
        device: Where its cache is, and what it takes and gives; of a spread model, the device of
            the embeddings.
        spread: Whether its layers lie on several devices.
        context_length: Positions that it was made for.
        vocabulary: How many ids have an embedding.
        stop_ids: Ids that end an answer.
        parts: Fingerprint, by the name of the part.
    """

    def __init__(
        self,
        directory: Path,
        network: Any,
        tokenizer: Tokenizer | str,
        stop_ids: Iterable[int],
        parts: dict[str, str],
    ) -> None:
        config = network.config
        attention = network.model.layers[0].self_attn
        self.directory = directory
        self.network = network
        self._tokenizer = tokenizer
        self.parts = parts
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_key_value_heads
        self.groups: int = config.num_attention_heads // config.num_key_value_heads
        self.width: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.context_length: int = config.max_position_embeddings
        self.vocabulary: int = network.model.embed_tokens.weight.shape[0]
        self.dtype: torch.dtype = network.dtype
        self.device: torch.device = network.device
        self.spread = len(set(getattr(network, "hf_device_map", {}).values())) > 1
        rotary = network.model.rotary_emb
        self.rope = Rope(rotary.inv_freq.float().to(self.device), float(rotary.attention_scaling))
        self.stop_ids = frozenset(stop_ids)
        self._reduced: dict[str, Model] = {}

    @classmethod
    def open(
        cls, directory: Path, *, device: str = "auto", dtype: str = "auto", stock: bool = False
    ) -> Model:
        """Read the checkpoint in a directory.

        A checkpoint that has passed `check` before is read without transformers.

        Args:
            directory: config.json, safetensors weights, tokenizer.
            device: `auto`, `cpu`, `cuda` or `mps`; `map` spreads the layers over all GPUs and, if
                they are too small, the CPU's memory.
            dtype: `auto` (float32 on a CPU, bfloat16 elsewhere), or a name of a dtype.
            stock: Read it with transformers in any case.

        Raises:
            ModelError: The device is not there, or the model is unsupported or damaged.
        """
        place = _device("auto" if device == "map" else device)
        kind = ("float32" if place.type == "cpu" else "bfloat16") if dtype == "auto" else dtype
        known = None if stock or device == "map" else cls._quick(directory, kind, place)
        if known is not None:
            return known
        from kvedit.checkpoint import read as checkpoint

        network = checkpoint.read_network(
            directory, _DTYPES[kind], place, "auto" if device == "map" else None
        )
        tokenizer, template = checkpoint.read_tokenizer(directory)
        parts = {**fingerprint.of_files(directory), **fingerprint.of_text(tokenizer, template.chat_template)}
        return cls(directory, network, tokenizer, _stop_ids(network, template), parts)

    @classmethod
    def admit(cls, directory: Path, *, device: str = "auto", dtype: str = "auto") -> Model:
        """Open a checkpoint, check it, and give it as it is opened from then on; raises as both do."""
        model = cls.open(directory, device=device, dtype=dtype)
        model.check()
        return model.quick()

    @classmethod
    def _quick(cls, directory: Path, kind: str, place: torch.device) -> Model | None:
        """Read a checkpoint by its recipe; `None` where it has none for that dtype and device."""
        known = recipe.find(directory)
        if known is None or f"{kind} {place.type}" not in known[0].checked:
            return None
        made, serialized = known
        network = light.read(directory, made, _DTYPES[kind], place, pack=True)
        parts = {**fingerprint.of_files(directory), **made.parts}
        return cls(directory, network, serialized, made.stop_ids, parts)

    def quick(self) -> Model:
        """Give the model as it is opened once it was checked: of plain parts, where it has a recipe."""
        if self.spread or isinstance(self.network, light.Network):
            return self
        return self._quick(self.directory, self.dtype_name, self.device) or self

    def reduced(self, weights: str | None) -> Model:
        """Give a model with weights of fewer bits, for decoding only; itself for `None`.

        Args:
            weights: By the names of `kvedit.model.reduced.KINDS`.

        Raises:
            UsageError: They have no meaning, or cannot be had of this model or here.
        """
        if weights is None:
            return self
        if weights not in self._reduced:
            from kvedit.model.reduced import reduce

            twin = copy.copy(self)
            with allocating():
                twin.network = reduce(self.network, weights)
            self._reduced = {weights: twin}  # one at a time: memory is dear
        return self._reduced[weights]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; a session has its own, so many a question needs none."""
        return Tokenizer(self._tokenizer) if isinstance(self._tokenizer, str) else self._tokenizer

    @cached_property
    def mean_embedding(self) -> Tensor:
        """The mean of the whole vocabulary's input embeddings, `float32 [hidden]`."""
        table: Tensor = self.network.model.embed_tokens.weight
        # In parts: a sum in another dtype copies what it sums.
        sums = [part.sum(dim=0, dtype=torch.float32) for part in torch.split(table, TABLE_ROWS)]
        release(table)
        return torch.stack(sums).sum(dim=0) / len(table)

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding table."""
        if isinstance(self.network, light.Network):
            return self.network.recipe.tied
        return self.network.lm_head.weight is self.network.model.embed_tokens.weight

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def layout(self, system: str | None) -> Prompt:
        """Lay the prompt out with the checkpoint's chat template."""
        known = self.network.recipe.prompt if isinstance(self.network, light.Network) else None
        if known is not None and not system:
            return known
        from kvedit.checkpoint import read as checkpoint

        return layout(checkpoint.read_tokenizer(self.directory)[1], self.tokenizer, system)

    def to_device(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Bring ids to the model's device. `int64 [N]`."""
        return sent(torch.from_numpy(ids), self.device)

    @allocating()
    def new_cache(self, capacity: int) -> KVCache:
        """Make an empty cache with room for `capacity` rows; raises `KveditError` if memory fails."""
        return KVCache(self.layers, self.heads, capacity, self.width, dtype=self.dtype, device=self.device)

    def cache_bytes(self, rows: int) -> int:
        """Bytes of the keys and values of some rows."""
        return 2 * self.layers * self.heads * self.width * self.dtype.itemsize * rows

    def walk_bytes(self, rows: int) -> int:
        """About the bytes that taking some rows through the layers needs beside the cache.

        Raw keys and values of all layers, and in one layer hidden states, queries and the MLP's.
        """
        config, rows = self.network.config, min(rows, PACK_ROWS)
        wide = 4 * config.hidden_size + 3 * config.intermediate_size
        wide += 3 * self.groups * self.heads * self.width
        return self.cache_bytes(rows) + int(wide) * self.dtype.itemsize * rows

    def embed(self, ids: Tensor) -> Tensor:
        """Look the frozen input embeddings up. `int64 [N] -> [N, hidden]`."""
        table: Tensor = self.network.model.embed_tokens.weight
        return table[ids].to(self.dtype)

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
        """Take rows through all layers, writing their keys and values into the cache.

        Row i attends to every cached row up to itself, whatever its state, and to the rows in
        hand that come before it, with the states that this walk gives them (section A.1 and
        G.2 of Budgeted KV-Cache Repair). Of a spread model, the layers' devices hold weights and
        hidden states; cache and attention stay on the model's device.

        Args:
            ids: `int64 [N]`, on the model's device.
            rows: Where they stand: a slice of adjacent rows, or sorted `int64 [N]`, on the host. There
                they are read, so that a walk never waits for the device.
            cache: Changed at `rows`, in every layer.
            outputs: How many of the last rows need an output. The others leave the last layer
                as soon as it has their keys and values, which is all that a cache needs of it.
            layers: Walk the first so many only, for a probe.
            attend: Attention, by the kinds of `kvedit.model.attention`; the fastest without it.
            on_layer: Called with the number of layers done, after each.
            on_query: Called in each layer with its index and the rotated queries
                `[Hq, N, D]`, once the keys of the rows are in the cache.

        Raises:
            ValueError: Ids and rows differ in number, or the rows are not sorted or not in the cache.
            KveditError: An allocation fails.
        """
        network, count = self.network.model, len(ids)
        _check_rows(count, rows, cache)
        place = rows if isinstance(rows, Tensor) else torch.arange(rows.start, rows.stop)
        there = sent(place, self.device)
        cos, sin = (part[:, None] for part in self.rope.angles(there, self.dtype))
        prepare = choose(rows, count, self.device) if attend is None else attend
        mix = prepare(cache, place, self.scaling)
        target = rows if isinstance(rows, slice) else there
        depth = self.layers if layers is None else layers
        keys = torch.empty((depth, self.heads, count, self.width), dtype=self.dtype, device=self.device)
        values = torch.empty_like(keys)
        queries = self.groups * self.heads
        hidden = self.embed(ids)
        for layer, module in enumerate(network.layers[:depth]):
            attention = module.self_attn
            normed = module.input_layernorm(hidden)
            turning, standing = self._project(attention, normed)
            turned = rotate(turning, cos, sin).transpose(0, 1)
            keys[layer], values[layer] = turning[:, queries:].transpose(0, 1), standing.transpose(0, 1)
            cache.scatter_(layer, target, turned[queries:], values[layer])
            query = turned[:queries]
            if layer == depth - 1 and outputs < count:
                done = count - outputs
                hidden, query = hidden[done:], query[:, done:]
                if not outputs:
                    break
                mix = (attend or masked)(cache, place[done:], self.scaling)
            on_query(layer, query)
            mixed = attention.o_proj(mix(layer, query))
            hidden = hidden.to(mixed.device) + mixed
            hidden = hidden + module.mlp(module.post_attention_layernorm(hidden))
            on_layer(layer + 1)
        cache.length = max(cache.length, int(place[-1]) + 1)
        return Walked(States(place, keys, values), hidden)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Turn outputs of the last layer `[N, hidden]` into logits `float32 [N, vocabulary]`."""
        logits: Tensor = self.network.lm_head(self.network.model.norm(hidden))
        return logits.float().to(self.device)

    def compare(self) -> Likeness:
        """Compare the walk with the stock forward pass on a few ids; needs a network of transformers'.

        Raises:
            ModelError: The layers cannot be walked.
        """
        from kvedit.checkpoint import compare as stock
        from kvedit.checkpoint.admission import REMEDY

        try:
            return stock.compare(self)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"This model is not supported: its layers cannot be walked ({error}).", REMEDY
            ) from None

    def check(self) -> None:
        """Refuse a model whose walk is not its stock forward pass, to catch what no field says.

        A model that passes is read without transformers from then on, where its parts are plain.

        Raises:
            ModelError: They differ by more than rounding.
        """
        if isinstance(self.network, light.Network):
            return  # its recipe says that it has passed
        from kvedit.checkpoint import compare as stock

        self.compare().check()
        stock.remember(self)

    def _project(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Project `[N, hidden]` to what turns and what does not.

        Returns:
            Normed queries and keys before RoPE, `[N, Hq + H, D]`, and values, `[N, H, D]`; both on the
            model's device.
        """
        if isinstance(attention, light.Attention):
            turning, values = attention.project(normed)
        else:
            query, keys, values = (
                getattr(attention, f"{part}_proj")(normed).view(len(normed), -1, self.width) for part in "qkv"
            )
            if getattr(attention, "q_norm", None) is not None:
                query, keys = attention.q_norm(query), attention.k_norm(keys)
            turning = torch.cat((query, keys), dim=1)
        return turning.to(self.device), values.to(self.device)


def _check_rows(count: int, rows: slice | Tensor, cache: KVCache) -> None:
    """Refuse what broadcasting would make fit, with wrong positions and no word of it."""
    ends = [rows.start, rows.stop - 1] if isinstance(rows, slice) else rows[[0, -1]].tolist()
    held = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    if held != count:
        raise ValueError(f"{count} ids at {held} rows")
    if isinstance(rows, Tensor) and not bool((rows[1:] > rows[:-1]).all()):
        raise ValueError("rows that are not sorted, or not unique")
    cache.check_rows(*ends)


def _device(name: str) -> torch.device:
    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(place for place in ("cuda", "mps", "cpu") if found[place])
    if not found[name]:
        raise ModelError(f"There is no {name} device here.", "Use --device cpu, or auto.")
    return torch.device(name)


def _stop_ids(network: Any, template: Any) -> frozenset[int]:
    """Gather the ids that end an answer, from all the places where checkpoints name them."""
    found: set[int] = set()
    generation = getattr(network, "generation_config", None)
    for source in (generation, network.config, template):
        named = getattr(source, "eos_token_id", None)
        found.update([named] if isinstance(named, int) else named or [])
    return frozenset(found)
