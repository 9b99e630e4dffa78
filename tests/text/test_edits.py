"""Insert, replace, move, compare and spell lines: each against an obvious way on a list of lines."""

from __future__ import annotations

import shlex
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rigs.reference import load_session
from support.edits import ending, inserted, moved, replaced, split

from kvedit.errors import UsageError
from kvedit.model.model import Model
from kvedit.session.session import Session
from kvedit.text.document import Document, Edit, LineRange
from kvedit.text.edits import difference, escape, insertion, line_counts, movement, replacement, unescape

steady = settings(derandomize=True, deadline=None, max_examples=250)

# --- texts of every script and line ending, and an oracle that knows lists of lines only ----------

ODD = [
    "a",
    "b",
    " ",
    "\t",
    "\n",
    "\n",
    "\n",
    "\r\n",
    "\r\n",
    "\r",
    "\f",
    "\v",
    "\x1b",
    "\x7f",
    "\x85",
    "\u2028",
]
ODD += [
    "\u2029",
    "\ufeff",
    "é",
    "e\u0301",
    "日本",
    "שלום",
    "\u202e",
    "🙂",
    "👨\u200d👩\u200d👧",
    "🇸🇪",
    "\u200d",
]
ODD += ["<|im_end|>", "\\", "\\n", "'", '"', "-", "#", "\ue000", "\U0010ffff", "The fees are paid."]
TEXTS = st.lists(st.sampled_from(ODD), max_size=24).map("".join)
# Few lines that often repeat, with one kind of ending or several.
_CONTENTS = st.sampled_from(["", "", "a", "a", "b", "ab", "\f", "one two", "日本", "🙂", "x\ry", "\\n", "-"])
_ENDINGS = st.sampled_from([("\n",), ("\n",), ("\r\n",), ("\r\n",), ("\n", "\r\n")])


@st.composite
def documents(draw: st.DrawFn) -> str:
    endings = draw(_ENDINGS)
    lines = draw(st.lists(st.tuples(_CONTENTS, st.sampled_from(endings)), max_size=7))
    text = "".join(content + ending for content, ending in lines)
    return text if draw(st.booleans()) else text + draw(_CONTENTS)


def check_edits(document: Document, edits: list[Edit]) -> Document:
    """Edits are sorted, disjoint, and say what they change; their counts agree with the texts."""
    assert all(0 <= edit.start <= edit.stop <= len(document.text) for edit in edits)
    assert all(left.stop <= right.start for left, right in pairwise(edits))
    assert all(edit.start < edit.stop or edit.text or edit.origin is not None for edit in edits)
    for edit in edits:
        if edit.origin is not None:
            assert document.text[edit.origin :].startswith(edit.text)
    after = document.apply(edits)
    removed, added = line_counts(document, after, edits)
    assert added - removed == after.line_count - document.line_count
    assert 0 <= removed <= document.line_count
    assert 0 <= added <= after.line_count
    return after


# --- insertion --------------------------------------------------------------------------------


@steady
@given(documents(), TEXTS, st.booleans(), st.data())
@example("a\nb", "x\r\n", False, None)
@example("a\r\nb", "x\ny", False, None)
@example("", "", False, None)
def test_inserting_lines_equals_inserting_into_a_list(text, new, exact, data):
    document = Document(text)
    after = data.draw(st.integers(0, document.line_count)) if data else document.line_count
    if exact and not new:
        with pytest.raises(UsageError, match="no text to insert"):
            insertion(document, after, new, exact=True)
        return
    edits = insertion(document, after, new, exact=exact)
    assert check_edits(document, edits).text == inserted(text, after, new, exact)
    assert line_counts(document, document.apply(edits), edits)[0] == 0 or exact


@pytest.mark.parametrize("text", ["a\r\nb\r\n", "a\r\nb"])
def test_a_crlf_document_stays_crlf_after_any_insertion(text):
    document = Document(text)
    for edits in (
        insertion(document, 1, "x\ny"),
        insertion(document, 2, "x\ny\n"),
        replacement(document, LineRange(1, 2), "x\r\ny\nz"),
        movement(document, LineRange(2, 2), 0),
    ):
        after = document.apply(edits)
        assert after.newline == "\r\n"
        assert after.text.count("\r\n") == after.text.count("\n") >= 1
        assert after.text.endswith("\r\n") == text.endswith("\r\n")


def test_crlf_lines_in_an_lf_document_become_lf():
    document = Document("a\nb")
    assert document.apply(insertion(document, 1, "x\r\ny\r\n")).text == "a\nx\ny\nb"
    assert document.apply(insertion(document, 2, "x\r\n")).text == "a\nb\nx"
    assert document.apply(replacement(document, LineRange(2, 2), "x\r\n")).text == "a\nx"


