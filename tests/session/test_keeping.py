"""Keeping sessions: use, copy, rename, remove, compact, check, and which one is current."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from rigs.reference import contents

from kvedit.cache.kv import States
from kvedit.cache.rows import RowTable
from kvedit.errors import LockedError, SessionError, UsageError
from kvedit.model.model import Model
from kvedit.repair.budget import Budget
from kvedit.session.session import Session
from kvedit.session.state import State
from kvedit.store.home import Home
from kvedit.store.records import Entry, Revision
from kvedit.store.store import Store
from kvedit.text.document import Document, Source

TEXT = "".join(f"Line {number}: the fees of item {number} are {number * 37}.\n" for number in range(1, 13))
QUESTION = "What are the fees of item 9?"


@pytest.fixture(scope="module")
def original(tiny_models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session with a branch that was undone, a conversation and five segments; tests get copies."""
    folder = tmp_path_factory.mktemp("home")
    source = Source("a.txt")
    session = Session.load(Document(TEXT, source), model=tiny_models["llama"], name="contract", home=folder)
    session.delete("3-4")
    ask(session)
    session.append("This way was left.")
    session.heal(budget=Budget.parse("20t"))
    session.undo()
    session.replace("2", "Other words.")
    session.ask(QUESTION, max_new_tokens=2, conversation=True)
    return folder / "contract"


@pytest.fixture
def store(original: Path, home: Path) -> Store:
    shutil.copytree(original, home / "contract")
    return Store(home / "contract")


def ask(session: Session, budget: str = "30%") -> tuple[int, ...]:
    return session.ask(QUESTION, budget=Budget.parse(budget), max_new_tokens=3).ids


def opened(store: Store, model: Model) -> Session:
    session = Session(State(store))
    session.use_model(model)
    return session


def findings(store: Store) -> list[str]:
    return list(Session(State(store)).check().findings)


def target(store: Store, name: str = "twin") -> Store:
    return Home(store.folder.parent).store(name)


# --- copy -------------------------------------------------------------------------------------


def test_a_copy_shares_segments_but_has_its_own_journal(store):
    Home(store.folder.parent).copy(store.name, "twin")
    left, right = store.folder, target(store).folder
    names = [path.name for path in (left / "segments").iterdir()]
    assert len(names) >= 4
    for name in names:
        ours, other = (os.stat(folder / "segments" / name) for folder in (left, right))
        assert (ours.st_ino, ours.st_nlink) == (other.st_ino, 2)
    journal = store.read_manifest().journal.name
    assert os.stat(left / journal).st_ino != os.stat(right / journal).st_ino
    assert os.stat(left / "session.json").st_ino != os.stat(right / "session.json").st_ino
    ours, other = contents(left), contents(right)
    assert ours.pop("session.json") != other.pop("session.json")  # when it was used
    assert ours == other
    manifest = target(store).read_manifest()
    assert structs.replace(manifest, used=store.read_manifest().used) == store.read_manifest()
    assert findings(target(store)) == []


def test_a_copy_and_its_original_do_not_affect_each_other(store, llama):
    Home(store.folder.parent).copy(store.name, "twin")
    before = contents(store.folder)
    twin = opened(target(store), llama)
    twin.delete("1-3")
    ask(twin)
    twin.undo(2)
    twin.ask("Who?", conversation=True, max_new_tokens=2)
    twin.heal()
    twin.compact()
    assert contents(store.folder) == before
    twin.purge()
    assert contents(store.folder) == before
    assert findings(store) == []
    kept = contents(target(store).folder)
    session = opened(store, llama)
    session.append("One more.")
    session.heal()
    session.purge()
    assert contents(target(store).folder) == kept
    assert findings(target(store)) == []


def test_a_copy_outlives_its_original(store, llama):
    Home(store.folder.parent).copy(store.name, "twin")
    answer = opened(store, llama).ask(QUESTION, keep=False, max_new_tokens=3).ids
    Home(store.folder.parent).remove(store.name)
    twin = opened(target(store), llama)
    assert twin.ask(QUESTION, keep=False, max_new_tokens=3).ids == answer
    twin.undo(2)
    assert twin.document.text == TEXT
    assert findings(target(store)) == []


def test_a_copy_is_complete_where_files_cannot_be_linked(store, monkeypatch):
    def link(*args: object) -> None:
        raise OSError(18, "another device")

    monkeypatch.setattr(os, "link", link)
    Home(store.folder.parent).copy(store.name, "twin")
    assert findings(target(store)) == []
    for path in (target(store).folder / "segments").iterdir():
        assert path.stat().st_nlink == 1
        assert path.read_bytes() == (store.folder / "segments" / path.name).read_bytes()


