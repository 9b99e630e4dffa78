"""Recipes: how to build a checkpoint's network of plain parts, so that it opens without transformers.

The first time, transformers reads the checkpoint. If a network of the plain parts in `kvedit.model.network`
gives the same numbers, bit for bit, its recipe is kept in the user's cache folder. Its key is a checksum of
everything that it depends on: the checkpoint's small files, the headers of its weights, and the versions of
kvedit and its libraries. If any of them changes, transformers reads the checkpoint again.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import platformdirs
from torch import Tensor

from kvedit import __version__
from kvedit.errors import KveditError
from kvedit.model.network import LayerNorm, Part, RmsNorm, Sizes
from kvedit.store.files import make_folder, replace_file
from kvedit.store.header import read_bytes
from kvedit.tokens.prompt import Prompt

_FORMAT = 3
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_LIBRARIES = ("torch", "transformers", "tokenizers")


@dataclass(frozen=True, slots=True)
class Norm:
    """How every norm of a network works.

    Attributes:
        centred: Whether it is a layer norm, which subtracts the mean, or a root mean square norm.
        offset: Added to the stored weight.
        epsilon: Added to the mean square.
    """

    centred: bool
    offset: float
    epsilon: float

    def part(self, weight: Tensor, bias: Tensor | None) -> Part:
        """Return the norm with a stored weight and bias `[width]`."""
        weight = weight + self.offset if self.offset else weight
        return LayerNorm(weight, bias, self.epsilon) if self.centred else RmsNorm(weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a network of plain parts is built from weights, and what else a model needs.

    Attributes:
        sizes: The numbers that describe the network.
        norm: How its norms work.
        head_norms: Whether queries and keys are normalized.
        gated: Whether the MLP is gated with SiLU; otherwise it has a squared ReLU.
        stop_ids: Ids that end an answer.
        parts: Fingerprints of the tokenizer and the chat template as transformers read them.
        prompt: The layout without a system text; `None` if it must be computed each time.
        checked: Dtype and device type of each comparison that it passed, such as `float32 cpu`.
    """

    sizes: Sizes
    norm: Norm
    head_norms: bool
    gated: bool
    stop_ids: tuple[int, ...]
    parts: dict[str, str]
    prompt: Prompt | None
    checked: tuple[str, ...] = ()


def folder() -> Path:
    """Return the folder of recipes in the user's cache."""
    return Path(platformdirs.user_cache_dir("kvedit")) / "recipes"


def find(directory: Path) -> tuple[Recipe, str] | None:
    """Return the recipe of a checkpoint and its tokenizer's JSON; `None` if no valid one is kept."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        recipe_folder = folder() / key(directory)
        kept = json.loads((recipe_folder / "recipe.json").read_bytes())
        tokenizer = (recipe_folder / "tokenizer.json").read_text(encoding="utf-8")
        if hashlib.sha256(tokenizer.encode()).hexdigest() != kept["parts"]["tokenizer"]:
            return None
        frequencies = tuple(kept["sizes"].pop("inverse_frequencies"))
        kept["sizes"] = Sizes(**kept["sizes"], inverse_frequencies=frequencies)
        kept["norm"] = Norm(**kept["norm"])
        for name in ("stop_ids", "checked"):
            kept[name] = tuple(kept[name])
        if kept["prompt"] is not None:
            kept["prompt"]["head_ids"] = tuple(kept["prompt"]["head_ids"])
            kept["prompt"] = Prompt(**kept["prompt"])
        return Recipe(**kept), tokenizer
    return None


def keep(directory: Path, recipe: Recipe, tokenizer: str, checked: str) -> None:
    """Keep a recipe; an unwritable cache folder is not an error and only costs time."""
    with suppress(OSError, KveditError):
        before = find(directory)
        passed = {*(before[0].checked if before else ()), checked}
        recipe_folder = folder() / key(directory)
        make_folder(recipe_folder)
        replace_file(recipe_folder / "tokenizer.json", tokenizer.encode())
        kept = asdict(replace(recipe, checked=tuple(sorted(passed))))
        replace_file(recipe_folder / "recipe.json", json.dumps(kept).encode())


def refuse(directory: Path, checked: str) -> None:
    """Record that plain parts do not give the numbers of a checkpoint's own network.

    Args:
        directory: Folder of the checkpoint.
        checked: Dtype and device type of the comparison, such as `float32 cpu`.
    """
    with suppress(OSError, KveditError):
        checkpoint_folder = folder() / key(directory)
        make_folder(checkpoint_folder)
        replace_file(checkpoint_folder / _refusal(checked), b"")


def refused(directory: Path, checked: str) -> bool:
    """Return whether this comparison of plain parts has failed before; `checked` is as in `refuse`."""
    with suppress(OSError):
        return (folder() / key(directory) / _refusal(checked)).is_file()
    return False


def _refusal(checked: str) -> str:
    return f"refused {checked}"


def key(directory: Path) -> str:
    """Return a checksum of everything that a recipe depends on.

    Raises:
        OSError: A file cannot be read.
    """
    checksum = hashlib.sha256(f"{_FORMAT};kvedit={__version__};".encode())
    for name in _LIBRARIES:
        checksum.update(f"{name}={version(name)};".encode())
    for path in sorted({path for pattern in _SMALL_FILES for path in directory.glob(pattern)}):
        data = path.read_bytes()
        checksum.update(f"{path.name}:{len(data)};".encode() + data)
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = read_bytes(file)
        checksum.update(f"{path.name}:{len(header)};".encode() + header)
    return checksum.hexdigest()[:32]
