"""Law 9: killed at any instant, interrupted or out of room, a session is as before the command or as after.

Commands run as processes of their own. A small server that has loaded torch forks them, so that
the instants fall into the command's work and not into the loading of libraries.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from rigs.killing import SCRIPT, Server, Stage, check_next, held, kill_scripts, serving, stage

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as served:
        yield served


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


@pytest.mark.parametrize("command", ["load", "delete", "ask"])
def test_a_kill_at_any_step_keeps_the_old_or_new_state(server, short, tmp_path, command):
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


@pytest.mark.slow
@pytest.mark.parametrize("words", OTHERS, ids=lambda words: words.partition(" ")[0])
def test_other_killed_commands_keep_the_old_or_new_state(server, short, tmp_path, words):
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
def test_a_kill_in_a_script_leaves_one_of_its_steps(server, medium, tmp_path):
    """Sixty kills; `benchmarks/reliability.py` does two hundred."""
    done = kill_scripts(server, medium, tmp_path, turns=60, seed=200)
    assert done.wrong == []
    assert done.killed > 45
    assert done.steps > len(SCRIPT) // 2  # the instants fell into all of it


def test_a_kill_in_a_first_load_leaves_all_or_nothing(server, short, tmp_path):
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
def test_a_kill_at_a_random_time_keeps_the_old_or_new_state(server, long, tmp_path, command):
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
def test_an_interrupted_command_keeps_the_old_or_new_state(server, short, tmp_path, command):
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


def test_an_interrupted_unkept_answer_changes_nothing(server, long, tmp_path):
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
def test_a_command_on_a_full_disk_fails_and_changes_nothing(server, short, long, small_disk, command, pages):
    home = shutil.copytree(short.home, small_disk / "home")
    before = held(home)
    fill(small_disk, pages * 4096)
    args = long.commands["load"] if command == "load" else short.commands[command]
    done = server.run(home, *args)
    if (command, done.code) == ("delete", 0):
        return  # it needs two pages; one is free once nobody can be named as the holder
    assert done.code == 1, done.err
    assert "The disk is full" in done.err
    assert "Free some space" in done.err
    assert held(home) == before
    (small_disk / "filler").unlink()
    check_next(server, home, (before, before))
