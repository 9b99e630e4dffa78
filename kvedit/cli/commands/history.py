"""Commands on the past: undo, redo, log, checkout."""

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
    """Make edits again that were taken back."""
    return change_reply(here.session(session).redo(count))


@command(example="kvedit checkout 3")
def checkout(
    revision: Annotated[int, typer.Argument(metavar="REVISION", help="Its number in the log.")],
    session: SessionName = None,
) -> Reply:
    """Make any revision of the log the present one."""
    return change_reply(here.session(session).checkout(revision))


@command(example="kvedit log --script > session.kvedit")
def log(
    script: Annotated[
        bool, typer.Option("--script", help="Print the commands that rebuild the session.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="What was undone, too.")] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="The latest N only.")
    ] = None,
    session: SessionName = None,
) -> Reply:
    """List the revisions, the latest first: what, when, lines, tokens, stale rows."""
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
