"""The comparison with the stock forward pass of transformers, which catches what no field says."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvedit.cache.rope import rotate
from kvedit.checkpoint import recipe
from kvedit.checkpoint.admission import REMEDY
from kvedit.checkpoint.recipe import Recipe
from kvedit.errors import ModelError
from kvedit.model import network as light
from kvedit.tokens.prompt import Prompt

if TYPE_CHECKING:
    from kvedit.model.model import Model

ROWS = 24
_PAST = 8  # rows of the first of the two walks, so that the second one reads a cache


@dataclass(frozen=True, slots=True)
class Likeness:
    """How far kvedit's walk is from the stock forward pass, on a few ids.

    Attributes:
        forward: Largest difference of two logits, in standard deviations of the stock ones.
        far: The same, with the stock pass at the end of the context: RoPE knows distances alone,
            so a difference means that something else depends on the position.
        limit: What rounding may come to, for both.
        rotation: Largest difference of two rotated keys, in parts of the largest number in them.
        rotation_limit: Of it: none on a CPU, where a rotation is bit for bit the network's own.
    """

    forward: float
    far: float
    limit: float
    rotation: float
    rotation_limit: float

    def check(self) -> None:
        """Raise `ModelError` where a difference is more than rounding."""
        if not self.forward <= self.limit:
            raise ModelError(
                "This model is not supported: its own forward pass differs from kvedit's by "
                f"{self.forward:.3g} standard deviations.",
                REMEDY,
            )
        if not self.far <= self.limit:
            raise ModelError(
                "This model is not supported: at the end of its context its own forward pass differs by "
                f"{self.far:.3g} standard deviations, so more than RoPE depends on the position.",
                REMEDY,
            )
        if not self.rotation <= self.rotation_limit:
            raise ModelError(
                "This model is not supported: it does not rotate its keys as kvedit does.", REMEDY
            )


@torch.no_grad()
def compare(model: Model) -> Likeness:
    """Compare the walk of a model with its network's own forward pass.

    Raises:
        AttributeError, RuntimeError, TypeError, ValueError: The layers cannot be walked.
    """
    ids = torch.arange(ROWS, device=model.device) * 7 % model.network.config.vocab_size
    cache = model.new_cache(ROWS)
    model.walk(ids[:_PAST], slice(0, _PAST), cache)
    own = model.logits(model.walk(ids[_PAST:], slice(_PAST, ROWS), cache, outputs=ROWS - _PAST).hidden)
    raw, near = _with_keys(model, ids)
    place = torch.arange(ROWS, device=model.device) + max(0, model.context_length - ROWS)
    far = model.network(ids[None], position_ids=place[None], use_cache=False)
    return Likeness(
        forward=_distance(own, near.logits[0, _PAST:]),
        far=_distance(own, far.logits[0, _PAST:]),
        limit=_limit(model),
        rotation=_rotation(model, raw, [layer.keys for layer in near.cache.layers]),
        rotation_limit=0.0 if model.device.type == "cpu" else 0.01,
    )


def _with_keys(model: Model, ids: Tensor) -> tuple[list[Tensor], Any]:
    """Take ids through the network; give each layer's keys before RoPE, and the output with its cache."""
    raw: list[Tensor] = []
    hooks = []
    for layer in model.network.model.layers:
        norm = getattr(layer.self_attn, "k_norm", None)
        last = layer.self_attn.k_proj if norm is None else norm
        hooks.append(last.register_forward_hook(lambda module, given, result: raw.append(result)))
    try:
        return raw, model.network(ids[None], use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()


def _limit(model: Model) -> float:
    """What rounding may come to, in standard deviations of logits."""
    return 0.02 if model.dtype == torch.float32 else 0.5


def _distance(own: Tensor, logits: Tensor) -> float:
    stock = logits.float().to(own.device)
    return float((own - stock).abs().max()) / max(float(stock.std()), 1e-6)


def _rotation(model: Model, raw: list[Tensor], held: list[Tensor]) -> float:
    cos, sin = model.rope.angles(torch.arange(ROWS, device=model.device), model.dtype)
    worst = 0.0
    for states, stock in zip(raw, held, strict=True):
        keys = states.reshape(ROWS, model.heads, model.width).transpose(0, 1).to(model.device)
        gap = (rotate(keys, cos, sin) - stock[0].to(model.device)).abs().max()
        worst = max(worst, float(gap) / max(float(keys.abs().max()), 1e-30))
    return worst


def remember(model: Model) -> None:
    """Keep the recipe of a model that was compared, if plain parts give the same numbers.

    If they do not, that is remembered too, so that later openings do not compare plain parts again.
    """
    checked = f"{model.dtype_name} {model.device.type}"
    if model.spread or recipe.refused(model.directory, checked):
        return
    plain = _recipe(model)
    if plain is None:
        return
    with suppress(ModelError):  # names that only transformers knows how to read
        if _same(model, plain):
            recipe.keep(model.directory, plain, model.tokenizer.serialized, checked)
            return
    recipe.refuse(model.directory, checked)


def _recipe(model: Model) -> Recipe | None:
    """Describe a network of plain parts; `None` where a look at its modules says that it has others."""
    network = model.network
    attention = network.model.layers[0].self_attn
    norms = [module for module in network.modules() if type(module).__name__.endswith("Norm")]
    epsilons = {float(getattr(module, "variance_epsilon", -1.0)) for module in norms}
    if len(epsilons) != 1 or min(epsilons) < 0 or getattr(network.config, "hidden_act", None) != "silu":
        return None
    return Recipe(
        layers=model.layers,
        heads=model.heads,
        groups=model.groups,
        width=model.width,
        scaling=model.scaling,
        context_length=model.context_length,
        epsilon=epsilons.pop(),
        head_norms=getattr(attention, "k_norm", None) is not None,
        tied=model.tied,
        inverse_frequencies=tuple(model.rope.inverse_frequencies.tolist()),
        attention_scaling=model.rope.attention_scaling,
        stop_ids=tuple(sorted(model.stop_ids)),
        parts={name: model.parts[name] for name in ("tokenizer", "chat_template")},
        prompt=_prompt(model),
    )


def _prompt(model: Model) -> Prompt | None:
    """Lay the prompt out, unless that fails or gives another one tomorrow."""
    places = [model.directory / name for name in ("chat_template.jinja", "tokenizer_config.json")]
    with suppress(ModelError, OSError):
        if not any(path.is_file() and b"strftime_now" in path.read_bytes() for path in places):
            return model.layout(None)
    return None


@torch.no_grad()
def _same(model: Model, made: Recipe) -> bool:
    """Whether plain parts give the numbers of the model's own, bit for bit, and packed ones up to rounding.

    Raises:
        ModelError: The weights have other names than the recipe's.
    """
    twin = copy.copy(model)

    def logits(one: Model) -> Tensor:
        ids = torch.arange(ROWS, device=model.device) * 7 % model.vocabulary
        return one.logits(one.walk(ids, slice(0, ROWS), one.new_cache(ROWS), outputs=ROWS).hidden)

    stock = logits(model)
    twin.network = light.read(model.directory, made, model.dtype, model.device)
    networks = (twin.network, model.network)
    tables = ((one.model.embed_tokens.weight.to(model.dtype), one.lm_head.weight) for one in networks)
    same = all(torch.equal(left, right) for left, right in zip(*tables, strict=True))
    if not (same and torch.equal(logits(twin), stock)):
        return False
    twin.network = light.read(model.directory, made, model.dtype, model.device, pack=True)
    return _distance(logits(twin), stock) <= _limit(model)
