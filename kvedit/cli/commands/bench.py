"""The `bench` commands: which rows are worth refreshing on a budget, with your model?"""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvedit.cli import output
from kvedit.cli.command import Reply, app, command
from kvedit.cli.inputs import lengths_of, names_of, open_model, read_questions, say_left, split, texts_of
from kvedit.cli.options import Device, Dtype, ModelName, declared, one_of
from kvedit.cli.workspace import here
from kvedit.errors import check_one_of
from kvedit.names import DEFAULT_MODEL, SUPPORTS
from kvedit.policies.registry import POLICIES

if TYPE_CHECKING:
    from kvedit.lab.arms import Arm
    from kvedit.lab.case import Case
    from kvedit.model.model import Model

bench = typer.Typer(help="Measure which rows are worth refreshing, on your model.", no_args_is_help=True)
app.add_typer(bench, name="bench")
VARIANT_NAMES = ("same-key", "relabel", "derived", "injection")
TEMPLATE_NAMES = ("plain", "ruler")

Out = Annotated[
    str, typer.Option("--out", "-o", metavar="FOLDER", help="The run's folder. An interrupted run continues.")
]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        "-a",
        metavar="ARM",
        help="shift, replay, reprefill, erratum, POLICY@BUDGET or POLICY/SUPPORT@BUDGET. Repeat it.",
    ),
]
Policies = Annotated[
    str,
    typer.Option(metavar="NAMES", help="Policies, separated by commas; each runs at every budget."),
]
Budgets = Annotated[str, typer.Option(metavar="5%,10%", help="Budgets, separated by commas.")]
Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="Data sets, as published or as JSONL.")]
Questions = Annotated[int, typer.Option(metavar="N", min=1, help="Questions per file.")]
Hay = Annotated[
    str | None,
    typer.Option(
        "--haystack", metavar="FILE", help="Text or folder of texts to hide needles in. Default: built-in."
    ),
]


def _check_ray(address: str | None) -> str | None:
    if address is not None:
        from kvedit.lab.cluster import check_address

        check_address(address)
    return address


Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run the cases on Ray: local:N for N local workers, auto, or HOST:PORT.",
        callback=_check_ray,
    ),
]
SupportName = Annotated[str | None, declared("support")]
Seed = Annotated[int, typer.Option(metavar="N", help="Random seed.")]


@command("niah", example="kvedit bench niah --cases 24 --policies sur,tokens --budgets 2%", group=bench)
def niah(
    out: Out = "runs/niah",
    variant: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"{', '.join(VARIANT_NAMES)}.", autocompletion=one_of(VARIANT_NAMES)
        ),
    ] = "same-key",
    template: Annotated[
        str, typer.Option(metavar="NAMES", help="Wording of the needles: plain, ruler, or both.")
    ] = "plain,ruler",
    cases: Annotated[int, typer.Option(metavar="N", min=1, help="Number of cases.")] = 96,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="A-B", help="Tokens per text. Default: 1000-2000, or 400-600 for relabel."),
    ] = None,
    haystack: Hay = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="test, or dev for tuning.")] = "test",
    policies: Policies = "sur,window,tokens,units-random",
    budgets: Budgets = "2%,5%",
    support: SupportName = None,
    arm: Arms = None,
    model: ModelName = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    ray: Ray = None,
) -> Reply:
    """Erasing-NIAH: a sentence is deleted, and the question asks about what remains."""
    from kvedit.lab.niah import SPLITS

    check_one_of("variant", variant, VARIANT_NAMES)
    check_one_of("split", split, SPLITS)
    options = {
        "variant": variant,
        "templates": names_of("template", template, TEMPLATE_NAMES),
        "count": cases,
        "tokens": lengths_of(tokens or ("400-600" if variant == "relabel" else "1000-2000")),
        "split": split,
        "seed": seed,
    }
    arms = _arms(arm, policies, budgets, support)
    return _hide("niah", out, model, device, dtype, haystack, arms, options, ray)


@command("qa", example="kvedit bench qa hotpot_dev_distractor_v1.json --questions 12", group=bench)
def qa(
    files: Files,
    out: Out = "runs/qa",
    questions: Questions = 100,
    policies: Policies = "sur,tokens,units-random",
    budgets: Budgets = "5%",
    support: SupportName = None,
    arm: Arms = None,
    model: ModelName = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    ray: Ray = None,
) -> Reply:
    """Multi-hop questions: one irrelevant passage is deleted, at three placements.

    Full sets take a night on a CPU. An interrupted run continues where it stopped.
    """
    from kvedit.lab import qa as maker

    arms = _arms(arm, policies, budgets, support)
    options = {"files": [Path(name).name for name in files], "questions": questions, "seed": seed}
    sets, left = read_questions(files, maker.unfit, questions)
    cases = [case for found in sets for case in maker.cases(found, seed=seed, limit=questions)]
    say_left(left)
    return _run("qa", out, open_model(model, device, dtype), model, arms, cases, options, ray)


