"""Fuzz the readers of a session's files (manifest, journal, segment header), guided by coverage.

    pip install atheris
    python benchmarks/fuzz.py --inputs 200000 --seed 1

Each input must be accepted, or refused with the error for a damaged session, within a second and 200 MB. An
accepted input is then checked for consistency. Checksums are recomputed, so that the code after a checksum is
tested too. libFuzzer keeps inputs that reach new branches; most mutations change the JSON as a tree (keys,
numbers, strings, arrays), the others change bytes. Equal seeds give equal inputs. The first failing input
ends the run and is written to a file, which `--try FILE --target NAME` runs again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:
    sys.exit("The fuzzer is not installed. Run `pip install atheris`.")

with atheris.instrument_imports(include=["kvedit"]):
    from kvedit.cache.rows import RowTable
    from kvedit.errors import SessionError
    from kvedit.store import checks, header, journal, records
    from kvedit.store.files import digest

_SECONDS = 1.0
_BYTES = 200 << 20
_LARGEST_INPUT = 1 << 16
_SHARES = {"manifest": 0.35, "journal": 0.45, "segment": 0.2}
_MANY_ROWS = 100_000  # larger row tables are not expanded, to save time

# --- valid files to start from --------------------------------------------------------------------

A, B = "a" * 32, "0b" * 16
MODEL = {
    "name": "smollm2-135m",
    "directory": "/models/smollm2-135m",
    "dtype": "float32",
    "device": "auto",
    "context_length": 8192,
    "parts": {part: "5" * 64 for part in records.PARTS},
}
MANIFEST = {
    "format": records.FORMAT,
    "created": "2026-11-30T06:44:55.065631Z",
    "used": "2026-11-30T06:44:56.000001Z",
    "source": "/documents/contract.txt",
    "encoding": "utf-8",
    "bom": False,
    "system": "Be brief.",
    "model": MODEL,
    "tokenizer": A,
    "head_ids": [1, 9690, 198, 2],
    "before_question": "\n<|im_end|>",
    "after_question": "<|im_start|>assistant\n",
    "before_next": "<|im_end|>\n",
    "prefill_tokens_per_s": 812.5,
    "journal": {"name": f"journal-{B}.jsonl", "size_bytes": 4096, "digest": A},
    "revision": 3,
    "undone": [5, 4],
}


def _line(number: int, parent: int | None, **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "number": number,
        "parent": parent,
        "state": number,
        "created": MANIFEST["created"],
        "command": f"delete --lines {number + 1}",
        "edits": number,
        "changes": [],
        "lines": 3,
        "tokens": 9,
        "stale": 0,
        "missing": 0,
        "frontier": 4,
    }
    return {**fields, "rows": [0, [], 0], "turns": [0, [], 0], **more}


LINES = [
    _line(0, None, command="load", text="one\ntwo\nthree\n", rows=[0, [[A, 0, 9, 0]], 0]),
    _line(1, 0, changes=[[4, 8, ""]], rows=[0, [[A, 0, 3, 0], [A, 5, 4, 1]], 0]),
    _line(2, 1, changes=[[0, 0, "caf\u00e9\n"], [5, 5, "x"]], rows=[1, [[None, 0, 2, 0]], 1]),
    _line(
        3, 2, state=2, command="ask 'Why?' --continue", rows=[2, [[B, 0, 5, 1]], 1], turns=[0, [7, 8, 9], 0]
    ),
    _line(4, 0, changes=[[0, 4, ""]], text="two\nthree\n", rows=[0, [[A, 4, 5, 0]], 0]),
]


def _segment(layers: int, heads: int, rows: int, width: int, dtype: str = "F32") -> bytes:
    size = layers * heads * rows * width * (4 if dtype == "F32" else 2)
    shape = [layers, heads, rows, width]
    fields = {
        "__metadata__": header.FORMAT,
        "keys": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]},
        "values": {"dtype": dtype, "shape": shape, "data_offsets": [size, 2 * size]},
        "ids": {"dtype": "I32", "shape": [rows], "data_offsets": [2 * size, 2 * size + 4 * rows]},
    }
    start = json.dumps(fields).encode()
    start += b" " * (-len(start) % 8)
    return struct.pack("<Q", len(start)) + start + bytes(2 * size + 4 * rows)


SEEDS: dict[str, list[bytes]] = {
    "manifest": [
        json.dumps(MANIFEST).encode(),
        json.dumps({**MANIFEST, "system": None, "used": ""}).encode(),
    ],
    "journal": [
        b"".join(json.dumps(line).encode() + b"\n" for line in LINES[:count]) for count in (1, 2, 3, 4, 5)
    ],
    "segment": [_segment(1, 1, 2, 2), _segment(3, 2, 4, 8, "BF16")],
}

# --- the targets ------------------------------------------------------------------------------------


def try_manifest(data: bytes) -> str:
    """Read a manifest, with a valid checksum if it is an object."""
    try:
        fields = json.loads(data)
        fields.pop("checksum", None)
        data = json.dumps({**fields, "checksum": digest(json.dumps(fields).encode())}).encode()
    except (ValueError, RecursionError, AttributeError):
        pass  # not an object: leave it unchanged
    try:
        manifest = records.parse_manifest(data)
    except (SessionError, ValueError):  # `Store.read_manifest` turns the second into the first
        return "refused"
    assert records.parse_manifest(records.dump_manifest(manifest)) == manifest
    assert checks.JOURNAL.fullmatch(manifest.journal.name)
    assert checks.NAME.fullmatch(manifest.tokenizer)
    return "taken"


def try_journal(data: bytes) -> str:
    """Read every revision of a journal, as opening, `log`, `compact` and `check` do."""
    record = records.JournalRecord(f"journal-{A}.jsonl", len(data), hashlib.sha256(data).hexdigest()[:32])
    journal._read = lambda path, size: data
    try:
        opened = journal.Journal(Path("."), record)
    except SessionError:
        return "refused"
    outcome = "taken"
    for number in range(len(opened)):
        try:
            opened.entry(number)
            revision = opened.revision(number)
        except SessionError:
            outcome = "refused in part"
            continue
        assert len(revision.text) <= len(data)  # reading must not expand data
        assert len(revision.rows) + len(revision.turns) <= len(data)
        if sum(piece.length for piece in revision.rows) <= _MANY_ROWS:
            rows = RowTable.from_pieces(revision.rows, revision.entry.frontier)
            assert len(rows) == sum(piece.length for piece in revision.rows)
        again = records.parse_line(records.dump_revision(revision, None), number)
        assert records.parse_revision(again, None) == revision
    try:
        assert all(checks.NAME.fullmatch(name) for name in opened.segments())
    except SessionError:
        outcome = "refused in part"
    return outcome


def try_segment(data: bytes) -> str:
    """Read a header; if it is accepted, the safetensors library must read the same sizes."""
    import safetensors

    try:
        found = header.parse_header(data[: header.HEADER_BYTES], len(data))
    except ValueError:  # `read_segment` turns it into the error for a damaged session
        return "refused"
    tensors = dict(safetensors.deserialize(data))
    assert sorted(tensors) == ["ids", "keys", "values"]
    for name in ("keys", "values"):
        part = found.tensors[name]
        assert (tensors[name]["dtype"], tuple(tensors[name]["shape"])) == (part.dtype, part.shape)
    return "taken"


TARGETS: dict[str, Callable[[bytes], str]] = {
    "manifest": try_manifest,
    "journal": try_journal,
    "segment": try_segment,
}

# --- mutations of the JSON --------------------------------------------------------------------------

_NUMBERS = (0, 1, -1, 2, 9, 255, 2**31 - 1, 2**31, 2**53, 10**15, 10**18, -(2**63), 10**400, 0.5, 1e308, -0.0)
_OTHERS = (
    None,
    True,
    False,
    "",
    [],
    {},
    "a" * 32,
    "../../etc/passwd",
    "/",
    "\0",
    "\ud800",
    "\U0001f642",
    "9999",
)
_RAW = (
    "NaN",
    "-Infinity",
    "1e999",
    "[" * 2000,
    "9" * 5000,
    '{"a":1,"a":1}',
    "\n",
    "\r",
    "[[[]]]",
    "01",
    "\xff",
)


def change_json(data: bytes, chance: random.Random) -> bytes:
    """Change one element of a JSON value, or replace it with invalid JSON."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places = list(_places(value))
    if not places:
        return json.dumps(chance.choice(_NUMBERS)).encode()
    holder, key = chance.choice(places)
    old, kind = holder[key], chance.random()
    if kind < 0.08:
        holder[key] = "\x01mark\x01"
        return (
            json.dumps(value).encode().replace(b'"\\u0001mark\\u0001"', chance.choice(_RAW).encode("latin-1"))
        )
    if kind < 0.2:
        del holder[key]
    elif kind < 0.3:
        _insert(holder, key, chance)
    elif kind < 0.45:
        holder[key] = chance.choice([*_OTHERS, *_NUMBERS])
    elif kind < 0.6 and len(places) > 1:
        other, name = chance.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    elif type(old) in (int, float) and type(old) is not bool:
        holder[key] = chance.choice([old + 1, old - 1, old * 2, -old, chance.choice(_NUMBERS)])
    elif isinstance(old, str):
        at = chance.randrange(len(old) + 1)
        holder[key] = (
            old[:at] + chance.choice(["", "x", "0", "/", "é", "\n", old]) + old[at + chance.randrange(2) :]
        )
    elif isinstance(old, list):
        holder[key] = chance.choice([old + old, old[::-1], old[:-1], [old], old * 3])
    else:
        holder[key] = chance.choice(_OTHERS)
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return data


