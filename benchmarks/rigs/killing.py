"""Kill commands at chosen or random moments, and check the session that they leave.

Each command runs in its own process. A small server that has loaded torch forks it, so that it is killed
while it works and not while it imports libraries.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rigs.tiny import save_tiny

from kvedit.session.session import Session
from kvedit.session.state import State
from kvedit.store.store import Store

SERVER = """
import json, os, pathlib, signal, sys, traceback
import kvedit.session.asking, kvedit.cli.app
import kvedit.session.session, kvedit.checkpoint.resolve, kvedit.store.segments
from kvedit.__main__ import main
from kvedit.checkpoint.opening import open_stock

stock = open_stock(pathlib.Path(sys.argv[1]))
stock.compare().check(), stock.model.layout(None)  # imports what is imported on first use

def arm(home, step, number):
    # Send a signal to this process before its step-th change of a file below `home`.
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event == "open":
            changes = set(args[1] or "") & set("wax+") or args[2] & (os.O_WRONLY | os.O_RDWR)
        else:
            changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
        if changes and str(args[0]).startswith(home):
            seen += 1
            if seen == step:
                os.kill(os.getpid(), number)
    sys.addaudithook(hook)

while line := sys.stdin.readline():
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for target, name in enumerate((os.devnull, job["out"], job["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_TRUNC), target)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests
        os.environ["KVEDIT_HOME"] = job["home"]
        sys.argv = ["kvedit", *job["args"]]
        try:
            arm(job["home"], job["step"], job["signal"])
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 99
        sys.stdout.flush(), sys.stderr.flush(), os._exit(code)
    print("process", pid, flush=True)
    sys.stdin.readline()  # until then its number is not given to another process
    print("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


SCRIPT = [
    r"insert --after 5 --exact 'A new line.\nAnd another of them.\n'",
    "ask 'What are the fees of item 9?' --budget 30% --max-new-tokens 3",
    "move --lines 10-12 --after 20",
    "heal --budget 40%",
    "undo",
    "redo",
    "ask 'And of item 11?' --continue --max-new-tokens 4",
    "delete --lines 30-34",
    "undo 2",
    "replace --lines 3 'Line 3 is another one now.'",
    "purge",
    "append 'The last line.'",
    "heal",
]


class Done(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float


class Server:
    def __init__(self, folder: Path, model: Path) -> None:
        self.model, self.out, self.err = model, folder / "out", folder / "err"
        command, env = [sys.executable, "-c", SERVER, str(model)], {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=env, **pipes)

    def start(self, home: Path, *args: Any, step: int = 0, number: int = signal.SIGKILL) -> int:
        job = {"home": str(home), "args": [str(arg) for arg in args], "step": step, "signal": int(number)}
        for name, path in (("out", self.out), ("err", self.err)):
            path.write_bytes(b"")
            job[name] = str(path)
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        self.began = time.perf_counter()
        return self.told("process")

    def told(self, what: str) -> int:
        word, _, number = self.process.stdout.readline().partition(" ")
        assert word == what, "the server is not where the tests think it is"
        return int(number)

    def end(self) -> Done:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        code = self.told("code")
        texts = (path.read_text(errors="replace") for path in (self.out, self.err))
        return Done(code, *texts, time.perf_counter() - self.began)

    def run(self, home: Path, *args: Any, **how: Any) -> Done:
        self.start(home, *args, **how)
        done = self.end()
        assert "Traceback" not in done.err, done.err
        return done

    def runs(self, home: Path, lines: list[str]) -> None:
        for line in lines:
            done = self.run(home, *shlex.split(line))
            assert done.code == 0, (line, done.err)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run a server with a tiny model until the block ends."""
    served = Server(folder, save_tiny(folder / "llama", "llama", max_position_embeddings=4096))
    try:
        yield served
    finally:
        served.process.stdin.close()
        served.process.wait(timeout=30)
        served.process.stdout.close()


class Stage(NamedTuple):
    """A session to disturb, and the commands that change it."""

    home: Path
    commands: dict[str, tuple[Any, ...]]

    def copy(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        return shutil.copytree(self.home, folder)


def stage(root: Path, server: Server, lines: int) -> Stage:
    for name, first in (("old", 1), ("new", 1000)):
        numbers = range(first, first + lines)
        text = "".join(f"Line {number}: the fees of item {number} are {number * 37}.\n" for number in numbers)
        (root / f"{name}.txt").write_text(text)
    load = ("load", root / "old.txt", "-m", server.model, "-s", "contract")
    commands = {
        "load": ("load", root / "new.txt", "-m", server.model, "-s", "contract", "--force"),
        "delete": ("delete", "--lines", "5-6"),
        "ask": ("ask", "What are the fees of item 9?", "--budget", "60%", "--max-new-tokens", "3"),
    }
    assert server.run(root / "home", *load).code == 0
    assert server.run(root / "home", "delete", "--lines", "2").code == 0
    return Stage(root / "home", commands)


def held(home: Path) -> tuple[Any, ...] | None:
    """Return the state of a session, after reading and checking all of its files."""
    store = Store(home / "contract")
    if not store.exists():
        return None
    session = Session(State(store))
    session._state.read_segments()
    entry, revision = session._state.revision.entry, session._state.revision
    told = (entry.edits, entry.frontier, revision.turns, session._state.manifest.undone)
    return session.document.text, revision.rows, *told


def check_next(server: Server, home: Path, states: tuple[Any, Any]) -> None:
    """Check that the session is as before the command or as after it, and that the next command works."""
    found = held(home)
    assert found in states
    done = server.run(home, "delete", "--lines", "1", "--json")
    assert (done.code, json.loads(done.out)["removed_lines"]) == (0, 1), done.err
    assert held(home)[0] == found[0].partition("\n")[2]
    assert not list(home.rglob("*.tmp")), "what was left behind is still there"


class Killed(NamedTuple):
    """Results of killing a script repeatedly.

    Attributes:
        turns, killed: How often it was started, and how often it was killed before its end.
        steps: Number of states between its commands that occurred.
        wrong: Turns that left a different state, or a session that cannot continue.
    """

    turns: int
    killed: int
    steps: int
    wrong: list[str]


def kill_scripts(server: Server, start: Stage, folder: Path, turns: int, seed: int) -> Killed:
    """Kill a script at random moments spread over its duration, and check the session each time."""
    home, chance, script = folder / "home", random.Random(seed), folder / "script.kvedit"
    script.write_text("\n".join(SCRIPT))
    states = [held(start.copy(home))]
    for line in SCRIPT:
        server.runs(home, [line])
        states.append(held(home))
    duration = float("inf")
    for _ in range(3):  # the shortest: after a slow one, kills would come when the script has ended
        whole = server.run(start.copy(home), "replay", script)
        assert (whole.code, held(home)) == (0, states[-1]), whole.err
        duration = min(duration, whole.seconds)
    found, wrong, killed = set[int](), list[str](), 0
    for turn in range(turns):
        pid = server.start(start.copy(home), "replay", script)
        time.sleep(duration * (turn + chance.random()) / turns)
        os.kill(pid, signal.SIGKILL)
        killed += server.end().code == -signal.SIGKILL
        try:
            found.add(states.index(held(home)))
            if turn % 10 == 0:
                assert server.run(home, "sessions", "check").code == 0
                check_next(server, home, tuple(states))
        except Exception as error:  # an unreadable session is a failure too
            wrong.append(f"turn {turn} of seed {seed}: {error!r}"[:300])
    return Killed(turns, killed, len(found), wrong)