def test_exact_characters_are_inserted_without_a_line_end():
    document = Document("a\r\nb\r\n")
    assert document.apply(insertion(document, 1, "x\ny", exact=True)).text == "a\r\nx\nyb\r\n"
    assert document.apply(replacement(document, LineRange(1, 1), "x", exact=True)).text == "xb\r\n"
    assert document.apply(replacement(document, LineRange(1, 1), "", exact=True)).text == "b\r\n"


@pytest.mark.parametrize("after", [-1, 3, 10**9])
def test_a_position_after_a_missing_line_is_refused(after):
    document = Document("a\nb\n")
    for plan in (
        lambda: insertion(document, after, "x"),
        lambda: movement(document, LineRange(1, 1), after),
    ):
        with pytest.raises(UsageError, match="lines 1 to 2") as caught:
            plan()
        assert caught.value.exit_code == 2
        assert str(after) in caught.value.fact


def test_an_empty_document_accepts_lines_only_at_its_top():
    document = Document("")
    assert document.apply(insertion(document, 0, "a")).text == "a\n"
    with pytest.raises(UsageError, match="no lines"):
        insertion(document, 1, "a")
    with pytest.raises(UsageError, match="no lines"):
        replacement(document, LineRange(None, None), "a")
    with pytest.raises(UsageError, match="no lines"):
        movement(document, LineRange(None, None), 0)


# --- replacement ------------------------------------------------------------------------------


@steady
@given(documents().filter(bool), TEXTS, st.booleans(), st.data())
def test_replacing_lines_equals_replacing_in_a_list(text, new, exact, data):
    document = Document(text)
    count = document.line_count
    first, last = sorted(data.draw(st.tuples(st.integers(1, count), st.integers(1, count))))
    edits = replacement(document, LineRange(first, last), new, exact=exact)
    expected = replaced(text, first, last, new, exact)
    assert check_edits(document, edits).text == expected
    assert bool(edits) == (expected != text)
    start, stop = document.characters(first - 1, last)
    assert all(start <= edit.start <= edit.stop <= stop for edit in edits)


def test_replacing_lines_with_themselves_is_not_an_edit():
    document = Document("a\nb\n")
    assert replacement(document, LineRange(1, 2), "a\nb") == []
    assert replacement(document, LineRange(2, 2), "b\n", exact=True) == []


def test_a_replacement_changes_no_more_than_what_differs():
    document = Document("The fee is 10 euros.\nNext.\n")
    assert replacement(document, LineRange(1, 1), "The fee is 25 euros.") == [Edit(11, 13, "25")]
    assert replacement(document, LineRange(1, 2), "The fee is 10 euros.") == [Edit(21, 27)]


@pytest.mark.parametrize("lines", [LineRange(3, 3), LineRange(2, 3), LineRange(0, 1), LineRange(3, None)])
def test_lines_outside_the_document_are_refused(lines):
    document = Document("a\nb\n")
    for plan in (lambda: replacement(document, lines, "x"), lambda: movement(document, lines, 0)):
        with pytest.raises(UsageError, match="lines 1 to 2") as caught:
            plan()
        assert caught.value.exit_code == 2


# --- movement ---------------------------------------------------------------------------------


@st.composite
def movements(draw: st.DrawFn) -> tuple[str, int, int, int]:
    text = draw(documents().filter(bool))
    number = st.integers(1, len(split(text)))
    return (text, *sorted((draw(number), draw(number))), draw(st.just(0) | number))


@steady
@given(movements())
@example(("a\nb", 1, 1, 2))
@example(("a\nb", 2, 2, 0))
@example(("a\n\nb", 3, 3, 0))
@example(("a\r\n\nb", 1, 2, 3))
@example(("\na", 1, 1, 2))
def test_moving_lines_equals_moving_in_a_list(case):
    text, first, last, after = case
    document = Document(text)
    if first <= after < last:
        with pytest.raises(UsageError, match="inside the range") as caught:
            movement(document, LineRange(first, last), after)
        assert caught.value.exit_code == 2
        return
    edits = movement(document, LineRange(first, last), after)
    found = check_edits(document, edits).text
    assert found == moved(text, first, last, after)
    assert (not edits) == (after in (first - 1, last))
    # Every line is still there, and every ending; an open end stays one.
    assert Counter(found) == Counter(text)
    contents = [Counter(line.removesuffix(ending(line)) for line in split(part)) for part in (text, found)]
    for counter in contents:
        del counter[""]  # an empty line that comes last is none
    assert contents[0] == contents[1]
    if found.endswith("\n") != text.endswith("\n"):  # the open end is an empty line, which does not show
        assert "" in [line.removesuffix(ending(line)) for line in split(text)]