def _insert(holder: Any, key: Any, chance: random.Random) -> None:
    if isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), holder[key])
    else:
        holder[chance.choice(["text", "checksum", "format", "__class__", f"{key}2"])] = holder[key]


def _places(value: Any, depth: int = 0) -> Any:
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ()
    for key in keys:
        yield value, key
        if depth < 8:
            yield from _places(value[key], depth + 1)


def change_journal(data: bytes, chance: random.Random) -> bytes:
    """Change one line of a journal, or the order or number of its lines."""
    lines = data.split(b"\n")[:-1] or [b""]
    at = chance.randrange(len(lines))
    kind = chance.random()
    if kind < 0.75:
        lines[at] = change_json(lines[at], chance)
    elif kind < 0.85:
        del lines[at]
    elif kind < 0.95:
        lines.insert(chance.randrange(len(lines) + 1), lines[at])
    else:
        chance.shuffle(lines)
    if chance.random() < 0.5:  # renumber the lines, so that later checks run
        for number, line in enumerate(lines):
            first, found, rest = line.partition(b'"number": ')
            if found:
                lines[number] = first + found + str(number).encode() + rest[rest.find(b",") :]
    return b"".join(line + b"\n" for line in lines)


def change_segment(data: bytes, chance: random.Random) -> bytes:
    """Change the header of a segment, its recorded length, or the length of the file."""
    if len(data) < 8:
        return data
    (length,) = struct.unpack("<Q", data[:8])
    start = change_json(data[8 : 8 + min(length, len(data))], chance)
    rest = data[8 + min(length, len(data)) :]
    recorded = chance.choice([len(start)] * 8 + [0, len(start) - 1, 2**63, 2**64 - 1, 2**31, 100_000_001])
    if chance.random() < 0.2:
        rest = rest[: chance.randrange(len(rest) + 1)] + bytes(chance.randrange(9))
    return struct.pack("<Q", max(recorded, 0)) + start + rest


