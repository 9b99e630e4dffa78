"""Compare kvedit with the stock forward pass of transformers, to catch what the configuration does not show.

If plain parts give the same numbers for a checkpoint that passes, their recipe is kept, and the checkpoint is
opened without transformers from then on.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvedit.cache.rope import rotate
from kvedit.checkpoint import recipe
from kvedit.checkpoint.admission import REMEDY
from kvedit.checkpoint.assemble import read_plain
from kvedit.checkpoint.recipe import Norm, Recipe
from kvedit.errors import ModelError
from kvedit.model.model import Model
from kvedit.model.network import Network
from kvedit.tokens.prompt import Prompt

ROWS = 24
_ACTIVATIONS = {True: "silu", False: "relu2"}  # of an MLP with a gate, and of one without
_PAST = 8  # rows of the first of two walks, so that the second one reads a cache


@dataclass(frozen=True, slots=True)
class Likeness:
    """Differences between kvedit's walk and the stock forward pass, on a few ids.

    Attributes:
        forward: Largest difference between logits, in standard deviations of the stock logits.
        far: The same, with the stock pass at the end of the context. RoPE depends only on distances, so a
            difference means that something else depends on the position.
        limit: Limit for `forward` and `far`, which allows for rounding.
        rotation: Largest difference between rotated keys, relative to the largest number in them.
        rotation_limit: Limit for `rotation`: 0 on a CPU, where rotations are bit-identical.
    """

    forward: float
    far: float
    limit: float
    rotation: float
    rotation_limit: float

    def check(self) -> None:
        """Raise `ModelError` if a difference exceeds its limit."""
        if not self.forward <= self.limit:
            raise ModelError(
                "This model is not supported: kvedit's logits differ from its own forward pass by "
                f"{self.forward:.3g} standard deviations.",
                REMEDY,
            )
        if not self.far <= self.limit:
            raise ModelError(
                "This model is not supported: its forward pass differs by "
                f"{self.far:.3g} standard deviations at the end of the context, so something other than "
                "RoPE depends on the position.",
                REMEDY,
            )
        if not self.rotation <= self.rotation_limit:
            raise ModelError("This model is not supported: it rotates keys differently from kvedit.", REMEDY)


@dataclass(frozen=True, slots=True)
class Stock:
    """A checkpoint read by transformers.

    Attributes:
        model: A model whose parts are the modules of `network`.
        network: The causal language model of transformers.
    """

    model: Model
    network: Any

    def compare(self) -> Likeness:
        """Compare the model's walk with the network's forward pass.

        Raises:
            ModelError: kvedit cannot run the layers.
        """
        try:
            return self._compare()
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"This model is not supported: its layers cannot be run by kvedit ({error}).", REMEDY
            ) from None

    @torch.no_grad()
    def _compare(self) -> Likeness:
        model = self.model
        ids = _probe(model)
        cache = model.new_cache(ROWS)
        model.walk(ids[:_PAST], slice(0, _PAST), cache)
        own = model.logits(model.walk(ids[_PAST:], slice(_PAST, ROWS), cache, outputs=ROWS - _PAST).hidden)
        raw, near = self._with_keys(ids)
        positions = torch.arange(ROWS, device=model.device) + max(0, model.context_length - ROWS)
        far = self.network(ids[None], position_ids=positions[None], use_cache=False)
        return Likeness(
            forward=_distance(own, near.logits[0, _PAST:]),
            far=_distance(own, far.logits[0, _PAST:]),
            limit=_limit(model),
            rotation=_rotation(model, raw, [layer.keys for layer in near.cache.layers]),
            rotation_limit=0.0 if model.device.type == "cpu" else 0.01,
        )

    def _with_keys(self, ids: Tensor) -> tuple[list[Tensor], Any]:
        """Run the network on ids `int64 [N]`; return each layer's keys before RoPE, and its output."""
        raw: list[Tensor] = []
        hooks = []
        for layer in self.network.model.layers:
            norm = getattr(layer.self_attn, "k_norm", None)
            last = layer.self_attn.k_proj if norm is None else norm
            hooks.append(last.register_forward_hook(lambda module, given, result: raw.append(result)))
        try:
            return raw, self.network(ids[None], use_cache=True)
        finally:
            for hook in hooks:
                hook.remove()


def _probe(model: Model) -> Tensor:
    """Return the ids for comparisons, `int64 [ROWS]`."""
    return torch.arange(ROWS, device=model.device) * 7 % model.vocabulary