@command("location", example="kvedit bench location hotpot_dev_distractor_v1.json", group=bench)
def location(
    files: Files,
    out: Out = "runs/location",
    questions: Questions = 25,
    policies: Policies = "sur,tokens",
    budgets: Budgets = "5%",
    arm: Arms = None,
    model: ModelName = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    ray: Ray = None,
) -> Reply:
    """Does it matter where the evidence lies: before the edit, just after it, or at the end?"""
    from kvedit.lab import location as maker

    arms = _arms(arm, policies, budgets, None)
    options = {"files": [Path(name).name for name in files], "questions": questions, "seed": seed}
    sets, left = read_questions(files, maker.unfit, questions)
    cases = [case for found in sets for case in maker.cases(found, seed=seed, limit=questions)]
    say_left(left)
    return _run("location", out, open_model(model, device, dtype), model, arms, cases, options, ray)


@command("geometry", example="kvedit bench geometry --policy sur --cases 24", group=bench)
def geometry(
    out: Out = "runs/geometry",
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Scoring policy.", autocompletion=one_of(POLICIES))
    ] = "sur",
    budgets: Budgets = "1%,2%,5%,10%,20%,40%,80%",
    cases: Annotated[int, typer.Option(metavar="N", min=1, help="Number of cases.")] = 24,
    tokens: Annotated[str, typer.Option(metavar="A-B", help="Tokens per text.")] = "1000-2000",
    haystack: Hay = None,
    model: ModelName = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    ray: Ray = None,
) -> Reply:
    """Compare supports: one policy's scores as rows, window and units, over budgets (C.1)."""
    check_one_of("policy", policy, POLICIES)
    names = [f"{policy}/{support}@{budget}" for support in SUPPORTS for budget in split(budgets)]
    options = {"count": cases, "tokens": lengths_of(tokens), "seed": seed}
    return _hide("geometry", out, model, device, dtype, haystack, _arms(names, "", "", None), options, ray)


def _hide(
    bench: str,
    out: str,
    model: str,
    device: str,
    dtype: str,
    haystack: str | None,
    arms: list[Arm],
    options: dict[str, Any],
    ray: str | None,
) -> Reply:
    """Hide needles in a haystack and run the cases."""
    from kvedit.lab.haystack import Haystack
    from kvedit.lab.niah import cases

    texts = texts_of(haystack)
    opened = open_model(model, device, dtype)
    hidden = list(cases([Haystack(text, opened.tokenizer) for text in texts], **options))
    return _run(bench, out, opened, model, arms, hidden, {**options, "haystack": haystack or "built-in"}, ray)


def _run(
    bench: str,
    out: str,
    model: Model,
    called: str,
    arms: list[Arm],
    cases: list[Case],
    options: dict[str, Any],
    ray: str | None,
) -> Reply:
    """Run the cases with a live table and write the report."""
    from kvedit.cli import runs
    from kvedit.lab.cluster import distribute
    from kvedit.lab.run import Run, describe, execute

    command = shlex.join(["kvedit", *sys.argv[1:]])
    run = Run.start(here.path(out), describe(bench, model, called, arms, options, command))
    skipped: list[str] = []
    go = execute if ray is None else partial(distribute, address=ray)
    try:
        with runs.live_run([arm.name for arm in arms], len(cases)) as show:
            go(
                run,
                model,
                cases,
                arms,
                seed=options["seed"],
                on_case=show,
                on_skip=lambda case, why: skipped.append(why),
            )
    except KeyboardInterrupt:
        done = output.count(len(run.records()), "case")
        output.say(f"Interrupted with {done} done. Run the same command again to continue.")
        raise typer.Exit(130) from None
    for why in skipped:
        output.say(output.one_line(f"Left out: {why}"))
    summary = run.finish()
    return Reply(
        {"folder": str(run.folder), "left_out": len(skipped), **summary},
        lambda: runs.show_run(summary, run.folder),
    )


def _arms(named: list[str] | None, policies: str, budgets: str, support: str | None) -> list[Arm]:
    """Return the named arms, or each policy at each budget, between `shift` and `reprefill`."""
    from kvedit.lab.arms import Arm

    if not named:
        suffix = "" if support is None else f"/{support}"
        chosen = names_of("policy", policies, POLICIES)
        named = [f"{policy}{suffix}@{budget}" for budget in split(budgets) for policy in chosen]
    named = list(dict.fromkeys(["shift", *named, "reprefill"]))
    return [Arm.parse(name) for name in named]
