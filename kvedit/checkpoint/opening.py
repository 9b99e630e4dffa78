"""Open a checkpoint: with transformers the first time, later without it if plain parts are equal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvedit.checkpoint import fingerprint, recipe
from kvedit.checkpoint.assemble import read_plain
from kvedit.checkpoint.template import layout
from kvedit.errors import ModelError
from kvedit.model.model import Model
from kvedit.tokens.prompt import Prompt

if TYPE_CHECKING:
    from kvedit.checkpoint.compare import Stock

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_model(directory: Path, *, device: str = "auto", dtype: str = "auto") -> Model:
    """Open the checkpoint in a directory.

    The first time, transformers reads it, and its forward pass is compared with kvedit's. If plain parts
    give the same numbers, it is then opened without transformers.

    Args:
        directory: Folder with config.json, safetensors weights and the tokenizer.
        device: `auto`, `cpu`, `cuda` or `mps`; `map` spreads the layers over all GPUs and, if they are
            too small, the memory of the CPU.
        dtype: `auto` (float32 on a CPU, bfloat16 elsewhere), `float32`, `bfloat16` or `float16`.

    Raises:
        ModelError: The device is unavailable, or the model is unsupported or damaged.
    """
    target, computed = _target(device, dtype)
    model = None if device == "map" else _reopen(directory, computed, target)
    return model or admit(open_stock(directory, device=device, dtype=dtype))


def open_stock(directory: Path, *, device: str = "auto", dtype: str = "auto") -> Stock:
    """Read the checkpoint in a directory with transformers, without the comparison.

    Args:
        directory, device, dtype: As in `open_model`.

    Raises:
        ModelError: The device is unavailable, or the model is unsupported or damaged.
    """
    from kvedit.checkpoint.adapt import from_transformers
    from kvedit.checkpoint.compare import Stock
    from kvedit.checkpoint.read import read_network, read_tokenizer

    target, computed = _target(device, dtype)
    network = read_network(directory, _DTYPES[computed], target, "auto" if device == "map" else None)
    tokenizer, template = read_tokenizer(directory)
    parts = {**fingerprint.of_files(directory), **fingerprint.of_text(tokenizer, template.chat_template)}
    stop_ids = _stop_ids(network, template)
    lay_out = partial(_layout, directory, None)
    return Stock(Model(directory, from_transformers(network), tokenizer, stop_ids, parts, lay_out), network)


def admit(stock: Stock) -> Model:
    """Compare a checkpoint with its own forward pass, and return the model to work with.

    Returns:
        A model of plain parts, if they give the same numbers; otherwise the stock one.

    Raises:
        ModelError: The forward passes differ by more than rounding.
    """
    from kvedit.checkpoint.compare import remember

    stock.compare().check()
    remember(stock)
    model = stock.model
    quick = None if model.spread else _reopen(model.directory, model.dtype_name, model.device)
    return quick or model


def _reopen(directory: Path, dtype: str, device: torch.device) -> Model | None:
    """Open a checkpoint by its recipe; return `None` if it has none for that dtype and device."""
    kept = recipe.find(directory)
    if kept is None or f"{dtype} {device.type}" not in kept[0].checked:
        return None
    plain, tokenizer = kept
    network = read_plain(directory, plain, _DTYPES[dtype], device, pack=True)
    parts = {**fingerprint.of_files(directory), **plain.parts}
    return Model(
        directory, network, tokenizer, plain.stop_ids, parts, partial(_layout, directory, plain.prompt)
    )


def _layout(directory: Path, kept: Prompt | None, system: str | None) -> Prompt:
    """Return the layout of the prompt; `kept` is that without a system text, if it is known."""
    if kept is not None and not system:
        return kept
    from kvedit.checkpoint.read import read_tokenizer

    tokenizer, template = read_tokenizer(directory)
    return layout(template, tokenizer, system)


def _target(device: str, dtype: str) -> tuple[torch.device, str]:
    """Return the device to open a model on, which is the first one of a map, and the name of the dtype."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device in ("auto", "map"):
        device = next(name for name in ("cuda", "mps", "cpu") if available[name])
    if not available[device]:
        raise ModelError(f"This machine has no {device} device.", "Use --device cpu or auto.")
    default = "float32" if device == "cpu" else "bfloat16"
    return torch.device(device), default if dtype == "auto" else dtype


def _stop_ids(network: Any, template: Any) -> frozenset[int]:
    """Collect the ids that end an answer from all files that can name them."""
    ids: set[int] = set()
    generation = getattr(network, "generation_config", None)
    for source in (generation, network.config, template):
        named = getattr(source, "eos_token_id", None)
        ids.update([named] if isinstance(named, int) else named or [])
    return frozenset(ids)
