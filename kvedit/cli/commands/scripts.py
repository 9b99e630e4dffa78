"""Commands that run commands: repl and replay."""

from __future__ import annotations

from typing import Annotated

import typer

from kvedit.cli.command import Reply, command
from kvedit.cli.workspace import here


@command(example="kvedit repl")
def repl(
    session: Annotated[
        str | None, typer.Option("--session", "-s", metavar="NAME", help="Session. Default: the current one.")
    ] = None,
    no_history: Annotated[bool, typer.Option("--no-history", help="Do not save typed lines.")] = False,
) -> None:
    """Open the REPL: the same commands, with the model kept warm. `kvedit` alone does the same.

    With --json every command prints its JSON object.
    """
    from kvedit.cli.repl.loop import run

    here.name, here.as_json = session, not here.streams
    run(history=not no_history)


@command(example="kvedit replay sessions/contract/script.kvedit")
def replay(
    script: Annotated[str, typer.Argument(help="Script to run; - reads standard input.")],
    keep_going: Annotated[
        bool, typer.Option("--keep-going", "-k", help="Continue after a failed command or expectation.")
    ] = False,
    jsonl: Annotated[
        str | None,
        typer.Option("--jsonl", metavar="OUT", help="Write one JSON record per command to this file."),
    ] = None,
) -> Reply:
    """Run a script of commands, one per line, and check its expectations.

    Paths in a script are relative to the script's folder. Exit code 1 means that an expectation
    failed; a failed command exits with its own code.
    """
    from kvedit.cli.replay import replay_script

    return replay_script(script, keep_going=keep_going, jsonl=jsonl)
