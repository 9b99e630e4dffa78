"""What others wrote is printed as data: a document, an answer, a name cannot steer a terminal.

A terminal sees what could steer it as marks, and no markup; a pipe gets texts as they are. Commands
run in this process on a pseudo-terminal of their own, so that the model is opened once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.sessions import reset_workspace
from typer.testing import CliRunner

import kvedit.session.asking
from kvedit.cli.app import app
from kvedit.cli.output import visible
from kvedit.cli.repl.line import run_line
from kvedit.cli.workspace import here

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals on Windows")

TITLE, WIPE, C1, BIDI, MARKUP = (
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[H",
    "\x9b2J\x90q",
    "\u202egnp\u202c",
    "[/][bold]b",
)
HOSTILE = f"a{TITLE}{WIPE}{C1}{BIDI}{MARKUP}:smile:\rOVER\x08\x7f[link=file:///x]"
LINES = [f"{number}. {HOSTILE} The fees of item {number} are {number * 37}." for number in range(1, 9)]
TEXT = "".join(f"{line}\n" for line in LINES)
NAME = f"x{TITLE}{WIPE}{BIDI}[blink]:smile:\nError: none\r"  # of a file or folder
# What rich itself writes: styles, and what draws a bar or a spinner anew.
OWN = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|2K|1A)|\r(?=\x1b\[(?:2K|1A)|\r?\n)")
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Terminal:
    """A pseudo-terminal as stdout and stderr; what comes out of its other end is collected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self._found = monkeypatch, bytearray()

    def run(self, *words: str, code: int = 0, line: str | None = None, **env: str) -> str:
        """Run a command, or a line of the REPL; give what the terminal got, without rich's own codes."""
        main, side = pty.openpty()
        self._found = bytearray()
        reader = threading.Thread(target=self._read, args=(main,))
        reader.start()
        with self._patch.context() as patch, open(side, "w", encoding="utf-8", newline="") as stream:
            for name, value in {"TERM": "xterm-256color", **env}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", stream)
            patch.setattr("typer.rich_utils.COLOR_SYSTEM", "auto")  # as at the start of a process
            ended = run_line(line) if line is not None else called(words)
        reader.join()
        os.close(main)
        text = self._found.decode("utf-8", errors="surrogateescape")
        assert ended == code, text
        assert "Traceback" not in text
        assert "this is a bug in kvedit" not in text
        return text

    def _read(self, main: int) -> None:
        while True:
            try:
                data = os.read(main, 1 << 16)
            except OSError:  # as Linux tells that nobody holds the other end
                return
            if not data:
                return
            self._found += data


def called(words: Sequence[str]) -> int:
    try:
        app(args=list(words), prog_name="kvedit")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def check_tame(shown: str) -> str:
    """Check that nothing steers the terminal but what rich writes itself."""
    text = OWN.sub("", shown)
    assert not STEERS.search(text), repr(text)
    return text


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return Terminal(monkeypatch)


