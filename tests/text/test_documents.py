"""A user's file of any bytes: it comes back byte for byte, or it is refused with the byte; nothing is cut."""

from __future__ import annotations

import codecs
import itertools
import json
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from rigs.reference import contents
from support.sessions import FEE_LINES
from typer.testing import CliRunner

from kvedit.cli.app import app
from kvedit.text.document import Document
from kvedit.text.units import unit_starts
from kvedit.timing import clock

PATIENCE_S = 8.0  # on a busy machine; to encode all of a text of 20 MB takes minutes


def kvedit(*args: str | Path, code: int = 0, stdin: str | bytes | None = None) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    assert result.exit_code == code, result.output
    assert "this is a bug in kvedit" not in result.output
    return result


@pytest.fixture
def contract(home: Path, fee_sessions: Path) -> Path:
    return shutil.copytree(fee_sessions, home)


# --- encodings ---------------------------------------------------------------------------------

ACCENTS, JAPANESE = "Café, dû le 3.\r\nNaïve.\nZoë", "「はい。」と言った。\n料金は三十日。\n"
FILES = [
    (codecs.BOM_UTF8 + ACCENTS.encode(), None, "utf-8"),
    (codecs.BOM_UTF8 + ACCENTS.encode(), "utf-8", "utf-8"),
    (codecs.BOM_UTF8 + ACCENTS.encode(), "utf-8-sig", "utf-8"),
    (ACCENTS.encode(), "utf-8-sig", "utf-8"),
    (codecs.BOM_UTF16_LE + JAPANESE.encode("utf-16-le"), None, "utf-16-le"),
    (codecs.BOM_UTF16_BE + JAPANESE.encode("utf-16-be"), "utf-16", "utf-16-be"),
    (JAPANESE.encode("utf-16-le"), "utf-16-le", "utf-16-le"),
    (codecs.BOM_UTF32_LE + ACCENTS.encode("utf-32-le"), "utf-32", "utf-32-le"),
    (ACCENTS.encode("utf-32-be"), "utf-32-be", "utf-32-be"),
    (ACCENTS.encode("latin-1"), "latin-1", "iso8859-1"),
    (ACCENTS.encode("cp1252"), "windows-1252", "cp1252"),
    (b"\xff\xfe is no mark in latin-1\n", "latin-1", "iso8859-1"),
    ("Срок тридцать дней.\n".encode("koi8-r"), "KOI8_R", "koi8-r"),
    (JAPANESE.encode("cp932"), "cp932", "cp932"),
    (JAPANESE.encode("gb18030"), "gb18030", "gb18030"),
]


@pytest.mark.parametrize(("data", "asked", "encoding"), FILES, ids=lambda part: str(part)[:12])
def test_bytes_of_any_encoding_round_trip(data: bytes, asked: str | None, encoding: str) -> None:
    document = Document.decode(data, "-", "text.txt", asked)
    assert document.encode() == data
    assert document.source.encoding == encoding
    assert document.text.encode(encoding) == data[len(data) - len(document.text.encode(encoding)) :]
    assert not document.text.startswith("\ufeff")  # the mark is no text, so no row is computed for it
    again = Document.decode(data, "-", "text.txt", document.source.named)
    assert again == document


@pytest.mark.parametrize(("data", "asked", "encoding"), [FILES[at] for at in (2, 6, 7, 13)], ids="abcd")
def test_a_file_can_be_exported_compared_synced_and_reloaded(
    home: Path, checkpoints: dict[str, Path], data: bytes, asked: str, encoding: str
) -> None:
    path = Path("text.txt")
    path.write_bytes(data)
    kvedit("load", path, "-m", checkpoints["llama"], "--encoding", asked)
    record = json.loads(kvedit("export", "-o", "copy.txt", "--json").stdout)
    assert Path("copy.txt").read_bytes() == data == kvedit("export").stdout_bytes
    assert record["encoding"] == encoding
    kvedit("append", "More: 7.")
    grown = kvedit("export").stdout_bytes
    assert grown.startswith(data)
    assert grown.decode(encoding).rstrip().endswith("More: 7.")
    assert "No difference" not in kvedit("diff").output
    path.write_bytes(grown)
    assert "No difference." in kvedit("diff").output
    assert "Nothing was changed." in kvedit("sync").output
    path.write_bytes(data)
    kvedit("sync")
    assert kvedit("export").stdout_bytes == data
    Path("again.kvedit").write_text(kvedit("log", "--script").stdout.replace(" --model", " --force --model"))
    kvedit("replay", "again.kvedit")
    assert kvedit("export").stdout_bytes == data


