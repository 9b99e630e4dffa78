"""A network of plain parts, made from a checkpoint's weights without transformers.

Importing transformers and building its modules takes longer than many an answer. What a walk needs
of them is little: linear layers, RMS norms and a gated MLP. `kvedit.checkpoint.recipe` remembers of which
checkpoints these parts are the whole truth, bit for bit. They have the names that transformers
gives its modules, so that one walk serves both. On a CPU they are packed: see `Packed`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvedit.cache.memory import trim
from kvedit.checkpoint.recipe import Recipe
from kvedit.errors import ModelError
from kvedit.store.header import read_header
from kvedit.store.tensorfile import map_file, release, tensors

_PREFIXES = ("model.", "lm_head.")  # some folders hold the weights twice, under other names
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_AT_ONCE = 16
_PACKED_ROWS = 16  # what oneDNN is told to lay out for; the same layout is best for 4 rows and for 256
TABLE_ROWS = 4096
"""Of a table of the vocabulary, rows that are converted at once: the table is the largest of all weights."""
Tensors = Callable[[str], "Tensor | None"]
"""Gives a tensor by its name, or `None` where there is none."""


class Linear:
    """`x @ weight.T + bias`."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, states: Tensor) -> Tensor:
        """Project `[..., in]` to `[..., out]`."""
        return functional.linear(states, self.weight, self.bias)


class Packed:
    """Linear layers of the same input as one, `x @ weight.T + bias`, in a blocked layout of oneDNN.

    It is faster than plain weights, above all for few rows, which plain ones make a processor wait for
    memory on a single core. Sums are rounded in another order.

    Args:
        layers: Whose outputs follow one another.

    Attributes:
        bias: Of all of them, or `None`.
    """

    __slots__ = ("_weight", "bias")

    def __init__(self, *layers: Linear) -> None:
        joined = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(joined, _PACKED_ROWS)
        biases = [
            layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
            for layer in layers
        ]
        self.bias = None if all(layer.bias is None for layer in layers) else torch.cat(biases)

    @staticmethod
    def can_hold(weight: Tensor) -> bool:
        """Whether weights like these can be packed here: float32 on a CPU for which oneDNN was built."""
        known = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        return known and weight.device.type == "cpu" and weight.dtype == torch.float32

    @property
    def weight(self) -> Tensor:
        """A plain copy of the weights, `[out of all layers, in]`."""
        plain: Tensor = self._weight.to_dense()
        return plain

    def __call__(self, states: Tensor) -> Tensor:
        """Project `[N, in]` to `[N, out of all layers]`."""
        projected: Tensor = torch.ops.mkldnn._linear_pointwise(
            states, self._weight, self.bias, "none", [], ""
        )
        return projected


class Parts:
    """A large layer as packed layers whose outputs follow one another, so that none of them is held twice."""

    __slots__ = ("layers",)

    def __init__(self, layers: Sequence[Packed]) -> None:
        self.layers = layers

    def __call__(self, states: Tensor) -> Tensor:
        """Project `[N, in]` to `[N, out of all layers]`."""
        return torch.cat([layer(states) for layer in self.layers], dim=-1)


class RmsNorm:
    """Root mean square norm (arXiv 1910.07467), with every rounding of transformers'."""

    __slots__ = ("epsilon", "weight")

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight, self.epsilon = weight, epsilon

    def __call__(self, states: Tensor) -> Tensor:
        """Norm the last dimension."""
        if states.dtype == torch.float32:  # the same steps in one call
            return functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon)
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * exact.to(states.dtype)


