"""The journal: what comes back of it, how large it gets, and what a killed writer leaves in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvedit.cache.rows import Piece
from kvedit.errors import SessionError
from kvedit.store import files
from kvedit.store import journal as room
from kvedit.store.journal import Journal
from kvedit.store.records import Entry, JournalRecord, Revision
from kvedit.text.document import Document, Edit
from kvedit.text.edits import difference

S1, S2, S3 = (digit * 32 for digit in "123")
steady = settings(derandomize=True, deadline=None, max_examples=40)
TEXTS = st.lists(
    st.sampled_from(["a\n", "b\n", "\r\n", "\n", "\r", "\u2028", "\x85", "日本\n", "🙂", '"\\', "\x1b"]),
    max_size=12,
).map("".join)
PIECES = st.lists(
    st.one_of(
        st.builds(Piece, st.none(), st.just(0), st.integers(1, 9)),
        st.builds(Piece, st.sampled_from([S1, S2, S3]), st.integers(0, 99), st.integers(1, 9), st.booleans()),
    ),
    max_size=6,
).map(tuple)
TURNS = st.lists(st.integers(0, 5), max_size=5).map(tuple)


def revision(
    number: int, parent: Revision | None, text: str, rows: tuple[Piece, ...] = (), turns: tuple[int, ...] = ()
) -> Revision:
    before = parent.text if parent else ""
    entry = Entry(
        number=number,
        parent=parent.entry.number if parent else None,
        state=number,
        created="2026-11-30T00:00:00.000000Z",
        command="load" if parent is None else "insert --after 0 'é\u2028'",
        edits=number,
        changes=tuple(difference(before, text)) if parent else (),
        lines=Document(text).line_count,
        tokens=sum(piece.length for piece in rows),
        stale=1,
        missing=2,
        frontier=3,
    )
    return Revision(entry, text, rows, turns)


@st.composite
def pasts(draw: st.DrawFn) -> list[Revision]:
    """Revisions of which each comes after any earlier one."""
    past = [revision(0, None, draw(TEXTS), draw(PIECES), draw(TURNS))]
    for number in range(1, draw(st.integers(1, 14))):
        parent = past[draw(st.integers(0, number - 1))]
        text = draw(st.just(parent.text) | TEXTS)
        rows = draw(st.just(parent.rows) | PIECES | PIECES.map(lambda more, held=parent.rows: (*held, *more)))
        turns = draw(
            st.just(parent.turns) | st.just(()) | TURNS.map(lambda more, held=parent.turns: (*held, *more))
        )
        past.append(revision(number, parent, text, rows, turns))
    return past


def write(folder: Path, past: list[Revision]) -> Journal:
    journal = Journal(folder, None)
    for each in past:
        journal.append(each)
    return journal


def wholes(folder: Path, journal: Journal) -> list[int]:
    """Numbers of the revisions that are written whole."""
    lines = (folder / journal.record.name).read_bytes()[: journal.record.size_bytes].split(b"\n")[:-1]
    return [number for number, line in enumerate(lines) if "text" in json.loads(line)]


def chain(count: int, line: str = "a line of the text, number {}\n") -> Iterator[Revision]:
    """A document and edits of one line each, one after the other."""
    lines = [line.format(number) for number in range(200)]
    last = revision(0, None, "".join(lines), (Piece(S1, 0, 4000),))
    yield last
    for number in range(1, count):
        lines[number % 200] = f"changed {number}\n"
        rows = (Piece(S1, 0, number), Piece(None, 0, 3), Piece(S1, number + 3, 3997 - number))
        last = revision(number, last, "".join(lines), rows)
        yield last


# --- what comes back --------------------------------------------------------------------------


@steady
@given(pasts(), st.booleans(), st.data())
def test_every_revision_is_restored_in_any_order(past, small, data):
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "_LEAST_BYTES", 100 if small else 16384)  # many whole lines, or few
        folder = Path(name)
        written = write(folder, past)
        opened = Journal(folder, written.record)
        assert len(opened) == len(past)
        for number in data.draw(st.permutations(range(len(past)))):
            assert opened.revision(number) == past[number]
            assert Journal(folder, written.record).revision(number) == past[number]
            assert opened.entry(number) == past[number].entry
        named = {piece.segment for each in past for piece in each.rows if piece.segment is not None}
        assert opened.segments() == named


@steady
@given(pasts(), st.data())
def test_a_journal_may_be_reopened_between_revisions(past, data):
    with TemporaryDirectory() as name:
        folder = Path(name)
        journal, record = Journal(folder, None), None
        for each in past:
            if record is not None and data.draw(st.booleans()):
                journal = Journal(folder, record)
            journal.append(each)
            record = journal.record
        at_once = Path(name) / "again"
        at_once.mkdir()
        assert write(at_once, past).record == record
        assert [Journal(folder, record).revision(number) for number in range(len(past))] == past


def test_a_revision_is_a_change_of_its_own_parent(tmp_path):
    first = revision(0, None, "a\nb\n", (Piece(S1, 0, 4),), (7,))
    left = revision(1, first, "a\n", (Piece(S1, 0, 2),))
    right = revision(2, first, "a\nb\nc\n", (Piece(S1, 0, 4), Piece(None, 0, 2)), (7, 8, 9))
    again = revision(3, left, "a\nd\n", (Piece(S1, 0, 2), Piece(S2, 0, 2)), (7, 8))
    journal = Journal(tmp_path, write(tmp_path, [first, left, right, again]).record)
    assert [journal.revision(number) for number in (3, 1, 2, 0)] == [again, left, right, first]
    assert wholes(tmp_path, journal) == [0]
    assert journal.segments() == {S1, S2}


# --- size -------------------------------------------------------------------------------------


def test_opening_a_revision_reads_few_lines(tmp_path):
    past = list(chain(300))
    journal = write(tmp_path, past)
    whole = wholes(tmp_path, journal)
    assert len(whole) > 2
    sizes = [len(line) + 1 for line in (tmp_path / journal.record.name).read_bytes().split(b"\n")]
    for start, stop in zip(whole, [*whole[1:], len(past)], strict=True):
        between = sum(sizes[start + 1 : stop])
        assert between <= max(sizes[start], room._LEAST_BYTES) + 2 * max(sizes[start + 1 : stop], default=0)
        if stop < len(past):  # and it is not written whole before it pays
            assert between > max(sizes[start], room._LEAST_BYTES)
    assert Journal(tmp_path, journal.record).revision(299) == past[-1]


def test_the_journal_grows_with_changes_not_the_document(tmp_path):
    size, after = 0, {}
    journal = Journal(tmp_path, None)
    for number, each in enumerate(chain(801)):
        size += len(journal.append(each))
        after[number] = size
    first = after[0]
    assert (tmp_path / journal.record.name).stat().st_size == size == journal.record.size_bytes
    # A change of one line, and the share of whole lines that come as often as changes fill one.
    assert (after[800] - first) / 800 < 1500
    growth = [(after[stop] - after[stop - 200]) for stop in (200, 400, 600, 800)]
    assert max(growth) < 2 * min(growth)


def test_a_one_line_change_of_a_long_document_is_short(tmp_path):
    past = list(chain(2, line="some line of a rather long document, and this is number {} of them\n"))
    journal = Journal(tmp_path, None)
    whole, change = (len(journal.append(each)) for each in past)
    assert whole > 13_000
    assert change < 600


# --- killed writers and damage ----------------------------------------------------------------


@pytest.mark.parametrize("tail", [b"{", b'{"number":3', b"\n", b"\xff\xfe", b"x" * 70_000])
def test_an_unfinished_line_at_the_end_is_overwritten(tmp_path, tail):
    past = list(chain(5))
    record = write(tmp_path, past[:3]).record
    path = tmp_path / record.name
    kept = path.read_bytes()
    path.write_bytes(kept + tail)
    journal = Journal(tmp_path, record)
    assert (len(journal), journal.record) == (3, record)
    assert journal.revision(2) == past[2]
    journal.append(past[3])
    assert path.read_bytes().startswith(kept + b'{"number":3,')
    assert path.stat().st_size == journal.record.size_bytes
    assert Journal(tmp_path, journal.record).revision(3) == past[3]


def test_a_revision_not_in_the_manifest_is_ignored(tmp_path):
    past = list(chain(4))
    journal = write(tmp_path, past[:2])
    record = journal.record
    journal.append(past[2])  # killed before the manifest
    other = revision(2, past[0], "another\n")
    again = Journal(tmp_path, record)
    assert len(again) == 2
    again.append(other)
    assert Journal(tmp_path, again.record).revision(2) == other
    with pytest.raises(SessionError, match="journal"):
        Journal(tmp_path, journal.record)  # that one is gone


def test_any_flipped_bit_is_noticed(tmp_path):
    past = [revision(0, None, "a\nb 🙂\n", (Piece(S1, 0, 9),))]
    past.append(revision(1, past[0], "a\nc\n", (Piece(S1, 0, 2), Piece(None, 0, 1)), (3, 4)))
    record = write(tmp_path, past).record
    path = tmp_path / record.name
    intact = path.read_bytes()
    for at in range(len(intact)):
        broken = bytearray(intact)
        broken[at] ^= 1 << (at % 8)
        path.write_bytes(broken)
        with pytest.raises(SessionError, match="journal does not match its checksum") as caught:
            Journal(tmp_path, record)
        assert caught.value.exit_code == 3
    path.write_bytes(intact)
    assert Journal(tmp_path, record).revision(1) == past[1]


@pytest.mark.parametrize("size", [0, 1, -1])
def test_a_truncated_or_missing_journal_is_reported(tmp_path, size):
    record = write(tmp_path, list(chain(3))).record
    path = tmp_path / record.name
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(SessionError, match=f"bytes of {record.size_bytes}") as caught:
        Journal(tmp_path, record)
    assert caught.value.exit_code == 3
    path.unlink()
    with pytest.raises(SessionError, match="journal"):
        Journal(tmp_path, record)


def forged(folder: Path, *lines: dict[str, object]) -> Journal:
    """A journal of any lines, under a checksum that agrees."""
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    (folder / "journal-forged.jsonl").write_bytes(data)
    return Journal(folder, JournalRecord("journal-forged.jsonl", len(data), files.digest(data)))


def fields(tmp_path: Path) -> list[dict[str, object]]:
    journal = write(tmp_path, list(chain(3)))
    return [json.loads(line) for line in (tmp_path / journal.record.name).read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("line", "change"),
    [
        (1, {"number": 2}),
        (1, {"number": 0}),
        (1, {"parent": 1}),
        (1, {"parent": 2}),
        (2, {"parent": -1}),
        (0, {"number": 1}),
        (1, {"rows": [0, [], 0, 0]}),
        (1, {"turns": None}),
        (1, {"changes": [["a"]]}),
        (1, {"frontier": ...}),
    ],
)
def test_invalid_or_misplaced_lines_are_damage(tmp_path, line, change):
    lines = fields(tmp_path)
    assert forged(tmp_path, *lines).revision(2).entry.number == 2
    lines[line] |= change
    lines[line] = {name: value for name, value in lines[line].items() if value is not ...}
    journal = forged(tmp_path, *lines)
    with pytest.raises(SessionError, match="revision") as caught:
        [journal.revision(number) for number in (2, 1, 0)]
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("number", [-1, 3, 10**6])
def test_a_missing_revision_is_damage(tmp_path, number):
    journal = write(tmp_path, list(chain(3)))
    for read in (journal.revision, journal.entry):
        with pytest.raises(SessionError, match=f"revision {number}"):
            read(number)


def test_a_line_of_invalid_json_is_damage(tmp_path):
    data = b"not json\n"
    (tmp_path / "j").write_bytes(data)
    journal = Journal(tmp_path, JournalRecord("j", len(data), files.digest(data)))
    with pytest.raises(SessionError, match="revision 0"):
        journal.revision(0)


def test_the_origin_of_moved_characters_is_not_stored(tmp_path):
    first = revision(0, None, "a\nb\n")
    moved = (Edit(0, 0, "b\n", origin=2), Edit(2, 4))
    entry = replace(revision(1, first, "b\na\n").entry, changes=moved)
    journal = write(tmp_path, [first, Revision(entry, "b\na\n", ())])
    found = Journal(tmp_path, journal.record).revision(1)
    assert found.text == "b\na\n"
    assert [edit.origin for edit in found.entry.changes] == [None, None]