def test_moved_text_records_its_origin():
    document = Document("a\nb\nc\nd\n")
    moved_up = movement(document, LineRange(3, 4), 1)
    assert moved_up == [Edit(2, 2, "c\nd\n", origin=4), Edit(4, 8)]
    assert movement(document, LineRange(1, 1), 3) == [Edit(0, 2), Edit(6, 6, "a\n", origin=0)]
    for after in (1, 3):
        assert movement(document, LineRange(2, 3), after) == []


@pytest.mark.parametrize("text", ["a\nb\nc\nd\n", "a\nb\nc\nd", "a\r\nb\r\nc\r\nd"])
def test_moved_lines_are_counted_as_removed_and_added_once(text):
    document = Document(text)
    for first, last, after in [(1, 1, 4), (4, 4, 0), (2, 3, 4), (3, 4, 1), (1, 2, 3)]:
        edits = movement(document, LineRange(first, last), after)
        size = last - first + 1
        assert line_counts(document, document.apply(edits), edits) == (size, size)


# --- difference -------------------------------------------------------------------------------


@steady
@given(documents() | TEXTS, documents() | TEXTS)
def test_the_difference_turns_the_old_text_into_the_new(old, new):
    edits = difference(old, new)
    document = Document(old)
    assert check_edits(document, edits).text == new
    assert bool(edits) == (old != new)


@steady
@given(documents().filter(bool), st.data())
def test_a_difference_touches_only_the_changed_lines(text, data):
    lines = split(text)
    at = data.draw(st.integers(0, len(lines) - 1))
    new = "".join([*lines[:at], "Q9", *lines[at:]])
    start, stop = len("".join(lines[:at])), len("".join(lines[: at + 1]))
    for edit in difference(text, new):
        assert start <= edit.start <= edit.stop <= stop


def test_a_difference_finds_unchanged_lines_between_changes():
    old = "".join(f"line {number}\n" for number in range(40))
    new = old.replace("line 3\n", "line three\n").replace("line 30\n", "")
    assert difference(old, new) == [
        Edit(old.index("3\n"), old.index("3\n") + 1, "three"),
        Edit(old.index("line 30\n"), old.index("line 31\n")),
    ]


@steady
@given(documents(), documents())
def test_removed_and_added_lines_are_counted_once(old, new):
    edits = difference(old, new)
    check_edits(Document(old), edits)


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("a\nb\nc\n", "a\nc\n", (1, 0)),
        ("a\nc\n", "a\nb\nc\n", (0, 1)),
        ("a\nb\nc\n", "a\nx\nc\n", (1, 1)),
        ("a\nb\nc\n", "a\nx\ny\nc\n", (1, 2)),
        ("a\nb", "a\nb\nc", (0, 1)),
        ("a\nb\nc", "a\nb", (1, 0)),
        ("", "a\nb", (0, 2)),
        ("a\nb", "", (2, 0)),
        ("a\n\n\nb\n", "a\n\nb\n", (1, 0)),
        ("a\r\nb", "a\r\nb\r\nc", (0, 1)),
        ("a\nb\nc\nd\n", "A\nb\nc\nD\n", (2, 2)),
        ("same\n", "same\n", (0, 0)),
    ],
)
def test_a_difference_counts_the_lines_that_a_person_would(old, new, counts):
    assert line_counts(Document(old), Document(new), difference(old, new)) == counts


@steady
@given(documents().filter(bool), st.data())
def test_deleted_lines_are_counted_as_they_were_named(text, data):
    document = Document(text)
    named = data.draw(st.sets(st.integers(1, document.line_count), min_size=1))
    edits = document.deletions([LineRange(number, number) for number in named])
    assert line_counts(document, check_edits(document, edits), edits) == (len(named), 0)


# --- escapes ----------------------------------------------------------------------------------


@steady
@given(TEXTS | st.text(max_size=30))
def test_an_escaped_text_is_one_printable_line_and_reads_back(text):
    written = escape(text)
    assert written.isprintable()
    assert len(written.splitlines()) <= 1
    assert unescape(written) == text
    assert shlex.split(f"insert --exact -- {shlex.quote(written)}")[-1] == written


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"a\nb", "a\nb"),
        (r"\r\n\t\\", "\r\n\t\\"),
        (r"\\n", r"\n"),
        (r"\u2028\U0001f642", "\u2028🙂"),
        (r"\u00e9é", "éé"),
        ("", ""),
    ],
)
def test_each_escape_means_one_character(written, text):
    assert unescape(written) == text


