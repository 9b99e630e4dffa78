"""Sessions as a stranger could make them: any values, under checksums that agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvedit.store.files import digest

FIELDS = dict[str, Any]


def read_manifest(folder: Path) -> FIELDS:
    return json.loads((folder / "session.json").read_bytes())


def seal(folder: Path, fields: FIELDS) -> None:
    """Write a manifest whose checksum agrees."""
    fields = {name: value for name, value in fields.items() if name != "checksum"}
    fields["checksum"] = digest(json.dumps(fields).encode())
    (folder / "session.json").write_text(json.dumps(fields))


def change(folder: Path, place: str, value: Any) -> None:
    """Put a value at a place of the manifest, such as `model.dtype`."""
    fields = read_manifest(folder)
    *way, last = place.split(".")
    holder = fields
    for name in way:
        holder = holder[name]
    holder[last] = value
    seal(folder, fields)


def read_lines(folder: Path) -> list[FIELDS]:
    kept = read_manifest(folder)["journal"]
    data = (folder / kept["name"]).read_bytes()[: kept["size_bytes"]]
    return [json.loads(line) for line in data.splitlines()]


def write_journal(folder: Path, data: bytes) -> None:
    """Put a journal in place of the session's, with a manifest that agrees."""
    fields = read_manifest(folder)
    (folder / fields["journal"]["name"]).write_bytes(data)
    fields["journal"] |= {"size_bytes": len(data), "digest": digest(data)}
    seal(folder, fields)


def write_lines(folder: Path, lines: list[FIELDS]) -> None:
    write_journal(folder, b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def replace_content(folder: Path, kind: str, old: str, make: Callable[[bytes], bytes]) -> str:
    """Put another tokenizer or segment in the place of one, under the name that its bytes give it."""
    suffix = {"tokenizers": "json", "segments": "safetensors"}[kind]
    path = folder / kind / f"{old}.{suffix}"
    data = make(path.read_bytes())
    path.with_name(f"{digest(data)}.{suffix}").write_bytes(data)
    lines = json.dumps(read_lines(folder)).replace(old, digest(data))
    write_lines(folder, json.loads(lines))
    seal(folder, json.loads(json.dumps(read_manifest(folder)).replace(old, digest(data))))
    return digest(data)


def contents(folder: Path) -> dict[str, bytes | str]:
    """All below a folder: the bytes of files, where links lead."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = str(path.readlink())
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
        else:
            found[str(path.relative_to(folder))] = "not a file"
    return found
