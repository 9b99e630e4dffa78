"""Law 9: killed at any instant, interrupted or out of room, a session is as before the command or as after.

Commands run as processes of their own. A small server that has loaded torch forks them, so that
the instants fall into the command's work and not into the loading of libraries.
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
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import save_tiny

from kvedit.session import Session
from kvedit.store import Store

SERVER = """
import json, os, pathlib, signal, sys, traceback
import kvedit.ask, kvedit.cli.app, kvedit.session, kvedit.model.resolve, kvedit.store.segments
from kvedit.__main__ import main

kvedit.model.Model.open(pathlib.Path(sys.argv[1])).check()  # loads what is loaded on first use

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


OTHERS = [
    r"insert --after 3 --exact 'One.\n\nTwo.\n'",
    "move --lines 1-2 --after 5",
    "undo",
    "redo",
    "heal --budget 50%",
    "ask 'And item 4?' --continue --max-new-tokens 3",
    "checkout 1",
    "purge",
    "sessions compact",
    "sessions copy contract other",
    "sessions use contract",
]
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    served = Server(folder, save_tiny(folder / "llama", "llama", max_position_embeddings=4096))
    yield served
    served.process.stdin.close()
    served.process.wait(timeout=30)
    served.process.stdout.close()


class Stage(NamedTuple):
    """A session to be disturbed, and the commands that do something to it."""

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


