"""A session's files: replaced at once, known when damaged, held by one writer, kept while reachable."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from rigs.reference import read_whole

from kvedit.errors import KveditError, LockedError, SessionError, UsageError
from kvedit.model.model import Model
from kvedit.repair.budget import Budget
from kvedit.session.session import Session
from kvedit.session.state import State
from kvedit.store import files
from kvedit.store.home import Home
from kvedit.store.records import dump_manifest, parse_manifest
from kvedit.store.store import Store
from kvedit.text.document import Document, LineRange, Source

TEXT = "".join(f"Line {number}: the fees of item {number} are {number * 37}.\n" for number in range(1, 25))
KINDS = ["segments", "journal", "tokenizers", "session.json"]


def load(store: Store, model: Model, text: str = TEXT) -> Session:
    document = Document(text, Source("a.txt"))
    return Session.load(document, model=model, name=store.name, home=store.folder.parent, force=True)


@pytest.fixture(scope="module")
def original(tiny_models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Three revisions and two segments, never to be changed: each test gets a copy.
    folder = tmp_path_factory.mktemp("home") / "contract"
    session = load(Store(folder), tiny_models["llama"])
    session.delete(LineRange(3, 4))
    session.ask("What are the fees of item 9?", budget=Budget.parse("20%"), max_new_tokens=2)
    return folder


@pytest.fixture
def store(original: Path, home: Path) -> Store:
    shutil.copytree(original, home / "contract")
    return Store(home / "contract")


def a_file(store: Store, kind: str) -> Path:
    manifest, journal = store.read()
    if kind == "journal":
        return store.folder / manifest.journal.name
    revision = journal.revision(manifest.revision)
    names = {"segments": f"{revision.rows[-1].segment}.safetensors"}
    names |= {"tokenizers": f"{manifest.tokenizer}.json"}
    return store.folder / kind / names.get(kind, "")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def failing(step: str, number: int):
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        if step == "write":  # a real failure, with the file half written
            resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
        else:
            patch.setattr(os, step, fail)
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


FULL, OTHER = ("The disk is full", "Free some space"), ("cannot be written", "KVEDIT_HOME")
FAILURES = [("write", errno.EFBIG, *FULL), ("fsync", errno.ENOSPC, *FULL), ("fsync", errno.EIO, *OTHER)]
FAILURES += [("replace", errno.ENOSPC, *FULL), ("replace", errno.EDQUOT, *FULL)]
FAILURES += [("replace", errno.EACCES, *OTHER), ("replace", errno.EROFS, *OTHER)]


@pytest.mark.parametrize(("step", "number", "fact", "remedy"), FAILURES)
def test_a_failed_write_leaves_only_the_old_file(tmp_path, step, number, fact, remedy):
    path = tmp_path / "session.json"
    path.write_bytes(b"old")
    with failing(step, number), pytest.raises(KveditError) as caught:
        files.replace_file(path, b"new content")
    assert fact in caught.value.fact
    assert str(path) in caught.value.fact
    assert remedy in caught.value.remedy
    assert contents(tmp_path) == {"session.json": b"old"}


def test_a_file_is_flushed_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    done: list[str] = []
    fsync, put = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("flush"), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), put(*paths))[1])
    files.replace_file(tmp_path / "a", b"new")
    assert done == ["flush", "replace", "flush"]  # the second is the folder's
    assert contents(tmp_path) == {"a": b"new"}


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
@pytest.mark.parametrize("command", ["delete", "ask"])
def test_a_command_on_a_full_disk_leaves_the_session_as_it_was(store, llama, step, command):
    session, before = read_whole(store, llama), contents(store.folder)
    with failing(step, errno.ENOSPC), pytest.raises(KveditError, match="The disk is full"):
        session.delete(LineRange(1, 1)) if command == "delete" else session.ask("?", max_new_tokens=1)
    before.pop("holder.json")  # it would name another holder, so it goes
    after, journal = contents(store.folder), a_file(store, "journal").name
    assert after.pop(journal).startswith(before.pop(journal))
    assert after == before
    assert Session(State(store)).document.text == session.document.text


def test_a_deletion_writes_no_tensors(store):
    before = contents(store.folder / "segments")
    removal = Session(State(store)).delete(LineRange(5, 9))
    assert contents(store.folder / "segments") == before
    assert removal.written_bytes < 4_000


DAMAGES = {
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "4 bytes": lambda path: os.truncate(path, 4),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "first byte": lambda path: flip(path, 0),
    "middle byte": lambda path: flip(path, path.stat().st_size // 2),
    "last byte": lambda path: flip(path, -1),
}


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_reported_in_one_line_with_a_remedy(store, llama, kind, damage):
    DAMAGES[damage](a_file(store, kind))
    with pytest.raises(SessionError) as caught:
        read_whole(store, llama)
    assert caught.value.exit_code == 3
    assert "\n" not in caught.value.fact
    assert "kvedit load FILE" in caught.value.remedy


def test_one_flipped_bit_anywhere_in_the_manifest_is_noticed(store, llama):
    path = store.folder / "session.json"
    intact = path.read_bytes()
    unnoticed = []
    for at in range(0, len(intact), 3):
        flip(path, at, bit=at % 7)
        with suppress(SessionError):
            read_whole(store, llama)
            unnoticed.append(intact[max(0, at - 12) : at + 12].decode())
        path.write_bytes(intact)
    assert not unnoticed


@pytest.mark.parametrize("kind", KINDS)
def test_loading_again_repairs_a_damaged_session(store, llama, kind):
    flip(a_file(store, kind), a_file(store, kind).stat().st_size // 2)
    load(store, llama)
    assert read_whole(store, llama).document.text == TEXT


def test_another_format_is_refused_and_survives_a_failed_load(store, llama, monkeypatch):
    path = store.folder / "session.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 2', b'"format": 3'))
    with pytest.raises(SessionError, match="format 3, but this kvedit reads format 2"):
        store.read_manifest()
    before = contents(store.folder)
    monkeypatch.setattr(Store, "write_segment", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(store, llama, "Another document.\n")
    after = contents(store.folder)
    assert after.pop("holder.json") != before.pop("holder.json")
    assert after == before


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"../../etc", b"\0", b"gone"])
def test_a_damaged_current_name_is_ignored_or_a_session_error(store, data):
    home = Home(store.folder.parent)
    (home.folder / ".current").write_bytes(data)
    with suppress(SessionError):  # no other error; to find the only session there is, is right too
        assert home.current().read_manifest() == store.read_manifest()


def test_a_manifest_round_trips_with_any_path(store):
    manifest = replace(store.read_manifest(), source="/tmp/caf\udce9 '🙂'\n.txt")
    assert parse_manifest(dump_manifest(manifest)) == manifest


def test_a_sweep_removes_only_what_no_revision_reaches(store, llama):
    before = contents(store.folder)
    name = "0" * 32
    for place in (f"segments/{name}.safetensors", f"tokenizers/{name}.json", f"journal-{name}.jsonl"):
        (store.folder / place).write_bytes(b"left behind")
    assert store.sweep(*store.read()) == 33
    assert contents(store.folder) == before
    journal = Session(State(store))._state.journal
    assert [journal.entry(number).parent for number in range(len(journal))] == [None, 0, 1]
    assert journal.revision(0).text == TEXT


def test_a_load_over_a_session_leaves_only_the_new_one(store, llama):
    load(store, llama, "Another document.\n")
    assert [len(list((store.folder / kind).iterdir())) for kind in ("segments", "tokenizers")] == [1, 1]
    assert len(list(store.folder.glob("journal-*"))) == 1
    assert read_whole(store, llama).document.text == "Another document.\n"


def test_the_next_command_removes_leftover_temporary_files(store):
    for place in (store.folder, store.folder / "segments"):
        (place / f"x.1.ab{files.TEMPORARY}").write_bytes(b"half a segm")
    with store.lock("delete", "now"):
        assert not list(store.folder.rglob(f"*{files.TEMPORARY}"))


HOLD = """import sys, time, pathlib, kvedit.store.store
with kvedit.store.store.Store(pathlib.Path(sys.argv[1])).lock("delete", "noon"):
    print("held", flush=True) or time.sleep(60)"""


@contextmanager
def another_process_holding(store: Store):
    with subprocess.Popen([sys.executable, "-c", HOLD, store.folder], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def test_a_locked_session_names_its_holder_and_can_be_read(store):
    with another_process_holding(store) as holder:
        expected = rf"process {holder.pid} \(kvedit delete, since noon\)"
        with pytest.raises(LockedError, match=expected):
            store.lock("ask", "now").__enter__()
        assert Session(State(store)).status().lines == 22


def test_a_killed_process_or_failed_command_releases_the_lock(store):
    with another_process_holding(store) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with pytest.raises(KveditError, match="It failed"), store.lock("ask", "now"):
            raise KveditError("It failed.", "Try again.")
    with store.lock("ask", "now"), pytest.raises(LockedError, match=str(os.getpid())):
        store.lock("load", "now").__enter__()


NO_NAMES = ["", ".", "..", ".hidden", "-x", "a/b", "../a", "a\\b", "a b", "a\n", "a\0", "x" * 65, "a:b", "/a"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_session_name_that_leaves_the_home_is_refused(home, name):
    with pytest.raises(UsageError, match="is not a valid session name"):
        Home(home).store(name)


def test_ordinary_names_and_foreign_letters_name_sessions(home):
    for name in ("a", "contract-2.1_b", "Ärger", "日本", "x" * 64):
        assert Home(home).store(name).folder == home / name
    with pytest.raises(SessionError, match="no session"):
        Home(home).current()


def test_a_session_without_tensor_samples_keeps_its_model(store: Store, tiny_models) -> None:
    """As kvedit 0.2 wrote them: only parts that are recorded are compared."""
    manifest = store.read_manifest()
    parts = {name: kept for name, kept in manifest.model.parts.items() if name != "tensor_samples"}
    assert len(parts) == len(manifest.model.parts) - 1
    store.write_manifest(replace(manifest, model=replace(manifest.model, parts=parts)))
    session = read_whole(store, tiny_models["llama"])
    session.delete("1")
    Session(State(store)).delete("1")  # another process
    session.delete("1")
    assert session.has_model