class GatedMlp:
    """`down(silu(gate(x)) * up(x))` (arXiv 2002.05202).

    Attributes:
        width: Of what is between.
    """

    __slots__ = ("_down", "_expand", "width")

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        self.width = len(gate.weight)
        self._expand: tuple[Linear, Linear] | Packed = (gate, up)
        self._down: Linear | Packed = down

    def pack(self) -> None:
        """Pack the layers."""
        if isinstance(self._expand, tuple) and isinstance(self._down, Linear):
            self._expand, self._down = Packed(*self._expand), Packed(self._down)

    def remade(self, make: Callable[[Packed], Packed]) -> GatedMlp:
        """Give a copy with each packed layer made anew."""
        twin = copy.copy(self)
        if isinstance(self._expand, Packed) and isinstance(self._down, Packed):
            twin._expand, twin._down = make(self._expand), make(self._down)
        return twin

    def __call__(self, states: Tensor) -> Tensor:
        """Map `[N, hidden]` to `[N, hidden]`."""
        if isinstance(self._expand, Packed):
            gate, up = self._expand(states).chunk(2, dim=-1)
        else:
            gate, up = (part(states) for part in self._expand)
        return self._down(functional.silu(gate).mul_(up))


class Attention:
    """The projections of an attention layer, and the norms of queries and keys where there are some.

    Attributes:
        head_dim: Width of a head.
        scaling: What scores are multiplied with.
        q_norm, k_norm: Norms of each head, or `None`.
    """

    def __init__(
        self, recipe: Recipe, linear: Callable[[str], Linear], norm: Callable[[str], RmsNorm]
    ) -> None:
        self.head_dim, self.scaling = recipe.width, recipe.scaling
        self._queries = recipe.heads * recipe.groups
        self._turning = self._queries + recipe.heads
        self._parts: list[Linear] | Packed = [linear(f"{part}_proj") for part in "qkv"]
        self.o_proj: Linear | Packed = linear("o_proj")
        self.q_norm, self.k_norm = (norm(f"{part}_norm") if recipe.head_norms else None for part in "qk")

    def pack(self) -> None:
        """Pack the layers."""
        if isinstance(self._parts, list) and isinstance(self.o_proj, Linear):
            self._parts, self.o_proj = Packed(*self._parts), Packed(self.o_proj)

    def remade(self, make: Callable[[Packed], Packed]) -> Attention:
        """Give a copy with each packed layer made anew."""
        twin = copy.copy(self)
        if isinstance(self._parts, Packed) and isinstance(self.o_proj, Packed):
            twin._parts, twin.o_proj = make(self._parts), make(self.o_proj)
        return twin

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project `[N, hidden]` to normed queries and keys, `[N, Hq + H, D]`, and values, `[N, H, D]`."""
        if isinstance(self._parts, Packed):
            together = self._parts(states)
        else:
            together = torch.cat([part(states) for part in self._parts], dim=-1)
        heads = together.view(len(states), -1, self.head_dim)
        turning, values = heads[:, : self._turning], heads[:, self._turning :]
        if self.q_norm is not None and self.k_norm is not None:
            query, keys = turning[:, : self._queries], turning[:, self._queries :]
            turning = torch.cat((self.q_norm(query), self.k_norm(keys)), dim=1)
        return turning, values


class Network:
    """The parts of a network, under the names of transformers' modules.

    The embedding table stays as it is in its file, and the output layer is made when it is first used: a
    load needs only the rows of the table that the document has, and no logits.

    Args:
        recipe: What it is made of.
        tensors: Give its weights.
        dtype: Of all that is computed; of the weights, if not given.
        pack: Pack the layers, each as soon as it is there, so that no layer is held twice for long.

    Attributes:
        packed: Whether the layers are packed.

    Raises:
        ModelError: A weight is not there.
    """

    def __init__(
        self, recipe: Recipe, tensors: Tensors, dtype: torch.dtype | None = None, *, pack: bool = False
    ) -> None:
        def found(name: str) -> Tensor:
            tensor = tensors(name)
            if tensor is None:
                raise ModelError(
                    f"The weights are not whole: `{name}` is missing.", "Download the model again."
                )
            return tensor

        def linear(name: str) -> Linear:
            return Linear(found(f"{name}.weight"), tensors(f"{name}.bias"))

        def norm(name: str) -> RmsNorm:
            return RmsNorm(found(f"{name}.weight"), recipe.epsilon)

        def layer(number: int) -> Any:
            at = f"model.layers.{number}"
            made = SimpleNamespace(
                self_attn=Attention(
                    recipe,
                    lambda part: linear(f"{at}.self_attn.{part}"),
                    lambda part: norm(f"{at}.self_attn.{part}"),
                ),
                input_layernorm=norm(f"{at}.input_layernorm"),
                post_attention_layernorm=norm(f"{at}.post_attention_layernorm"),
                mlp=GatedMlp(*(linear(f"{at}.mlp.{part}_proj") for part in ("gate", "up", "down"))),
            )
            if self.packed:
                made.self_attn.pack()
                made.mlp.pack()
            return made

        final = norm("model.norm")
        self.packed = pack and Packed.can_hold(final.weight)
        table = found("model.embed_tokens.weight")
        frequencies = torch.tensor(recipe.inverse_frequencies, dtype=torch.float32)
        self.model = SimpleNamespace(
            embed_tokens=SimpleNamespace(weight=table),
            layers=[layer(number) for number in range(recipe.layers)],
            norm=final,
            rotary_emb=SimpleNamespace(inv_freq=frequencies, attention_scaling=recipe.attention_scaling),
        )
        self._output = Linear(table, None) if recipe.tied else linear("lm_head")
        self.config = SimpleNamespace(
            num_hidden_layers=recipe.layers,
            num_key_value_heads=recipe.heads,
            num_attention_heads=recipe.heads * recipe.groups,
            max_position_embeddings=recipe.context_length,
            vocab_size=len(table),
            hidden_size=table.shape[1],
            intermediate_size=self.model.layers[0].mlp.width,
            eos_token_id=list(recipe.stop_ids),
        )
        self.dtype, self.device = dtype or table.dtype, table.device
        self.recipe = recipe

    @cached_property
    def lm_head(self) -> Linear | Parts:
        """The output layer."""
        weight, bias = self._output.weight, self._output.bias
        if not self.packed:
            return Linear(weight.to(self.dtype), bias)
        parts: list[Packed] = []
        for first in range(0, len(weight), TABLE_ROWS):
            rows = slice(first, first + TABLE_ROWS)
            parts.append(Packed(Linear(weight[rows].to(self.dtype), None if bias is None else bias[rows])))
            release(weight)
            trim()
        return Parts(parts)


def read(
    directory: Path, recipe: Recipe, dtype: torch.dtype, device: torch.device, *, pack: bool = False
) -> Network:
    """Read the weights in a directory; on a CPU, tables of the vocabulary are mapped from their files.

    Raises:
        ModelError: They are damaged, or not whole.
    """
    try:
        weights = _Weights(directory, dtype, device)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The weights in {directory} cannot be read ({error}).",
            "Download the model again, or remove the folder so that it is converted anew.",
        ) from None
    network = Network(recipe, weights, dtype, pack=pack)
    del weights
    trim()  # of what was read, and of plain weights that are packed now
    return network


class _Weights:
    """Gives the weights in a directory by name: tables of the vocabulary as they are mapped, others read."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._files: list[Tensor] = []
        self._mapped: dict[str, Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with path.open("rb") as file:
                data, header = map_file(file), read_header(file)
            self._files.append(data)
            self._mapped |= tensors(data, header)
        self._read = 0

    def __call__(self, name: str) -> Tensor | None:
        tensor = self._mapped.get(name) if name.startswith(_PREFIXES) else None
        if tensor is None or (name in _TABLES and self._device.type == "cpu"):
            return tensor
        # Pages that were read count as memory, beside the copies.
        self._read += 1
        if not self._read % _AT_ONCE:
            for data in self._files:
                release(data)
        return tensor.to(self._device, self._dtype)
