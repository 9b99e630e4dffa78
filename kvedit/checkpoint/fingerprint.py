"""Fingerprints of models: checksums of their parts by content."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from kvedit.errors import ModelError
from kvedit.store.header import read_header
from kvedit.tokens.tokenizer import Tokenizer

_SAMPLE_BYTES = 1 << 16
_TENSOR_BYTES = 1 << 10


def of_text(tokenizer: Tokenizer, chat_template: str | None) -> dict[str, str]:
    """Return the SHA-256 of tokenizer and chat template, by name of the part."""
    return {
        "tokenizer": tokenizer.fingerprint,
        "chat_template": hashlib.sha256((chat_template or "").encode()).hexdigest(),
    }


def of_files(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of configuration and weights, by name of the part.

    Weights are sampled: the size and the first, middle and last 64 KiB of each file and, to detect a change
    of a few tensors, the size and the first, middle and last 1 KiB of each tensor.

    Raises:
        ModelError: A weights file is damaged.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(name, None)
    weights, samples = hashlib.sha256(), hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            weights.update(f"{path.name}:{size};".encode())
            add_samples(weights, file, 0, size, _SAMPLE_BYTES)
            _sample_tensors(file, samples)
    return {
        "config": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "weights": weights.hexdigest(),
        "tensor_samples": samples.hexdigest(),
    }


def add_samples(checksum: Any, file: BinaryIO, start: int, stop: int, size: int) -> None:
    """Add up to `size` bytes each from the start, middle and end of a byte range of a file to a checksum."""
    for offset in (start, (start + stop) // 2, max(start, stop - size)):
        file.seek(offset)
        checksum.update(file.read(min(size, stop - offset)))


def _sample_tensors(file: BinaryIO, samples: Any) -> None:
    """Add the first, middle and last bytes of each tensor in a safetensors file to a checksum."""
    try:
        header = read_header(file)
    except ValueError as error:
        raise ModelError(
            f"The weights in {file.name} cannot be read ({error}).", "Download the model again."
        ) from None
    for name, part in sorted(header.tensors.items()):
        start, stop = (header.size_bytes + offset for offset in part.data_offsets)
        samples.update(f"{name}:{stop - start};".encode())
        add_samples(samples, file, start, stop, _TENSOR_BYTES)
