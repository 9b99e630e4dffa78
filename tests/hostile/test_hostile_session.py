"""A session folder from a stranger is data: it is read with care or refused, and leads nowhere else."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rigs.reference import read_whole
from rigs.tiny import save_tiny
from support.forging import (
    FIELDS,
    change,
    contents,
    read_lines,
    read_manifest,
    replace_content,
    seal,
    write_journal,
    write_lines,
)

from kvedit.errors import KveditError, ModelError, SessionError, UsageError
from kvedit.model.model import Model
from kvedit.session.session import Session
from kvedit.session.state import State
from kvedit.store.files import digest
from kvedit.store.header import FORMAT, HEADER_BYTES, parse_header
from kvedit.store.home import Home
from kvedit.store.store import Store
from kvedit.text.document import Document

TEXT = "".join(f"Line {number}: the fees of item {number} are {number * 37}.\n" for number in range(1, 9))
OUT = "../" * 12 + "etc/passwd"


@pytest.fixture(scope="module")
def original(tiny_models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five revisions, among them a conversation and an undone edit. Never to be changed."""
    home = tmp_path_factory.mktemp("home")
    session = Session.load(Document(TEXT), model=tiny_models["llama"], name="contract", home=home)
    session.delete("3-4")
    session.ask("What are the fees?", budget="20%", max_new_tokens=2, conversation=True)
    session.insert("A new line.", after=1)
    session.delete("1")
    session.undo()
    return home / "contract"


@pytest.fixture
def store(original: Path, home: Path) -> Store:
    shutil.copytree(original, home / "contract")
    return Store(home / "contract")


def refused(act: Callable[[], Any], *, exit_code: int = 3) -> KveditError:
    """The error of an act: one sentence of fact, one of remedy."""
    with pytest.raises(KveditError) as caught:
        act()
    assert caught.value.exit_code == exit_code, caught.value
    assert "\n" not in caught.value.fact + caught.value.remedy
    return caught.value


@contextmanager
def at_once() -> Iterator[None]:
    """Fail if the block waits."""

    def fail(*args: object) -> None:
        raise AssertionError("kvedit waited")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def everything(store: Store, model: Model) -> list[KveditError]:
    """Do all that one can do to a session, readers first; give what was refused."""

    def session() -> Session:
        opened = Session(State(store))
        opened.use_model(model)
        return opened

    twin = Store(store.folder.with_name("twin"))
    document = Document("Another document.\n")
    acts: list[Callable[[], Any]] = [
        lambda: Home(store.folder.parent).list(),
        lambda: session().status(),
        lambda: session().script(),
        lambda: session().check(),
        lambda: session().ask("Why?", max_new_tokens=1, keep=False),
        lambda: session().delete("1"),
        lambda: session().undo(),
        lambda: session().ask("Why?", max_new_tokens=1, conversation=True),
        lambda: session().heal(budget="4t"),
        lambda: session().compact(),
        lambda: Home(store.folder.parent).use(store.name),
        lambda: Home(store.folder.parent).copy(store.name, twin.name),
        lambda: Home(twin.folder.parent).remove(twin.name),
        lambda: session().purge(),
        lambda: Session.load(document, model=model, name="contract", home=store.folder.parent, force=True),
        lambda: Home(store.folder.parent).rename(store.name, "other"),
        lambda: Home(store.folder.parent).remove("other"),
        lambda: Home(store.folder.parent).remove(store.name),
    ]
    errors: list[KveditError] = []
    for act in acts:
        try:
            act()
        except KveditError as error:
            errors.append(error)
    return errors


# --- nothing leads out of the folder --------------------------------------------------------------


def place_of(store: Store, what: str) -> Path:
    manifest = read_manifest(store.folder)
    names = {"journal": manifest["journal"]["name"], "tokenizer": f"tokenizers/{manifest['tokenizer']}.json"}
    names["segment"] = f"segments/{read_lines(store.folder)[0]['rows'][1][0][0]}.safetensors"
    names["session"] = "."
    return store.folder / names.get(what, what)


PLACES = ["session.json", "journal", "tokenizer", "segment", "lock", "holder.json", "segments", "tokenizers"]