def _limit(model: Model) -> float:
    """Return the largest difference that rounding explains, in standard deviations of logits."""
    return 0.02 if model.dtype == torch.float32 else 0.5


def _distance(own: Tensor, logits: Tensor) -> float:
    """Return the largest difference of logits `[N, vocabulary]`, in standard deviations of the second."""
    stock = logits.float().to(own.device)
    return float((own - stock).abs().max()) / max(float(stock.std()), 1e-6)


def _rotation(model: Model, raw: list[Tensor], cached: list[Tensor]) -> float:
    cos, sin = model.rope.angles(torch.arange(ROWS, device=model.device), model.dtype)
    worst = 0.0
    for states, stock in zip(raw, cached, strict=True):
        keys = states.reshape(ROWS, model.heads, model.width).transpose(0, 1).to(model.device)
        gap = (rotate(keys, cos, sin) - stock[0].to(model.device)).abs().max()
        worst = max(worst, float(gap) / max(float(keys.abs().max()), 1e-30))
    return worst


def remember(stock: Stock) -> None:
    """Keep the recipe of an admitted checkpoint if plain parts give the same numbers.

    If they do not, that is recorded too, so that later openings do not compare again.
    """
    model = stock.model
    checked = f"{model.dtype_name} {model.device.type}"
    if model.spread or recipe.refused(model.directory, checked):
        return
    plain = _describe(stock)
    if plain is None:
        return
    with suppress(ModelError):  # weights with names that only transformers can map
        if _same(model, plain):
            recipe.keep(model.directory, plain, model.tokenizer.serialized, checked)
            return
    recipe.refuse(model.directory, checked)


def _describe(stock: Stock) -> Recipe | None:
    """Return the recipe of a network; `None` if its modules show that plain parts do not suffice."""
    model, inner = stock.model, stock.network.model
    norms = {_norm(module) for module in inner.modules() if "norm" in type(module).__name__.lower()}
    norm = norms.pop() if len(norms) == 1 else None
    gated = hasattr(inner.layers[0].mlp, "gate_proj")
    if norm is None or getattr(inner.config, "hidden_act", None) != _ACTIVATIONS[gated]:
        return None
    return Recipe(
        sizes=model.network.sizes,
        norm=norm,
        head_norms=model.network.layers[0].key_norm is not None,
        gated=gated,
        stop_ids=tuple(sorted(model.stop_ids)),
        parts={name: model.parts[name] for name in ("tokenizer", "chat_template")},
        prompt=_prompt(model),
    )


def _norm(module: Any) -> Norm | None:
    """Return the norm that equals a module on random states; `None` if none does."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.is_meta or epsilon is None:
        return None
    states = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    for centred, offset in product((False, True), (0.0, 1.0)):
        norm = Norm(centred, offset, float(epsilon))
        if torch.equal(norm.part(weight, bias)(states), module(states)):
            return norm
    return None


def _prompt(model: Model) -> Prompt | None:
    """Return the layout of the prompt; `None` if that fails or depends on the date."""
    paths = [model.directory / name for name in ("chat_template.jinja", "tokenizer_config.json")]
    with suppress(ModelError, OSError):
        if not any(path.is_file() and b"strftime_now" in path.read_bytes() for path in paths):
            return model.layout(None)
    return None


@torch.no_grad()
def _same(model: Model, plain: Recipe) -> bool:
    """Return whether plain parts equal the model bit for bit, and packed ones up to rounding.

    Raises:
        ModelError: The weights do not have the names that plain parts expect.
    """

    def logits(network: Network) -> Tensor:
        twin = copy.copy(model)
        twin.network = network
        return twin.logits(twin.walk(_probe(twin), slice(0, ROWS), twin.new_cache(ROWS), outputs=ROWS).hidden)

    stock = logits(model.network)
    network = read_plain(model.directory, plain, model.dtype, model.device)
    heads: Any = zip(network.head.parts, model.network.head.parts, strict=True)
    tables = [(network.table.to(model.dtype), model.network.table)]
    tables += [(own.weight, module.weight) for own, module in heads]
    if not all(torch.equal(*pair) for pair in tables) or not torch.equal(logits(network), stock):
        return False
    del network, tables
    packed = read_plain(model.directory, plain, model.dtype, model.device, pack=True)
    return _distance(logits(packed), stock) <= _limit(model)