@pytest.fixture(scope="module")
def original(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of a hostile text, from a file and with a model of hostile names; never to be changed."""
    root = tmp_path_factory.mktemp("hostile")
    shutil.copytree(checkpoints["llama"], root / f"m{NAME}")
    (root / NAME).write_text(TEXT, newline="")
    args = ["load", str(root / NAME), "-m", str(root / f"m{NAME}"), "-s", "hostile", "--system", HOSTILE]
    done = CliRunner().invoke(app, args, env={"KVEDIT_HOME": str(root / "sessions")})
    assert done.exit_code == 0, done.output
    return root


@pytest.fixture
def hostile(home: Path, original: Path) -> Iterator[Path]:
    shutil.copytree(original / "sessions", home)
    here.warm = True  # the model is opened once a test
    yield home
    reset_workspace()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model answers with what is hostile."""

    def decode(model: Any, cache: Any, logits: Any, sampler: Any, limit: int, *more: Any) -> Any:
        yield from model.tokenizer.encode_text(HOSTILE).ids.tolist()

    monkeypatch.setattr(kvedit.session.asking, "decode_", decode)


# --- on a terminal -----------------------------------------------------------------------------


def test_every_command_shows_a_hostile_document_as_data(
    hostile: Path, original: Path, terminal: Terminal
) -> None:
    for words in (["show"], ["export"], ["log", "--script"]):
        shown = check_tame(terminal.run(*words))
        assert MARKUP in shown
        assert ":smile:" in shown
        assert "OVER" in shown
    assert visible(LINES[3]) in terminal.run("show", "--lines", "4")
    (original / NAME).write_text(TEXT.replace("item 3", f"item {HOSTILE} 3"), newline="")
    shown = check_tame(terminal.run("diff"))
    assert shown.count(MARKUP) == 8
    assert "+3. " in shown
    assert "-3. " in shown
    (original / NAME).write_text(TEXT, newline="")
    for words in (
        ["status"],
        ["sessions", "list"],
        ["sessions", "check"],
        ["insert", "--after", "1", HOSTILE],
        ["replace", "--lines", "3", HOSTILE],
        ["move", "--lines", "4", "--after", "1"],
        ["log"],
        ["undo"],
        ["redo"],
        ["log", "--all"],
        ["sync"],
    ):
        check_tame(terminal.run(*words))
    assert MARKUP in terminal.run("log", COLUMNS="300")


def test_questions_answers_and_units_are_data(hostile: Path, terminal: Terminal, answers: None) -> None:
    terminal.run("delete", "--lines", "2")
    shown = check_tame(terminal.run("explain", HOSTILE, COLUMNS="300"))
    assert shown.count(MARKUP) > 4
    assert visible(HOSTILE) in check_tame(terminal.run("ask", HOSTILE))
    assert visible(HOSTILE) in check_tame(terminal.run("ask", "--continue", HOSTILE))
    assert visible(HOSTILE).replace("\r", "") in check_tame(terminal.run(line=f"?{HOSTILE}"))
    check_tame(terminal.run("log", "--all", COLUMNS="300"))
    check_tame(terminal.run("heal"))
    check_tame(terminal.run("purge"))


def test_verify_shows_hostile_answers_as_data(
    hostile: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvedit.tokens.tokenizer.Tokenizer.decode", lambda self, ids: HOSTILE)
    shown = check_tame(terminal.run("verify", "-q", "Fees?", "--max-new-tokens", "2"))
    assert shown.count(visible(HOSTILE)) == 2


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, ["load", NAME]),
        (2, ["show", "--session", NAME]),
        (2, ["show", "--lines", NAME]),
        (2, [NAME]),
        (2, ["show", f"--{NAME}"]),
        (2, ["delete"]),
        (2, ["ask", "x", "--policy", NAME]),
        (2, ["ask", "x", "--budget", NAME]),
        (2, ["undo", NAME]),
        (2, ["export", "-o", f"{NAME}/{NAME}"]),
        (0, ["export", "-o", NAME]),
        (2, ["replay", NAME]),
        (3, ["sessions", "remove", "gone"]),
        (4, ["ask", "x", "--model", NAME]),
        (2, ["insert", "--after", "1", "--exact", "\\" + HOSTILE]),
        (2, ["load", "contract.txt", "--encoding", NAME]),
    ],
    ids=lambda part: " ".join(part).split("\x1b")[0][:24] if isinstance(part, list) else str(part),
)
def test_a_hostile_argument_is_named_as_data_on_one_line(
    hostile: Path, terminal: Terminal, code: int, words: list[str]
) -> None:
    text = check_tame(terminal.run(*words, code=code, COLUMNS="1000"))
    assert not any(line.startswith("Error: none") for line in text.splitlines()), text


def test_a_line_of_the_repl_and_of_a_script_is_data(hostile: Path, terminal: Terminal) -> None:
    for line in (HOSTILE, f"'{NAME}'", f"set budget '{NAME}'", f"help '{NAME}'"):
        check_tame(terminal.run(line=line, code=2))
    Path("script").write_text(
        f"# {HOSTILE}\nappend '{HOSTILE}'\nexpect answer contains '{HOSTILE}'\n", newline=""
    )
    shown = check_tame(terminal.run("replay", "script", code=1, COLUMNS="300"))
    assert f"> append '{visible(HOSTILE)}'" in shown


def test_names_found_on_the_disk_are_data(
    hostile: Path, terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(hostile / "hostile", hostile / NAME)
    shutil.copytree(hostile / "hostile", hostile / f"z{NAME}")
    (hostile / f"z{NAME}" / "session.json").write_text("{}")
    shown = check_tame(terminal.run("sessions", "list", COLUMNS="300"))
    assert "hostile" in shown
    assert "[blink]" not in shown  # what no session can be called is none
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "kvedit" / "models" / NAME).mkdir(parents=True)
    assert shown.count("\nError: none") == 0
    assert check_tame(terminal.run("models", "list")).count("\nError: none") == 0


def test_a_hostile_name_of_file_and_model_can_be_loaded(
    hostile: Path, original: Path, terminal: Terminal
) -> None:
    reset_workspace()
    args = ("load", str(original / NAME), "-m", str(original / f"m{NAME}"), "--force", "-s", "again")
    assert "Loaded 8 lines" in check_tame(terminal.run(*args))
    assert check_tame(terminal.run("status", COLUMNS="1000")).count("[blink]:smile:") == 1
    (original / f"m{NAME}" / "config.json").rename(original / "config.json")
    try:
        check_tame(terminal.run(*args, code=4))
    finally:
        (original / "config.json").rename(original / f"m{NAME}" / "config.json")


# --- in a pipe ---------------------------------------------------------------------------------