@pytest.mark.parametrize("what", [*PLACES, "session"])
def test_a_link_in_a_session_is_not_followed_by_any_command(store, llama, tmp_path, what):
    place, outside = place_of(store, what).absolute(), tmp_path / "outside"
    outside.mkdir()
    (outside / "diary.txt").write_text("mine")
    for name in ("0" * 32 + ".safetensors", "1" * 32 + ".json", "x.1.ab.tmp"):
        (outside / name).write_text("mine too, though it has such a name")
    there = outside / "there"
    place = Path(os.path.normpath(place))
    shutil.move(place, there)  # what a session needs is there; only the way leads out
    if there.is_dir():
        shutil.copytree(outside, there, dirs_exist_ok=True, ignore=lambda *_: ["there"])
    place.symlink_to(there, target_is_directory=there.is_dir())
    before = contents(outside)
    errors = everything(store, llama)
    assert contents(outside) == before
    if what not in ("holder.json",):  # which is replaced, not followed
        assert errors
        assert any("is a link" in error.fact for error in errors)
        assert not [error.fact for error in errors if error.exit_code not in (2, 3)]


def test_a_dangling_link_creates_no_file(store, llama, tmp_path):
    for what in ("lock", "holder.json", "tokenizers"):
        place, there = place_of(store, what), tmp_path / f"new-{what}"
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        place.symlink_to(there)
    everything(store, llama)
    assert not list(tmp_path.glob("new-*"))


def test_a_link_in_the_sessions_folder_writes_nothing_elsewhere(home, llama, tmp_path):
    home.mkdir()
    (home / ".gitignore").symlink_to(tmp_path / "profile")
    Session.load(Document(TEXT), model=llama, name="contract", home=home)
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("what", PLACES)
def test_a_pipe_or_socket_in_a_session_is_refused_at_once(store, llama, what, kind):
    place = place_of(store, what)
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        here = os.getcwd()
        os.chdir(place.parent)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(place.name)
        os.chdir(here)
    with at_once():
        errors = everything(store, llama)
    assert errors or what == "holder.json"
    assert all("should not" not in error.fact for error in errors)


NAMES = [
    OUT,
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/b",
    "a\\b",
    "A" * 32,
    "0" * 31,
    "0" * 33,
    f"{'0' * 32}\n",
    "\0" * 32,
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["tokenizer", "journal", "segment"])
def test_a_file_name_unknown_to_kvedit_opens_no_file(store, llama, monkeypatch, what, name):
    if what == "tokenizer":
        change(store.folder, "tokenizer", name)
    elif what == "journal":
        change(store.folder, "journal.name", name if name else f"journal-{'0' * 32}.jsonl/../x")
    else:
        lines = read_lines(store.folder)
        lines[0]["rows"][1][0][0] = name
        write_lines(store.folder, lines)
    asked: list[str] = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest, **more: (asked.append(str(path)), real(path, *rest, **more))[1]
    )
    refused(lambda: read_whole(store, llama))
    refused(lambda: Session(State(store)).check())
    if what == "segment":  # what cannot be understood is not a reason to remove what it might reach
        refused(lambda: store.sweep(*store.read()))
    inside = {str(store.folder / "session.json"), str(next(store.folder.glob("journal-*")))}
    inside |= {str(path) for path in store.folder.rglob("*.json")}
    assert set(asked) <= inside


def test_removing_a_session_leaves_foreign_files(store):
    for place in ("notes.txt", "segments/mine.safetensors", "journal-mine.jsonl"):
        (store.folder / place).write_text("mine")
    Home(store.folder.parent).remove(store.name)
    left = {str(path.relative_to(store.folder)) for path in store.folder.rglob("*") if path.is_file()}
    assert left == {"notes.txt", "segments/mine.safetensors", "journal-mine.jsonl"}
    assert not store.exists()


def test_a_load_into_a_foreign_folder_removes_nothing(home, llama):
    for place in ("project/segments/mine.bin", "project/tokenizers/mine.json", "project/journal-1.jsonl"):
        (home / place).parent.mkdir(parents=True, exist_ok=True)
        (home / place).write_text("mine")
    before = contents(home)
    session = Session.load(Document(TEXT), model=llama, name="project", home=home)
    session.purge()
    session.compact()
    Home(session._state.store.folder.parent).remove(session.name)
    assert {name: data for name, data in contents(home).items() if name != ".gitignore"} == before


