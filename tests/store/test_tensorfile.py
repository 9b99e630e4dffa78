"""Tensor files: read as the library reads them, through one descriptor, and refused where they lie."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvedit.cache.kv import States
from kvedit.checkpoint import fingerprint
from kvedit.errors import ModelError
from kvedit.store import header, segments, tensorfile

TENSORS = {
    "é": torch.arange(6, dtype=torch.float32).view(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "bytes": torch.arange(3, dtype=torch.uint8),
    "none": torch.zeros(0, 4),
    "one": torch.tensor(7, dtype=torch.int64),
}


def written(path: Path, fields: dict[str, object], body: bytes, blanks: int = 0) -> Path:
    start = json.dumps(fields).encode() + b" " * blanks
    path.write_bytes(struct.pack("<Q", len(start)) + start + body)
    return path


def read(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        return tensorfile.tensors(tensorfile.map_file(file), header.read_header(file))


def test_a_file_reads_as_the_library_reads_it(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors", metadata={"author": "日本"})
    found, stock = read(tmp_path / "a.safetensors"), load_file(tmp_path / "a.safetensors")
    assert found.keys() == stock.keys()
    for name, tensor in found.items():
        assert tensor.dtype == stock[name].dtype
        assert torch.equal(tensor, stock[name])


@pytest.mark.parametrize("blanks", range(4))
def test_a_tensor_at_any_offset_is_read(tmp_path: Path, blanks: int) -> None:
    body = np.arange(4, dtype=np.float32).tobytes()
    fields = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    assert read(written(tmp_path / "a", fields, body, blanks))["a"].tolist() == [0, 1, 2, 3]


LIES = {
    "no header": b"",
    "a header longer than the file": struct.pack("<Q", 99) + b"{}",
    "a header without end": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": struct.pack("<Q", 2) + b"{{",
}
PARTS: dict[str, dict[str, object]] = {
    "more bytes than the file has": {"data_offsets": [0, 32], "shape": [8]},
    "another shape": {"shape": [5]},
    "a hole": {"data_offsets": [4, 16], "shape": [3]},
    "a start after its end": {"data_offsets": [16, 0]},
    "a key more": {"more": 1},
    "half an element": {"shape": [1.5]},
}


@pytest.mark.parametrize("name", [*LIES, *PARTS])
def test_a_false_header_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    if name in LIES:
        path.write_bytes(LIES[name])
    else:
        part = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **PARTS[name]}
        written(path, {"a": part}, bytes(16))
    with path.open("rb") as file, pytest.raises(ValueError):  # noqa: PT011
        header.read_header(file)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        fingerprint.of_files(tmp_path)


def test_a_file_replaced_after_it_was_opened_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def states(value: float) -> States:
        rows = torch.full((1, 1, 2, 2), value)
        return States(torch.arange(2), rows, rows)

    ids = np.zeros(2, dtype=np.int64)
    ours, theirs = (segments.write_segment(tmp_path, states(value), ids) for value in (1.0, 2.0))
    exchanged: list[str] = []

    def exchange(start: bytes, size: int) -> header.Header:
        os.replace(tmp_path / f"{theirs}.safetensors", tmp_path / f"{ours}.safetensors")
        exchanged.append(ours)
        return header.parse_header(start, size)

    monkeypatch.setattr(segments, "parse_header", exchange)
    assert segments.read_segment(tmp_path, ours)["keys"].unique().tolist() == [1.0]
    assert exchanged == [ours]
