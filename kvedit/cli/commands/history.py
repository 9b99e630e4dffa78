"""Commands on the past: undo, redo, log, checkout."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvedit.cli import output as render
from kvedit.cli.options import Json, SessionName, app, report_change
from kvedit.cli.workspace import here

Count = Annotated[int, typer.Argument(metavar="N", help="How many edits.")]


@app.command(epilog="Example: kvedit undo 2")
def undo(count: Count = 1, session: SessionName = None, json: Json = False) -> None:
    """Restore the text and its cache; nothing is recomputed."""
    report_change(here.session(session).undo(count), json)


@app.command(epilog="Example: kvedit redo")
def redo(count: Count = 1, session: SessionName = None, json: Json = False) -> None:
    """Make edits again that were taken back."""
    report_change(here.session(session).redo(count), json)


@app.command(epilog="Example: kvedit checkout 3")
def checkout(
    revision: Annotated[int, typer.Argument(metavar="REVISION", help="Its number in the log.")],
    session: SessionName = None,
    json: Json = False,
) -> None:
    """Make any revision of the log the present one."""
    report_change(here.session(session).checkout(revision), json)


@app.command(epilog="Example: kvedit log --script > session.kvedit")
def log(
    script: Annotated[
        bool, typer.Option("--script", help="Print the commands that rebuild the session.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="What was undone, too.")] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="The latest N only.")
    ] = None,
    session: SessionName = None,
    json: Json = False,
) -> None:
    """List the revisions, the latest first: what, when, lines, tokens, stale rows."""
    from kvedit.cli import tables

    opened = here.session(session)
    if script:
        text = opened.script()
        here.give({"script": text}, json, lambda: render.out(text, end=""))
        return
    entries = opened.log(everything=everything)[:limit]
    present = opened.manifest.revision
    records = [{**asdict(entry), "present": entry.number == present} for entry in entries]
    for record in records:
        del record["changes"]
    here.give({"revisions": records}, json, lambda: tables.show_log(entries, present))