# --- every value of the manifest ------------------------------------------------------------------

VALUES: list[tuple[str, Any]] = [
    *(("revision", value) for value in (-1, True, 2**31, 10**30, 1.0, "0", None, [0], 5)),
    *(("undone", value) for value in ([-1], [True], [99], [2**40], "4", {}, [[0]], None)),
    *(("head_ids", value) for value in ([-1], [2**31], [False], [1.5], ["1"], "12", None)),
    *(("journal.size_bytes", value) for value in (-1, 0, True, 2**62, 10**400, 1.0, None)),
    *(("journal.digest", value) for value in ("", "0", None, 0)),
    *(("prefill_tokens_per_s", value) for value in (0.0, -1.0, float("nan"), float("inf"), True, "1", None)),
    *(
        ("used", value)
        for value in ("9999-12-31T23:59:59.999999Z", "soon", "2026-13-01T00:00:00.000000Z", 0, None)
    ),
    *(("created", value) for value in ("", "yesterday", None)),
    *(("encoding", value) for value in ("rot13", "zlib", "UTF8", "../utf-8", "", None, 8)),
    *(("system", value) for value in (0, [], "half \ud800")),
    *(("before_question", value) for value in (None, "half \udfff")),
    *(("source", value) for value in ("", "nul\0", "x" * 5000, None, ["a"])),
    ("bom", 0),
    ("model", None),
    ("model", []),
    *(("model.dtype", value) for value in ("float8", "", None, "float64", "__class__")),
    *(("model.device", value) for value in ("cuda:99", "", None, "meta")),
    *(("model.context_length", value) for value in (0, -5, True, 2**31, None)),
    *(("model.directory", value) for value in ("", "nul\0", "x" * 5000, None)),
    *(("model.parts", value) for value in ({}, {"config": "0" * 64}, None, [])),
    *(("model.parts.weights", value) for value in ("", "0" * 63, "G" * 64, None)),
    *(("format", value) for value in (0, 1, 3, 10**9, -1, True, "2", None, [2], 2.0)),
    ("more", 1),
]


@pytest.mark.parametrize(("place", "value"), VALUES, ids=lambda value: repr(value)[:24])
def test_an_invalid_value_with_a_valid_checksum_is_refused(store, llama, place, value):
    change(store.folder, place, value)
    refused(lambda: read_whole(store, llama))
    assert [item.damage is not None for item in Home(store.folder.parent).list()] == [True]


@pytest.mark.parametrize(
    "name", list(Store.read_manifest.__annotations__) and ["created", "model", "journal", "undone"]
)
def test_a_manifest_without_a_key_is_refused(store, llama, name):
    fields = read_manifest(store.folder)
    del fields[name]
    seal(store.folder, fields)
    refused(lambda: read_whole(store, llama))


RAW = {
    "nested deep": b"[" * 100_000,
    "objects nested deep": b'{"a":' * 100_000,
    "a number of a million digits": b'{"format": ' + b"9" * 1_000_000 + b"}",
    "a key twice": b'{"format": 2, "format": 2}',
    "NaN": b'{"format": NaN}',
    "a list": b"[]",
    "a word": b'"format"',
    "nothing": b"",
    "UTF-16": json.dumps({"format": 2}).encode("utf-16"),
    "UTF-8": '{"format": "é"}'.encode(),
}


@pytest.mark.parametrize("name", RAW)
def test_invalid_json_is_refused_at_once(store, llama, name):
    intact = (store.folder / "session.json").read_bytes()
    (store.folder / "session.json").write_bytes(RAW[name])
    with at_once():
        refused(lambda: read_whole(store, llama))
    (store.folder / "session.json").write_bytes(intact)
    write_journal(store.folder, RAW[name].replace(b"\n", b"") + b"\n")
    fields = read_manifest(store.folder)
    seal(store.folder, fields | {"revision": 0, "undone": []})
    with at_once():
        assert "journal" in (fact := refused(lambda: read_whole(store, llama)).fact) or "revision 0" in fact


def test_a_newer_format_is_refused_with_both_numbers(store, llama):
    change(store.folder, "format", 7)
    error = refused(lambda: read_whole(store, llama))
    assert error.fact == "The session has format 7, but this kvedit reads format 2."
    assert "Update kvedit" in error.remedy


