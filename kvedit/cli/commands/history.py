"""Commands for history: undo, redo, log, checkout."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvedit.cli import output
from kvedit.cli.command import Reply, change_reply, command
from kvedit.cli.options import SessionName
from kvedit.cli.workspace import here

Count = Annotated[int, typer.Argument(metavar="N", help="How many edits.")]


@command(example="kvedit undo 2")
def undo(count: Count = 1, session: SessionName = None) -> Reply:
    """Restore the text and its cache; nothing is recomputed."""
    return change_reply(here.session(session).undo(count))


@command(example="kvedit redo")
def redo(count: Count = 1, session: SessionName = None) -> Reply:
    """Redo undone edits."""
    return change_reply(here.session(session).redo(count))


@command(example="kvedit checkout 3")
def checkout(
    revision: Annotated[int, typer.Argument(metavar="REVISION", help="Its number in the log.")],
    session: SessionName = None,
) -> Reply:
    """Make any revision of the log the current one."""
    return change_reply(here.session(session).checkout(revision))


@command(example="kvedit log --script > session.kvedit")
def log(
    script: Annotated[
        bool, typer.Option("--script", help="Print the commands that rebuild the session.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Include undone edits.")] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="Only the latest N.")
    ] = None,
    session: SessionName = None,
) -> Reply:
    """List the revisions, latest first: what, when, lines, tokens, stale rows."""
    from kvedit.cli import tables

    opened = here.session(session)
    if script:
        text = opened.script()
        return Reply({"script": text}, lambda: output.out(text, end=""))
    entries = opened.log(everything=everything)[:limit]
    present = opened.manifest.revision
    records = [{**asdict(entry), "present": entry.number == present} for entry in entries]
    for record in records:
        del record["changes"]
    return Reply({"revisions": records}, lambda: tables.show_log(entries, present))
