"""The script of a session, run line by line or replayed, builds the same session again."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.main import get_command

from kvedit.cache.rows import MISSING
from kvedit.cli.app import app
from kvedit.cli.repl.line import run_line
from kvedit.cli.replay import replay_script
from kvedit.cli.workspace import Settings, here
from kvedit.errors import UsageError
from kvedit.model.model import Model
from kvedit.repair.budget import Budget
from kvedit.session.script import spell
from kvedit.session.session import Session
from kvedit.text.document import Document, Edit
from kvedit.text.edits import difference

NAMES = "alpha beta gamma delta epsilon zeta".split()
TEXT = "".join(f"{number}. The {name} code is {number * 37}.\n" for number, name in enumerate(NAMES, 1))
ODD = [
    "a",
    "a",
    " b ",
    "\n",
    "\n",
    "\r\n",
    "\r",
    "\f",
    "\v",
    "\x85",
    "\u2028",
    "\ufeff",
    "é",
    "e\u0301",
    "日本",
    "שלום",
]
ODD += [
    "🙂",
    "👨\u200d👩\u200d👧",
    "'",
    '"',
    "\\",
    "\\n",
    "#",
    "-",
    "--exact",
    "?",
    "$HOME",
    "`ls`",
    "<|im_end|>",
]
TEXTS = st.lists(st.sampled_from(ODD), max_size=9).map("".join)
QUESTIONS = [
    "What is the delta code?",
    "it's 'quoted' \"twice\"",
    "-x",
    "--help",
    "two\nlines",
    "a\r\nb\u2028c\x0bd",
]
QUESTIONS += [" blanks around ", "?", "# no comment", "\\n", "日本 🙂", "-1\n'", "a\tb"]


class Seen(NamedTuple):
    text: str
    ids: list[int]
    missing: list[bool]
    stale: list[bool]
    frontier: int


def state(session: Session) -> Seen:
    rows = session.rows
    missing = (rows.segment == MISSING).tolist()
    return Seen(
        session.document.text, session._state.ids.tolist(), missing, rows.stale.tolist(), rows.frontier
    )


PARSER = get_command(app)


@contextmanager
def sessions_in(folder: Path, model: Model) -> Iterator[None]:
    """Commands find their sessions and files here, and the model is open already."""
    before = here.folder, here.warm, here.name, here.settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVEDIT_HOME", str(folder / "sessions"))
        patch.setenv("COLUMNS", "80")
        patch.setattr("kvedit.checkpoint.opening.open_model", lambda directory, **more: model)
        for module in ("typer.main", "kvedit.cli.repl.line"):  # which is slow, and done for each line anew
            patch.setattr(f"{module}.get_command", lambda _: PARSER)
        here.folder, here.warm, here.name, here.settings = folder, True, None, Settings()
        try:
            yield
        finally:
            here.drop()
            here.folder, here.warm, here.name, here.settings = before


def load(folder: Path, model: Model, text: str, **more: Any) -> Session:
    """A session of a file, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "doc.txt").write_bytes(text.encode())
    return Session.load(folder / "doc.txt", model=model, name="a", home=folder / "made", **more)


def rebuilt(folder: Path, session: Session, *, by_line: bool = True) -> Session:
    """Run the script of a session, and give what it builds."""
    script = session.script()
    with sessions_in(folder, session.model):
        shutil.rmtree(folder / "sessions", ignore_errors=True)
        if by_line and not any("\n" in entry.command for entry in session.log()):
            for line in script.split("\n"):
                assert run_line(line) == 0, line
        else:
            (folder / "script.kvedit").write_bytes(script.encode())
            assert replay_script("script.kvedit", keep_going=False, jsonl=None).exit_code == 0
        return Session.open()


# --- each command by itself -------------------------------------------------------------------

SERIES = {
    "nothing": [],
    "delete": [lambda s: s.delete("2", "4-5")],
    "delete all": [lambda s: s.delete("1-")],
    "insert": [lambda s: s.insert("New.\n\nLines.", after=3)],
    "insert at the top": [lambda s: s.insert("New.", after=0)],
    "insert into nothing": [lambda s: s.delete("1-"), lambda s: s.insert("New.", after=0)],
    "insert exactly": [lambda s: s.insert("New and ", after=2, exact=True)],
    "append": [lambda s: s.append("\tThe end.")],
    "append twice to an open end": [
        lambda s: s.replace("6", "open", exact=True),
        lambda s: s.append("x"),
        lambda s: s.append("y"),
    ],
    "replace": [lambda s: s.replace("2-3", "One line.")],
    "replace within a line": [lambda s: s.replace("2", "2. The beta code is 75.")],
    "move": [lambda s: s.move("5-6", after=1)],
    "move the open end": [lambda s: s.replace("6", "open", exact=True), lambda s: s.move("6", after=0)],
    "rewrite": [lambda s: s.rewrite(TEXT.replace("delta code", "delta number"))],
    "ask": [lambda s: s.delete("2"), lambda s: ask(s), lambda s: ask(s, budget=Budget.parse("9t"), seed=3)],
    "policies": [
        lambda s: s.delete("2"),
        lambda s: ask(s, policy="units-random", seed=5, budget=Budget.parse("20t"), executor="interval"),
        lambda s: ask(s, policy="units-bm25", budget=Budget.parse("10%")),
    ],
    "heal": [lambda s: s.delete("2"), lambda s: s.heal(budget=Budget.parse("16t")), lambda s: s.append("z")],
    "chat": [
        lambda s: ask(s, conversation=True),
        lambda s: ask(s, "And?", conversation=True),
        lambda s: s.delete("1"),
    ],
    "forget": [
        lambda s: ask(s, conversation=True),
        lambda s: s.forget(),
        lambda s: ask(s, "And?", conversation=True),
    ],
    "sampled": [lambda s: ask(s, conversation=True, temperature=1.5, seed=11, max_new_tokens=9)],
    "undo": [lambda s: s.delete("2"), lambda s: s.delete("2"), lambda s: s.undo(), lambda s: s.append("q")],
    "redo": [lambda s: s.delete("2"), lambda s: s.delete("2"), lambda s: s.undo(2), lambda s: s.redo()],
    "checkout": [lambda s: s.delete("2"), lambda s: s.append("q"), lambda s: s.checkout(1)],
}