def test_one_bad_session_does_not_hide_the_others(store, llama):
    home = Home(store.folder.parent)
    Session.load(Document("a\n"), model=llama, name="good", home=home.folder)
    change(store.folder, "revision", -1)
    (home.folder / "a name with blanks").mkdir()
    (home.folder / "pipe").mkdir()
    os.mkfifo(home.folder / "pipe" / "session.json")
    (home.folder / "loop").symlink_to("loop")
    found = home.list()
    assert [(item.name, item.current, item.damage is None) for item in found] == [
        ("contract", False, False),
        ("good", True, True),
        ("pipe", False, False),
    ]


# --- every line of the journal --------------------------------------------------------------------

A = "a" * 32
LINES: list[tuple[int, FIELDS]] = [
    (1, {"number": True}),
    (0, {"number": False}),
    (1, {"parent": None}),
    (1, {"parent": False}),
    (2, {"state": 3}),
    (2, {"state": -1}),
    (1, {"frontier": -1}),
    (4, {"frontier": 10**6}),
    (0, {"tokens": 2**31}),
    (0, {"text": None}),
    (0, {"text": "half \ud800"}),
    (0, {"command": 1}),
    (0, {"created": "then"}),
    (0, {"more": 1}),
    (1, {"changes": [[5, 3, ""]]}),
    (1, {"changes": [[-1, 3, ""]]}),
    (1, {"changes": [[0, 10**6, ""]]}),
    (1, {"changes": [[4, 8, ""], [0, 2, ""]]}),
    (1, {"changes": [[4, 8, ""], [6, 9, ""]]}),
    (1, {"changes": [[0, 8, 7]]}),
    (1, {"rows": [0, [], 2]}),
    (1, {"rows": [-1, [], 0]}),
    (1, {"rows": [1, [], 1]}),
    (1, {"rows": [True, [], 0]}),
    (0, {"rows": [0, [[A, 0, 0, 0]], 0]}),
    (0, {"rows": [0, [[A, -1, 9, 0]], 0]}),
    (0, {"rows": [0, [[A, 0, 9, 2]], 0]}),
    (0, {"rows": [0, [[A, 0, 9, True]], 0]}),
    (0, {"rows": [0, [[None, 3, 9, 0]], 0]}),
    (0, {"rows": [0, [[None, 0, 9, 1]], 0]}),
    (0, {"rows": [0, [[7, 0, 9, 0]], 0]}),
    (2, {"turns": [0, [-1], 0]}),
    (2, {"turns": [0, [2**31], 0]}),
    (2, {"turns": [9, [], 9]}),
    (2, {"turns": "0"}),
]


@pytest.mark.parametrize(("number", "fields"), LINES, ids=lambda value: repr(value)[:40])
def test_an_invalid_line_with_a_valid_checksum_is_refused(store, number, fields):
    lines = read_lines(store.folder)
    lines[number] |= fields
    write_lines(store.folder, lines)

    def read_all() -> None:
        session = Session(State(store))
        for at in range(len(session._state.journal)):
            session._state.journal.entry(at)
            session._state.ids_reader(at)()
        session.script()

    refused(read_all)


def growing(lines: list[FIELDS], **fields: Any) -> list[FIELDS]:
    """A whole line and forty after it, each made of its parent in the same way."""
    base = {**lines[1], "changes": [], "turns": [0, [], 0], "rows": [0, [], 0]}
    more = [{**base, "number": at, "parent": at - 1, "state": at, **fields} for at in range(1, 41)]
    return [lines[0], *more]


