"""Run cases on many machines: Ray workers compute them, and one process writes the run.

The only module that imports ray. Each worker opens the model once and runs the cases of one source
after another, like the serial run, so that they share a clean prefill. The records equal those of
the serial run, in its order, except for times. Two things may change the last bits: the number of
threads of a worker, and a different kind of processor.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch

from kvedit.checkpoint.opening import open_model
from kvedit.checkpoint.resolve import ALIASES, resolve
from kvedit.errors import ContextError, KveditError, UsageError
from kvedit.lab.arms import Arm
from kvedit.lab.case import Case
from kvedit.lab.run import Record, Run, describe
from kvedit.lab.trial import Clean, run_case
from kvedit.model.model import Model

Outcomes = dict[str, Record | str]
"""A record by the name of its case, or why the case does not fit the model's context."""

LOCAL_WORKERS = 2
_REACH_S = 5.0
_STORE_BYTES = 1 << 27  # of a local cluster; cases and records are small
_LOCAL = re.compile(r"local(?::([1-9]\d*))?", re.ASCII)
_REMOTE = re.compile(r"(?!local:)([\w.\-]+):(\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Refused:
    """A `KveditError` of a worker; ray cannot transfer it as an exception."""

    fact: str
    remedy: str


class Worker:
    """A model in its own process, on a machine that Ray chooses."""

    def open(self, config: Record, name: str, device: str, threads: int) -> Outcomes | Refused:
        """Open the model, and check it and the library versions against the run; returns no outcomes."""
        torch.set_num_threads(threads)
        ours = config["model"]
        try:
            self.model = open_model(resolve(name), device=device, dtype=ours["dtype"])
        except KveditError as error:
            return Refused(error.fact, error.remedy)
        self.clean: Clean | None = None
        here = describe("", self.model, ours["name"], [], {}, "")
        different = sorted(
            key
            for part in ("model", "versions")
            for key in {*config[part], *here[part]}
            if config[part].get(key) != here[part].get(key)
        )
        if different:
            return Refused(
                f"A Ray worker differs from this machine in {', '.join(different)}.",
                "Install the same versions and the same model on the worker.",
            )
        return {}

    def try_cases(self, cases: list[Case], arms: list[Arm], seed: int) -> Outcomes | Refused:
        """Run every arm on cases."""
        found: Outcomes = {}
        try:
            for case in cases:
                try:
                    found[case.name], self.clean = run_case(
                        self.model, case, arms, seed=seed, clean=self.clean
                    )
                except ContextError as error:
                    found[case.name] = error.fact
        except KveditError as error:
            return Refused(error.fact, error.remedy)
        return found


def distribute(
    run: Run,
    model: Model,
    cases: Iterable[Case],
    arms: list[Arm],
    *,
    address: str,
    seed: int = 0,
    on_case: Callable[[int, Record], None] = lambda done, record: None,
    on_skip: Callable[[Case, str], None] = lambda case, why: None,
) -> None:
    """Run the cases that have no record yet on Ray workers; otherwise like `kvedit.lab.run.execute`.

    Records are written in the order of the cases. An interrupt ends the workers; unfinished cases run
    again when the run is continued.

    Args:
        run: Receives one record per case; its `config` says which model the workers must open.
        model: The same model in this process.
        cases: All cases of the run.
        arms: The arms to run on every case.
        address: As `check_address` takes it. `local:N` starts a cluster of N workers, which share
            this machine's threads. A cluster gets one worker per GPU or, if this machine has no GPU,
            one per machine.
        seed: For random policies.
        on_case: Called with the number of cases done and the record, for old records too.
        on_skip: Called with a case that does not fit the model's context, and why.

    Raises:
        UsageError: Ray is not installed or unreachable, has too few GPUs, or the model is spread.
        KveditError: A worker died, or has a different model or different versions.
    """
    if model.spread:
        raise UsageError(
            "A model spread over several devices cannot run on Ray.", "Leave out --ray or --device map."
        )
    cases = list(cases)
    outcomes: Outcomes = {record["case"]: record for record in run.records()}
    held = set(outcomes)
    left = [case for case in cases if case.name not in held]
    groups = [list(part) for _, part in groupby(left, key=lambda case: case.source)]
    at = done = 0
    with closing(_work(run, model, groups, arms, address, seed)) as work:
        for found in chain([{}], work):
            outcomes |= found
            while at < len(cases) and cases[at].name in outcomes:
                case, outcome = cases[at], outcomes[cases[at].name]
                at += 1
                if isinstance(outcome, str):
                    on_skip(case, outcome)
                    continue
                if case.name not in held:
                    run.append(outcome)
                done += 1
                on_case(done, outcome)


def check_address(address: str) -> None:
    """Raise if an address is not `local`, `local:N`, `auto` or `HOST:PORT`, or ray is missing.

    Raises:
        UsageError: The address is not valid, or ray is not installed.
    """
    if address != "auto" and not _LOCAL.fullmatch(address) and not _REMOTE.fullmatch(address):
        raise UsageError(f"'{address}' is not valid for --ray.", "Write local:2, auto, or HOST:PORT.")
    _import_ray()


def _import_ray() -> Any:
    # Ray reads these when it is imported: no usage statistics, and a worker that is not assigned a GPU
    # sees none.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    try:
        import ray
    except ImportError:
        raise UsageError(
            "--ray needs Ray, which is not installed.", "Run `pip install 'kvedit[ray]'`."
        ) from None
    return ray


def _work(
    run: Run, model: Model, groups: list[list[Case]], arms: list[Arm], address: str, seed: int
) -> Generator[Outcomes]:
    """Assign groups to free workers; yield outcomes as they arrive."""
    if not groups:
        return
    name = run.config["model"]["name"]
    if name not in ALIASES and Path(name).expanduser().exists():
        name = str(Path(name).expanduser().absolute())  # a worker has a different working folder
    with _connected(address) as ray:
        number, threads, gpus = _shares(ray, address, model.device.type)
        make = ray.remote(Worker).options(num_cpus=threads, num_gpus=gpus, scheduling_strategy="SPREAD")
        workers = [make.remote() for _ in range(min(number, len(groups)))]
        waiting = iter(groups)
        busy = {
            worker.open.remote(run.config, name, model.device.type, threads): worker for worker in workers
        }
        while busy:
            (ready,), _ = ray.wait(list(busy), num_returns=1)
            worker = busy.pop(ready)
            found = _fetch(ray, ready)
            group = next(waiting, None)
            if group is not None:
                busy[worker.try_cases.remote(group, arms, seed)] = worker
            yield found


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Join or start a cluster; on exit, end the workers, and the cluster if it was started here."""
    ray = _import_ray()
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if match := _LOCAL.fullmatch(address):
            number = int(match[1] or LOCAL_WORKERS)
            ray.init(
                address="local",
                num_cpus=number * _threads(number),
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                **quiet,
            )
        else:
            if match := _REMOTE.fullmatch(address):  # ray itself would retry for minutes
                socket.create_connection((match[1], int(match[2])), _REACH_S).close()
            ray.init(address=address, **quiet)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        first = str(error).split("\n")[0].rstrip(".")
        raise UsageError(
            f"Ray cannot be reached at {address} ({first}).",
            "Start it with `ray start --head`, set RAY_AUTH_TOKEN if it needs one, or use --ray local:2.",
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _shares(ray: Any, address: str, device: str) -> tuple[int, int, int]:
    """Return the number of workers, and the threads and GPUs of each."""
    kind = "GPU" if device == "cuda" else "CPU"
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [node for node in nodes if node.get(kind, 0) >= 1]
    places = [int(node["GPU"]) if kind == "GPU" else 1 for node in nodes]
    number, gpus = sum(places), int(kind == "GPU")
    if match := _LOCAL.fullmatch(address):
        wanted = int(match[1] or LOCAL_WORKERS)
        if gpus and number < wanted:
            raise UsageError(
                f"{wanted} Ray workers need a GPU each, but this machine has {number}.",
                f"Use --ray local:{number}.",
            )
        return wanted, _threads(wanted), gpus
    if not nodes:
        raise UsageError(f"The Ray cluster at {address} has no {kind}.", "Choose another --device.")
    shares = (int(node.get("CPU", 0)) // count for node, count in zip(nodes, places, strict=True))
    return number, max(1, min(shares)), gpus


def _threads(workers: int) -> int:
    return max(1, (os.cpu_count() or 1) // workers)


def _fetch(ray: Any, task: Any) -> Any:
    """Return the result of a worker; raises `KveditError` if it refused or died."""
    try:
        found = ray.get(task)
    except ray.exceptions.RayActorError as error:
        raise KveditError(
            f"A Ray worker died before its cases were done ({str(error).splitlines()[0].rstrip('.')}).",
            "Run the same command again to continue; Ray's logs may show the cause.",
        ) from None
    if isinstance(found, Refused):
        raise KveditError(found.fact, found.remedy)
    return found
