"""Cases on Ray's workers: the serial run's records, in its order; sentences where Ray is not there."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvedit.cli.app import app
from kvedit.errors import KveditError, UsageError
from kvedit.lab import cluster
from kvedit.lab.arms import Arm
from kvedit.lab.case import Case
from kvedit.lab.cluster import check_address, distribute
from kvedit.lab.run import Run, describe, execute
from kvedit.model.model import Model
from kvedit.text.document import Edit

LINES = [f"Line {number}: the fees of item {number} are {number * 37}.\n" for number in range(1, 9)]
STARTS = [sum(map(len, LINES[:at])) for at in range(len(LINES) + 1)]
ARMS = [Arm.parse(name) for name in ("shift", "sur@20%", "units-random@20%", "reprefill")]


def make_cases(sources: int) -> list[Case]:
    """Two cases a source, which end alike: before or after the line that is asked for."""
    return [
        Case(
            name=f"item{asked}-{place}",
            source=f"item{asked}",
            text="".join(LINES),
            edits=(Edit(STARTS[place - 1], STARTS[place]),),
            question=f"What are the fees of item {asked}?",
            answers=(str(asked * 37),),
            stale="74",
            max_new_tokens=4,
        )
        for asked in range(3, 3 + sources)
        for place in (1, 2)
    ]


def start(folder: Path, model: Model, name: object) -> Run:
    return Run.start(folder, describe("niah", model, str(name), ARMS, {"seed": 0}, "kvedit"))


def without_times(run: Run) -> list[str]:
    records = run.records()
    for record in records:
        for arm in record["arms"].values():
            arm["seconds"] = sorted(arm["seconds"])
    return [json.dumps(record) for record in records]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for ray: tasks run when they are asked for, and the last one given is ready first."""
    calls: list[str] = []
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0}}]

    class ActorError(Exception):
        pass

    class Ref:
        def __init__(self, method: Callable[..., Any], args: tuple[Any, ...]) -> None:
            self.method, self.args = method, args

    class Handle:
        def __init__(self, made: Any) -> None:
            self.made = made

        def __getattr__(self, name: str) -> Any:
            def remote(*args: Any) -> Ref:
                calls.append(name)
                return Ref(getattr(self.made, name), args)

            return SimpleNamespace(remote=remote)

    def options(kind: Any, **wanted: Any) -> Any:
        calls.append(f"{wanted['num_cpus']} threads, {wanted['num_gpus']} GPUs")
        return SimpleNamespace(remote=lambda: Handle(kind()))

    fake: Any = ModuleType("ray")
    fake.calls, fake.fleet = calls, nodes
    fake.exceptions = SimpleNamespace(RayActorError=ActorError)
    fake.init = lambda **given: calls.append(f"init {given['address']} {given.get('num_cpus')}")
    fake.shutdown = lambda: calls.append("shutdown")
    fake.nodes = lambda: nodes
    fake.remote = lambda kind: SimpleNamespace(options=lambda **wanted: options(kind, **wanted))
    fake.wait = lambda refs, num_returns: ([refs[-1]], refs[:-1])
    fake.get = lambda ref: ref.method(*ref.args)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    threads = torch.get_num_threads()
    yield fake
    torch.set_num_threads(threads)


def test_records_follow_the_order_of_the_cases(ray, llama: Model, tmp_path: Path):
    cases = make_cases(3)
    torch.set_num_threads(2)  # as each worker has here: sums are split among threads
    serial, shared = (start(tmp_path / name, llama, llama.directory) for name in ("serial", "shared"))
    execute(serial, llama, cases, ARMS)
    seen: list[tuple[int, str]] = []
    distribute(
        shared, llama, cases, ARMS, address="local:2", on_case=lambda *at: seen.append((at[0], at[1]["case"]))
    )
    assert without_times(shared) == without_times(serial)
    assert seen == list(enumerate([case.name for case in cases], start=1))
    assert ray.calls[:2] == ["init local 4", "2 threads, 0 GPUs"]
    assert ray.calls.count("open") == 2
    assert ray.calls.count("try_cases") == 3  # a source each
    assert ray.calls[-1] == "shutdown"


def test_a_resumed_run_computes_only_cases_without_a_record(ray, llama: Model, tmp_path: Path):
    cases = make_cases(2)
    run = start(tmp_path / "run", llama, llama.directory)
    execute(run, llama, [cases[1]], ARMS)
    held = (run.folder / "cases.jsonl").read_text()
    seen: list[str] = []
    distribute(run, llama, cases, ARMS, address="local", on_case=lambda done, it: seen.append(it["case"]))
    assert seen == [case.name for case in cases]
    assert (run.folder / "cases.jsonl").read_text().startswith(held)
    assert sorted(record["case"] for record in run.records()) == sorted(seen)
    ray.calls.clear()
    distribute(run, llama, cases, ARMS, address="local")
    assert ray.calls == []  # nothing is left, so Ray is not asked


def test_a_case_that_does_not_fit_is_left_out_with_its_reason(ray, llama: Model, tmp_path: Path):
    cases = make_cases(2)
    cases[1] = replace(cases[1], max_new_tokens=2000)
    skipped: list[tuple[str, str]] = []
    run = start(tmp_path / "run", llama, llama.directory)
    distribute(
        run, llama, cases, ARMS, address="local", on_skip=lambda case, why: skipped.append((case.name, why))
    )
    assert [record["case"] for record in run.records()] == [cases[at].name for at in (0, 2, 3)]
    ((name, why),) = skipped
    assert name == cases[1].name
    assert "context has 1024" in why


