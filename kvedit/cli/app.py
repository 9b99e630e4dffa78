"""The command line: all commands, and the REPL when none is given."""

from __future__ import annotations

from typing import Annotated

import typer

from kvedit import __version__
from kvedit.cli.command import app
from kvedit.cli.commands import (  # noqa: F401  (importing a module registers its commands)
    bench,
    doctor,
    documents,
    edits,
    history,
    measure,
    models,
    questions,
    scripts,
    sessions,
)

__all__ = ["app"]


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version.")] = False,
) -> None:
    """Without a command, open the REPL."""
    if version:
        typer.echo(f"kvedit {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        from kvedit.cli.repl.loop import run

        run()