def test_a_copy_leaves_out_uncommitted_journal_bytes(store):
    name = store.read_manifest().journal.name
    with (store.folder / name).open("ab") as file:
        file.write(b'{"number": 9')  # as a killed writer leaves it
    Home(store.folder.parent).copy(store.name, "twin")
    assert (target(store).folder / name).stat().st_size == store.read_manifest().journal.size_bytes
    assert findings(target(store)) == []


def test_a_failed_copy_does_not_block_the_next(store, monkeypatch):
    monkeypatch.setattr(Store, "write_manifest", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Home(store.folder.parent).copy(store.name, "twin")
    assert not target(store).exists()
    assert [item.name for item in Home(store.folder.parent).list()] == ["contract"]
    monkeypatch.undo()
    Home(store.folder.parent).copy(store.name, "twin")
    assert findings(target(store)) == []


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["copy", "rename"])
def test_a_taken_name_or_a_missing_session_is_refused(store, verb):
    Home(store.folder.parent).copy(store.name, "twin")
    before = contents(store.folder.parent)
    for other in (target(store), store):
        with pytest.raises(UsageError, match=f"'{other.name}' already") as caught:
            getattr(Home(store.folder.parent), verb)(store.name, other.name)
        assert caught.value.exit_code == 2
    with pytest.raises(SessionError, match="no session 'gone'") as gone:
        getattr(Home(store.folder.parent), verb)("gone", "new")
    assert gone.value.exit_code == 3
    assert contents(store.folder.parent) == before
    assert not target(store, "gone").folder.exists()
    assert not target(store, "new").folder.exists()