def piped(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done


def test_a_pipe_and_json_get_texts_unchanged(hostile: Path, answers: None) -> None:
    assert piped("export").stdout_bytes == TEXT.encode()
    shown = piped("show").stdout_bytes.decode().split("\n")
    assert shown == [*(f"{number}  {line}" for number, line in enumerate(LINES, start=1)), ""]
    assert piped("ask", "Fees?").stdout_bytes == f"{HOSTILE}\n".encode()
    for words, find in (
        (["ask", "--json", HOSTILE], lambda record: [record["answer"], record["question"]]),
        (["show", "--json"], lambda record: [record["lines"][0]["text"].removeprefix("1. ")[: len(HOSTILE)]]),
    ):
        done = piped(*words)
        assert done.stdout.isascii()
        assert not STEERS.search(done.stdout)
        assert set(find(json.loads(done.stdout))) == {HOSTILE}
    done = piped("load", NAME, "--json", code=2)
    assert json.loads(done.stdout)["error"]["fact"].startswith(f"{NAME} cannot be read")


def test_messages_for_people_are_escaped_in_a_pipe_too(hostile: Path) -> None:
    for words, code in ((["status"], 0), (["load", NAME], 2), (["sessions", "list"], 0)):
        done = piped(*words, code=code)
        assert not STEERS.search(done.stdout + done.stderr)


# --- what a terminal wants, and what a stream can hold ------------------------------------------

WORDS = (["status"], ["show"], ["log"], ["sessions", "list"], ["--help"], ["ask", "--help"], ["sessions"])


def test_colours_go_where_they_are_wanted(hostile: Path, terminal: Terminal) -> None:
    """https://github.com/Textualize/rich/issues/2924"""
    coloured = re.compile(r"\x1b\[[0-9;]*m")
    Path("new.txt").write_text("changed\n")
    for words in (*WORDS[:1], *WORDS[2:], ["diff"]):
        code = 2 if words == ["sessions"] else 0
        plain = terminal.run(*words, code=code, NO_COLOR="1")
        assert "\x1b" not in plain
        assert "\x1b" not in terminal.run(*words, code=code, TERM="dumb")
        assert coloured.search(terminal.run(*words, code=code, NO_COLOR="")) or words == ["diff"]
        check_tame(terminal.run(*words, code=code, COLUMNS="20"))


def test_a_dumb_terminal_sees_no_progress_but_the_result(
    hostile: Path, original: Path, terminal: Terminal
) -> None:
    terminal.run("delete", "-l", "2")
    for words in (["ask", "x", "--max-new-tokens", "2"], ["heal"], ["sessions", "check"], ["verify"]):
        shown = terminal.run(*words, TERM="dumb", COLUMNS="20")
        assert "\x1b" not in shown
        assert shown.count("\n") > 0


def test_a_pipe_gets_no_escapes_or_progress(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = re.compile(r"\x1b\[(?!\d*(?:;\d+)*m)|\r[^\n]")
    Path("plain.txt").write_text("The fees are due.\n")
    args = ("load", "plain.txt", "-m", json.loads(piped("status", "--json").stdout)["model"], "-s", "plain")
    for words in (
        ["status"],
        ["log"],
        ["sessions", "list"],
        [*args, "--force"],
        ["ask", "x", "--max-new-tokens", "2"],
    ):
        done = piped(*words)
        assert "\x1b" not in done.stdout + done.stderr
        monkeypatch.setenv("FORCE_COLOR", "1")
        forced = piped(*words)
        assert not steps.search(forced.stdout + forced.stderr), forced.stderr
        assert "Loading the model ..." not in forced.stderr
        if words[0] in ("status", "ask", "log"):
            assert "\x1b[1m" in forced.stdout + forced.stderr
        monkeypatch.delenv("FORCE_COLOR")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_a_stream_of_any_encoding_takes_all_output(hostile: Path, encoding: str) -> None:
    """https://github.com/vshulcz/deja-vu/issues/903"""
    Path("wide.txt").write_text("料金 🙂 dû\n", encoding="utf-8")
    lines = [
        "append --file wide.txt",
        *(
            "show",
            "show --json",
            "log",
            "status",
            "sessions list",
            "diff",
            "diff --json",
            "--help",
            "help ask",
        ),
        "export",
        "load 料金🙂.txt",
        "show --lines 料金",
    ]
    env = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "20", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "kvedit", "repl"]
    text = "\n".join(lines).encode(encoding, errors="replace")
    done = subprocess.run(command, input=text, capture_output=True, env=env, check=False)
    assert done.returncode == 2  # of the last two lines
    assert b"Traceback" not in done.stderr
    assert b"this is a bug in kvedit" not in done.stderr
    assert done.stderr.count(b"Error: ") == 2
    done.stdout.decode("latin-1" if encoding == "cp1252" else "utf-8")  # what `export` writes is UTF-8
    records = [json.loads(line) for line in done.stdout.split(b"\n") if line.startswith(b'{"schema_version"')]
    assert len(records) == 2
    assert records[0]["lines"][-1]["text"] == "料金 🙂 dû"
    shown = "料金 🙂 dû".encode(encoding, errors="replace")
    assert b"9  " + shown in done.stdout
    assert "料金 🙂 dû\n".encode() in done.stdout
