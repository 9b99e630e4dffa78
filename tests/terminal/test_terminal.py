"""The REPL at a real terminal: a person's keys go into tmux, and the screen is read back."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvedit.cli.app import app
from kvedit.session.session import Session

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
PATIENCE_S = 30
TEXT = "".join(f"Line {number}: the fees of item {number} are {number * 37}.\n" for number in range(1, 31))
# Holds a phase while the file `hold` names it, and says so in the file `held`.
SLOW = """
import time
from pathlib import Path
import kvedit.session.asking, kvedit.session.state, kvedit.repair.pipeline, kvedit.repair.working

def hold(phase):
    while Path("hold").exists() and Path("hold").read_text() == phase:
        Path("held").write_text(phase)
        time.sleep(0.01)

def slowed(place, name, phase):
    plain = getattr(place, name)
    def slow(*args, **more):
        hold(phase)
        return plain(*args, **more)
    setattr(place, name, slow)

slowed(kvedit.session.state.State, "find_model", "load")
slowed(kvedit.repair.working.WorkingCache, "gather_", "shift")
slowed(kvedit.repair.pipeline, "refresh_", "refresh")
slowed(kvedit.repair.pipeline, "prefill_question_", "question")
decode = kvedit.session.asking.decode_
def slow_decode(*args):
    for number, token in enumerate(decode(*args)):
        yield token
        if number == 2:
            hold("decode")
kvedit.session.asking.decode_ = slow_decode
from kvedit.__main__ import main
main()
"""


def until(holds: Callable[[], bool], what: Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, what()
        time.sleep(0.02)


class Pane:
    """A terminal of its own, with a shell in it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._socket = folder, "none"

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self._socket, "-f", "/dev/null", *words]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    def start(self, *words: str, columns: int = 80, **env: str) -> None:
        """Run kvedit, and print its exit code when it has ended."""
        self.end()
        self._socket = f"kvedit-{secrets.token_hex(4)}"
        given = {
            "TERM": "xterm-256color",
            "KVEDIT_HOME": str(self._folder / "sessions"),
            "XDG_STATE_HOME": str(self._folder / "state"),
            "OMP_NUM_THREADS": "1",
            **env,
        }
        command = ["env", "-u", "NO_COLOR", *(f"{name}={value}" for name, value in given.items())]
        command += [sys.executable, *(words or ("-m", "kvedit"))]
        quoted = " ".join(f"'{word}'" for word in command)
        size = ("-x", str(columns), "-y", "30")
        script = f"{quoted}; echo code $?; exec cat"
        self.tmux("new-session", "-d", *size, "-c", str(self._folder), script)

    def end(self) -> None:
        subprocess.run(["tmux", "-L", self._socket, "kill-server"], capture_output=True, check=False)

    def screen(self, *options: str) -> str:
        text = self.tmux("capture-pane", "-p", *options)
        return "\n".join(line.rstrip() for line in text.splitlines())

    def toolbar(self) -> str:
        return (self.screen().rstrip().splitlines() or [""])[-1]

    def sees(self, pattern: str) -> str:
        """Wait for a pattern on the screen; give the screen."""
        until(
            lambda: re.search(pattern, self.screen(), re.MULTILINE) is not None,
            lambda: f"no {pattern!r} in:\n{self.screen()}",
        )
        return self.screen()

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def line(self, text: str) -> None:
        """Type a line, once the REPL waits for one."""
        waits = re.compile(r"^kvedit>|^   \.\.\.>|^no session|tokens", re.MULTILINE)
        until(lambda: waits.search(self.toolbar()) is not None, self.screen)
        self.tmux("send-keys", "-l", text)
        self.keys("Enter")

    def clear(self) -> None:
        self.keys("C-l")
        until(lambda: self.screen().lstrip().startswith("kvedit>"), self.screen)

    def holds(self, phase: str) -> None:
        """Wait until a slowed phase goes on."""
        held = self._folder / "held"
        until(lambda: held.exists() and held.read_text() == phase, lambda: f"{phase}:\n{self.screen()}")


@pytest.fixture
def pane(tmp_path: Path) -> Iterator[Pane]:
    found = Pane(tmp_path)
    yield found
    found.end()


