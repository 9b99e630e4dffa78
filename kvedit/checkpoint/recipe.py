"""Recipes: how plain parts make up a checkpoint's network, remembered to open it without transformers.

transformers reads and admits a checkpoint. If a network of the plain parts in `kvedit.model.network` then
gives the same numbers, bit for bit, its recipe is kept in the user's cache folder, under a checksum of
everything that it follows from: the checkpoint's small files, the headers of its weights, and the versions
of kvedit and its libraries. If any of them changes, transformers reads the checkpoint again.
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
        centred: Whether it subtracts the mean, as a layer norm does, or is a root mean square norm.
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
        head_norms: Whether queries and keys are normalised.
        gated: Whether the MLP is gated with SiLU; otherwise it has a squared ReLU.
        stop_ids: Ids that end an answer.
        parts: Fingerprints of what transformers made of the small files.
        prompt: The layout without a system text; `None` if it must be computed each time.
        checked: Dtype and kind of device of each comparison that it passed, such as `float32 cpu`.
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
    """Find the recipe of a checkpoint, and its tokenizer's JSON; `None` where none is kept."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        place = folder() / key(directory)
        kept = json.loads((place / "recipe.json").read_bytes())
        tokenizer = (place / "tokenizer.json").read_text(encoding="utf-8")
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
    """Keep a recipe; a cache folder that cannot be written only costs time."""
    with suppress(OSError, KveditError):
        before = find(directory)
        passed = {*(before[0].checked if before else ()), checked}
        place = folder() / key(directory)
        make_folder(place)
        replace_file(place / "tokenizer.json", tokenizer.encode())
        kept = asdict(replace(recipe, checked=tuple(sorted(passed))))
        replace_file(place / "recipe.json", json.dumps(kept).encode())


def refuse(directory: Path, checked: str) -> None:
    """Remember that plain parts give other numbers than a checkpoint's own network.

    Args:
        directory: Where the checkpoint is.
        checked: Dtype and kind of device of the comparison, such as `float32 cpu`.
    """
    with suppress(OSError, KveditError):
        checkpoint_folder = folder() / key(directory)
        make_folder(checkpoint_folder)
        replace_file(checkpoint_folder / _refusal(checked), b"")


def refused(directory: Path, checked: str) -> bool:
    """Report whether that comparison of plain parts has failed before; `checked` is as in `refuse`."""
    with suppress(OSError):
        return (folder() / key(directory) / _refusal(checked)).is_file()
    return False


def _refusal(checked: str) -> str:
    return f"refused {checked}"


def key(directory: Path) -> str:
    """Return a checksum of everything that a recipe follows from.

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
