"""What a machine can do to a session: full and read-only disks, no locks, clocks set back, folders gone.

Each fault is one sentence of fact and one of remedy, with the right exit code, and the session is as it
was before or as it is after.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.tiny import save_tiny
from support.forging import contents
from typer.testing import CliRunner

from kvedit import timing
from kvedit.cache.kv import States
from kvedit.cli.app import app
from kvedit.errors import KveditError, LockedError, ModelError, SessionError, UsageError
from kvedit.model.model import Model
from kvedit.session.session import Session
from kvedit.session.state import State
from kvedit.store.header import HEADER_BYTES, parse_header
from kvedit.store.home import Home
from kvedit.store.store import Store
from kvedit.text.document import Document

TEXT = "".join(f"Line {number}: the fees of item {number} are {number * 37}.\n" for number in range(1, 9))


@pytest.fixture(scope="module")
def original(tiny_models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sessions with one that has a past. Never to be changed."""
    home = tmp_path_factory.mktemp("home") / "sessions"
    session = Session.load(Document(TEXT), model=tiny_models["llama"], name="contract", home=home)
    session.delete("3-4")
    session.ask("What are the fees?", budget="20%", max_new_tokens=2, conversation=True)
    return home


@pytest.fixture
def store(original: Path, home: Path) -> Store:
    shutil.copytree(original, home)
    return Store(home / "contract")


def use(store: Store, model: Model) -> Session:
    session = Session(State(store))
    session.use_model(model)
    return session


def view(store: Store) -> Any:
    """What a session is; `None` where there is none."""
    if not store.exists():
        return None
    session = Session(State(store))
    session._state.read_segments()
    entry = session._state.revision.entry
    return session.document.text, session._state.revision.rows, session._state.revision.turns, entry.edits


def views(home: Path) -> dict[str, Any]:
    return {store.name: view(store) for store in Home(home).stores()}


def of_load(store: Store, model: Model) -> Any:
    document = Document("Another document.\n")
    return Session.load(document, model=model, name="contract", home=store.folder.parent, force=True)


COMMANDS: dict[str, Callable[[Store, Model], Any]] = {
    "delete": lambda store, model: Session(State(store)).delete("1"),
    "undo": lambda store, model: Session(State(store)).undo(),
    "forget": lambda store, model: Session(State(store)).forget(),
    "ask": lambda store, model: use(store, model).ask("Why?", max_new_tokens=1, conversation=True),
    "heal": lambda store, model: use(store, model).heal(),
    "purge": lambda store, model: use(store, model).purge(),
    "load": of_load,
    "use": lambda store, model: Home(store.folder.parent).use(store.name),
    "copy": lambda store, model: Home(store.folder.parent).copy(store.name, "twin"),
    "rename": lambda store, model: Home(store.folder.parent).rename(store.name, "twin"),
    "compact": lambda store, model: Session(State(store)).compact(),
    "remove": lambda store, model: Home(store.folder.parent).remove(store.name),
}


