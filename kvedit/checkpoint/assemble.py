"""Build a network of plain parts from a checkpoint's weights, without transformers.

Importing transformers and building its modules can take longer than an answer, and all that is needed are
linear layers, norms and an MLP. `kvedit.checkpoint.recipe` records which checkpoints plain parts reproduce
bit for bit. On a CPU the linear layers are packed; see `kvedit.model.packed`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvedit.cache.memory import trim
from kvedit.checkpoint.recipe import Recipe
from kvedit.errors import ModelError
from kvedit.model.network import (
    TABLE_ROWS,
    Gated,
    Head,
    Joined,
    Layer,
    Linear,
    Network,
    Part,
    gate_halves,
    squared_relu,
)
from kvedit.model.packed import Packed
from kvedit.store.header import read_header
from kvedit.store.tensorfile import map_file, release, tensors

Weights = Callable[[str], "Tensor | None"]
"""Returns a weight by its name in the checkpoint, or `None` if the checkpoint lacks it."""
_PREFIXES = ("model.", "lm_head.")  # some folders contain the weights again under other names
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_AT_ONCE = 16


def assemble(
    recipe: Recipe, weights: Weights, dtype: torch.dtype | None = None, *, pack: bool = False
) -> Network:
    """Build a network of plain parts.

    The embedding table keeps the dtype of its file, and the output layer is built on first use: a load needs
    only the document's rows of the table, and no logits.

    Args:
        recipe: How the parts fit together.
        weights: Returns the weights.
        dtype: Dtype of the computation; by default that of the embedding table.
        pack: Pack the linear layers if this machine can; each is packed as soon as it is read, so that few
            weights are in memory twice.

    Raises:
        ModelError: A weight is missing.
    """
    parts = _Parts(recipe, weights)
    packed = parts.packed = pack and Packed.can_hold(parts.weight("model.norm.weight"))
    table = parts.weight("model.embed_tokens.weight")
    computed = dtype or table.dtype
    output = Linear(table, None) if recipe.sizes.tied else parts.linear("lm_head")
    return Network(
        sizes=recipe.sizes,
        table=table,
        layers=tuple(parts.layer(f"model.layers.{number}") for number in range(recipe.sizes.layers)),
        norm=parts.norm("model.norm"),
        head=Head(lambda: _head(output, computed, packed)),
        dtype=computed,
        device=table.device,
        packed=packed,
    )


class _Parts:
    """Builds the parts of a network by the names of their weights.

    Attributes:
        packed: Whether linear layers are packed.
    """

    def __init__(self, recipe: Recipe, weights: Weights) -> None:
        self._recipe, self._weights = recipe, weights
        self.packed = False

    def weight(self, name: str) -> Tensor:
        """Return a weight; raise `ModelError` if it is missing."""
        tensor = self._weights(name)
        if tensor is None:
            raise ModelError(f"The weights are incomplete: `{name}` is missing.", "Download the model again.")
        return tensor

    def linear(self, name: str) -> Linear:
        return Linear(self.weight(f"{name}.weight"), self._weights(f"{name}.bias"))

    def norm(self, name: str) -> Part:
        return self._recipe.norm.part(self.weight(f"{name}.weight"), self._weights(f"{name}.bias"))

    def layer(self, name: str) -> Layer:
        attention = f"{name}.self_attn"
        head_norms = self._recipe.head_norms
        return Layer(
            attention_norm=self.norm(f"{name}.input_layernorm"),
            projection=self._joined(*(f"{attention}.{part}_proj" for part in "qkv")),
            query_norm=self.norm(f"{attention}.q_norm") if head_norms else None,
            key_norm=self.norm(f"{attention}.k_norm") if head_norms else None,
            output=self._joined(f"{attention}.o_proj"),
            mlp_norm=self.norm(f"{name}.post_attention_layernorm"),
            mlp=self._mlp(f"{name}.mlp"),
        )

    def _joined(self, *names: str) -> Part:
        linears = [self.linear(name) for name in names]
        if self.packed:
            return Packed(*linears)
        return linears[0] if len(linears) == 1 else Joined(linears)

    def _mlp(self, name: str) -> tuple[Part, ...]:
        gate, up, down = (f"{name}.{part}_proj" for part in ("gate", "up", "down"))
        if not self._recipe.gated:
            return self._joined(up), squared_relu, self._joined(down)
        if self.packed:
            return self._joined(gate, up), gate_halves, self._joined(down)
        return Gated(self.linear(gate), self.linear(up)), self.linear(down)


def _head(output: Linear, dtype: torch.dtype, packed: bool) -> list[Part]:
    """Convert the output layer to `dtype`; if packed, in parts, so that little of it is in memory twice."""
    weight, bias = output.weight, output.bias
    if not packed:
        return [Linear(weight.to(dtype), bias)]
    parts: list[Part] = []
    for first in range(0, len(weight), TABLE_ROWS):
        rows = slice(first, first + TABLE_ROWS)
        parts.append(Packed(Linear(weight[rows].to(dtype), None if bias is None else bias[rows])))
        release(weight)
        trim()
    return parts


def read_plain(
    directory: Path, recipe: Recipe, dtype: torch.dtype, device: torch.device, *, pack: bool = False
) -> Network:
    """Read the weights in a directory; on a CPU, vocabulary tables are mapped from their files.

    Args:
        directory: Folder with safetensors weights.
        recipe: How the parts fit together.
        dtype: Dtype of the computation.
        device: Device of the weights.
        pack: As in `assemble`.

    Raises:
        ModelError: They are damaged or incomplete.
    """
    try:
        weights = _Weights(directory, dtype, device)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The weights in {directory} cannot be read ({error}).",
            "Download the model again, or remove the folder so that the model is converted again.",
        ) from None
    network = assemble(recipe, weights, dtype, pack=pack)
    del weights
    trim()  # return the memory of weights that have been converted or packed
    return network


class _Weights:
    """Returns the weights in a directory by name: mapped vocabulary tables, and copies of the others."""

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
        # Pages that were read count as memory in addition to the copies.
        self._read += 1
        if not self._read % _AT_ONCE:
            for data in self._files:
                release(data)
        return tensor.to(self._device, self._dtype)
