"""Commands that need the model: ask, explain, heal, verify, purge; and forget."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvedit.cli import output as render
from kvedit.cli.options import (
    Budget,
    Continue,
    Json,
    ModelPlace,
    Policy,
    Question,
    SessionName,
    SupportName,
    app,
    one_of,
    question_of,
)
from kvedit.cli.workspace import here
from kvedit.errors import UsageError
from kvedit.names import DECODE_WEIGHTS, EXECUTOR_NAMES

if TYPE_CHECKING:
    from kvedit.repair import budget as budgets

Seed = Annotated[int, typer.Option(metavar="N", help="For sampling and random policies.")]


@app.command(epilog="Example: kvedit ask 'When must fees be paid?' --budget 5%")
def ask(
    question: Question,
    budget: Budget = None,
    policy: Policy = None,
    support: SupportName = None,
    executor: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(EXECUTOR_NAMES)}.",
            autocompletion=one_of(EXECUTOR_NAMES),
        ),
    ] = "auto",
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of answer at most. Default: 256, or what fits.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Seed = 0,
    decode_weights: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Decode with weights of fewer bits, on a CPU: "
            f"{', '.join(DECODE_WEIGHTS)}. Default: the model's own.",
            autocompletion=one_of(DECODE_WEIGHTS),
        ),
    ] = None,
    chat: Continue = False,
    no_keep: Annotated[bool, typer.Option("--no-keep", help="Leave the session as it is.")] = False,
    model: ModelPlace = None,
    session: SessionName = None,
    json: Json = False,
) -> None:
    """Repair the cache on a budget and answer.

    The answer goes to stdout; timings and counts go to stderr.
    """
    from kvedit.cli import tables
    from kvedit.timing import Timings, clock

    chosen, words = _budget(budget), question_of(question)
    opened, timings, start = here.session(session), Timings(), clock()
    options: dict[str, Any] = {
        "budget": chosen,
        "policy": policy or here.settings.policy,
        "support": support,
        "executor": executor,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "keep": not no_keep,
        "conversation": chat or (here.settings.chat and not no_keep),
        "decode_weights": decode_weights or here.settings.decode_weights,
    }
    with render.working("Loading the model"):
        from kvedit.repair.options import Options

        Options(**options)
    here.ready(opened, model)
    timings.add("load", clock() - start)
    with render.repairing() as on_phase:
        answer = opened.ask(
            words,
            **options,
            timings=timings,
            on_text=(lambda text: None) if json else (lambda text: render.out(text, end="")),
            on_phase=on_phase,
        )

    def human() -> None:
        render.out("")
        tables.show_answer(answer)

    here.give(render.answer_json(answer, words), json, human)
    if answer.finish_reason == "interrupted":
        raise typer.Exit(130)


@app.command(epilog="Example: kvedit explain 'When must fees be paid?' --budget 5%")
def explain(
    question: Question,
    budget: Budget = None,
    policy: Policy = None,
    support: SupportName = None,
    seed: Seed = 0,
    chat: Continue = False,
    model: ModelPlace = None,
    session: SessionName = None,
    json: Json = False,
) -> None:
    """Show which units a question would refresh, and why, without computing them.

    The chosen lines go to stdout, scores and cost to stderr.
    """
    from kvedit.cli import tables

    chosen, words, opened = _budget(budget), question_of(question), here.session(session)
    here.ready(opened, model)
    found = opened.explain(
        words,
        budget=chosen,
        policy=policy or here.settings.policy,
        support=support,
        seed=seed,
        conversation=chat or here.settings.chat,
    )
    record = {"question": words, **asdict(found)}
    here.give(record, json, lambda: tables.show_explanation(found, opened.document))


@app.command(epilog="Example: kvedit heal --budget 20%")
def heal(
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="20%|128t|full",
            help="Rows to recompute, of those that are not exact. Default: all.",
        ),
    ] = None,
    model: ModelPlace = None,
    session: SessionName = None,
    json: Json = False,
) -> None:
    """Recompute rows from the frontier onward, so that they become exact.

    Ctrl-C stops it, and what was computed until then is kept.
    """
    from kvedit.repair.budget import Budget as Rows

    chosen = None if budget is None else Rows.parse(budget)
    opened = here.session(session)
    here.ready(opened, model)
    with render.progressing("heal") as progress:
        healed = opened.heal(budget=chosen, progress=progress)
    here.give(asdict(healed), json, lambda: render.say(render.healed_text(healed)))
    if healed.finished == "interrupted":
        raise typer.Exit(130)


@app.command(epilog="Example: kvedit verify --question 'When must fees be paid?'")
def verify(
    question: Annotated[
        str | None, typer.Option("--question", "-q", metavar="TEXT", help="Compare the answers to it, too.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="5%|128t|0|full",
            help="Rows to refresh for the question before comparing. Default: 0.",
        ),
    ] = None,
    policy: Policy = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of either answer at most.")
    ] = 64,
    chat: Continue = False,
    model: ModelPlace = None,
    session: SessionName = None,
    json: Json = False,
) -> None:
    """Compare the cache with a clean prefill: how stale is it, and does that change the answer?

    Computes a whole prefill. Nothing is kept.
    """
    from kvedit.cli import tables
    from kvedit.repair.budget import Budget as Rows

    chosen = None if budget is None else Rows.parse(budget)
    if question is None and (chosen is not None or chat):
        raise UsageError(
            "A budget is chosen for a question, and there is none.", "Give --question TEXT, too."
        )
    opened = here.session(session)
    here.ready(opened, model)
    with render.progressing("prefill") as progress:
        found = opened.verify(
            question,
            budget=chosen,
            policy=policy or here.settings.policy,
            max_new_tokens=max_new_tokens,
            conversation=chat or (here.settings.chat and question is not None),
            progress=progress,
        )
    record = {"question": question, **asdict(found), "heat": tables.heat_columns(found.heat).tolist()}
    here.give(record, json, lambda: tables.show_verification(found))


@app.command(epilog="Example: kvedit forget")
def forget(session: SessionName = None, json: Json = False) -> None:
    """Drop the conversation from the context. The log still holds it; see purge."""
    opened = here.session(session)
    dropped = opened.forget()
    here.give(
        {"tokens": dropped},
        json,
        lambda: render.say(
            f"Dropped {render.count(dropped, 'token')} of conversation."
            if dropped
            else "There is no conversation."
        ),
    )


@app.command(epilog="Example: kvedit purge")
def purge(model: ModelPlace = None, session: SessionName = None, json: Json = False) -> None:
    """Compute the present text from nothing, and drop everything that held an older one.

    Every older revision, question and conversation goes, and with them undo. What it cannot
    reach is in docs/privacy.md.
    """
    opened = here.session(session)
    here.ready(opened, model)
    with render.progressing("prefill") as progress:
        done = opened.purge(progress=progress)
    here.give(asdict(done), json, lambda: render.say(render.purge_text(done)))


def _budget(text: str | None) -> budgets.Budget:
    from kvedit.repair import budget as budgets

    text = text if text is not None else here.settings.budget
    return budgets.Budget.default() if text is None else budgets.Budget.parse(text)