@pytest.mark.parametrize(
    ("data", "option", "facts"),
    [
        (b"caf\xe9 ol\xe9\n", [], "not valid UTF-8: byte 3 "),
        (b"ok \xed\xa0\x80\n", [], "not valid UTF-8: byte 3 "),  # a lone surrogate
        (b"caf\xc3\xa9 \xe9\n", [], "not valid UTF-8: byte 6 "),  # both in one file
        (b"a\x81b", ["--encoding", "cp1252"], "not valid CP1252: byte 1 "),
        (b"a\x82", ["--encoding", "cp932"], "not valid CP932: byte 1 "),
        (b"abc", ["--encoding", "utf-16-le"], "byte 2 "),
        (b"\x00\xd8a\x00", ["--encoding", "utf-16-le"], "byte 0 "),
        ("fees".encode("utf-16-le"), [], "byte 1 is zero"),
        ("fees".encode("utf-16-le"), ["--encoding", "utf-16"], "no byte order mark"),
        (codecs.BOM_UTF16_LE + "Ā\0".encode("utf-16-le"), [], "byte 4 is zero"),
        (b"fees\0", ["--encoding", "latin-1"], "byte 4 is zero"),
        (codecs.BOM_UTF32_LE + "fees".encode("utf-32-le"), [], "zero"),
        # Two codes for one character: Python writes the other one.
        (b"a \x87\x90\n", ["--encoding", "cp932"], "does not round-trip through CP932: byte 2 would change"),
        (b"fees", ["--encoding", "nosuch"], "not a text encoding"),
        (b"fees", ["--encoding", "hex"], "not a text encoding"),
        (b"fees", ["--encoding", "rot13"], "not a text encoding"),
        (b"fees", ["--encoding", "undefined"], "not a text encoding"),
        (b"fees", ["--encoding", ""], "not a text encoding"),
        (b"fees", ["--encoding", "é\x1b"], "not a text encoding"),
        (codecs.BOM_UTF8, ["--encoding", "utf-8-sig"], "is empty"),
    ],
    ids=lambda part: str(part)[:24],
)
@pytest.mark.parametrize("place", ["text.txt", "-"])
def test_an_undecodable_file_is_refused_by_its_byte(
    contract: Path, data: bytes, option: list[str], facts: str, place: str
) -> None:
    before = contents(contract)
    Path("text.txt").write_bytes(data)
    for command in (
        ["load", place, "-m", "nosuch"],
        ["append", *(["--file", place] if place != "-" else "-")],
    ):
        told = kvedit(*command, *option, code=2, stdin=data).stderr
        assert facts in " ".join(told.split())
        if "would change" not in facts and "empty" not in facts:
            assert "--encoding" in told or "cp1252" in told
    assert contents(contract) == before


def test_new_lines_come_from_a_file_of_another_encoding(contract: Path) -> None:
    Path("annex.txt").write_bytes(ACCENTS.encode("cp1252"))
    kvedit("insert", "--after", "0", "--file", "annex.txt", "--encoding", "cp1252")
    kvedit("append", "-", "--encoding", "latin-1", stdin="fin é".encode("latin-1"))
    text = kvedit("export").stdout_bytes.decode()
    assert text.startswith("Café, dû le 3.\nNaïve.\nZoë\nLine 1:")
    assert text.endswith("\nfin é\n")
    assert "for a file, not for TEXT" in kvedit("append", "é", "--encoding", "latin-1", code=2).stderr


def test_export_names_an_unencodable_character_and_its_line(home: Path, checkpoints: dict[str, Path]) -> None:
    Path("text.txt").write_bytes("dû\n".encode("latin-1"))
    kvedit("load", "text.txt", "-m", checkpoints["llama"], "--encoding", "latin-1")
    kvedit("append", "18 €")
    told = kvedit("export", "-o", "copy.txt", code=2).stderr
    assert "Line 2 contains '€', which iso8859-1 cannot represent." in told
    assert not Path("copy.txt").exists()
    for name, start in (("utf-8", b""), ("utf-8-sig", codecs.BOM_UTF8), ("utf-16", codecs.BOM_UTF16_LE)):
        record = json.loads(
            kvedit("export", "-o", "copy.txt", "--force", "--encoding", name, "--json").stdout
        )
        assert Path("copy.txt").read_bytes() == start + "dû\n18 €\n".encode(record["encoding"])
        assert record["bom"] == bool(start)
    assert "is not a text encoding" in kvedit("export", "--encoding", "hex", code=2).stderr
    assert "€" in kvedit("show").stdout


@pytest.mark.parametrize(
    "words",
    [["append", "-e", "a\\u0000b"], ["replace", "-l", "1", "-e", "\\u0000"], ["insert", "-a", "0", "a\0"]],
)
def test_a_document_never_contains_a_nul_character(contract: Path, words: list[str]) -> None:
    assert "NUL character" in kvedit(*words, code=2).stderr


