"""The REPL without a terminal: its lines, its settings, its warm session, and healing in the background."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.sessions import FEE_LINES, reset_workspace
from typer.testing import CliRunner

from kvedit.checkpoint import opening
from kvedit.cli import progress
from kvedit.cli.app import app
from kvedit.cli.repl import background
from kvedit.cli.repl.background import Healer
from kvedit.cli.repl.line import is_open, lines_of, run_line, words_of
from kvedit.cli.workspace import here
from kvedit.errors import UsageError
from kvedit.model.model import Model
from kvedit.session.heal import Healing
from kvedit.session.session import Session
from kvedit.store.home import Home

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset_workspace()
    yield
    reset_workspace()


@pytest.fixture
def contract(home: Path, fee_sessions: Path) -> Path:
    return shutil.copytree(fee_sessions, home)


@pytest.fixture
def warm(contract: Path) -> Session:
    """A warm session with its model and stale rows, as the REPL has it."""
    here.warm = True
    assert run_line("delete --lines 3-4") == 0
    here.ready(here.session())
    assert here.held is not None
    return here.held


def repl(*lines: str, code: int = 0, options: tuple[str, ...] = ()) -> Any:
    """Pipe lines into the REPL."""
    result = CliRunner().invoke(app, ["repl", *options], input="".join(f"{line}\n" for line in lines))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert "this is a bug in kvedit" not in result.output
    return result


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def exact(session: Session) -> bool:
    return session.rows.frontier == len(session.rows)


# Lines.


def test_lines_run_in_order_and_the_first_failure_sets_the_code(contract: Path) -> None:
    done = repl("delete --lines 99", "# a comment", "", "delete --lines 1", "nosuch", "show -l 1", code=2)
    assert done.stdout == f" 1  {FEE_LINES[1]}\n"
    assert done.stderr.count("Error: ") == 2
    assert "lines 1 to 30" in done.stderr


def test_a_line_runs_before_the_next_one_arrives(home: Path) -> None:
    command = [sys.executable, "-m", "kvedit", "repl", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        assert process.stdin
        assert process.stdout
        for budget in ("7%", "9t"):
            process.stdin.write(f"set budget {budget}\n")
            assert json.loads(process.stdout.readline())["budget"] == budget
        process.stdin.close()
    assert process.returncode == 0


def test_exit_ends_the_input_and_quoted_text_spans_lines(contract: Path) -> None:
    done = repl("insert --after 0 'two", "lines'", "show -l 1-2", "exit", "show -l 3")
    assert done.stdout == " 1  two\n 2  lines\n"
    assert "not closed" in repl("append 'never", "closed", code=2).stderr


def test_a_question_mark_asks_whatever_follows_it(contract: Path) -> None:
    done = repl('?What\'s "due" --json?', options=("--json",))
    assert json.loads(done.stdout)["question"] == 'What\'s "due" --json?'
    assert "question is empty" in repl("?", code=2).stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("  delete -l '1 2' ", ["delete", "-l", "1 2"]),
        ("kvedit status", ["status"]),
        ("# ask", []),
        ("", []),
        (" ?Is it's? ", ["ask", "--", "Is it's?"]),
    ],
)
def test_a_line_is_split_into_words_as_in_a_shell(line: str, words: list[str]) -> None:
    assert words_of(line) == words


def test_an_unclosed_quotation_mark_is_reported(home: Path) -> None:
    with pytest.raises(UsageError, match="not closed"):
        words_of("ask 'a")
    assert is_open("ask 'a")
    assert not is_open("?What's it")
    assert run_line("ask 'a") == 2


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\nb", ["a", "b"]),
        ("append 'x\ny'\nb", ["append 'x\ny'", "b"]),
        ("?one\ntwo", ["?one two"]),
        ("?one\n?two\nstatus\n?three\nfour", ["?one", "?two", "status", "?three four"]),
        ("?don't\nstatus", ["?don't", "status"]),
        ("append 'x", ["append 'x"]),
    ],
)
def test_pasted_text_is_split_into_lines(text: str, lines: list[str]) -> None:
    assert lines_of(text) == lines


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("dlete --lines 3", "Did you mean 'delete'?"),
        ("stauts", "Did you mean 'status'?"),
        ("What is due?", "Begin a question with '?'"),
        ("kvedit", "Begin a question with '?'"),
    ],
)
def test_an_unknown_command_gets_a_suggestion_not_an_answer(
    home: Path, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    assert run_line(line) == 2
    fact, remedy = capsys.readouterr().err.splitlines()
    assert (fact, told in remedy) == (f"Error: Unknown command '{line.split()[0]}'.", True)


def test_help_names_the_commands_and_explains_one(home: Path) -> None:
    assert "checkout" in repl("help").stdout
    assert "--max-new-tokens" in repl("help ask").stdout
    assert "set budget VALUE" in repl("help set").stderr


def test_a_parser_error_is_reported_as_fact_and_remedy(home: Path) -> None:
    done = repl("ask Who --nosuch", code=2)
    assert done.stderr.splitlines() == [
        "Error: No such option: --nosuch.",
        "Run `kvedit ask --help` for usage.",
    ]
    told = json.loads(repl("undo x", options=("--json",), code=2).stdout)["error"]
    assert (told["exit_code"], told["remedy"]) == (2, "Run `kvedit undo --help` for usage.")


def test_the_repl_cannot_start_another_repl(home: Path) -> None:
    assert "REPL is already open" in repl("repl", code=2).stderr


# Settings.


def test_settings_are_the_defaults_of_later_questions(contract: Path) -> None:
    lines = (
        "set budget 7t",
        "set policy units-bm25",
        "delete -l 2",
        "?fees of item 9",
        "set budget default",
        "set",
    )
    done = repl(*lines, options=("--json",))
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert records[0] == {
        "schema_version": 2,
        "budget": "7t",
        "policy": "sur-seam",
        "decode_weights": "default",
        "conversation": "off",
        "heal": "on",
    }
    assert (records[3]["policy"], records[3]["rows"]["refreshed"]) == ("units-bm25", 7)
    assert records[5]["budget"] == "default"


@pytest.mark.parametrize(
    "line",
    [
        *("set budget lots", "set policy best", "set decode-weights int2"),
        *("set conversation maybe", "set tempo 3", "set x"),
    ],
)
def test_an_invalid_setting_is_refused(home: Path, line: str) -> None:
    usual = "budget default\npolicy sur-seam\ndecode-weights default\nconversation off\nheal on\n"
    assert repl(line, "set", code=2).stderr.endswith(usual)


def test_decode_weights_that_are_set_serve_later_questions(contract: Path) -> None:
    ask = "ask --max-new-tokens 1 --no-keep Who?"
    asked: list[str | None] = []
    with pytest.MonkeyPatch.context() as patch:
        plain = Model.reduced
        patch.setattr(Model, "reduced", lambda model, kind: asked.append(kind) or plain(model, kind))
        repl("set decode-weights bf16", ask, "set decode-weights default", ask)
    assert asked == ["bf16", "bf16", None]


def test_chat_keeps_the_conversation(contract: Path) -> None:
    assert run_line("ask --max-new-tokens 2 Who?") == 0
    assert Session.open()._state.revision.turns == ()
    repl("set conversation on", "ask --max-new-tokens 2 Who?")
    first = len(Session.open()._state.revision.turns)
    assert first
    repl("ask --continue --max-new-tokens 2 Why?")
    assert len(Session.open()._state.revision.turns) > first


# The warm session.


def test_the_model_is_opened_once(contract: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, plain = [], opening.open_model
    monkeypatch.setattr(
        opening, "open_model", lambda folder, **more: opened.append(folder) or plain(folder, **more)
    )
    ask = "ask --max-new-tokens 1 Who?"
    repl(ask, "delete -l 1", ask, "sessions copy contract twin", "sessions use twin", ask, "undo", ask)
    assert len(opened) == 1


def test_changes_by_another_process_are_seen(warm: Session) -> None:
    Session.open().delete("1-5")
    assert run_line("status") == 0
    assert here.record is not None
    assert (here.record["lines"], here.held) == (23, warm)
    Session.open().undo(2)
    assert run_line("ask --max-new-tokens 1 Who?") == 0
    assert (here.record["rows"]["total"], here.record["budget"]["rows"]) == (len(warm.rows), 0)


def test_a_locked_session_fails_a_command_but_not_the_repl(contract: Path) -> None:
    hold = (
        "import sys; from pathlib import Path; from kvedit.store.home import Home\n"
        "with Home(Path(sys.argv[1])).store('contract').lock('ask', 'noon'):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(contract)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        done = repl("delete -l 1", "show -l 1", code=3)
        process.stdin.close()
    assert f"process {process.pid}" in done.stderr
    assert done.stdout == f" 1  {FEE_LINES[0]}\n"


def test_after_a_removed_session_another_can_be_loaded(warm: Session, checkpoints: dict[str, Path]) -> None:
    shutil.rmtree(warm._state.store.folder)
    healer = Healer()
    with healer.paused():
        assert run_line("status") == 3
    Path("new.txt").write_text("\n".join(FEE_LINES))
    with healer.paused():
        assert run_line(f"load new.txt -m {checkpoints['llama']}") == 0
    healer.end()
    assert run_line("show -l 1") == 0
    assert here.held is not None
    assert here.held.name == "new"


# Healing in the background.


@pytest.fixture
def healer(warm: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Healer]:
    monkeypatch.setattr(background, "_QUIET_S", 0.01)
    monkeypatch.setattr(background, "_LOCKED_S", 0.05)
    here.settings.heal = False  # until the test lets it go
    found = Healer()
    yield found
    found.end()


def test_a_question_does_not_pay_for_rows_healed_while_idle(warm: Session, healer: Healer) -> None:
    assert healer.stale_share() > 0.5
    here.settings.heal = True
    until(lambda: exact(warm))
    assert (healer.stale_share(), healer.problem) == (0.0, None)
    with healer.paused():
        assert run_line("ask --budget full --max-new-tokens 4 Fees?") == 0
    assert here.record is not None
    assert here.record["rows"]["refreshed"] == here.record["rows"]["missing"] == 0
    healed = here.record["answer_ids"]
    with healer.paused():
        assert run_line("checkout 1") == 0
        assert run_line("ask --budget full --max-new-tokens 4 Fees?") == 0
    assert here.record["rows"]["refreshed"] > 0
    assert here.record["answer_ids"] == healed


def test_healing_can_be_turned_off(warm: Session, healer: Healer) -> None:
    before = warm.rows.frontier
    time.sleep(0.3)
    assert (warm.rows.frontier, healer.longest_s) == (before, 0.0)


def test_a_key_stops_healing_and_discards_the_piece(
    warm: Session, healer: Healer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressed, plain = [], Healing.step

    def step(healing: Healing, *args: Any) -> int:
        pressed.append(healing.frontier)
        healer.touched()  # as the piece begins
        return plain(healing, *args)

    before = warm.rows.frontier
    monkeypatch.setattr(background, "_QUIET_S", 0.3)  # longer than a piece
    monkeypatch.setattr(Healing, "step", step)
    here.settings.heal = True
    until(lambda: len(pressed) > 4)
    monkeypatch.setattr(Healing, "step", plain)
    assert (set(pressed), healer.problem) == ({before}, None)
    until(lambda: exact(warm))  # and it goes on where it was


def test_healing_never_overwrites_changes_by_another_process(
    warm: Session, healer: Healer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_KEEP_ROWS", 64)
    plain = Healing.step

    def step(healing: Healing, *args: Any) -> int:
        rows = plain(healing, *args)
        if healing.unkept:
            here.settings.heal = False  # stop with something in hand
        return rows

    monkeypatch.setattr(Healing, "step", step)
    share = healer.stale_share()
    here.settings.heal = True
    until(lambda: not here.settings.heal)
    until(lambda: healer.stale_share() < share)
    Session.open().delete("1")
    with healer.paused():
        assert run_line("show -l 1") == 0
    entries = Session.open().log()
    assert [entry.command.split()[0] for entry in entries] == ["delete", "delete", "load"]
    assert warm.document.text.startswith(FEE_LINES[1])


def test_idle_healing_follows_changes_by_another_process(
    warm: Session, healer: Healer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_LOOK_S", 0.01)
    here.settings.heal = True
    until(lambda: exact(warm))
    Session.open().delete("1-5")
    until(lambda: warm.document.line_count == 23 and exact(warm))
    assert Session.open().rows.frontier == len(warm.rows)
    shutil.rmtree(warm._state.store.folder)
    until(lambda: healer.problem is not None)
    assert "There is no session 'contract'" in str(healer.problem)


def test_a_lock_of_another_process_delays_saving_healed_rows(
    warm: Session, healer: Healer, contract: Path
) -> None:
    before = warm.rows.frontier
    with Home(contract).store("contract").lock("ask", "noon"):
        here.settings.heal = True
        until(lambda: healer.longest_s > 0)
        time.sleep(0.3)
        assert (warm.rows.frontier, healer.problem) == (before, None)
    until(lambda: exact(warm))
    assert exact(Session.open())


def test_an_error_stops_healing_until_the_next_command(
    warm: Session, healer: Healer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> int:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Healing, "step", fail)
        here.settings.heal = True
        until(lambda: healer.problem is not None)
    assert healer.problem == "RuntimeError: out of memory"
    assert not exact(warm)
    with healer.paused():
        pass
    until(lambda: exact(warm))


def test_a_piece_takes_less_than_a_fifth_of_a_second(warm: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where a row costs what the default model's do on two cores, however that changes."""
    now, pieces = [0.0], list[float]()

    def refresh(model: Any, cache: Any, ids: Any, rows: Any, *more: Any) -> Iterator[Any]:
        pieces.append(0.06 + len(rows) * 0.002)
        now[0] += pieces[-1]
        yield from ()

    monkeypatch.setattr("kvedit.session.heal.clock", lambda: now[0])
    monkeypatch.setattr("kvedit.session.heal.refresh_", refresh)
    healing = Healing(warm._state)
    while healing.left:
        healing.step(256, background._PIECE_S)
    assert max(pieces) < 0.2
    assert len(pieces) < len(warm.rows) / 10  # it is not a row at a time, either


@pytest.mark.parametrize("step", ["set_live", "show_cursor", "push_render_hook"])
@pytest.mark.parametrize("shown", [progress.working, progress.progressing, lambda text: progress.repairing()])
def test_an_interrupt_while_a_spinner_starts_is_raised(
    monkeypatch: pytest.MonkeyPatch, shown: Any, step: str
) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(progress, "console", lambda: screen)
    monkeypatch.setattr(progress, "is_watched", lambda stream: True)
    real = getattr(screen, step)

    def interrupt(*args: Any) -> Any:
        monkeypatch.setattr(screen, step, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(screen, step, interrupt)
    with pytest.raises(KeyboardInterrupt), shown("prefill"):
        pass
    with shown("prefill"):  # and the next one works
        pass
