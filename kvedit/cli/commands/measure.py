"""The `bench` commands that measure the machine, and those that read runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvedit.cli import output as render
from kvedit.cli.commands.bench import (
    Budgets,
    Files,
    Out,
    Policies,
    Questions,
    Seed,
    bench,
    names_of,
    numbers_of,
    open_model,
    read_questions,
    say_left,
    split,
    texts_of,
)
from kvedit.cli.options import POLICY_NAMES, Device, Dtype, Json, ModelName
from kvedit.cli.workspace import here
from kvedit.errors import KveditError, UsageError
from kvedit.names import DEFAULT_MODEL, EXECUTOR_NAMES

if TYPE_CHECKING:
    from kvedit.lab.run import Run
    from kvedit.model.model import Model

Text = Annotated[
    str | None, typer.Option("--text", metavar="FILE", help="A long text. Default: a built-in one.")
]
Contexts = Annotated[str, typer.Option(metavar="N,N", help="Lengths in tokens, with commas.")]


@bench.command("executor", epilog="Example: kvedit bench executor --contexts 2000 --budgets 5%")
def executor(
    out: Out = "runs/executor",
    contexts: Contexts = "1000,2000,4000",
    budgets: Budgets = "1%,5%,20%",
    executors: Annotated[
        str, typer.Option(metavar="NAMES", help=f"Of {', '.join(EXECUTOR_NAMES[1:])}.")
    ] = "packed,interval,direct",
    runs: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Counts of runs. Default: 1, 2, 4, ... and one for each row."),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds after the first.")] = 5,
    text: Text = None,
    model: ModelName = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """How fast is a refresh of B rows, when they lie in one run, in two, ... in B runs?"""
    from kvedit.lab.executor import sweep

    named = names_of("--executors", executors, EXECUTOR_NAMES[1:])
    lengths, shares = numbers_of("--contexts", contexts), split(budgets)
    counts = None if runs is None else numbers_of("--runs", runs)
    opened = open_model(model, device, dtype)
    ids = opened.tokenizer.encode_text(texts_of(text)[0]).ids
    options = {"contexts": lengths, "budgets": shares, "executors": named}
    options |= {"runs": counts, "rounds": rounds}

    found = sweep(opened, ids, lengths, shares, named, runs=counts, rounds=rounds)
    _measure("executor", out, opened, model, options, found, json)


@bench.command("numerics", epilog="Example: kvedit bench numerics --contexts 1000 --cases 4")
def numerics(
    out: Out = "runs/numerics",
    contexts: Contexts = "500,1000",
    cases: Annotated[int, typer.Option(metavar="N", min=1, help="Texts of each length.")] = 4,
    text: Text = None,
    model: ModelName = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """How far do replays differ that should not: by chunk size, threads, executor and dtype?"""
    from kvedit.lab.numerics import numerics as compared

    lengths = numbers_of("--contexts", contexts)
    opened = open_model(model, device, dtype)
    ids = opened.tokenizer.encode_text(texts_of(text)[0]).ids
    if len(ids) < max(lengths) + cases - 1:
        raise UsageError(f"The text has {len(ids)} tokens only.", "Name a longer one with --text.")
    prompt = opened.layout(None)
    question = prompt.question_ids(opened.tokenizer, "What is the text about?")

    def records() -> Iterable[dict[str, Any]]:
        for length in lengths:
            for number in range(cases):
                start = number * (len(ids) - length) // max(cases, 1)
                for record in compared(opened, ids[start : start + length], question):
                    yield {"schema_version": 1, "context": length, "case": number, **record}

    options = {"contexts": lengths, "cases": cases}
    _measure("numerics", out, opened, model, options, records(), json)


@bench.command("evidence", epilog="Example: kvedit bench evidence musique_ans_v1.0_dev.jsonl --budgets 5%")
def evidence(
    files: Files,
    out: Out = "runs/evidence",
    questions: Questions = 60,
    policies: Policies = "sur,units-bm25,sur-plain,units-random",
    budgets: Budgets = "2%,5%,10%",
    model: ModelName = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Which share of the rows that a policy buys lies in the evidence? Needs no forward pass."""
    from kvedit.lab import qa
    from kvedit.lab.arms import Arm
    from kvedit.lab.evidence import precision

    named = names_of("--policies", policies, POLICY_NAMES)
    arms = [Arm.parse(f"{policy}@{budget}") for budget in split(budgets) for policy in named]
    sets, left = read_questions(files, qa.unfit, questions)
    opened = open_model(model, device, dtype)
    cases = [case for found in sets for case in qa.cases(found, seed=seed, limit=questions)]
    options = {"files": [Path(name).name for name in files], "questions": questions, "seed": seed}
    options |= {"arms": [arm.name for arm in arms]}
    say_left(left)
    _measure("evidence", out, opened, model, options, precision(opened, cases, arms, seed=seed), json)