def test_a_session_is_not_renamed_into_a_foreign_folder(store):
    target(store).folder.mkdir()
    (target(store).folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="folder"):
        Home(store.folder.parent).rename(store.name, "twin")
    assert store.exists()
    assert (target(store).folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("verb", ["rename", "remove", "use", "compact"])
def test_a_session_locked_by_another_process_is_unchanged(store, verb):
    session, before = Session(State(store)), contents(store.folder)
    act = {
        "rename": lambda: Home(store.folder.parent).rename(store.name, "twin"),
        "remove": lambda: Home(store.folder.parent).remove(store.name),
        "use": lambda: Home(store.folder.parent).use(store.name),
        "compact": lambda: session.compact(),
    }[verb]
    with Store(store.folder).lock("ask", "noon"):
        with pytest.raises(LockedError, match="kvedit ask, since noon") as caught:
            act()
        assert caught.value.exit_code == 3
        assert contents(store.folder) == before
    act()


def test_a_copy_is_not_made_where_another_process_makes_one(store):
    with target(store).lock("load", "noon", new=True), pytest.raises(LockedError, match="'twin'"):
        Home(store.folder.parent).copy(store.name, "twin")
    assert not target(store).exists()


def test_a_copy_does_not_replace_a_session_made_meanwhile(store, monkeypatch):
    lock = Store.lock

    def late(self: Store, *args: str, **more: bool) -> object:
        monkeypatch.undo()
        Home(store.folder.parent).copy(store.name, self.name)  # the other process is faster
        return lock(self, *args, **more)

    monkeypatch.setattr(Store, "lock", late)
    with pytest.raises(UsageError, match="'twin' already"):
        Home(store.folder.parent).copy(store.name, "twin")
    assert findings(target(store)) == []


# --- rename and remove ------------------------------------------------------------------------


def test_a_renamed_session_is_the_same_under_another_name(store, llama):
    before = contents(store.folder)
    old = Session(State(store.__class__(store.folder)))
    Home(store.folder.parent).rename(store.name, "lease")
    assert contents(target(store, "lease").folder) == before
    assert not target(store, "contract").folder.exists()
    assert Home(store.folder.parent).current().name == "lease"
    session = opened(target(store, "lease"), llama)
    session.undo()
    ask(session)
    with pytest.raises(SessionError, match="no session 'contract'"):
        old.delete("1")


def test_removing_deletes_all_files_and_reports_their_size(store):
    size = store.size_bytes()
    assert size == sum(len(data) for data in contents(store.folder).values())
    assert Home(store.folder.parent).remove(store.name) == size
    assert not store.folder.exists()
    assert list(store.folder.parent.glob("*/*")) == []


@pytest.mark.parametrize("damage", ["session.json", "journal", "segments"])
def test_a_damaged_session_can_be_removed(store, damage):
    Home(store.folder.parent).copy(store.name, "twin")
    path = store.folder / damage if damage != "journal" else next(store.folder.glob("journal-*"))
    shutil.rmtree(path) if path.is_dir() else path.write_bytes(b"?")
    Home(store.folder.parent).remove(store.name)
    assert not store.folder.exists()
    assert findings(target(store)) == []


# --- compact ----------------------------------------------------------------------------------


def test_compacting_drops_only_unreachable_files(store, llama):
    before = contents(store.folder)
    name = "0" * 32
    left = {f"segments/{name}.safetensors": b"x" * 100, f"tokenizers/{name}.json": b"y" * 10}
    left[f"journal-{name}.jsonl"] = b"z"
    left["segments/1.safetensors.7.ab.tmp"] = b"half"
    for name, data in left.items():
        (store.folder / name).write_bytes(data)
    session = opened(store, llama)
    assert session.compact() == 111  # what was being written goes with the lock
    assert contents(store.folder) == before
    assert session.compact() == 0
    for number in range(len(session._state.journal)):
        session.checkout(number)
        session._state.read_segments()
    assert findings(store) == []


def test_compacting_keeps_what_another_process_has_written(store, llama):
    session, other = opened(store, llama), opened(store, llama)
    other.delete("1")
    other.heal()
    assert session.compact() == 0
    assert session.rows.frontier == len(session.rows)
    session._state.read_segments()
    assert findings(store) == []


# --- check ------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_sound_session_has_no_findings_after_a_full_check(store):
    session, seen = Session(State(store)), []
    checked = session.check(lambda done, total: seen.append((done, total)))
    assert checked.findings == ()
    total = len(session._state.journal) + len(session._state.journal.segments())
    assert seen == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize("place", [-1, 0, 1])
def test_every_segment_that_is_flipped_short_or_gone_is_found(store, place):
    names = sorted(Session(State(store))._state.journal.segments())
    for name in names:  # also those of ways that were left
        path = store.folder / "segments" / f"{name}.safetensors"
        data = path.read_bytes()
        flip(path, len(data) // 2 if place == 1 else place)
        assert findings(store) == [f"The session is damaged: segment {name} does not match its checksum."]
        path.write_bytes(data[:-1])
        assert findings(store) == [f"The session is damaged: segment {name} does not match its checksum."]
        path.unlink()
        (found,) = findings(store)
        assert f"segment {name} cannot be read" in found
        path.write_bytes(data)
    assert findings(store) == []


def test_each_damage_is_reported_in_its_own_sentence(store):
    names = sorted(Session(State(store))._state.journal.segments())
    for name in names[:2]:
        flip(store.folder / "segments" / f"{name}.safetensors", -1)
    found = findings(store)
    assert len(found) == 2
    for name, sentence in zip(names, found, strict=False):
        assert name in sentence
        assert sentence.endswith(".")
        assert "\n" not in sentence


def forge(session: Session, **changes: object) -> None:
    """Put a revision with a mistake under the present one, and a right one after it."""
    present = session._state.revision
    entry = replace(present.entry, number=len(session._state.journal), parent=present.entry.number)
    rows = changes.pop("rows", present.rows)
    assert isinstance(rows, tuple)
    numbers = {name: value for name, value in changes.items() if name in Entry.__slots__}
    session._state.store.append(
        session._state.journal, Revision(replace(entry, **numbers), present.text, rows, present.turns)
    )
    right = replace(present.entry, number=len(session._state.journal), parent=present.entry.number)
    session._state.store.append(session._state.journal, replace(present, entry=right))
    session._state._publish(right.number, ())


def test_rows_of_other_tokens_than_the_text_are_found(store, llama):
    session = opened(store, llama)
    session._state.read_segments()
    rows = np.arange(3)
    keys, values = next(iter(session._state.segments.states.values()))
    states = States(llama.to_device(rows), keys[:, :, :3].clone(), values[:, :, :3].clone())
    name = store.write_segment(states, session._state.ids[rows] + 1)
    table = session.rows.computed(rows, name)
    forge(session, rows=tuple(table.pieces()))
    number = len(session._state.journal) - 2
    assert findings(store) == [f"Revision {number} and segment {name} differ in their tokens at row 0."]
    session.checkout(number)
    with pytest.raises(SessionError, match="wrong tokens"):
        ask(session)


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"stale": 9999}, "records counts that do not match its rows"),
        ({"missing": 9999}, "records counts that do not match its rows"),
        ({"tokens": 1}, "records counts that do not match its rows"),
    ],
)
def test_counts_that_do_not_add_up_are_found(store, changes, finding):
    session = Session(State(store))
    forge(session, **changes)
    assert findings(store) == [f"Revision {len(session._state.journal) - 2} {finding}."]


