"""Lines as `grep -n` counts them, ranges of them, edits, and the bytes of a file as text."""

from __future__ import annotations

import codecs
import shutil
import subprocess
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvedit.errors import UsageError
from kvedit.text.document import Document, Edit, LineRange, kept_spans
from kvedit.text.encoding import decode

steady = settings(derandomize=True, deadline=None, max_examples=150)
# All that some program or other takes for the end of a line, and what is wide or joined.
CHARACTERS = [
    "a",
    "b",
    " ",
    "\n",
    "\n",
    "\r",
    "\r\n",
    "\f",
    "\v",
    "\x85",
    "\u2028",
    "\x1c",
    "é",
    "🙂",
    "\u200d",
]
texts = st.lists(st.sampled_from(CHARACTERS), max_size=40).map("".join)


@st.composite
def edited_texts(draw: st.DrawFn) -> tuple[str, list[Edit]]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8, unique=True)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    return text, [Edit(start, stop, draw(texts)) for start, stop in pairs]


@pytest.mark.parametrize(
    ("text", "first", "last", "span"),
    [
        ("7", 7, 7, (6, 7)),
        ("40-60", 40, 60, (39, 60)),
        ("40-", 40, None, (39, 100)),
        ("-5", None, 5, (0, 5)),
        (" 7 ", 7, 7, (6, 7)),
        ("007", 7, 7, (6, 7)),
        ("1-100", 1, 100, (0, 100)),
    ],
)
def test_a_range_is_read_as_lines_from_1_both_ends_included(text, first, last, span):
    lines = LineRange.parse(text)
    assert lines == LineRange(first, last)
    assert lines.resolve(100) == span
    assert LineRange.parse(str(lines)) == lines


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-",
        "--",
        "a-b",
        "a",
        "5-2",
        "1-2-3",
        "--5",
        "1.5",
        "1,2",
        "+1",
        "1 - 2",
        "٣",
        "1-²",
        "0x1",
        "1\n2",
    ],
)
def test_an_invalid_range_is_refused_with_the_valid_forms(text):
    with pytest.raises(UsageError) as caught:
        LineRange.parse(text)
    assert text.strip() in caught.value.fact
    assert caught.value.remedy


def test_a_reversed_range_suggests_the_right_order():
    with pytest.raises(UsageError, match="2-5"):
        LineRange.parse("5-2")


def test_a_number_of_thousands_of_digits_is_out_of_range():
    # Python's int refuses more than 4300 digits with an error of its own.
    with pytest.raises(UsageError):
        LineRange.parse("9" * 5000).resolve(100)


@pytest.mark.parametrize(
    "text", ["0", "0-3", "-0", "0-", "101", "1-101", "101-", "-101", "99999999999999999999"]
)
def test_a_range_outside_the_lines_is_refused_with_their_number(text):
    with pytest.raises(UsageError, match="lines 1 to 100"):
        LineRange.parse(text).resolve(100)


def test_an_empty_document_has_no_lines_to_name():
    for text in ("1", "1-", "-1"):
        with pytest.raises(UsageError, match="no lines"):
            LineRange.parse(text).resolve(0)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("a\nb", ["a", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("a\rb\n", ["a\rb"]),
        ("a\n\n\nb\n", ["a", "", "", "b"]),
        ("a\nb\fc\nd\u2028e\nf\n", ["a", "b\fc", "d\u2028e", "f"]),
        ("x\vy\x85z\x1c\x1d\x1e\u2029w\n", ["x\vy\x85z\x1c\x1d\x1e\u2029w"]),
    ],
)
def test_only_a_line_feed_ends_a_line(text, lines):
    document = Document(text)
    assert document.line_count == len(lines)
    assert document.lines(0, len(lines)) == lines


@pytest.mark.skipif(shutil.which("grep") is None, reason="there is no grep here")
@pytest.mark.parametrize(
    "text",
    [
        "a\nb\fc\nd\u2028e\nf\n",
        "a\r\nb\rc\r\n",
        "one\n\n\ntwo",
        "\n\n",
        "\u2029\n\x85\n\x1c\n",
        "🙂\n日本\nשלום",
        "x",
    ],
)
def test_lines_are_numbered_as_by_grep(text):
    def grep(*options: str) -> bytes:
        command = ["grep", "-a", *options, ""]
        return subprocess.run(
            command, input=text.encode(), capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
        ).stdout

    document = Document(text)
    assert document.line_count == int(grep("-c"))
    numbered = [line.partition(b":") for line in grep("-n").removesuffix(b"\n").split(b"\n")]
    ours = list(enumerate(document.lines(0, document.line_count), start=1))
    assert ours == [(int(number), line.decode().removesuffix("\r")) for number, _, line in numbered]


@steady
@given(texts)
def test_the_lines_cover_the_text_exactly_once(text):
    document = Document(text)
    spans = [document.characters(index, index + 1) for index in range(document.line_count)]
    assert "".join(text[start:stop] for start, stop in spans) == text
    assert all(
        text[start:stop].count("\n") == (stop < len(text) or text.endswith("\n")) for start, stop in spans
    )


