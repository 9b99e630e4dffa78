"""What a checkpoint is made of, remembered, so that it can be opened again without transformers.

transformers is what reads and admits a checkpoint. Once `Model.check` has found that a network of
the plain parts in `kvedit.model.network` gives the same numbers, bit for bit, a recipe is kept in the
user's cache folder, under a checksum of all that it follows from: the checkpoint's small files, the
headers of its weights, and the versions of kvedit and its libraries. A change in any of them means that
transformers reads the checkpoint again.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import platformdirs

from kvedit import __version__
from kvedit.errors import KveditError
from kvedit.store.files import make_folder, replace_file
from kvedit.store.header import read_bytes
from kvedit.tokens.prompt import Prompt

_FORMAT = 2
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_LIBRARIES = ("torch", "transformers", "tokenizers")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A network of plain parts, except its weights.

    Attributes:
        layers, heads, groups, width: As `Model` has them.
        scaling: What attention scores are multiplied with.
        context_length: Positions that it was made for.
        epsilon: Of every RMS norm.
        head_norms: Whether queries and keys are normed.
        tied: Whether the output layer is the embedding table.
        inverse_frequencies: Of RoPE, one for each pair of dimensions that turns.
        attention_scaling: Factor on cosine and sine.
        stop_ids: Ids that end an answer.
        parts: Fingerprints of what transformers made of the small files.
        prompt: The layout without a system text; `None` where it must be made each time.
        checked: Dtype and kind of device of each comparison that it has passed, such as
            `float32 cpu`.
    """

    layers: int
    heads: int
    groups: int
    width: int
    scaling: float
    context_length: int
    epsilon: float
    head_norms: bool
    tied: bool
    inverse_frequencies: tuple[float, ...]
    attention_scaling: float
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
        for name in ("inverse_frequencies", "stop_ids", "checked"):
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
