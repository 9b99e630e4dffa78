"""Commands that run commands: repl and replay."""

from __future__ import annotations

from typing import Annotated

import typer

from kvedit.cli.command import Reply, command
from kvedit.cli.workspace import here


@command(example="kvedit repl")
def repl(
    session: Annotated[
        str | None, typer.Option("--session", "-s", metavar="NAME", help="Session; else the current one.")
    ] = None,
    no_history: Annotated[bool, typer.Option("--no-history", help="Remember no line that is typed.")] = False,
) -> None:
    """Open the REPL: the same commands, with the model kept warm. So does `kvedit` alone.

    With --json every command prints its JSON object.
    """
    from kvedit.cli.repl.loop import run

    here.name, here.as_json = session, not here.streams
    run(history=not no_history)


@command(example="kvedit replay sessions/contract/script.kvedit")
def replay(
    script: Annotated[str, typer.Argument(help="Script to run; - is standard input.")],
    keep_going: Annotated[
        bool, typer.Option("--keep-going", "-k", help="Go on after a failed command or expectation.")
    ] = False,
    jsonl: Annotated[
        str | None,
        typer.Option("--jsonl", metavar="OUT", help="Write one JSON record a command to this file."),
    ] = None,
) -> Reply:
    """Run a script of commands, one a line, and check what it expects.

    Paths in a script count from the script's folder. Exit code 1 means that an expectation
    failed; a command that failed gives its own.
    """
    from kvedit.cli.replay import replay_script

    return replay_script(script, keep_going=keep_going, jsonl=jsonl)