@steady
@given(texts, st.data())
def test_ranges_count_the_original_lines_and_overlaps_merge(text, data):
    document = Document(text)
    count = document.line_count
    ranges = []
    if count:
        pairs = st.tuples(st.integers(1, count), st.integers(1, count)).map(sorted)
        ranges = [LineRange(*pair) for pair in data.draw(st.lists(pairs, max_size=4))]
    edits = document.deletions(ranges)
    gone = {line for lines in ranges for line in range(lines.first, lines.last + 1)}
    # The obvious way: walk over the lines with their numbers and leave out those that were named.
    kept = [line for number, line in enumerate(text.split("\n"), start=1) if number not in gone]
    expected = "".join(f"{line}\n" for line in kept)
    last_has_no_end = not text.endswith("\n") and count not in gone
    if text.endswith("\n") or not text or last_has_no_end:
        expected = expected[:-1]
    assert document.apply(edits).text == expected
    assert all(a.stop <= b.start for a, b in pairwise(edits))
    assert document.deletions([*ranges, *ranges]) == edits


def test_ranges_in_any_order_count_the_original_lines():
    document = Document("".join(f"line {number}\n" for number in range(1, 31)))
    ranges = [LineRange.parse(text) for text in ("20-25", "3-4", "9", "4-5", "24-26")]
    left = document.apply(document.deletions(ranges))
    gone = {3, 4, 5, 9, 20, 21, 22, 23, 24, 25, 26}
    assert left.text == "".join(f"line {number}\n" for number in range(1, 31) if number not in gone)


@pytest.mark.parametrize("text", ["a\nb", "a\nb\n", "a\r\nb"])
def test_deleting_every_line_leaves_an_empty_document(text):
    document = Document(text)
    emptied = document.apply(document.deletions([LineRange(None, None)]))
    assert (emptied.text, emptied.line_count) == ("", 0)


def test_a_range_outside_the_document_deletes_nothing():
    with pytest.raises(UsageError):
        Document("a\nb\n").deletions([LineRange(1, 1), LineRange(2, 3)])


@steady
@given(edited_texts())
def test_edits_replace_only_their_characters(edited):
    text, edits = edited
    expected = text
    for edit in reversed(edits):  # from the end, so that earlier offsets stay right
        expected = expected[: edit.start] + edit.text + expected[edit.stop :]
    assert Document(text).apply(edits).text == expected


@steady
@given(edited_texts())
def test_kept_spans_map_each_remaining_character_once(edited):
    text, edits = edited
    after = Document(text).apply(edits).text
    spans = kept_spans(edits, len(text))
    touched = {at for edit in edits for at in range(edit.start, edit.stop)}
    survivors = [old + step for old, _, size in spans for step in range(size)]
    assert survivors == [at for at in range(len(text)) if at not in touched]
    assert all(text[old : old + size] == after[new : new + size] for old, new, size in spans)
    assert all(a[1] + a[2] <= b[1] for a, b in pairwise(spans))
    assert len(after) == len(survivors) + sum(len(edit.text) for edit in edits)


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (b"", "utf-8"),
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ],
)
def test_a_byte_order_mark_sets_the_encoding_and_is_not_text(mark, encoding):
    text = "é🙂\r\nשלום\n"
    assert decode(mark + text.encode(encoding), "a.txt") == (text, encoding)


@pytest.mark.parametrize("data", [b"", codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_a_file_without_text_is_empty_with_or_without_a_mark(data):
    with pytest.raises(UsageError, match=r"a\.txt is empty"):
        decode(data, "a.txt")


@pytest.mark.parametrize("data", [b"\n", b" ", "\u2028".encode()])
def test_white_space_is_text(data):
    assert decode(data, "a.txt")[0] == data.decode()


@pytest.mark.parametrize(
    ("data", "offset"),
    [(b"\x00", 0), (b"\x7fELF\x02\x00", 5), (b"text\x00more", 4), (codecs.BOM_UTF8 + b"ab\x00", 5)],
)
def test_a_binary_file_is_named_with_its_first_binary_byte(data, offset):
    with pytest.raises(UsageError, match=f"binary file: byte {offset} "):
        decode(data, "a.bin")


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        ("caf\xe9\n".encode("latin-1"), 3),
        (b"ok\n\xed\xa0\x80", 3),  # a lone surrogate, as some programs write it
        (b"ok \xf0\x9f\x99", 3),  # an emoji cut short
        (codecs.BOM_UTF8 + b"caf\xe9", 6),
        (codecs.BOM_UTF16_LE + b"a\x00b", 4),
        (codecs.BOM_UTF16_LE + b"a\x00\x00\xd8", 4),
        (codecs.BOM_UTF16_BE + b"\x00a\xdc\x00", 4),
    ],
)
def test_an_invalid_byte_is_named_by_its_offset(data, offset):
    with pytest.raises(UsageError, match=f"byte {offset} "):
        decode(data, "a.txt")


@pytest.mark.parametrize("mark", [codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE])
def test_utf_32_is_refused_and_never_misread(mark):
    encoding = "utf-32-le" if mark == codecs.BOM_UTF32_LE else "utf-32-be"
    with pytest.raises(UsageError):
        decode(mark + "fees".encode(encoding), "a.txt")