def ask(session: Session, question: str = "What is the code?", **more: Any) -> None:
    session.ask(question, **{"max_new_tokens": 4, **more})


@pytest.mark.parametrize("name", SERIES)
def test_the_script_of_a_session_builds_it_again(llama, tmp_path, name):
    session = load(tmp_path, llama, TEXT)
    for act in SERIES[name]:
        act(session)
    again = rebuilt(tmp_path, session)
    assert state(again) == state(session)
    assert again.script() == session.script()


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_of_any_characters_is_asked_again(llama, tmp_path, question):
    session = load(tmp_path, llama, TEXT)
    ask(session, question, conversation=True)
    ask(session, question, conversation=True, budget=Budget.parse("3t"))
    session.append("After it.")
    again = rebuilt(tmp_path, session, by_line="\n" not in question)
    assert state(again) == state(session)
    replayed = rebuilt(tmp_path, session, by_line=False)
    assert state(replayed) == state(session)


@pytest.mark.parametrize("system", ["Be brief.", "it's\n'two lines'", "-x", "🙂\u2028"])
def test_the_system_text_is_part_of_the_script(llama, tmp_path, system):
    session = load(tmp_path, llama, TEXT, system=system)
    session.delete("1")
    again = rebuilt(tmp_path, session, by_line=False)
    assert state(again) == state(session)
    assert again._state.manifest.system == system


@pytest.mark.parametrize("text", ["\ufeffx\ny\n", "a\r\nb\r\nc", "\n\n\n", "x", "a\rb\u2028c\n", "🙂\n" * 3])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_of_any_encoding_is_loaded_again(llama, tmp_path, text, encoding):
    (tmp_path / "doc.txt").write_bytes(text.encode(encoding))
    session = Session.load(tmp_path / "doc.txt", model=llama, home=tmp_path / "made")
    session.insert("in\u2028serted", after=1)
    again = rebuilt(tmp_path, session)
    assert state(again) == state(session)
    assert again.export() == session.export()


def test_the_script_says_what_the_document_must_be(llama, tmp_path):
    session = load(tmp_path, llama, TEXT)
    session.delete("1")
    first, second, *_ = session.script().splitlines()
    assert first == f"# The text of the document had the SHA-256 {hashlib.sha256(TEXT.encode()).hexdigest()}."
    assert second.startswith(f"load {tmp_path / 'doc.txt'} --model {llama.directory}")
    session.purge()
    lines = session.script().splitlines()
    assert hashlib.sha256(session.document.text.encode()).hexdigest() in lines[0]
    assert "document.txt" in lines[1]
    (tmp_path / "document.txt").write_text(session.document.text)
    assert state(rebuilt(tmp_path, session)) == state(session)


def test_an_interrupted_answer_is_replayed_to_the_same_token(llama, tmp_path):
    session, heard = load(tmp_path, llama, TEXT), []

    def listen(text: str) -> None:
        heard.append(text)
        if len(heard) == 3:
            raise KeyboardInterrupt

    ask(session, conversation=True, max_new_tokens=50, on_text=listen)
    ask(session, "And?", conversation=True)
    assert state(rebuilt(tmp_path, session)) == state(session)


def test_a_script_with_an_unclosed_quotation_mark_runs_up_to_it(llama, tmp_path, capsys):
    load(tmp_path, llama, TEXT)
    lines = [f"load doc.txt -m {llama.directory}", "delete --lines 1", "ask 'who", "delete --lines 1"]
    (tmp_path / "bad.kvedit").write_text("\n".join(lines))
    with sessions_in(tmp_path, llama):
        assert replay_script("bad.kvedit", keep_going=False, jsonl=None).exit_code == 2
        assert Session.open().document.line_count == 5
    assert "quotation mark" in capsys.readouterr().err


# --- random series ----------------------------------------------------------------------------