@pytest.fixture(scope="module")
def short(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return stage(tmp_path_factory.mktemp("short"), server, 8)


@pytest.fixture(scope="module")
def long(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    # Several chunks of rows, so that the commands take a moment.
    return stage(tmp_path_factory.mktemp("long"), server, 120)


@pytest.fixture(scope="module")
def medium(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    # Fewer rows than healing computes before it keeps some: each command takes effect at once.
    return stage(tmp_path_factory.mktemp("medium"), server, 40)


def held(home: Path) -> tuple[Any, ...] | None:
    """All that a session says, each of its files read and checked."""
    store = Store(home / "contract")
    if not store.exists():
        return None
    session = Session(store)
    session.read_segments()
    entry, revision = session.revision.entry, session.revision
    told = (entry.edits, entry.frontier, revision.turns, session.manifest.undone)
    return session.document.text, revision.rows, *told


def check_next(server: Server, home: Path, states: tuple[Any, Any]) -> None:
    """The session is as before the command or as after it, and the next command works."""
    found = held(home)
    assert found in states
    done = server.run(home, "delete", "--lines", "1", "--json")
    assert (done.code, json.loads(done.out)["removed_lines"]) == (0, 1), done.err
    assert held(home)[0] == found[0].partition("\n")[2]
    assert not list(home.rglob("*.tmp")), "what was left behind is still there"


@pytest.mark.parametrize("command", ["load", "delete", "ask"])
def test_killed_before_any_change_of_a_file_a_session_is_as_before_or_after(server, short, tmp_path, command):
    home = tmp_path / "home"
    before = held(short.copy(home))
    assert server.run(home, *short.commands[command]).code == 0
    states = (before, held(home))
    assert states[0] != states[1]
    seen = []
    for step in count(1):  # until there are no more steps
        done = server.run(short.copy(home), *short.commands[command], step=step)
        if done.code == 0:
            break
        assert done.code == -signal.SIGKILL
        seen.append(held(home) == states[1])
        check_next(server, home, states)
    assert (seen == sorted(seen), step > 5) == (True, True)  # once it has taken effect, it stays so


@pytest.mark.parametrize("words", OTHERS, ids=lambda words: words.partition(" ")[0])
def test_killed_before_any_change_of_a_file_by_another_command_too(server, short, tmp_path, words):
    home, args = tmp_path / "home", shlex.split(words)
    setup = ["delete --lines 3", "ask Why? --budget 30% --max-new-tokens 2 --continue", "undo"]
    server.runs(short.copy(home), setup)
    start = shutil.copytree(home, tmp_path / "start")
    before = held(home)
    assert server.run(home, *args).code == 0
    states = (before, held(home))
    for step in count(1):
        shutil.rmtree(home)
        shutil.copytree(start, home)
        done = server.run(home, *args, step=step)
        if done.code == 0:
            break
        assert held(home) in states
        if step % 5 == 1:
            assert server.run(home, "sessions", "check").code == 0
    assert step > 2


@pytest.mark.slow
def test_killed_at_two_hundred_random_instants_of_a_script_a_session_is_at_one_of_its_steps(
    server, medium, tmp_path
):
    home, chance, script = tmp_path / "home", random.Random(200), tmp_path / "script.kvedit"
    script.write_text("\n".join(SCRIPT))
    states = [held(medium.copy(home))]
    for line in SCRIPT:
        server.runs(home, [line])
        states.append(held(home))
    whole = server.run(medium.copy(home), "replay", script)
    assert (whole.code, held(home)) == (0, states[-1]), whole.err
    found: set[int] = set()
    killed = 0
    for turn in range(200):
        pid = server.start(medium.copy(home), "replay", script)
        time.sleep(whole.seconds * (turn + chance.random()) / 200)
        os.kill(pid, signal.SIGKILL)
        killed += server.end().code == -signal.SIGKILL
        assert held(home) in states
        found.add(states.index(held(home)))
        if turn % 10 == 0:
            assert server.run(home, "sessions", "check").code == 0
            check_next(server, home, tuple(states))
    assert killed > 150
    assert len(found) > len(SCRIPT) // 2  # the instants fell into all of it


def test_killed_in_a_first_load_there_is_no_session_or_a_whole_one(server, short, tmp_path):
    home, load = tmp_path / "home", [part for part in short.commands["load"] if part != "--force"]
    for step in count(1, 2):
        shutil.rmtree(home, ignore_errors=True)
        done = server.run(home, *load, step=step)
        if done.code == 0:
            break
        there = held(home) is not None  # what the next command sees is one or the other, too
        assert server.run(home, "status").code == (0 if there else 3), f"step {step}"
        assert server.run(home, *load).code == (2 if there else 0)
        assert held(home)[0].count("\n") == 8
    assert step > 10


@pytest.mark.parametrize("command", ["load", "delete", "ask"])
def test_killed_at_random_instants_a_session_is_as_before_or_after(server, long, tmp_path, command):
    home, chance = tmp_path / "home", random.Random(command)
    before = held(long.copy(home))
    whole = server.run(home, *long.commands[command])
    states = (before, held(home))
    killed = 0
    for eighth in range(8):
        pid = server.start(long.copy(home), *long.commands[command])
        time.sleep(whole.seconds * (eighth + chance.random()) / 8)
        os.kill(pid, signal.SIGKILL)
        killed += server.end().code == -signal.SIGKILL
        assert server.run(home, "status").code == 0
        check_next(server, home, states)
    assert killed


@pytest.mark.parametrize("command", ["load", "ask", "delete"])
def test_an_interrupt_ends_a_command_without_a_trace(server, short, tmp_path, command):
    home = tmp_path / "home"
    before = held(short.copy(home))
    server.run(home, *short.commands[command])
    states = (before, held(home))
    for step in count(1):
        done = server.run(short.copy(home), *short.commands[command], step=step, number=signal.SIGINT)
        if done.code == 0:
            break
        assert done.code == 130
        assert "nterrupted" in done.err
        assert held(home) in states
        names = {path.stem for path in home.rglob("*.safetensors")}
        assert command != "load" or names == {piece.segment for piece in held(home)[1]}
    assert step > 5


def test_an_interrupt_while_an_answer_is_written_keeps_what_was_said(server, long, tmp_path):
    home = long.copy(tmp_path / "home")
    before = held(home)
    pid = server.start(home, "ask", "What are the fees?", "--max-new-tokens", "1000", "--no-keep")
    deadline = time.monotonic() + 20
    while server.out.stat().st_size < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)
    done = server.end()
    assert (done.code, "Traceback" in done.err) == (130, False)
    assert "The answer was interrupted." in done.err
    assert len(done.out) >= 20
    assert held(home) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, spare: int) -> None:
    free = os.statvfs(place)
    (place / "filler").write_bytes(b"\0" * max(0, free.f_bavail * free.f_bsize - spare))


@pytest.mark.parametrize("command", ["load", "delete", "ask"])
@pytest.mark.parametrize("pages", [0, 3, 8])
def test_a_command_on_a_full_disk_says_so_and_does_nothing(server, short, long, small_disk, command, pages):
    home = shutil.copytree(short.home, small_disk / "home")
    before = held(home)
    fill(small_disk, pages * 4096)
    args = long.commands["load"] if command == "load" else short.commands[command]
    done = server.run(home, *args)
    if (command, done.code) == ("delete", 0):
        return  # it needs two pages; one is free once nobody can be named as the holder
    assert done.code == 1, done.err
    assert "no room left on the disk" in done.err
    assert "Free some space" in done.err
    assert held(home) == before
    (small_disk / "filler").unlink()
    check_next(server, home, (before, before))
