"""A network at run time: parts that the walk calls one after another.

A part maps hidden states to hidden states. It is an instance of a class of this module, a packed layer
(`kvedit.model.packed`) or a module of transformers; this module does not distinguish them.
`kvedit.checkpoint` builds networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

Part = Callable[[Tensor], Tensor]
"""Maps `[N, in]` to `[N, out]`, in the network's dtype."""
TABLE_ROWS = 4096
"""Rows of a vocabulary table converted at once, to save memory: the table is the largest weight."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that describe a network.

    Attributes:
        hidden: Width of the hidden states.
        intermediate: Width inside the MLP.
        layers: Number of layers, L.
        heads: KV heads of a layer, H.
        groups: Query heads for each KV head.
        width: Width of a head, D.
        scaling: Factor on attention scores.
        context_length: Number of positions that the model was trained for.
        inverse_frequencies: Of RoPE, one for each rotated pair of dimensions.
        attention_scaling: Factor on cosine and sine (YaRN).
        tied: Whether the output layer is the embedding table.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    groups: int
    width: int
    scaling: float
    context_length: int
    inverse_frequencies: tuple[float, ...]
    attention_scaling: float
    tied: bool


class Linear:
    """`x @ weight.T + bias`."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, states: Tensor) -> Tensor:
        """Project `[..., in]` to `[..., out]`."""
        return functional.linear(states, self.weight, self.bias)


class RmsNorm:
    """Root mean square norm (arXiv 1910.07467), rounded at each step as in transformers."""

    __slots__ = ("epsilon", "weight")

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight, self.epsilon = weight, epsilon

    def __call__(self, states: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if states.dtype == torch.float32:  # one call rounds the same way
            return functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon)
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * exact.to(states.dtype)


class LayerNorm:
    """Layer norm (arXiv 1607.06450)."""

    __slots__ = ("bias", "epsilon", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, epsilon: float) -> None:
        self.weight, self.bias, self.epsilon = weight, bias, epsilon

    def __call__(self, states: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return functional.layer_norm(states, self.weight.shape, self.weight, self.bias, self.epsilon)


class Joined:
    """Parts with the same input, whose outputs are concatenated."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def __call__(self, states: Tensor) -> Tensor:
        """Map `[N, in]` to `[N, out of all parts]`."""
        return torch.cat([part(states) for part in self.parts], dim=-1)


class Gated:
    """`silu(gate(x)) * up(x)` (arXiv 2002.05202)."""

    __slots__ = ("gate", "up")

    def __init__(self, gate: Part, up: Part) -> None:
        self.gate, self.up = gate, up

    def __call__(self, states: Tensor) -> Tensor:
        """Map `[N, hidden]` to `[N, intermediate]`."""
        return functional.silu(self.gate(states)).mul_(self.up(states))


def gate_halves(states: Tensor) -> Tensor:
    """Map concatenated gate and up, `[N, 2 * intermediate]`, to `silu(gate) * up`, `[N, intermediate]`."""
    gate, up = states.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def squared_relu(states: Tensor) -> Tensor:
    """Return `relu(x) ** 2` (arXiv 2109.08668)."""
    return torch.square(functional.relu(states))


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of a decoder layer.

    Attributes:
        attention_norm: Before attention.
        projection: To queries, keys and values, `[N, hidden] -> [N, (Hq + 2 * H) * D]`.
        query_norm, key_norm: Of each head, or `None`.
        output: Of attention, `[N, Hq * D] -> [N, hidden]`.
        mlp_norm: Before the MLP.
        mlp: The steps of the MLP, `[N, hidden] -> [N, hidden]`, called one after another.
    """

    attention_norm: Part
    projection: Part
    query_norm: Part | None
    key_norm: Part | None
    output: Part
    mlp_norm: Part
    mlp: tuple[Part, ...]

    def project(self, hidden: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Normalise and project hidden states `[N, hidden]`.

        Returns:
            Queries and keys before RoPE, `[N, Hq + H, D]`, and values, `[N, H, D]`.
        """
        heads = self.projection(self.attention_norm(hidden)).view(len(hidden), -1, sizes.width)
        queries = sizes.groups * sizes.heads
        turning, values = heads.tensor_split([queries + sizes.heads], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, keys = turning.tensor_split([queries], dim=1)
            turning = torch.cat((self.query_norm(query), self.key_norm(keys)), dim=1)
        return turning, values

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Add the layer's output to its input.

        Args:
            hidden: The layer's input, `[N, hidden]`, on any device.
            mixed: Output of attention, `[N, Hq * D]`.

        Returns:
            The next layer's input, `[N, hidden]`, on the layer's device.
        """
        attended = self.output(mixed)
        hidden = hidden.to(attended.device) + attended
        states = self.mlp_norm(hidden)
        for part in self.mlp:
            states = part(states)
        return hidden + states

    @property
    def linears(self) -> tuple[Part, ...]:
        """The parts with weight matrices; the steps of the MLP include some without."""
        return (self.projection, self.output, *self.mlp)

    def rebuilt(self, rebuild: Callable[[Part], Part]) -> Layer:
        """Return a copy in which `rebuild` is applied to each of `linears`."""
        mlp = tuple(map(rebuild, self.mlp))
        return replace(self, projection=rebuild(self.projection), output=rebuild(self.output), mlp=mlp)


class Head:
    """The output layer, built on first use: a load needs no logits.

    Args:
        build: Returns its parts, whose outputs are concatenated.
    """

    def __init__(self, build: Callable[[], Sequence[Part]]) -> None:
        self._build = build

    @cached_property
    def parts(self) -> Sequence[Part]:
        """Its parts."""
        return self._build()

    def __call__(self, states: Tensor) -> Tensor:
        """Map `[N, hidden]` to logits `[N, vocabulary]`."""
        logits = [part(states) for part in self.parts]
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)


@dataclass(frozen=True, slots=True)
class Network:
    """A decoder-only network with a norm before attention and one before the MLP.

    Attributes:
        sizes: The numbers that describe it.
        table: The embedding table, `[vocabulary, hidden]`; on a CPU it can have the dtype of its file.
        layers: Its layers.
        norm: After the last layer.
        head: The output layer.
        dtype: Dtype of the computation.
        device: Device of the embedding table and the cache.
        spread: Whether its layers are on several devices.
        packed: Whether its linear layers are packed.
    """

    sizes: Sizes
    table: Tensor
    layers: tuple[Layer, ...]
    norm: Part
    head: Head
    dtype: torch.dtype
    device: torch.device
    spread: bool = False
    packed: bool = False