PLACES = st.integers(0, 999)
ACTS = st.one_of(
    st.tuples(st.just("delete"), PLACES, PLACES),
    st.tuples(st.just("insert"), PLACES, TEXTS, st.booleans()),
    st.tuples(st.just("append"), TEXTS),
    st.tuples(st.just("replace"), PLACES, PLACES, TEXTS, st.booleans()),
    st.tuples(st.just("move"), PLACES, PLACES, PLACES),
    st.tuples(st.just("rewrite"), PLACES, TEXTS),
    st.tuples(st.just("many hunks"), TEXTS, TEXTS),
    st.tuples(st.just("undo")),
    st.tuples(st.just("redo")),
    st.tuples(st.just("checkout"), PLACES),
    st.tuples(st.just("ask"), st.sampled_from(QUESTIONS), st.sampled_from(["0", "7t", "30%"]), st.booleans()),
    st.tuples(st.just("heal"), st.sampled_from(["1t", "16t", "full"])),
    st.tuples(st.just("forget")),
)


def perform(session: Session, act: tuple[Any, ...]) -> bool:
    """Do one thing to a session; gives whether it was more than one change at once."""
    verb, *given = act
    document, count = session.document, session.document.line_count
    numbers = [value % count + 1 for value in given if count and type(value) is int]
    match verb:
        case "delete" if count:
            session.delete(f"{min(numbers)}-{max(numbers)}" if len(numbers) == 2 else str(numbers[0]))
        case "insert" if given[1] or not given[2]:
            session.insert(given[1], after=given[0] % (count + 1), exact=given[2])
        case "append":
            session.append(given[0])
        case "replace" if count:
            session.replace(f"{min(numbers)}-{max(numbers)}", given[2], exact=given[3])
        case "move" if count and not min(numbers[:2]) <= numbers[2] < max(numbers[:2]):
            session.move(f"{min(numbers[:2])}-{max(numbers[:2])}", after=numbers[2])
        case "rewrite":
            at = given[0] % (len(document.text) + 1)
            session.rewrite(document.text[:at] + given[1] + document.text[at + 3 :])
        case "many hunks":
            text = given[0] + document.text.replace("code", "CODE") + given[1]
            several = len(difference(document.text, text)) > 1
            session.rewrite(text)
            return several
        case "undo" | "redo":
            try:
                getattr(session, verb)()
            except UsageError:
                assert verb == "redo" or session._state.revision.entry.edits == 0
        case "checkout":
            session.checkout(given[0] % len(session._state.journal))
        case "ask":
            ask(session, given[0], budget=Budget.parse(given[1]), conversation=given[2], max_new_tokens=2)
        case "heal":
            session.heal(budget=Budget.parse(given[0]))
        case "forget":
            session.forget()
    return False


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    st.lists(ACTS, min_size=1, max_size=9),
    st.sampled_from([TEXT, TEXT.replace("\n", "\r\n"), TEXT[:-1], "a\na\n\n"]),
)
@example([("rewrite", 0, "2. The beta code is 74.\n"), ("many hunks", "x\n", "y")], TEXT)
@example([("insert", 3, "a", True), ("rewrite", 30, "aa"), ("insert", 1, "\r", True)], TEXT)
def test_a_script_rebuilds_any_series_of_changes(tiny_models, acts, text):
    with TemporaryDirectory() as name:
        session = load(Path(name), tiny_models["llama"], text)
        several = [perform(session, act) for act in acts]
        wanted, again = state(session), state(rebuilt(Path(name), session, by_line=len(acts) % 2 == 0))
        assert again.text == wanted.text
        assert again.ids == wanted.ids
        assert again.frontier <= wanted.frontier or not any(several)
        if not any(several):
            assert again == wanted


# --- spelling ---------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=300)
@given(TEXTS, st.data())
def test_any_change_becomes_commands_on_whole_lines(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    changes = [
        Edit(start, stop, data.draw(TEXTS)) for start, stop in zip(cuts[::2], cuts[1::2], strict=False)
    ]
    changes = [edit for edit in changes if edit.text != text[edit.start : edit.stop]]
    document = Document(text)
    commands = spell(document, changes)
    assert len(commands) == len(changes)
    assert all(len(command.split("\n")) == 1 and command.isprintable() for command in commands)
    assert applied(document, commands) == document.apply(changes).text


def applied(document: Document, commands: list[str]) -> str:
    """Apply spelled commands to a text with the planners that the commands use."""
    import shlex

    from kvedit.text.document import LineRange
    from kvedit.text.edits import insertion, replacement, unescape

    for command in commands:
        verb, option, value, *rest = shlex.split(command)
        if verb == "delete":
            assert (option, rest) == ("--lines", [])
            edits = document.deletions([LineRange.parse(value)])
        else:
            exact, dashes, written = rest
            assert (exact, dashes) == ("--exact", "--")
            if verb == "insert":
                edits = insertion(document, int(value), unescape(written), exact=True)
            else:
                edits = replacement(document, LineRange.parse(value), unescape(written), exact=True)
        document = document.apply(edits)
    return document.text