def test_an_edited_text_is_kept_when_it_cannot_be_applied(
    contract: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    editor = tmp_path / "editor.py"
    monkeypatch.setenv("VISUAL", f"{sys.executable} {editor}")
    before = contents(contract)
    for data, code in ((b"caf\xe9\n", 2), (b"a lot of words. " * 4000, 5)):
        editor.write_text(f"import sys; open(sys.argv[-1], 'wb').write({data!r})")
        told = kvedit("edit", code=code).stderr
        kept = Path(re.search(r"Your text is in (\S+)\.$", told.strip())[1])
        assert kept.read_bytes() == data
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        kept.unlink()
    assert contents(contract) == before
    editor.write_text("import sys; open(sys.argv[-1], 'w').write('Fees.\\n')")
    kvedit("edit")
    assert kvedit("show").stdout == "1  Fees.\n"
    assert not list(tmp_path.glob("kvedit-*"))


# --- lines and units ---------------------------------------------------------------------------


def test_only_a_line_feed_starts_a_new_line_number(home: Path, checkpoints: dict[str, Path]) -> None:
    """https://github.com/oraios/serena/pull/1699"""
    Path("text.txt").write_bytes("a\nb\fc\nd\u2028e\nf\x85\rg\n".encode())
    kvedit("load", "text.txt", "-m", checkpoints["llama"])
    kvedit("delete", "--lines", "3-3")
    assert kvedit("export").stdout_bytes == "a\nb\fc\nf\x85\rg\n".encode()


@pytest.mark.parametrize(
    "units",
    [
        ["「はい。」", "と言った。", "料金は？", "三十日！？", "以上"],
        ["『一。』", "【二。】", "（三。）", "四｡", "五"],
        ["他说：“好。”", "然后走了。\n", "下一行"],
        ["ما الأجر؟", " ثلاثون يوما.", " نعم۔", " انتهى"],
        ["शुल्क देय है।", " तीस दिन।", " बस"],
        ["He said “no.”", " She (too.)", " «Oui.»", " 3.5 e.g.", " end"],
        ["e\u0301te\u0301.", " 🙂👨\u200d👩\u200d👧!", " ok"],
    ],
)
def test_units_end_with_sentences_in_any_script(units: list[str]) -> None:
    text = "".join(units)
    starts = [*unit_starts(text).tolist(), len(text)]
    assert [text[start:stop] for start, stop in itertools.pairwise(starts)] == units


# --- what is too long --------------------------------------------------------------------------


def numbers(told: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", told.replace(",", ""))]


def test_a_document_over_the_context_is_refused_with_numbers(
    contract: Path, checkpoints: dict[str, Path]
) -> None:
    """https://github.com/ollama/ollama/issues/8099"""
    before = contents(contract)
    lines = ["The code is 4471.", *FEE_LINES]
    while True:  # from what fits, line by line, to what does not
        Path("long.txt").write_text("\n".join(lines))
        done = CliRunner().invoke(
            app, ["load", "long.txt", "-m", str(checkpoints["llama"]), "-s", "long", "--force"]
        )
        if done.exit_code:
            break
        record = json.loads(kvedit("status", "-s", "long", "--json").stdout)
        assert record["lines"] == len(lines)
        lines += lines[1:8]
    assert done.exit_code == 5
    document, more, need, holds = numbers(done.stderr)[:4]
    assert (document + more, holds) == (need, 1024)
    assert need > 1024
    kvedit("sessions", "remove", "long", "--yes")
    assert contents(contract) == before


def test_a_question_over_the_context_is_refused_with_numbers(contract: Path) -> None:
    before = contents(contract)
    tokens = json.loads(kvedit("status", "--json").stdout)["tokens"]
    for words in (
        ["ask", "What are the fees?", "--max-new-tokens", str(1024 - tokens)],
        ["ask", "fees " * 600],
        ["ask", "--continue", "fees " * 600],
        ["explain", "fees " * 600],
        ["verify", "-q", "What are the fees?", "--max-new-tokens", "1000"],
    ):
        for option in ([], ["--json"]):
            done = kvedit(*words, *option, code=5)
            document, more, need, holds = numbers(done.stderr)[:4]
            assert (document, document + more, holds) == (tokens, need, 1024)
            assert need > 1024
            assert bool(done.stdout) == bool(option)
    kvedit("append", "more words. " * 400, code=5)
    assert contents(contract) == before


@pytest.mark.parametrize("part", ["a", "fees and notices\n"], ids=["a line", "lines"])
def test_twenty_megabytes_are_refused_at_once(
    contract: Path, checkpoints: dict[str, Path], part: str
) -> None:
    size = 20_000_000
    Path("huge.txt").write_text(part * (size // len(part)))
    before = contents(contract)
    for words in (
        ["load", "huge.txt", "-m", checkpoints["llama"], "-s", "huge"],
        ["append", "-f", "huge.txt"],
    ):
        start = clock()
        told = kvedit(*words, code=5).stderr
        assert clock() - start < PATIENCE_S
        found = numbers(told)
        assert 1024 in found
        assert max(found[2], found[0]) > 1024
        assert any(number >= size // len(part) * len(part) for number in found)
    assert contents(contract) == before
    source = Path(json.loads(kvedit("status", "--json").stdout)["source"])
    assert source.name == "contract.txt"


def test_a_line_of_megabytes_is_shown_and_compared_quickly(
    home: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("line.txt").write_text("fees " * 500)
    kvedit("load", "line.txt", "-m", checkpoints["llama"])
    Path("line.txt").write_text("fees " * 500 + "\x07" * 1_000_000)
    start = clock()
    assert len(kvedit("diff").stdout) > 1_000_000
    monkeypatch.setattr("kvedit.cli.output.is_watched", lambda stream: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert kvedit("diff").stdout.count("\u2407") == 1_000_000
    assert len(kvedit("show").stdout) > 2500
    assert clock() - start < PATIENCE_S