def test_a_worker_with_another_model_is_refused(ray, llama: Model, tmp_path: Path, checkpoints):
    run = start(tmp_path / "run", llama, checkpoints["qwen3"])
    with pytest.raises(
        KveditError, match=r"differs from this machine in config, tensor_samples, weights"
    ) as caught:
        distribute(run, llama, make_cases(1), ARMS, address="local:1")
    assert "same model" in caught.value.remedy
    assert run.records() == []
    assert ray.calls[-1] == "shutdown"


def test_a_worker_that_cannot_open_the_model_says_why(ray, llama: Model, tmp_path: Path):
    run = start(tmp_path / "run", llama, "nothing-here")
    with pytest.raises(KveditError, match="Unknown model 'nothing-here'"):
        distribute(run, llama, make_cases(1), ARMS, address="local:1")


def test_a_worker_that_dies_ends_the_run_and_keeps_what_is_done(
    ray, llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tries = 0
    get = ray.get

    def dying(ref: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 3:
            raise ray.exceptions.RayActorError("The actor died unexpectedly.\nclass_name: Worker")
        return get(ref)

    monkeypatch.setattr(ray, "get", dying)
    run = start(tmp_path / "run", llama, llama.directory)
    with pytest.raises(KveditError, match=r"were done \(The actor died unexpectedly\)\.") as caught:
        distribute(run, llama, make_cases(2), ARMS, address="local:1")
    assert "same command" in caught.value.remedy
    assert [record["case"] for record in run.records()] == ["item3-1", "item3-2"]
    assert ray.calls[-1] == "shutdown"


def test_whatever_stops_the_run_here_ends_the_workers_at_once(ray, llama: Model, tmp_path: Path):
    def stop(done: int, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    run = start(tmp_path / "run", llama, llama.directory)
    with pytest.raises(KeyboardInterrupt):
        distribute(run, llama, make_cases(2), ARMS, address="local:1", on_case=stop)
    assert ray.calls[-1] == "shutdown"


@pytest.mark.parametrize(
    ("fleet", "device", "shares"),
    [
        ([{"CPU": 8.0}, {"CPU": 6.0}, {"memory": 5.0}], "cpu", (2, 6, 0)),
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 6.0}, {"CPU": 9.0, "GPU": 3.0}], "cuda", (5, 3, 1)),
        ([{"GPU": 1.0}], "cuda", (1, 1, 1)),
    ],
)
def test_a_cluster_gives_a_worker_to_each_machine_or_each_gpu(ray, fleet, device, shares):
    nodes = [{"Alive": True, "Resources": node} for node in fleet]
    dead = {"Alive": False, "Resources": {"CPU": 1.0, "GPU": 1.0}}
    ray.fleet[:] = [*nodes, dead]
    assert cluster._shares(ray, "auto", device) == shares


def test_too_few_gpus_are_refused(ray):
    ray.fleet[:] = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}]
    with pytest.raises(UsageError, match="2 Ray workers need a GPU each, but this machine has 1"):
        cluster._shares(ray, "local:2", "cuda")
    ray.fleet[:] = []
    with pytest.raises(UsageError, match="The Ray cluster at auto has no GPU"):
        cluster._shares(ray, "auto", "cuda")


def test_a_spread_model_is_refused(ray, llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llama, "spread", True)
    with pytest.raises(UsageError, match="spread over several devices"):
        distribute(start(tmp_path / "run", llama, ""), llama, make_cases(1), ARMS, address="local")
    assert ray.calls == []


@pytest.mark.parametrize(
    "address", ["", "local:0", "local:x", "localhost", "ray://there:1", "here:", "a:1:2"]
)
def test_an_invalid_address_is_refused(ray, address: str):
    with pytest.raises(UsageError, match="is not valid for --ray"):
        check_address(address)


@pytest.mark.parametrize("address", ["local", "local:3", "auto", "head.example:6379", "192.0.2.7:6379"])
def test_valid_addresses_are_accepted(ray, address: str):
    check_address(address)


def test_an_unreachable_host_is_refused_before_ray_waits(ray, llama: Model, tmp_path: Path):
    run = start(tmp_path / "run", llama, llama.directory)
    with pytest.raises(UsageError, match=r"Ray cannot be reached at 127\.0\.0\.1:1 \(") as caught:
        distribute(run, llama, make_cases(1), ARMS, address="127.0.0.1:1")
    assert "ray start --head" in caught.value.remedy
    assert ray.calls == []


def test_without_ray_the_command_says_how_to_install_it(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(app, ["bench", "niah", "--ray", "local:2", "-m", "nothing-here"])
    assert done.exit_code == 2
    assert "Ray, which is not installed" in " ".join(done.output.split())
    assert "pip install 'kvedit[ray]'" in " ".join(done.output.split())


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not here: pip install 'kvedit[ray]'"
)
def test_two_local_workers_give_the_records_of_a_serial_run(
    llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cases = make_cases(4)
    monkeypatch.chdir(llama.directory.parent)  # a worker has another working folder
    serial, shared = (start(tmp_path / name, llama, llama.directory.name) for name in ("serial", "shared"))
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # as a worker has
    try:
        execute(serial, llama, cases, ARMS)
    finally:
        torch.set_num_threads(threads)
    distribute(shared, llama, cases, ARMS, address="local:2")
    assert without_times(shared) == without_times(serial)
    assert len(shared.records()) == len(cases)