@bench.command("compare", epilog="Example: kvedit bench compare runs/a runs/b")
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A run's folder.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another run's folder.")],
    json: Json = False,
) -> None:
    """Pair two runs case by case: what changed from A to B?"""
    from kvedit.cli import runs
    from kvedit.lab.run import Run
    from kvedit.lab.summary import compare as paired

    a, b = (Run.open(here.path(name)) for name in (first, second))
    for run in (a, b):
        if run.config["bench"] in runs.SHOW:
            raise UsageError(
                f"{run.folder} holds no cases, but a run of {run.config['bench']}.",
                "Compare runs of niah, qa, location or geometry.",
            )
    ours, theirs = (run.config["options"] for run in (a, b))
    different = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    if different:
        render.say(f"The runs differ in {', '.join(different)}; cases of the same name are paired.")
    found = paired(a.records(), b.records())
    here.give(found, json, lambda: runs.show_comparison(found))


@bench.command("report", epilog="Example: kvedit bench report runs/niah")
def report(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A run's folder.")], json: Json = False
) -> None:
    """Check a run, and write its summary and report again."""
    from kvedit.cli import runs
    from kvedit.lab.run import Run

    run = Run.open(here.path(folder))
    show = runs.SHOW.get(run.config["bench"])
    if show is not None:
        found = _finish(run)
        here.give(found, json, lambda: show(found, run.config, run.folder))
        return
    summary = run.finish()
    here.give(summary, json, lambda: runs.show_run(summary, run.folder))


def _measure(
    name: str,
    out: str,
    model: Model,
    called: str,
    options: dict[str, Any],
    found: Iterable[dict[str, Any]],
    as_json: bool,
) -> None:
    """Take all records, and write them with summary and report."""
    from kvedit.cli import runs
    from kvedit.lab.run import Run, describe

    command = shlex.join(["kvedit", *sys.argv[1:]])
    run = Run.start(here.path(out), describe(name, model, called, [], options, command))
    run.clear()
    with render.counting("records") as progress:
        for number, record in enumerate(found, start=1):
            run.append(record)
            progress(number)
    summary = _finish(run)
    here.give(
        {"folder": str(run.folder), **summary},
        as_json,
        lambda: runs.SHOW[name](summary, run.config, run.folder),
    )


def _finish(run: Run) -> dict[str, Any]:
    """Write summary and report of a measurement; gives the summary."""
    from kvedit.lab.evidence import summarise_precision
    from kvedit.lab.executor import summarise_executor
    from kvedit.lab.numerics import summarise_numerics
    from kvedit.lab.report import evidence_html, executor_html, numerics_html

    records, bench = run.records(), run.config["bench"]
    if not records:
        raise KveditError("The run has no records.", "Run it first, or ask for more.")
    found: dict[str, Any]
    if bench == "executor":
        found, page = {"shapes": summarise_executor(records)}, executor_html
    elif bench == "numerics":
        found, page = {"paths": summarise_numerics(records)}, numerics_html
    else:
        found, page = {"datasets": summarise_precision(records)}, evidence_html
    summary = {"schema_version": 1, **found}
    run.write(summary, page(run.config, records, summary))
    return summary