CHANGES = {"manifest": change_json, "journal": change_journal, "segment": change_segment}

# --- running one target, and all of them ------------------------------------------------------------


class Watch:
    """Runs a target on inputs, and records their outcomes, time and memory."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.before = _peak_bytes()

    def __call__(self, data: bytes) -> None:
        start, before = time.process_time(), _peak_bytes()
        self.outcomes[TARGETS[self.target](data)] += 1
        took, grown = time.process_time() - start, _peak_bytes() - before
        self.slowest_s = max(self.slowest_s, took)
        if took > _SECONDS or grown > _BYTES:
            raise RuntimeError(f"the input took {took:.2f} s and {grown / 2**20:.0f} MB")

    def report(self) -> dict[str, Any]:
        grown = (_peak_bytes() - self.before) / 2**20
        return {"outcomes": dict(self.outcomes), "slowest_s": self.slowest_s, "memory_mb": grown}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz_one(target: str, inputs: int, seed: int, folder: Path) -> None:
    """Run libFuzzer on one target; does not return."""
    seeds = folder / "seeds"
    seeds.mkdir()
    for number, data in enumerate(SEEDS[target]):
        (seeds / str(number)).write_bytes(data)
    watch = Watch(target)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        chance = random.Random(number)
        changed = CHANGES[target](data, chance) if chance.random() < 0.75 else atheris.Mutate(data, most)
        while chance.random() < 0.4:
            changed = CHANGES[target](changed, chance)
        return changed[:most]

    def note(data: bytes) -> None:
        watch(data)
        tried = sum(watch.outcomes.values())
        if tried % 5000 == 0 or tried >= inputs:
            (folder / "report.json").write_text(json.dumps(watch.report()))

    options = [
        f"-runs={inputs}",
        f"-seed={seed}",
        f"-max_len={_LARGEST_INPUT}",
        "-timeout=10",
        "-rss_limit_mb=2048",
    ]
    options += [f"-artifact_prefix={folder}/", "-print_final_stats=1", "-verbosity=1", str(seeds)]
    atheris.Setup([sys.argv[0], *options], note, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> None:
    """Run all targets, each in its own process, and print their reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=200_000, help="number of inputs over all targets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=TARGETS, help="run only this target")
    parser.add_argument("--try", dest="file", type=Path, help="run --target on the input in this file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per target")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file:
        print(TARGETS[options.target](options.file.read_bytes()))
        return
    if options.folder:
        fuzz_one(options.target, options.inputs, options.seed, options.folder)
        return
    failed = False
    for target in [options.target] if options.target else TARGETS:
        inputs = options.inputs if options.target else round(options.inputs * _SHARES[target])
        failed |= not _run(target, inputs, options.seed, options.json)
    sys.exit(failed)


