"""A network of plain parts, made from a checkpoint's weights without transformers.

Importing transformers and building its modules takes longer than many an answer. What a walk needs
of them is little: linear layers, RMS norms and a gated MLP. `kvedit.model.recipe` remembers of which
checkpoints these parts are the whole truth, bit for bit. They have the names that transformers
gives its modules, so that one walk serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors
import torch
from torch import Tensor
from torch.nn import functional

from kvedit.errors import ModelError
from kvedit.model.recipe import Recipe

_PREFIXES = ("model.", "lm_head.")  # some folders hold the weights twice, under other names
_AT_ONCE = 16
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


class RmsNorm:
    """Root mean square norm (arXiv 1910.07467), with every rounding of transformers'."""

    __slots__ = ("epsilon", "weight")

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight, self.epsilon = weight, epsilon

    def __call__(self, states: Tensor) -> Tensor:
        """Norm the last dimension."""
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * exact.to(states.dtype)


class GatedMlp:
    """`down(silu(gate(x)) * up(x))` (arXiv 2002.05202)."""

    __slots__ = ("down", "gate", "up")

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        self.gate, self.up, self.down = gate, up, down

    def __call__(self, states: Tensor) -> Tensor:
        """Map `[N, hidden]` to `[N, hidden]`."""
        return self.down(functional.silu(self.gate(states)) * self.up(states))


class Network:
    """The parts of a network, under the names of transformers' modules.

    Args:
        recipe: What it is made of.
        tensors: Give its weights.

    Raises:
        ModelError: A weight is not there.
    """

    def __init__(self, recipe: Recipe, tensors: Tensors) -> None:
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
            attention = SimpleNamespace(
                head_dim=recipe.width,
                scaling=recipe.scaling,
                **{f"{part}_proj": linear(f"{at}.self_attn.{part}_proj") for part in "qkvo"},
                **{f"{part}_norm": norm(f"{at}.self_attn.{part}_norm") for part in "qk" if recipe.head_norms},
            )
            return SimpleNamespace(
                self_attn=attention,
                input_layernorm=norm(f"{at}.input_layernorm"),
                post_attention_layernorm=norm(f"{at}.post_attention_layernorm"),
                mlp=GatedMlp(*(linear(f"{at}.mlp.{part}_proj") for part in ("gate", "up", "down"))),
            )

        table = found("model.embed_tokens.weight")
        frequencies = torch.tensor(recipe.inverse_frequencies, dtype=torch.float32)
        self.model = SimpleNamespace(
            embed_tokens=SimpleNamespace(weight=table),
            layers=[layer(number) for number in range(recipe.layers)],
            norm=norm("model.norm"),
            rotary_emb=SimpleNamespace(inv_freq=frequencies, attention_scaling=recipe.attention_scaling),
        )
        self.lm_head = Linear(table, None) if recipe.tied else linear("lm_head")
        self.config = SimpleNamespace(
            num_hidden_layers=recipe.layers,
            num_key_value_heads=recipe.heads,
            num_attention_heads=recipe.heads * recipe.groups,
            max_position_embeddings=recipe.context_length,
            vocab_size=len(table),
            hidden_size=table.shape[1],
            intermediate_size=len(self.model.layers[0].mlp.gate.weight),
            eos_token_id=list(recipe.stop_ids),
        )
        self.dtype, self.device = table.dtype, table.device
        self.recipe = recipe


def read(directory: Path, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Network:
    """Read the weights in a directory; they are mapped from the files where nothing must change.

    Raises:
        ModelError: They are damaged, or not whole.
    """
    held: dict[str, Tensor] = {}
    try:
        for path in sorted(directory.glob("*.safetensors")):
            with safetensors.safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(_PREFIXES)]  # noqa: SIM118
            # A few at a time: pages of a file that stays open count as memory, beside the copies.
            for first in range(0, len(names), _AT_ONCE):
                with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
                    for name in names[first : first + _AT_ONCE]:
                        held[name] = file.get_tensor(name).to(dtype)
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(
            f"The weights in {directory} cannot be read ({error}).",
            "Download the model again, or remove the folder so that it is converted anew.",
        ) from None
    return Network(recipe, held.get)