class HalfWritten(io.BufferedWriter):
    """A file that takes half of the bytes."""

    number = errno.ENOSPC

    def write(self, data: Any) -> int:
        super().write(data[: len(data) // 2])
        self.flush()
        raise OSError(self.number, os.strerror(self.number))


@contextmanager
def failing(home: Path, step: int, number: int) -> Iterator[list[str]]:
    """Fail the `step`-th change below `home`, by any of the calls that make one."""
    seen: list[str] = []

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(first: Any, *rest: Any, **more: Any) -> Any:
            changes = str(first).startswith(str(home)) or name in ("fsync", "fdopen")
            if name == "open":
                changes = changes and bool(rest[0] & (os.O_WRONLY | os.O_RDWR))
            if name == "fdopen":
                changes = rest[0] != "rb"
            if changes:
                seen.append(name)
            if changes and len(seen) == step:
                if name == "fdopen":
                    file = HalfWritten(io.FileIO(first, rest[0].replace("b", "")))
                    file.number = number
                    return file
                raise OSError(number, os.strerror(number))
            return real(first, *rest, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "fdopen", "fsync", "replace", "rename", "mkdir", "rmdir", "link", "unlink"):
            patch.setattr(os, name, wrap(name))
        yield seen


FAULTS = [(command, errno.ENOSPC) for command in COMMANDS]
FAULTS += [(command, errno.EIO) for command in ("delete", "copy", "remove")]


@pytest.mark.parametrize(("command", "number"), FAULTS)
def test_a_failed_write_keeps_the_old_or_new_state(original, home, llama, command, number):
    act = COMMANDS[command]

    def fresh() -> Store:
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(original, home)
        (home / "contract" / "segments" / f"{'0' * 32}.safetensors").write_bytes(b"left behind")
        return Store(home / "contract")

    before = views(fresh().folder.parent)
    act(Store(home / "contract"), llama)
    states = (before, views(home))
    for step in count(1):
        store = fresh()
        with failing(home, step, number) as seen:
            try:
                act(store, llama)
                error = None
            except KveditError as caught:
                error = caught
        if len(seen) < step:
            break
        if error is not None:
            assert error.exit_code == 1, error
            assert "\n" not in error.fact
            assert ("The disk is full" in error.fact) == (number == errno.ENOSPC)
        found = views(home)
        assert found in states or (command == "ask" and found["contract"][0] == before["contract"][0])
        if found.get("contract"):
            assert Session(State(store)).check().findings == ()
            Session(State(store)).delete("1")
            assert view(store)[0] == found["contract"][0].partition("\n")[2]
        assert not list(home.rglob("*.tmp"))
    assert step > 2


def test_a_full_disk_still_allows_freeing_space(store, monkeypatch):
    def full(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and not os.path.exists(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *rest, **more)

    real = os.open
    (store.folder / "segments" / f"{'0' * 32}.safetensors").write_bytes(b"left behind")
    monkeypatch.setattr(os, "open", full)
    assert Session(State(store)).compact() == 11
    assert not (store.folder / "holder.json").exists()  # rather than one that names somebody else
    assert Home(store.folder.parent).remove(store.name) > 0
    assert not store.folder.exists()


@pytest.mark.parametrize("command", ["delete", "load", "copy", "remove"])
def test_a_read_only_disk_allows_reading_and_explains_failures(store, llama, monkeypatch, command):
    def read_only(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(first: Any, *rest: Any, **more: Any) -> Any:
            changes = name != "open" or rest[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if changes and str(first).startswith(str(store.folder.parent)):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(first, *rest, **more)

        return call

    before = contents(store.folder.parent)
    for name in ("open", "replace", "rename", "mkdir", "rmdir", "link", "unlink"):
        monkeypatch.setattr(os, name, read_only(name))
    session = use(store, llama)
    assert session.status().lines == 6
    assert session.ask("Why?", max_new_tokens=1, keep=False).kept is False
    with pytest.raises(KveditError) as caught:
        COMMANDS[command](store, llama)
    assert caught.value.exit_code == 1
    assert os.strerror(errno.EROFS) in caught.value.fact
    assert "KVEDIT_HOME" in caught.value.remedy
    assert contents(store.folder.parent) == before


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP])
def test_a_file_system_without_locks_is_reported_before_a_write(store, monkeypatch, number):
    def without(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    before = contents(store.folder)
    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.raises(KveditError, match="does not support locks") as caught:
        Session(State(store)).delete("1")
    assert caught.value.exit_code == 1
    assert not isinstance(caught.value, LockedError)
    assert "local disk" in caught.value.remedy
    assert Session(State(store)).status().lines == 6
    assert contents(store.folder) == before


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_sync_folders_is_accepted(store, monkeypatch, number):
    def flush(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(number, os.strerror(number))
        real(handle)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", flush)
    Session(State(store)).delete("1")
    assert Session(State(store)).document.line_count == 5


# --- the clock ------------------------------------------------------------------------------------


class Clock(datetime):
    """A clock that stands where it is set."""

    year_now = 2030

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(cls.year_now, 1, 1, tzinfo=UTC)


def test_the_last_used_session_is_current_after_clock_changes(home, llama, monkeypatch):
    monkeypatch.setattr(timing, "datetime", Clock)
    Clock.year_now = 2030
    place = Home(home)
    for name, year in (("a", 2030), ("b", 2020), ("c", 2020)):
        Clock.year_now = year
        Session.load(Document(TEXT), model=llama, name=name, home=home)
        assert place.current().name == name
    for name in "abcba":  # at one instant, too
        place.use(name)
        assert place.current().name == name
    session = Session(State(place.store("b")))
    session.delete("1")
    session.undo()
    assert session.document.text == TEXT
    assert [entry.number for entry in session.log(everything=True)] == [1, 0]
    assert session.check().findings == ()


def test_durations_use_a_monotonic_clock(monkeypatch):
    monkeypatch.setattr(timing, "datetime", None)  # nothing measures by the date
    monkeypatch.setattr("time.time", None)
    timings = timing.Timings()
    with timings.measure("prefill"):
        pass
    assert timings.seconds("prefill") >= 0


# --- other people, and folders that go ------------------------------------------------------------


@pytest.mark.parametrize("what", ["session.json", "journal-", "tokenizers/", "segments/"])
def test_an_unreadable_file_is_not_reported_as_damaged(store, llama, monkeypatch, what):
    def closed(path: Any, *rest: Any, **more: Any) -> int:
        if what in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *rest, **more)

    real = os.open
    monkeypatch.setattr(os, "open", closed)
    with pytest.raises(SessionError, match="Permission denied") as caught:
        use(store, llama)._state.read_segments()
    assert what in caught.value.fact
    assert "damaged" not in caught.value.fact
    assert "permissions" in caught.value.remedy


def test_an_unreadable_folder_is_not_reported_as_empty(store, monkeypatch):
    def closed(path: Any) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "listdir", closed)
    with pytest.raises(SessionError, match="Permission denied"):
        Session.open(home=store.folder.parent)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="every folder is open to root")
def test_a_session_that_cannot_be_written_can_be_read(store):
    store.folder.chmod(0o500)
    try:
        assert Session(State(store)).status().lines == 6
        with pytest.raises(KveditError, match="Permission denied"):
            Session(State(store)).delete("1")
    finally:
        store.folder.chmod(0o700)


@pytest.mark.parametrize(
    "command", ["delete", "undo", "ask", "heal", "purge", "use", "compact", "rename", "copy"]
)
def test_a_session_removed_during_use_is_not_recreated(store, llama, command):
    session = use(store, llama)
    session._state.read_segments()
    shutil.rmtree(store.folder)
    acts = {
        "delete": lambda: session.delete("1"),
        "undo": session.undo,
        "ask": lambda: session.ask("Why?", max_new_tokens=1),
        "heal": session.heal,
        "purge": session.purge,
        "compact": lambda: session.compact(),
    }
    with pytest.raises(SessionError, match="There is no session 'contract'"):
        acts.get(command, lambda: COMMANDS[command](store, llama))()
    assert list(store.folder.parent.iterdir()) == [store.folder.parent / ".gitignore"]


def test_a_folder_that_vanishes_during_a_command_is_reported(store, monkeypatch):
    def gone(*args: Any) -> None:
        shutil.rmtree(store.folder)
        real(*args)

    real, session = os.replace, Session(State(store))
    with session._state.writing("delete"):
        monkeypatch.setattr(os, "replace", gone)
        with pytest.raises(KveditError, match="no longer exists"):
            session._state.edit([], "delete")
    assert not store.exists()


def test_a_lost_journal_is_not_recreated_with_zeros(store):
    session = Session(State(store))
    path = store.folder / session._state.manifest.journal.name
    manifest = (store.folder / "session.json").read_bytes()
    whole = path.read_bytes()
    for left in (None, 0, len(whole) - 1):
        path.unlink() if left is None else path.write_bytes(whole[:left])
        with pytest.raises(KveditError), session._state.store.lock("delete", "noon"):
            session._state.commit("delete", session.rows)
        assert path.exists() == (left is not None)
        assert (store.folder / "session.json").read_bytes() == manifest
    path.write_bytes(whole)
    assert Session(State(store)).check().findings == ()


# --- two processes --------------------------------------------------------------------------------

EDIT = """import pathlib, sys
from kvedit.errors import LockedError
from kvedit.session.session import Session
from kvedit.session.state import State
from kvedit.store.store import Store
done = 0
session = Session(State(Store(pathlib.Path(sys.argv[1]))))
while done < int(sys.argv[2]):
    try:
        session.append(f"{sys.argv[3]} {done}")
        done += 1
    except LockedError:
        pass"""


def test_simultaneous_edits_are_all_kept_and_read_whole(store):
    command = [sys.executable, "-c", EDIT, str(store.folder), "15"]
    writers = [subprocess.Popen([*command, name]) for name in "xy"]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        session = Session(State(store))
        assert session.document.line_count == 6 + session._state.revision.entry.edits - 1
        seen += 1
    assert [writer.wait() for writer in writers] == [0, 0]
    assert seen > 5
    lines = Session(State(store)).document.text.splitlines()[6:]
    assert sorted(lines) == sorted(f"{name} {number}" for name in "xy" for number in range(15))
    assert Session(State(store)).check().findings == ()


# --- files that are mapped, views, paths ------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what is mapped")
def test_no_mapped_file_is_replaced_or_removed(store, llama, monkeypatch):
    changed: list[str] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **more: Any) -> Any:
            target = os.path.abspath(args[-1])
            assert target not in Path("/proc/self/maps").read_text(), f"{name} of a mapped file"
            changed.append(target)
            return real(*args, **more)

        monkeypatch.setattr(os, name, call)

    watch("replace"), watch("unlink")
    session = use(store, llama)
    for _ in range(2):
        session.ask("Why?", max_new_tokens=1, conversation=True, budget="full")
        assert "safetensors" in Path("/proc/self/maps").read_text()  # so that there is something to see
        session.delete("1")
        session.heal()
        session.undo()
        session.compact()
    session.ask("Why?", max_new_tokens=1)
    session.purge()
    assert any(path.endswith(".safetensors") for path in changed)


def test_rows_already_stored_are_not_written_again(store, llama, monkeypatch):
    states = States(torch.arange(2), *(torch.ones(3, 2, 2, 16) for _ in range(2)))
    name = store.write_segment(states, np.arange(2))
    path = store.folder / "segments" / f"{name}.safetensors"
    before = path.stat().st_ino
    assert store.write_segment(states, np.arange(2)) == name
    assert path.stat().st_ino == before
    path.write_bytes(b"damaged")
    store.write_segment(states, np.arange(2))
    assert store.read_segment(name)["ids"].tolist() == [0, 1]


def test_views_of_larger_tensors_are_stored_alone_and_equal(store):
    buffer = torch.randn(16, 3, 9, 2)
    views = {
        "cut": torch.randn(3, 2, 64, 16)[:, :, 5:9],
        "turned": buffer.permute(1, 3, 2, 0)[:, :, ::2][:, :, :4],
        "shared": torch.randn(1, 2, 4, 16).expand(3, 2, 4, 16),
    }
    sizes = set()
    for view_ in views.values():
        name = store.write_segment(States(torch.arange(4), view_, view_), np.arange(4))
        found = store.read_segment(name)
        assert torch.equal(found["keys"], view_)
        assert torch.equal(found["values"], view_)
        path = store.folder / "segments" / f"{name}.safetensors"
        sizes.add(path.stat().st_size - 2 * view_.numel() * 4 - 4 * 4)
    assert max(sizes) < 500  # the header: nothing of the larger tensor comes along


def test_a_segment_has_three_tensors_for_any_number_of_lines(home, llama):
    headers = []
    for lines in (1, 100):
        session = Session.load(Document("a\n" * lines), model=llama, name=f"of-{lines}", home=home)
        (path,) = (session._state.store.folder / "segments").iterdir()
        headers.append(parse_header(path.read_bytes()[:HEADER_BYTES], path.stat().st_size))
    assert [header.tensors["ids"].shape[0] > 100 for header in headers] == [False, True]


@pytest.mark.parametrize("name", ["model.bin", "notes.txt", "."])
def test_a_file_is_not_accepted_as_a_session(store, name):
    Path("model.bin").write_bytes(b"\0" * 100)
    Path("notes.txt").write_text("text")
    done = CliRunner().invoke(app, ["status", "--session", name])
    assert done.exit_code == (2 if name == "." else 3)
    assert f"'{name}'" in done.stderr


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf", b"\n", b"\r\n"])
def test_a_nearly_empty_file_is_usable_or_refused(store, llama, data):
    Path("small.txt").write_bytes(data)
    before = view(store)
    if not data.strip(b"\xef\xbb\xbf"):
        with pytest.raises(UsageError, match="is empty"):
            Session.load("small.txt", model=llama, name="contract", home=store.folder.parent, force=True)
    else:
        session = Session.load("small.txt", model=llama, name="small", home=store.folder.parent)
        assert session.document.line_count == 1
        session.ask("Why?", max_new_tokens=1)
        session.delete("1")
        session.ask("Why?", max_new_tokens=1)
        assert session.export() == b""
    with pytest.raises(UsageError):
        Session.load("missing.txt", model=llama, name="contract", home=store.folder.parent, force=True)
    assert view(store) == before


def test_a_path_may_have_spaces_and_letters_of_any_script(tmp_path, llama):
    home = tmp_path / "Ünïcode und 日本 'quoted' $HOME"
    session = Session.load(Document(TEXT), model=llama, name="Vertrag-日本", home=home)
    session.delete("1")
    session.ask("Why?", max_new_tokens=1)
    Home(session._state.store.folder.parent).copy(session.name, "Kopie")
    session.purge()
    assert Session(State(Home(home).store("Kopie"))).check().findings == ()
    Home(session._state.store.folder.parent).remove(session.name)


# --- the model that computed the rows ---------------------------------------------------------------


def test_a_model_with_a_different_part_is_refused_by_its_name(home, tmp_path):
    folder = save_tiny(tmp_path / "model", "llama")
    Session.load(Document(TEXT), model=str(folder), name="contract", home=home)
    store = Store(home / "contract")
    folder.rename(moved := tmp_path / "moved")
    with pytest.raises(ModelError):
        Session(State(store))._state.find_model()
    session = Session(State(store))
    session.use_model(session._state.find_model(str(moved)))

    def differing(name: str, change: Callable[[Path], object]) -> None:
        shutil.copytree(moved, folder)
        change(folder)
        with pytest.raises(SessionError, match=rf"\(the {name} differs?\)"):
            Session(State(store)).ask("Why?", max_new_tokens=1)
        shutil.rmtree(folder)

    differing("weights", lambda there: save_tiny(there, "llama", seed=5))
    differing("config", lambda there: save_tiny(there, "llama", rms_norm_eps=0.5))
    differing("chat template", lambda there: (there / "chat_template.jinja").write_text("{{ messages }}"))
    differing(
        "tokenizer",
        lambda there: (there / "tokenizer.json").write_text(
            (there / "tokenizer.json").read_text().replace('"use_regex": true', '"use_regex": false')
        ),
    )


def test_a_session_is_asked_with_the_model_it_was_reloaded_with(home, tmp_path):
    folders = [save_tiny(tmp_path / str(seed), "llama", seed=seed) for seed in (1, 2)]
    for name, folder in zip(("contract", "clean"), folders, strict=True):
        Session.load(Document(TEXT), model=str(folder), name=name, home=home)
    warm, clean = (Session(State(Store(home / name))) for name in ("contract", "clean"))
    warm.ask("Why?", max_new_tokens=8)
    Session.load(Document(TEXT), model=str(folders[1]), name="contract", home=home, force=True)
    answer = warm.ask("Why?", max_new_tokens=8)
    assert answer.ids == clean.ask("Why?", max_new_tokens=8).ids
    assert warm.model.directory == folders[1]
