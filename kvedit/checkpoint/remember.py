"""Find out whether plain parts give the numbers of a network of transformers, and remember it."""

from __future__ import annotations

import copy
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvedit.checkpoint import recipe
from kvedit.checkpoint.assemble import read_plain
from kvedit.checkpoint.compare import ROWS, Stock, distance, limit, probe
from kvedit.checkpoint.recipe import Norm, Recipe
from kvedit.errors import ModelError
from kvedit.model.model import Model
from kvedit.model.network import Network
from kvedit.tokens.prompt import Prompt

_ACTIVATIONS = {True: "silu", False: "relu2"}  # of an MLP with a gate, and of one without
_PROBE_ROWS = 3


def remember(stock: Stock) -> None:
    """Keep the recipe of an admitted checkpoint, if plain parts give the same numbers.

    If they do not, that is remembered too, so that later openings do not compare plain parts again.
    """
    model = stock.model
    checked = f"{model.dtype_name} {model.device.type}"
    if model.spread or recipe.refused(model.directory, checked):
        return
    plain = _describe(stock)
    if plain is None:
        return
    with suppress(ModelError):  # names that only transformers knows how to read
        if _same(model, plain):
            recipe.keep(model.directory, plain, model.tokenizer.serialized, checked)
            return
    recipe.refuse(model.directory, checked)


def _describe(stock: Stock) -> Recipe | None:
    """Describe a network of plain parts; `None` if its modules show that it has others."""
    model, network = stock.model, stock.network
    norms = {_norm(module) for module in _norms(network.model)}
    norm = norms.pop()
    gated = hasattr(network.model.layers[0].mlp, "gate_proj")
    if norms or norm is None or getattr(network.config, "hidden_act", None) != _ACTIVATIONS[gated]:
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


def _norms(inner: Any) -> list[Any]:
    """Return the modules that normalise."""
    norms = [inner.norm]
    for layer in inner.layers:
        attention = layer.self_attn
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return norms


def _norm(module: Any) -> Norm | None:
    """Find the norm that gives the numbers of a module on random states; `None` if none does."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.is_meta or epsilon is None:
        return None
    states = torch.randn(_PROBE_ROWS, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    for centred, offset in product((False, True), (0.0, 1.0)):
        norm = Norm(centred, offset, float(epsilon))
        if torch.equal(norm.part(weight, bias)(states), module(states)):
            return norm
    return None


def _prompt(model: Model) -> Prompt | None:
    """Return the layout of the prompt, unless that fails or depends on the day."""
    paths = [model.directory / name for name in ("chat_template.jinja", "tokenizer_config.json")]
    with suppress(ModelError, OSError):
        if not any(path.is_file() and b"strftime_now" in path.read_bytes() for path in paths):
            return model.layout(None)
    return None


@torch.no_grad()
def _same(model: Model, plain: Recipe) -> bool:
    """Whether plain parts give the model's numbers bit for bit, and packed ones up to rounding.

    Raises:
        ModelError: The weights have other names than the recipe's.
    """

    def logits(network: Network) -> Tensor:
        twin = copy.copy(model)
        twin.network = network
        return twin.logits(twin.walk(probe(twin), slice(0, ROWS), twin.new_cache(ROWS), outputs=ROWS).hidden)

    stock = logits(model.network)
    network = read_plain(model.directory, plain, model.dtype, model.device)
    heads: Any = zip(network.head.parts, model.network.head.parts, strict=True)
    tables = [(network.table.to(model.dtype), model.network.table)]
    tables += [(own.weight, module.weight) for own, module in heads]
    if not all(torch.equal(*pair) for pair in tables) or not torch.equal(logits(network), stock):
        return False
    del network, tables
    packed = read_plain(model.directory, plain, model.dtype, model.device, pack=True)
    return distance(logits(packed), stock) <= limit(model)