@pytest.mark.parametrize(
    "written",
    ["\\", "a\\", r"\x41", r"\N", r"\u12", r"\u12g4", r"\U0001f6", r"\U00110000", r"\ud800", r"\'", "\\\n"],
)
def test_a_backslash_before_anything_else_is_refused(written):
    with pytest.raises(UsageError, match="is not an escape sequence") as caught:
        unescape(written)
    assert caught.value.exit_code == 2
    assert r"\n, \r, \t" in caught.value.remedy


# --- what an edit does to the rows ------------------------------------------------------------

ROWS = "".join(
    f"{name} {number}. The code of {name} is {number * 37}.\n"
    for number, name in enumerate("alpha beta gamma delta epsilon zeta eta theta".split(), 1)
)


def homes(session: Session) -> list[tuple[str, int] | None]:
    """Where each row lives."""
    rows = session.rows
    return [
        None if code < 0 else (rows.segments[code], index)
        for code, index in zip(rows.segment.tolist(), rows.index.tolist(), strict=True)
    ]


def rows_of_line(session: Session, number: int) -> list[int]:
    """Rows whose characters all lie within a line."""
    start, stop = session.document.characters(number - 1, number)
    head = len(session._state.manifest.head_ids)
    inside = (session._state.tokens.starts >= start) & (session._state.tokens.stops <= stop)
    return (np.flatnonzero(inside) + head).tolist()


@pytest.mark.parametrize(("lines", "after", "place"), [("2", 6, 6), ("7-8", 1, 2), ("5", 0, 1)])
def test_moved_rows_keep_their_states_and_become_stale(llama, home, lines, after, place):
    session = load_session(home, llama, ROWS)
    before, first = homes(session), LineRange.parse(lines).first
    source = rows_of_line(session, first)
    change = session.move(lines, after=after)
    target = rows_of_line(session, place)
    assert len(target) == len(source) > 10
    assert [homes(session)[row] for row in target] == [before[row] for row in source]
    exact = [row for row in target if row < session.rows.frontier]
    assert len(exact) < 3  # a first word may be that of the line that stood there
    assert session.rows.stale[[row for row in target if row not in exact]].all()
    assert change.missing <= 6  # seams at most
    assert list((session._state.store.folder / "segments").iterdir()) == [
        session._state.store.folder / "segments" / f"{name}.safetensors" for name in session.rows.segments
    ]


def test_inserted_rows_are_missing_and_the_others_keep_states(llama, home):
    session = load_session(home, llama, ROWS)
    before = homes(session)
    session.insert("omicron 77. The code of omicron is 4471.", after=3)
    new = rows_of_line(session, 4)
    assert session.rows.missing[new].all()
    assert session.rows.missing.sum() <= len(new) + 2
    after = homes(session)
    assert after[: new[0]] == before[: new[0]]
    assert after[new[-1] + 1 :] == before[new[0] :]
    assert session.rows.frontier == new[0]
    assert session.rows.stale[new[-1] + 1 :].all()


def test_repeated_lines_are_matched_by_position(llama, home):
    line = "The same words stand here, again.\n"
    session = load_session(home, llama, line * 8)
    before, each = homes(session), [rows_of_line(session, number) for number in range(1, 9)]
    session.replace("3", "Other words are here: 4471.")
    after = homes(session)
    # Lines 4 to 8 keep their own rows; none takes those of the line that was replaced.
    for number in range(4, 9):
        assert [after[row] for row in rows_of_line(session, number)] == [
            before[row] for row in each[number - 1]
        ]
    used = [home for home in after if home is not None]
    assert len(used) == len(set(used))
    session.undo()
    session.move("2", after=7)
    assert session.document.text == line * 8
    assert session.rows.frontier == len(session.rows)  # the same ids: the same rows, all exact
    assert homes(session) == before


@pytest.mark.parametrize("case", ["move", "rewrite"])
def test_no_state_is_used_for_two_rows(llama: Model, home: Path, case: str) -> None:
    session = load_session(home, llama, "a\nb\n" * 12)
    if case == "move":
        session.move("3-5", after=18)
    else:
        session.rewrite("b\na\na\n" * 9)
    used = [place for place in homes(session) if place is not None]
    assert len(used) == len(set(used))
    assert session.rows.stale.sum() + session.rows.missing.sum() + session.rows.frontier == len(session.rows)


def test_an_argument_of_invalid_utf_8_changes_nothing(llama, home):
    session = load_session(home, llama, ROWS)
    for act in (
        lambda: session.append("caf\udce9"),
        lambda: session.rewrite("\udcff"),
        lambda: session.ask("caf\udce9?", conversation=True),
    ):
        with pytest.raises(UsageError, match="not valid UTF-8") as caught:
            act()
        assert caught.value.exit_code == 2
    assert (session.document.text, len(session._state.journal)) == (ROWS, 1)
    session.append("café")