BOMBS: dict[str, Callable[[list[FIELDS]], list[FIELDS]]] = {
    "rows that double": lambda lines: growing(lines, rows=[1, [], 1]),
    "a conversation that doubles": lambda lines: growing(lines, turns=[1, [5], 1]),
    "a text that doubles": lambda lines: growing(lines, changes=[[9, 9, ""], [0, 0, ""]]),
    "a piece of a billion rows": lambda lines: [
        {**lines[0], "rows": [0, [[A, 0, 2**31 - 1, 0]], 0], "tokens": 2**31 - 1}
    ],
    "a billion missing rows": lambda lines: [{**lines[0], "rows": [0, [[None, 0, 2**31 - 1, 0]], 0]}],
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_journal_line_uses_no_more_memory_than_its_length(store, name):
    lines = BOMBS[name](read_lines(store.folder))
    write_lines(store.folder, lines)
    fields = read_manifest(store.folder)
    seal(store.folder, fields | {"revision": len(lines) - 1, "undone": []})
    tracemalloc.start()
    try:
        with at_once():
            refused(lambda: Session(State(store)))
            with suppress(KveditError):
                Session(State(store)).check()
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_a_journal_of_empty_lines_or_without_an_end_is_refused(store):
    for data in (b"\n" * 100_000, b"{}", b"{}\n" * 50_000):
        write_journal(store.folder, data)
        refused(lambda: Session(State(store)))


def test_an_oversized_file_is_refused_before_it_is_read(store, llama):
    for path in [place_of(store, what) for what in ("session.json", "tokenizer", "journal")]:
        os.truncate(path, 1 << 40)  # it takes no room
    with at_once():
        assert "at most" in refused(lambda: read_whole(store, llama)).fact
        for item in Home(store.folder.parent).list():
            assert item.damage
    shutil.rmtree(store.folder)


def test_a_revision_too_far_from_a_whole_line_is_refused(store):
    lines = read_lines(store.folder)
    lines = [
        lines[0],
        *({**lines[1], "number": at, "parent": at - 1, "state": at, "changes": []} for at in range(1, 200)),
    ]
    lines[1:] = [{**line, "rows": [1, [], 0]} for line in lines[1:]]
    write_lines(store.folder, lines)
    seal(store.folder, read_manifest(store.folder) | {"revision": 199, "undone": []})
    assert "too far" in refused(lambda: Session(State(store))).fact


def test_an_undo_to_an_invalid_text_is_damage(store):
    lines = read_lines(store.folder)
    lines[2]["state"] = 0  # it is that of revision 1
    lines[3]["state"] = 2
    write_lines(store.folder, lines)
    with suppress(SessionError):
        Session(State(store)).undo()
    with suppress(SessionError):
        Session(State(store)).redo()


# --- ids, tokenizer, segments ---------------------------------------------------------------------


def test_an_unknown_id_never_reaches_the_model(store, llama):
    for place in ("head", "turns"):
        lines, fields = read_lines(store.folder), read_manifest(store.folder)
        if place == "head":
            change(store.folder, "head_ids", [*fields["head_ids"][:-1], 10**6])
        else:
            lines[2]["turns"][1][-1] = 10**6
            write_lines(store.folder, lines)
        error = refused(lambda: read_whole(store, llama).ask("Why?", max_new_tokens=1))
        assert "outside the model's vocabulary" in error.fact
        seal(store.folder, fields)


def test_an_invalid_or_foreign_tokenizer_is_refused(store, llama):
    other = replace_content(
        store.folder,
        "tokenizers",
        read_manifest(store.folder)["tokenizer"],
        lambda data: data + b"\n",
    )
    assert "does not match the model" in refused(lambda: Session(State(store))).fact
    for data in (
        b"{}",
        b"[" * 10_000,
        b"\xff",
        b'{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[["a","b"]]}}',
    ):
        other = replace_content(store.folder, "tokenizers", other, lambda old, data=data: data)
        change(store.folder, "model.parts.tokenizer", "0" * 64)
        refused(lambda: Session(State(store)))


def header_of(data: bytes) -> FIELDS:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def segment(fields: FIELDS, body: bytes) -> bytes:
    start = json.dumps(fields).encode()
    return struct.pack("<Q", len(start)) + start + body


def with_header(fields: Callable[[FIELDS], None], body: bytes = b"") -> Callable[[bytes], bytes]:
    def make(data: bytes) -> bytes:
        found, (length,) = header_of(data), struct.unpack("<Q", data[:8])
        fields(found)
        return segment(found, data[8 + length :] + body)

    return make


def swap_layers_and_heads(fields: FIELDS) -> None:
    for name in ("keys", "values"):
        layers, heads, *rest = fields[name]["shape"]
        fields[name]["shape"] = [heads, layers, *rest]


def halve_dtype(fields: FIELDS) -> None:
    for name in ("keys", "values"):
        fields[name]["dtype"] = "F16"
        fields[name]["shape"][3] *= 2


SEGMENTS: dict[str, Callable[[bytes], bytes]] = {
    "no bytes but a length": lambda data: struct.pack("<Q", 2**63),
    "a header longer than the file": lambda data: struct.pack("<Q", len(data)) + data[8:],
    "a header of 90 MB": lambda data: struct.pack("<Q", 90 << 20) + b"{" + b" " * (90 << 20),
    "no bytes": lambda data: b"",
    "other words": lambda data: b"This is a text, and no segment at all.",
    "another format": with_header(lambda fields: fields.update(__metadata__={"format": "other"})),
    "no metadata": with_header(lambda fields: fields.pop("__metadata__")),
    "one tensor more": with_header(
        lambda fields: fields.update(more={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    ),
    "a shape of huge numbers": with_header(
        lambda fields: fields["keys"].update(shape=[2**31, 2**31, 2**31, 2**31])
    ),
    "a shape of other numbers": with_header(lambda fields: fields["ids"].update(shape=[1])),
    "five dimensions": with_header(lambda fields: fields["keys"]["shape"].append(1)),
    "offsets that overlap": with_header(lambda fields: fields["values"].update(fields["keys"])),
    "bytes that nothing names": with_header(lambda fields: None, b"more"),
    "the sizes of another model": with_header(swap_layers_and_heads),
    "another dtype": with_header(halve_dtype),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_an_inconsistent_segment_is_refused_despite_its_name(store, llama, name):
    old = read_lines(store.folder)[0]["rows"][1][0][0]
    new = replace_content(store.folder, "segments", old, SEGMENTS[name])
    error = refused(lambda: read_whole(store, llama))
    assert f"segment {new}" in error.fact
    session = Session(State(store))  # the other way round: the model comes after the segments
    with suppress(SessionError):
        session._state.read_segments()
    refused(lambda: session.ask("Why?", max_new_tokens=1) if session.use_model(llama) is None else None)


# --- the model's folder ---------------------------------------------------------------------------


class Mine:
    """What would run if it were unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_a_foreign_model_needs_its_fingerprint_and_runs_no_code(store, tmp_path):
    theirs = save_tiny(tmp_path / "theirs", "llama", seed=9)
    change(store.folder, "model.directory", str(theirs))
    session = Session(State(store))
    assert "(the weights differ)" in refused(lambda: session.ask("Why?", max_new_tokens=1)).fact
    marker = tmp_path / "ran"
    (theirs / "model.safetensors").rename(theirs / "other.safetensors")
    (theirs / "pytorch_model.bin").write_bytes(pickle.dumps(Mine(marker)))
    (theirs / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((theirs / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (theirs / "config.json").write_text(json.dumps(config))
    with at_once():
        refused(lambda: Session(State(store)).ask("Why?", max_new_tokens=1), exit_code=4)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["x" * 300, "a/" * 2000, "\udcff", "~nobody-of-that-name/x", "no-such-model"]
)
def test_an_unsearchable_model_path_is_a_missing_model(store, name):
    change(store.folder, "model.directory", name)
    change(store.folder, "model.name", name)
    with pytest.raises(ModelError):
        Session(State(store))._state.find_model()


def test_a_relative_model_folder_is_not_searched_in_cwd(store, checkpoints, monkeypatch):
    change(store.folder, "model.directory", checkpoints["llama"].name)
    change(store.folder, "model.name", "no-such-model")
    monkeypatch.chdir(checkpoints["llama"].parent)
    with pytest.raises(ModelError):
        Session(State(store))._state.find_model()


@pytest.mark.parametrize("path", ["pipe", "/dev/zero", "/"])
def test_a_source_that_never_ends_or_blocks_is_not_read(store, tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    change(store.folder, "source", str(tmp_path / path))
    with at_once(), pytest.raises(UsageError):
        Session(State(store)).sync()


def test_a_script_has_one_command_per_line_despite_its_journal(store):
    lines = read_lines(store.folder)
    lines[2]["command"] = "ask 'Why?'\nsessions remove contract --yes"
    write_lines(store.folder, lines)
    script = Session(State(store)).script().splitlines()
    assert not any(line.startswith("sessions") for line in script)
    lines[2]["command"] = "ask 'Why?"
    write_lines(store.folder, lines)
    refused(Session(State(store)).script)


# --- any change at all ----------------------------------------------------------------------------

quick = settings(
    deadline=None,
    max_examples=100,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 5, 114, 2**31 - 1, 2**31, 10**15, 10**18, 10**400, -(2**63)]),
    st.floats(),
    st.sampled_from(["", "load", A, OUT, "\0", "\ud800", "2026-11-30T06:44:55.065631Z", "float16", "cuda"]),
    st.text(max_size=4),
)
VALUE = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutate(value: Any, data: st.DataObject) -> None:
    """Change, drop, double or exchange a few places of a JSON value."""
    for _ in range(data.draw(st.integers(1, 3))):
        there = list(places(value))
        holder, key = there[data.draw(st.integers(0, len(there) - 1))]
        other, name = there[data.draw(st.integers(0, len(there) - 1))]
        how = data.draw(st.sampled_from(["value", "drop", "other", "more"]))
        if how == "drop":
            del holder[key]
        elif how == "more" and isinstance(holder, list):
            holder.append(holder[key])
        elif how == "other":
            holder[key] = json.loads(json.dumps(other[name]))
        else:
            holder[key] = data.draw(VALUE)


def look_at(store: Store, model: Model) -> str:
    """Open a session and do what reads all of it: it holds, or is refused as damaged."""
    try:
        session = Session(State(store))
        session.status(), session.log(everything=True), session.script(), session.export()
        session.check()
        session._state.journal.segments()
        session.use_model(model)
        session.ask("Why?", max_new_tokens=1, keep=False, budget="3t")
        for number in range(len(session._state.journal)):
            session._state.ids_reader(number)()
        for verb in (session.undo, session.redo):
            with suppress(UsageError):
                verb()
    except SessionError as error:
        return error.fact
    return ""


@quick
@given(st.data())
def test_a_changed_manifest_is_valid_or_refused(original, llama, tmp_path, data):
    store = fresh(original, tmp_path)
    fields = read_manifest(store.folder)
    mutate(fields, data)
    with suppress(ValueError, RecursionError):
        seal(store.folder, fields)
    look_at(store, llama)


@quick
@given(st.data())
def test_a_changed_journal_is_valid_or_refused(original, llama, tmp_path, data):
    store = fresh(original, tmp_path)
    lines = read_lines(store.folder)
    mutate(lines, data)
    write_lines(store.folder, lines)
    look_at(store, llama)


@quick
@given(st.data())
def test_a_changed_segment_header_is_valid_or_refused(original, llama, tmp_path, data):
    store = fresh(original, tmp_path)

    def make(old: bytes) -> bytes:
        fields, (length,) = header_of(old), struct.unpack("<Q", old[:8])
        mutate(fields, data)
        return segment(fields, old[8 + length :] + data.draw(st.binary(max_size=2)))

    names = sorted(Session(State(store))._state.journal.segments())
    new = replace_content(store.folder, "segments", data.draw(st.sampled_from(names)), make)
    written = (store.folder / "segments" / f"{new}.safetensors").read_bytes()
    fact = look_at(store, llama)
    try:
        taken = parse_header(written[:HEADER_BYTES], len(written))
    except ValueError:
        return  # a revision that is not the present one may use it
    assert header_of(written)["__metadata__"] == FORMAT
    assert fact or taken.tensors["keys"].shape[0] == llama.layers


@quick
@given(st.data())
def test_any_bytes_in_place_of_a_file_are_refused(original, llama, tmp_path, data):
    store = fresh(original, tmp_path)
    path = place_of(store, data.draw(st.sampled_from(["session.json", "journal", "tokenizer", "segment"])))
    old = path.read_bytes()
    at = data.draw(st.integers(0, len(old)))
    new = old[:at] + data.draw(st.binary(max_size=8)) + old[data.draw(st.integers(at, len(old))) :]
    path.write_bytes(new)
    assert look_at(store, llama) or digest(new) == digest(old) or new.startswith(old)


def fresh(original: Path, place: Path) -> Store:
    shutil.rmtree(place / "fresh", ignore_errors=True)
    shutil.copytree(original, place / "fresh" / "contract")
    return Store(place / "fresh" / "contract")