def _run(target: str, inputs: int, seed: int, as_json: bool) -> bool:
    folder, start = Path(tempfile.mkdtemp(prefix=f"fuzz-{target}-")), time.perf_counter()
    command = [sys.executable, __file__, "--target", target, "--inputs", str(inputs), "--seed", str(seed)]
    done = subprocess.run([*command, "--folder", folder], capture_output=True, text=True, check=False)
    (folder / "log").write_text(done.stderr + done.stdout)
    if done.returncode or not (folder / "report.json").exists():
        message = f"an input failed, see {folder}"
        print(
            json.dumps({"target": target, "inputs": inputs, "wrong": message})
            if as_json
            else f"{target}: {message}"
        )
        print("\n".join((done.stdout + done.stderr).splitlines()[-30:]))
        return False
    report = json.loads((folder / "report.json").read_text())
    covered = [line.split("cov: ")[1].split()[0] for line in done.stderr.splitlines() if "cov: " in line]
    tried = ", ".join(f"{count} {name}" for name, count in sorted(report["outcomes"].items()))
    total, took_s = sum(report["outcomes"].values()), time.perf_counter() - start
    if as_json:
        print(json.dumps({"target": target, "inputs": total, "wrong": 0, "seconds": took_s}))
        return True
    print(
        f"{target}: seed {seed}, {total} inputs in {took_s:.0f} s: {tried}; {covered[-1]} branches; "
        f"the slowest took {report['slowest_s'] * 1000:.0f} ms; memory grew by {report['memory_mb']:.0f} MB."
    )
    return True


if __name__ == "__main__":
    main()