@pytest.fixture(scope="module")
def original(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("terminal")
    (root / "contract.txt").write_text(TEXT)
    args = ["load", str(root / "contract.txt"), "--model", str(checkpoints["llama"])]
    assert CliRunner().invoke(app, args, env={"KVEDIT_HOME": str(root / "sessions")}).exit_code == 0
    return root / "sessions"


@pytest.fixture
def sessions(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "sessions")


def pause() -> None:
    """Wait for longer than the second within which Ctrl-C twice means to leave."""
    time.sleep(1.05)


def stale(pane: Pane) -> float:
    """The share in the toolbar; all of it while there is none."""
    return float((re.findall(r"stale (\S+)%", pane.toolbar()) or [100])[0])


def test_a_person_edits_asks_resizes_and_leaves(pane: Pane, sessions: Path) -> None:
    pane.start()
    pane.sees(r"^kvedit: 'help' lists the commands")
    pane.keys("C-c")  # most likely torch is being imported; half of it could not be imported again
    pane.sees(r"^contract \| \S+ tokens \| stale 0.0% \| budget 5% \| sur-seam$")
    pane.keys("s", "t", "a", "t", "Tab")
    pane.sees(r"^kvedit> status$")
    pane.keys("Enter")
    pane.sees(r"^document +30 lines$")
    pane.line("set heal off")
    pane.sees(r"sur-seam \| heal off$")
    pane.line("delete --lines 2-3")
    pane.sees(r"Deleted 2 lines")
    pane.sees(r"\| stale 9\d\.\d%")
    before = stale(pane)
    pane.line("dlete --lines 3")
    pane.sees(r"^Error: Unknown command 'dlete'.\nDid you mean 'delete'\?")
    pane.line("set budget 10%")
    pane.sees(r"budget 10% \| sur-seam \| heal off$")
    assert stale(pane) == before  # nothing was healed since
    pane.clear()
    pane.keys("a", "s", "k", " ", "-", "-", "Tab")
    assert "--max-new-tokens" in pane.sees(r"^ +--budget")
    pause()
    pane.keys("C-c")
    pane.sees(r"^kvedit> ask --\n(.*\n)*kvedit>$")  # a line that was given up, and a new one
    assert "Press Ctrl-D to leave" not in pane.screen()
    pane.tmux("resize-window", "-x", "40")
    pane.clear()
    until(lambda: len(pane.toolbar()) < 40 and "stale" in pane.toolbar(), pane.screen)
    assert "contract |" in pane.toolbar()  # it is one line still, with the most important first
    pane.line("?What's due --soon?")
    screen = pane.sees(r"^first token ")
    table = screen[screen.index("phase") : screen.index("rows  ")].splitlines()
    assert all(len(line) <= 40 for line in table)
    assert [len(line) for line in table if line.startswith("total")]
    pane.line("set heal on")
    until(lambda: stale(pane) == 0, pane.screen)
    pane.keys("C-d")
    pane.sees(r"^code 0$")
    held = Session.open(home=sessions)
    assert held.rows.frontier == len(held.rows)  # what the toolbar showed is what was kept


def test_history_survives_a_restart_and_ctrl_c_twice_leaves(pane: Pane) -> None:
    pane.start()
    assert "Load a document first" in pane.sees(r"^no session: load FILE$")
    pane.line("set conversation on")
    pane.sees(r"^conversation on$")
    pane.line("insert --after 1 'two")
    pane.sees(r"^   \.\.\.>")
    pane.line("lines'")
    assert "Load a document first" in pane.sees(r"^Error: There is no session")
    pane.keys("C-d")
    pane.sees(r"^code 0$")
    pane.start("-m", "kvedit", "repl", NO_COLOR="1")
    pane.sees(r"^no session: load FILE$")
    pane.keys("Up")
    pane.sees(r"^kvedit> insert --after 1 'two\n   \.\.\.> lines'$")
    pane.keys("Up", "Up")
    pane.sees(r"^kvedit> set conversation on$")
    pane.line("")
    pane.sees(r"^conversation on$")
    pane.line("nosuch --lines")
    pane.sees(r"^Error: Unknown command 'nosuch'.$")
    assert re.findall(r"\x1b\[[0-9;]*m", pane.screen("-e")) == []
    pane.keys("C-c")
    pane.sees(r"^Press Ctrl-D to leave, or Ctrl-C twice.$")
    pause()
    pane.keys("C-c")
    pane.sees(r"(^Press Ctrl-D to leave, or Ctrl-C twice.\n(.*\n)*){2}")
    pane.keys("C-c")
    pane.sees(r"^code 130$")


@pytest.mark.parametrize("damage", ["zero byte", "no text", "folder"])
def test_a_damaged_history_is_a_warning(pane: Pane, tmp_path: Path, damage: str) -> None:
    place = tmp_path / "state" / "kvedit" / "history"
    place.parent.mkdir(parents=True)
    if damage == "folder":
        place.mkdir()
    else:
        place.write_bytes(b"+ask\0\n" if damage == "zero byte" else b"\xff\xfe\n")
    pane.start()
    pane.sees(r"^Warning: cannot use the history in")
    pane.line("set")
    pane.sees(r"^policy sur-seam$")
    pane.keys("C-d")
    pane.sees(r"^code 0$")
    assert place.is_dir() or len(place.read_bytes()) < 8  # left as it was found


def test_ctrl_c_stops_each_phase_and_keeps_what_is_whole(pane: Pane, sessions: Path, tmp_path: Path) -> None:
    def hold(phase: str) -> None:
        (tmp_path / "held").unlink(missing_ok=True)
        (tmp_path / "hold").write_text(phase)

    (tmp_path / "slow.py").write_text(SLOW)
    hold("load")
    pane.start("slow.py")
    pane.holds("load")
    pane.keys("C-c")
    pane.sees(r"^Interrupted; the session is intact.$")
    pane.line("set heal off")
    pane.sees(r"heal off$")
    pane.line("delete --lines 2-3")
    pane.sees(r"^Deleted 2 lines")
    was = Session.open(home=sessions)
    before = was._state.revision
    for phase in ("shift", "refresh", "question"):
        pause()
        hold(phase)
        pane.clear()
        pane.line("?What are the fees?")
        pane.holds(phase)
        pane.keys("C-c")
        pane.sees(r"^Interrupted; the session is intact.$")
        assert Session.open(home=sessions)._state.revision == before
    pause()
    hold("decode")
    pane.clear()
    pane.line("ask --max-new-tokens 50 --budget 20t Fees?")
    pane.holds("decode")
    pane.keys("C-c")
    assert "20 refreshed" in pane.sees(r"^The answer was interrupted.$")
    after = Session.open(home=sessions)
    # The refresh was whole, and is kept; of its rows those at the frontier are exact now.
    assert int(after.rows.refreshed.sum()) + after.rows.frontier - was.rows.frontier >= 20
    pause()
    hold("refresh")
    pane.clear()
    pane.line("?What are the fees?")
    pane.holds("refresh")
    pane.keys("C-c")
    time.sleep(0.1)  # two at once would be one signal
    pane.keys("C-c")
    pane.sees(r"^code 130$")
    assert Session.open(home=sessions)._state.revision == after._state.revision


def test_a_dumb_terminal_gets_plain_lines(pane: Pane) -> None:
    pane.start(TERM="dumb", columns=40)
    pane.sees(r"^kvedit>")
    pane.line("set conversation on")
    pane.sees(r"^conversation on$")
    pane.line("append 'one")
    pane.sees(r"^   \.\.\.>")
    pane.line("more'")
    pane.sees(r"^Error: There is no session")
    pane.keys("C-c")
    pane.sees(r"^Press Ctrl-D to leave, or Ctrl-C twice.$")
    assert re.findall(r"\x1b\[", pane.screen("-e")) == []
    pane.keys("C-d")
    pane.sees(r"^code 0$")


def test_answers_go_into_a_file_and_the_prompt_to_the_terminal(pane: Pane, tmp_path: Path) -> None:
    redirect = 'import os; os.dup2(os.open("out.txt", os.O_WRONLY | os.O_CREAT), 1)'
    pane.start("-c", f"{redirect}; from kvedit.__main__ import main; main()")
    pane.sees(r"^no session: load FILE$")
    pane.line("sessions list --json")
    pane.line("exit")
    pane.sees(r"^code 0$")
    assert (tmp_path / "out.txt").read_text() == '{"schema_version": 1, "sessions": []}\n'