def test_too_few_or_missing_rows_are_found(store):
    session = Session(State(store))
    forge(session, rows=session._state.revision.rows[:-1])
    number, count = len(session._state.journal) - 2, len(session.rows)
    (found,) = findings(store)
    assert found.startswith(f"Revision {number} has ")
    assert found.endswith(f"rows for {count} tokens.")
    with pytest.raises(SessionError, match="damaged"):
        session.checkout(number)
    assert Session(State(store))._state.revision.entry.number == number + 1  # nothing has changed
    forge(session, frontier=count)  # the last row of the conversation is missing
    assert f"Revision {number + 2} has missing rows before its frontier." in findings(store)


def test_a_changed_journal_is_refused(store):
    flip(next(store.folder.glob("journal-*")), 100)
    with pytest.raises(SessionError, match="journal does not match its checksum"):
        findings(store)


# --- the current session ----------------------------------------------------------------------


def tiny_load(home: Path, model: Model, name: str) -> None:
    Session.load(Document("a\n"), model=model, name=name, home=home)


def test_the_session_that_was_loaded_or_chosen_last_is_current(home, llama):
    place = Home(home)
    with pytest.raises(SessionError, match="no session in"):
        place.current()
    for name in ("b", "a", "c"):
        tiny_load(home, llama, name)
        assert place.current().name == name
    place.use("a")
    assert place.current().name == "a"
    place.copy("a", "d")
    assert place.current().name == "a"  # the copy never is, by itself
    place.rename("a", "e")
    assert place.current().name == "e"
    place.remove("e")
    assert place.current().name == "c"
    place.use("d")
    assert place.current().name == "d"
    Session(State(place.store("c"))).append("An edit chooses nothing.")
    assert place.current().name == "d"
    assert Session.open(home=home)._state.store.name == "d"
    assert Session.open("c", home=home)._state.store.name == "c"


def test_a_copy_alone_is_current(home, llama):
    tiny_load(home, llama, "a")
    Home(home).copy("a", "b")
    Home(home).remove("a")
    assert Home(home).current().name == "b"


def test_an_unreadable_session_is_not_chosen_as_current(home, llama):
    for name in ("a", "b"):
        tiny_load(home, llama, name)
    place = Home(home)
    flip(home / "b" / "session.json", 40)
    assert place.current().name == "a"
    flip(home / "a" / "session.json", 40)
    with pytest.raises(SessionError, match=r"None of the sessions in .* can be read") as caught:
        place.current()
    assert caught.value.exit_code == 3
    place.remove("b")
    with pytest.raises(SessionError, match=r"session\.json"):
        place.current()


@pytest.mark.parametrize("name", ["gone", "bare"])
def test_a_missing_session_cannot_be_chosen(home, llama, name):
    tiny_load(home, llama, "a")
    (home / "bare").mkdir()
    with pytest.raises(SessionError, match=f"no session '{name}'"):
        Home(home).use(name)
    assert Home(home).current().name == "a"
    assert not (home / "gone").exists()


def test_the_list_says_what_each_session_holds(store, llama):
    home = store.folder.parent
    Home(store.folder.parent).copy(store.name, "twin")
    tiny_load(home, llama, "z")
    (home / "folder").mkdir()
    (home / "y").mkdir()
    (home / "y" / "session.json").write_bytes(b"{}")
    found = {item.name: item for item in Home(home).list()}
    assert list(found) == ["contract", "twin", "y", "z"]
    assert [item.name for item in found.values() if item.current] == ["z"]
    status = Session(State(store)).status()
    for name in ("contract", "twin"):
        item = found[name]
        assert (item.lines, item.tokens, item.stale) == (status.lines, status.tokens, status.stale)
        assert (item.missing, item.created) == (status.missing, status.created)
        assert (item.size_bytes, item.damage) == (Store(home / name).size_bytes(), None)
    assert found["y"].damage
    assert found["y"].tokens == 0


def test_an_unrolled_table_of_rows_equals_that_of_the_revision(store):
    session = Session(State(store))
    for number in range(len(session._state.journal)):
        revision = session._state.journal.revision(number)
        table = RowTable.from_pieces(revision.rows, revision.entry.frontier)
        assert tuple(table.pieces()) == revision.rows
