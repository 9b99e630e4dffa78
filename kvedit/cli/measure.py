"""The `bench` commands that measure the machine, and those that read runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvedit.cli import render
from kvedit.cli.base import EXECUTOR_NAMES, POLICY_NAMES, Json
from kvedit.cli.bench import (
    DEFAULT_NAME,
    Budgets,
    Device,
    Dtype,
    Files,
    ModelName,
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
from kvedit.cli.workspace import here
from kvedit.errors import UsageError

if TYPE_CHECKING:
    from kvedit.model import Model

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
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds after the first.")] = 5,
    text: Text = None,
    model: ModelName = DEFAULT_NAME,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """How fast is a refresh of B rows, when they lie in one run, in two, ... in B runs?"""
    from kvedit.bench.executor import summarise_executor, sweep
    from kvedit.bench.report import html

    named = names_of("--executors", executors, EXECUTOR_NAMES[1:])
    lengths, shares = numbers_of("--contexts", contexts), split(budgets)
    opened = open_model(model, device, dtype)
    ids = opened.tokenizer.encode_text(texts_of(text)[0]).ids
    options = {"contexts": lengths, "budgets": shares, "executors": named, "rounds": rounds}

    def page(config: dict[str, Any], records: list[dict[str, Any]], summary: dict[str, Any]) -> str:
        shapes = [{**record, "seconds": record["refresh_s"]} for record in records]
        return html(config, shapes, summary)

    _measure(
        "executor",
        out,
        opened,
        model,
        options,
        sweep(opened, ids, lengths, shares, named, rounds=rounds),
        lambda records: {"shapes": summarise_executor(records)},
        page,
        json,
    )


@bench.command("numerics", epilog="Example: kvedit bench numerics --contexts 1000 --cases 4")
def numerics(
    out: Out = "runs/numerics",
    contexts: Contexts = "500,1000",
    cases: Annotated[int, typer.Option(metavar="N", min=1, help="Texts of each length.")] = 4,
    text: Text = None,
    model: ModelName = DEFAULT_NAME,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """How far do replays differ that should not: by chunk size, threads, executor and dtype?"""
    from kvedit.bench.numerics import numerics as compared
    from kvedit.bench.numerics import summarise_numerics
    from kvedit.bench.report import numerics_html

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
    _measure(
        "numerics",
        out,
        opened,
        model,
        options,
        records(),
        lambda found: {"paths": summarise_numerics(found)},
        numerics_html,
        json,
    )


@bench.command("evidence", epilog="Example: kvedit bench evidence musique_ans_v1.0_dev.jsonl --budgets 5%")
def evidence(
    files: Files,
    out: Out = "runs/evidence",
    questions: Questions = 60,
    policies: Policies = "sur,units-bm25,sur-plain,units-random",
    budgets: Budgets = "2%,5%,10%",
    model: ModelName = DEFAULT_NAME,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Which share of the rows that a policy buys lies in the evidence? Needs no forward pass."""
    from kvedit.bench import qa
    from kvedit.bench.arms import Arm
    from kvedit.bench.evidence import precision, summarise_precision
    from kvedit.bench.report import evidence_html

    named = names_of("--policies", policies, POLICY_NAMES)
    arms = [Arm.parse(f"{policy}@{budget}") for budget in split(budgets) for policy in named]
    sets, left = read_questions(files, qa.unfit, questions)
    opened = open_model(model, device, dtype)
    cases = [case for found in sets for case in qa.cases(found, seed=seed, limit=questions)]
    options = {"files": files, "questions": questions, "seed": seed, "arms": [arm.name for arm in arms]}
    say_left(left)
    _measure(
        "evidence",
        out,
        opened,
        model,
        options,
        precision(opened, cases, arms, seed=seed),
        lambda records: {"datasets": summarise_precision(records)},
        evidence_html,
        json,
    )


@bench.command("compare", epilog="Example: kvedit bench compare runs/a runs/b")
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A run's folder.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another run's folder.")],
    json: Json = False,
) -> None:
    """Pair two runs case by case: what changed from A to B?"""
    from kvedit.bench.run import Run
    from kvedit.bench.summary import compare as paired
    from kvedit.cli import runs

    a, b = (Run.open(here.path(name)) for name in (first, second))
    found = paired(a.records(), b.records())
    here.give(found, json, lambda: runs.show_comparison(found))


@bench.command("report", epilog="Example: kvedit bench report runs/niah")
def report(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A run's folder.")], json: Json = False
) -> None:
    """Check a run of cases, and write its summary and report again."""
    from kvedit.bench.run import Run
    from kvedit.cli import runs

    run = Run.open(here.path(folder))
    summary = run.finish()
    here.give(summary, json, lambda: runs.show_run(summary, run.folder))


def _measure(
    name: str,
    out: str,
    model: Model,
    called: str,
    options: dict[str, Any],
    found: Iterable[dict[str, Any]],
    summarise: Callable[[list[dict[str, Any]]], dict[str, Any]],
    page: Callable[[dict[str, Any], list[dict[str, Any]], dict[str, Any]], str],
    as_json: bool,
) -> None:
    """Take all records, and write them with summary and report."""
    from kvedit.bench.run import Run, describe
    from kvedit.cli import runs

    command = shlex.join(["kvedit", *sys.argv[1:]])
    run = Run.start(here.path(out), describe(name, model, called, [], options, command))
    run.clear()
    with render.counting("records") as progress:
        for number, record in enumerate(found, start=1):
            run.append(record)
            progress(number)
    records = run.records()
    summary = {"schema_version": 1, **summarise(records)}
    run.write(summary, page(run.config, records, summary))
    here.give(
        {"folder": str(run.folder), **summary},
        as_json,
        lambda: runs.SHOW[name](summary, run.config, run.folder),
    )
