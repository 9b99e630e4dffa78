"""Commands that need the model: ask, explain, heal, verify, purge; and forget."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvedit.cli import output
from kvedit.cli.command import Reply, command
from kvedit.cli.options import ModelPlace, Question, SessionName, declared, question_of
from kvedit.cli.progress import progressing, repairing
from kvedit.cli.workspace import here
from kvedit.errors import UsageError
from kvedit.repair.budget import Budget
from kvedit.repair.options import Options

_Selecting = Annotated[Options, lambda known: known.selects]
_Verifying = Annotated[Options, lambda known: known.setting == "policy"]


@command(example="kvedit ask 'When must fees be paid?' --budget 5%")
def ask(question: Question, options: Options, model: ModelPlace = None, session: SessionName = None) -> Reply:
    """Repair the cache on a budget and answer.

    The answer goes to stdout; timings and counts go to stderr.
    """
    from kvedit.cli import tables
    from kvedit.timing import Timings, clock

    text = question_of(question)
    opened, timings, start = here.session(session), Timings(), clock()
    here.ready(opened, model)
    timings.add("load", clock() - start)
    with repairing() as on_phase:
        answer = opened.ask(
            text,
            options,
            timings=timings,
            on_text=(lambda text: output.out(text, end="")) if here.streams else (lambda text: None),
            on_phase=on_phase,
        )

    def show() -> None:
        output.out("")
        tables.show_answer(answer)

    interrupted = answer.finish_reason == "interrupted"
    return Reply(output.answer_json(answer, text), show, exit_code=130 if interrupted else 0)


@command(example="kvedit explain 'When must fees be paid?' --budget 5%")
def explain(
    question: Question, options: _Selecting, model: ModelPlace = None, session: SessionName = None
) -> Reply:
    """Show which units a question would refresh, and why, without computing them.

    The selected lines go to stdout; scores and cost go to stderr.
    """
    from kvedit.cli import tables

    text, opened = question_of(question), here.session(session)
    here.ready(opened, model)
    found = opened.explain(text, options)
    return Reply({"question": text, **asdict(found)}, lambda: tables.show_explanation(found, opened.document))


@command(example="kvedit heal --budget 20%")
def heal(
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="20%|128t|full",
            help="How many of the inexact rows to recompute. Default: all.",
        ),
    ] = None,
    model: ModelPlace = None,
    session: SessionName = None,
) -> Reply:
    """Recompute rows from the frontier onward, so that they become exact.

    Ctrl-C stops it; rows computed so far are kept.
    """
    chosen = None if budget is None else Budget.parse(budget)
    opened = here.session(session)
    here.ready(opened, model)
    with progressing("heal") as progress:
        healed = opened.heal(budget=chosen, progress=progress)
    interrupted = healed.finished == "interrupted"
    return Reply(
        asdict(healed), lambda: output.say(output.healed_text(healed)), exit_code=130 if interrupted else 0
    )


@command(example="kvedit verify --question 'When must fees be paid?'")
def verify(
    options: _Verifying,
    question: Annotated[
        str | None, typer.Option("--question", "-q", metavar="TEXT", help="Also compare the answers to it.")
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
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of tokens per answer.")
    ] = 64,
    continue_: Annotated[bool, declared("conversation")] = False,
    model: ModelPlace = None,
    session: SessionName = None,
) -> Reply:
    """Compare the cache with a clean prefill: how stale is it, and does that change the answer?

    Computes a full prefill. Nothing is kept.
    """
    from kvedit.cli import tables

    chosen = None if budget is None else Budget.parse(budget)
    if question is None and (chosen is not None or continue_):
        raise UsageError("--budget and --continue need a question.", "Add --question TEXT.")
    opened = here.session(session)
    here.ready(opened, model)
    with progressing("prefill") as progress:
        found = opened.verify(
            question,
            budget=chosen,
            policy=options.policy,
            max_new_tokens=max_new_tokens,
            conversation=continue_ or (options.conversation and question is not None),
            progress=progress,
        )
    record = {"question": question, **asdict(found), "heat": tables.heat_columns(found.heat).tolist()}
    return Reply(record, lambda: tables.show_verification(found))


@command(example="kvedit forget")
def forget(session: SessionName = None) -> Reply:
    """Drop the conversation from the context. Earlier revisions still hold it; see purge."""
    opened = here.session(session)
    dropped = opened.forget()
    return Reply(
        {"tokens": dropped},
        lambda: output.say(
            f"Dropped {output.count(dropped, 'token')} of conversation."
            if dropped
            else "There is no conversation."
        ),
    )


@command(example="kvedit purge")
def purge(model: ModelPlace = None, session: SessionName = None) -> Reply:
    """Compute the current text from scratch and drop everything older.

    This removes all older revisions, questions and conversations, so undo is no longer possible.
    See docs/privacy.md for what purge cannot reach.
    """
    opened = here.session(session)
    here.ready(opened, model)
    with progressing("prefill") as progress:
        done = opened.purge(progress=progress)
    return Reply(asdict(done), lambda: output.say(output.purge_text(done)))
