"""The `bench` commands that measure a model, and those that read runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvedit.cli import output
from kvedit.cli.command import Reply, command
from kvedit.cli.commands.bench import Budgets, Files, Out, Policies, Questions, Seed, bench
from kvedit.cli.inputs import names_of, numbers_of, open_model, read_questions, say_left, split, texts_of
from kvedit.cli.options import Device, Dtype, ModelName
from kvedit.cli.progress import counting
from kvedit.cli.workspace import here
from kvedit.errors import KveditError, UsageError
from kvedit.names import DEFAULT_MODEL, EXECUTOR_NAMES
from kvedit.policies.registry import POLICIES

if TYPE_CHECKING:
    from kvedit.lab.run import Run
    from kvedit.model.model import Model

Text = Annotated[str | None, typer.Option("--text", metavar="FILE", help="A long text. Default: built-in.")]
Contexts = Annotated[str, typer.Option(metavar="N,N", help="Lengths in tokens, separated by commas.")]


@command("executor", example="kvedit bench executor --contexts 2000 --budgets 5%", group=bench)
def executor(
    out: Out = "runs/executor",
    contexts: Contexts = "1000,2000,4000",
    budgets: Budgets = "1%,5%,20%",
    executors: Annotated[
        str, typer.Option(metavar="NAMES", help=f"Some of {', '.join(EXECUTOR_NAMES[1:])}.")
    ] = "packed,interval,direct",
    runs: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Numbers of runs. Default: 1, 2, 4, ... and one run per row."),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds after a warm-up.")] = 5,
    text: Text = None,
    model: ModelName = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> Reply:
    """How fast is a refresh of B rows in one run, in two, ... in B runs?"""
    from kvedit.lab.executor import sweep

    named = names_of("executor", executors, EXECUTOR_NAMES[1:])
    lengths, shares = numbers_of("--contexts", contexts), split(budgets)
    counts = None if runs is None else numbers_of("--runs", runs)
    opened = open_model(model, device, dtype)
    ids = opened.tokenizer.encode_text(texts_of(text)[0]).ids
    options = {"contexts": lengths, "budgets": shares, "executors": named}
    options |= {"runs": counts, "rounds": rounds}

    found = sweep(opened, ids, lengths, shares, named, runs=counts, rounds=rounds)
    return _measure("executor", out, opened, model, options, found)


@command("numerics", example="kvedit bench numerics --contexts 1000 --cases 4", group=bench)
def numerics(
    out: Out = "runs/numerics",
    contexts: Contexts = "500,1000",
    cases: Annotated[int, typer.Option(metavar="N", min=1, help="Texts per length.")] = 4,
    text: Text = None,
    model: ModelName = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> Reply:
    """How much do replays differ by chunk size, threads, executor and dtype?"""
    from kvedit.lab.numerics import numerics as compared

    lengths = numbers_of("--contexts", contexts)
    opened = open_model(model, device, dtype)
    ids = opened.tokenizer.encode_text(texts_of(text)[0]).ids
    if len(ids) < max(lengths) + cases - 1:
        raise UsageError(f"The text has only {len(ids)} tokens.", "Use --text to name a longer one.")
    prompt = opened.layout(None)
    question = prompt.question_ids(opened.tokenizer, "What is the text about?")

    def records() -> Iterable[dict[str, Any]]:
        for length in lengths:
            for number in range(cases):
                start = number * (len(ids) - length) // max(cases, 1)
                for record in compared(opened, ids[start : start + length], question):
                    yield {"schema_version": 1, "context": length, "case": number, **record}

    options = {"contexts": lengths, "cases": cases}
    return _measure("numerics", out, opened, model, options, records())


@command("evidence", example="kvedit bench evidence musique_ans_v1.0_dev.jsonl --budgets 5%", group=bench)
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
) -> Reply:
    """What share of a policy's selected rows lies in the evidence? Needs no forward pass."""
    from kvedit.lab import qa
    from kvedit.lab.arms import Arm
    from kvedit.lab.evidence import precision

    named = names_of("policy", policies, POLICIES)
    arms = [Arm.parse(f"{policy}@{budget}") for budget in split(budgets) for policy in named]
    sets, left = read_questions(files, qa.unfit, questions)
    opened = open_model(model, device, dtype)
    cases = [case for found in sets for case in qa.cases(found, seed=seed, limit=questions)]
    options = {"files": [Path(name).name for name in files], "questions": questions, "seed": seed}
    options |= {"arms": [arm.name for arm in arms]}
    say_left(left)
    return _measure("evidence", out, opened, model, options, precision(opened, cases, arms, seed=seed))


@command("compare", example="kvedit bench compare runs/a runs/b", group=bench)
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A run's folder.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another run's folder.")],
) -> Reply:
    """Pair two runs case by case: what changed from A to B?"""
    from kvedit.cli import runs
    from kvedit.lab.run import Run
    from kvedit.lab.summary import compare as paired

    a, b = (Run.open(here.path(name)) for name in (first, second))
    for run in (a, b):
        if run.config["bench"] in runs.SHOW:
            raise UsageError(
                f"{run.folder} is a run of {run.config['bench']}, which has no cases.",
                "Compare runs of niah, qa, location or geometry.",
            )
    ours, theirs = (run.config["options"] for run in (a, b))
    different = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    if different:
        output.say(f"The runs differ in {', '.join(different)}; cases are paired by name.")
    found = paired(a.records(), b.records())
    return Reply(found, lambda: runs.show_comparison(found))


@command("report", example="kvedit bench report runs/niah", group=bench)
def report(folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A run's folder.")]) -> Reply:
    """Check a run and rewrite its summary and report."""
    from kvedit.cli import runs
    from kvedit.lab.run import Run

    run = Run.open(here.path(folder))
    show = runs.SHOW.get(run.config["bench"])
    if show is not None:
        found = _finish(run)
        return Reply(found, lambda: show(found, run.config, run.folder))
    summary = run.finish()
    return Reply(summary, lambda: runs.show_run(summary, run.folder))


def _measure(
    name: str,
    out: str,
    model: Model,
    called: str,
    options: dict[str, Any],
    found: Iterable[dict[str, Any]],
) -> Reply:
    """Collect all records, and write them with summary and report."""
    from kvedit.cli import runs
    from kvedit.lab.run import Run, describe

    command = shlex.join(["kvedit", *sys.argv[1:]])
    run = Run.start(here.path(out), describe(name, model, called, [], options, command))
    run.clear()
    with counting("records") as progress:
        for number, record in enumerate(found, start=1):
            run.append(record)
            progress(number)
    summary = _finish(run)
    return Reply(
        {"folder": str(run.folder), **summary}, lambda: runs.SHOW[name](summary, run.config, run.folder)
    )


def _finish(run: Run) -> dict[str, Any]:
    """Write summary and report of a measurement; return the summary."""
    from kvedit.lab.evidence import summarise_precision
    from kvedit.lab.executor import summarise_executor
    from kvedit.lab.numerics import summarise_numerics
    from kvedit.lab.report import evidence_html, executor_html, numerics_html

    records, bench = run.records(), run.config["bench"]
    if not records:
        raise KveditError("The run has no records.", "Run the bench again, with more cases.")
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
