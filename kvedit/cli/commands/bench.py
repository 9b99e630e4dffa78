"""The `bench` commands: where is a budget of refreshed rows best spent, on your model?"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvedit.cli import output as render
from kvedit.cli.options import (
    POLICY_NAMES,
    Device,
    Dtype,
    Json,
    ModelName,
    SupportName,
    app,
    check_one_of,
    check_place,
    one_of,
)
from kvedit.cli.workspace import here
from kvedit.errors import UsageError
from kvedit.names import DEFAULT_MODEL, SUPPORTS

if TYPE_CHECKING:
    from kvedit.lab.arms import Arm
    from kvedit.lab.case import Case
    from kvedit.lab.questions import Question
    from kvedit.model.model import Model

bench = typer.Typer(help="Measure where a budget is best spent, on your model.", no_args_is_help=True)
app.add_typer(bench, name="bench")
VARIANT_NAMES = ("same-key", "relabel", "derived", "injection")
TEMPLATE_NAMES = ("plain", "ruler")

Out = Annotated[
    str, typer.Option("--out", "-o", metavar="FOLDER", help="The run's folder; a run that stopped goes on.")
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
    typer.Option(metavar="NAMES", help="Policies, with commas; each at every budget."),
]
Budgets = Annotated[str, typer.Option(metavar="5%,10%", help="Budgets, with commas.")]
Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="Data sets, as published or as JSONL.")]
Questions = Annotated[int, typer.Option(metavar="N", min=1, help="Questions of each file.")]
Hay = Annotated[
    str | None,
    typer.Option(
        "--haystack", metavar="FILE", help="Text, or folder of texts, to hide in. Default: a built-in one."
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
        help="Hand the cases to Ray: local:N for N workers here, auto, or HOST:PORT.",
        callback=_check_ray,
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", help="Of all draws.")]


@bench.command("niah", epilog="Example: kvedit bench niah --cases 24 --policies sur,tokens --budgets 2%")
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
    cases: Annotated[int, typer.Option(metavar="N", min=1, help="Cases.")] = 96,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="A-B", help="Tokens of a text. Default: 1000-2000, and 400-600 for relabel."),
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
    json: Json = False,
) -> None:
    """Erasing-NIAH: a sentence is deleted, and the question asks for what is left."""
    from kvedit.lab.niah import SPLITS

    check_one_of("--variant", variant, VARIANT_NAMES)
    check_one_of("--split", split, SPLITS)
    options = {
        "variant": variant,
        "templates": names_of("--template", template, TEMPLATE_NAMES),
        "count": cases,
        "tokens": _lengths(tokens or ("400-600" if variant == "relabel" else "1000-2000")),
        "split": split,
        "seed": seed,
    }
    arms = _arms(arm, policies, budgets, support)
    _hide("niah", out, model, device, dtype, haystack, arms, options, ray, json)


@bench.command("qa", epilog="Example: kvedit bench qa hotpot_dev_distractor_v1.json --questions 12")
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
    json: Json = False,
) -> None:
    """Multi-hop questions: one passage that does not matter is deleted, at three placements.

    Full sets take a night on a CPU; a run that stopped goes on where it was.
    """
    from kvedit.lab import qa as maker

    arms = _arms(arm, policies, budgets, support)
    options = {"files": [Path(name).name for name in files], "questions": questions, "seed": seed}
    sets, left = read_questions(files, maker.unfit, questions)
    cases = [case for found in sets for case in maker.cases(found, seed=seed, limit=questions)]
    say_left(left)
    _run("qa", out, open_model(model, device, dtype), model, arms, cases, options, ray, json)


@bench.command("location", epilog="Example: kvedit bench location hotpot_dev_distractor_v1.json")
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
    json: Json = False,
) -> None:
    """Does it matter where the evidence lies: before the edit or after it, near or at the end?"""
    from kvedit.lab import location as maker

    arms = _arms(arm, policies, budgets, None)
    options = {"files": [Path(name).name for name in files], "questions": questions, "seed": seed}
    sets, left = read_questions(files, maker.unfit, questions)
    cases = [case for found in sets for case in maker.cases(found, seed=seed, limit=questions)]
    say_left(left)
    _run("location", out, open_model(model, device, dtype), model, arms, cases, options, ray, json)


@bench.command("geometry", epilog="Example: kvedit bench geometry --policy sur --cases 24")
def geometry(
    out: Out = "runs/geometry",
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Whose scores.", autocompletion=one_of(POLICY_NAMES))
    ] = "sur",
    budgets: Budgets = "1%,2%,5%,10%,20%,40%,80%",
    cases: Annotated[int, typer.Option(metavar="N", min=1, help="Cases.")] = 24,
    tokens: Annotated[str, typer.Option(metavar="A-B", help="Tokens of a text.")] = "1000-2000",
    haystack: Hay = None,
    model: ModelName = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    ray: Ray = None,
    json: Json = False,
) -> None:
    """One score, spent as rows, as a window and as units, over budgets (C.1)."""
    check_one_of("--policy", policy, POLICY_NAMES)
    names = [f"{policy}/{rule}@{budget}" for rule in SUPPORTS for budget in split(budgets)]
    options = {"count": cases, "tokens": _lengths(tokens), "seed": seed}
    _hide("geometry", out, model, device, dtype, haystack, _arms(names, "", "", None), options, ray, json)


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
    as_json: bool,
) -> None:
    """Hide needles in a haystack, and run the cases."""
    from kvedit.lab.haystack import Haystack
    from kvedit.lab.niah import cases

    texts = texts_of(haystack)
    opened = open_model(model, device, dtype)
    made = list(cases([Haystack(text, opened.tokenizer) for text in texts], **options))
    _run(bench, out, opened, model, arms, made, {**options, "haystack": haystack or "built-in"}, ray, as_json)


def _run(
    bench: str,
    out: str,
    model: Model,
    called: str,
    arms: list[Arm],
    cases: list[Case],
    options: dict[str, Any],
    ray: str | None,
    as_json: bool,
) -> None:
    """Run the cases with a live table, and write the report."""
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
        kept = render.count(len(run.records()), "case")
        render.say(f"Interrupted with {kept} done. Run the same command again to go on.")
        raise typer.Exit(130) from None
    for why in skipped:
        render.say(render.one_line(f"Left out: {why}"))
    summary = run.finish()
    here.give(
        {"folder": str(run.folder), "left_out": len(skipped), **summary},
        as_json,
        lambda: runs.show_run(summary, run.folder),
    )


def _arms(named: list[str] | None, policies: str, budgets: str, support: str | None) -> list[Arm]:
    """Read the arms: those that were named, or every policy at every budget between the ends."""
    from kvedit.lab.arms import Arm

    if not named:
        rule = "" if support is None else f"/{support}"
        chosen = names_of("--policies", policies, POLICY_NAMES)
        named = [f"{policy}{rule}@{budget}" for budget in split(budgets) for policy in chosen]
    named = list(dict.fromkeys(["shift", *named, "reprefill"]))
    return [Arm.parse(name) for name in named]


def split(text: str) -> list[str]:
    """Cut a list at its commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def names_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Read names with commas between; raises `UsageError` when one is not known."""
    found = split(text)
    for name in found:
        check_one_of(option, name, tuple(known))
    if not found:
        raise UsageError(f"{option} names nothing.", f"Choose of {', '.join(known)}.")
    return found


def _lengths(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 200 <= found[0] <= found[1]:
        raise UsageError(f"'{text}' is no range of tokens.", "Write A-B, at least 200, such as 1000-2000.")
    return found


def read_questions(
    files: list[str], unfit: Callable[[Question], str | None], limit: int
) -> tuple[list[list[Question]], dict[str, str]]:
    """Read data sets; give the questions that qualify, a list a file, and why others do not."""
    from kvedit.lab.datasets import read
    from kvedit.lab.qa import sift

    found: list[list[Question]] = []
    left: dict[str, str] = {}
    for name in files:
        fit, reasons = sift(read(here.path(name)), unfit)
        found.append(fit[:limit])
        left |= reasons
    return found, left


def say_left(left: dict[str, str]) -> None:
    """Say how many questions give no case, and why."""
    for reason, number in Counter(left.values()).most_common():
        render.say(f"Left out: {render.count(number, 'question')}, because {reason}.")


def numbers_of(option: str, text: str) -> list[int]:
    """Read whole numbers with commas between; raises `UsageError` when one is none."""
    try:
        found = [int(part) for part in split(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(f"{option} cannot be '{text}'.", "Write whole numbers, such as 1000,2000.")
    return found


def texts_of(place: str | None) -> list[str]:
    """Read texts: one file, all files of a folder in the order of their names, or the built-in one."""
    from kvedit.lab.haystack import built_in
    from kvedit.text.document import Document

    if place is None:
        return [built_in()]
    path = here.path(place)
    paths = sorted(part for part in path.iterdir() if part.is_file()) if path.is_dir() else [path]
    if not paths:
        raise UsageError(f"{path} holds no file.", "Name a text, or a folder of texts.")
    return [Document.read(part).text for part in paths]


def open_model(name: str, device: str, dtype: str) -> Model:
    """Find and open a model, and check it as `load` does; show that this goes on."""
    check_place(device, dtype)
    with render.working("Loading the model") as say:
        from kvedit.checkpoint import opening
        from kvedit.checkpoint.resolve import resolve

        return opening.open_model(resolve(name, say), device=device, dtype=dtype)
