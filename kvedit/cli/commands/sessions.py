"""The `sessions` commands: list, use, copy, rename, remove, compact, check."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from kvedit.cli import output as render
from kvedit.cli.options import Json, SessionName, app, session_names
from kvedit.cli.workspace import here
from kvedit.errors import SessionError, UsageError

sessions = typer.Typer(help="List and manage sessions.", no_args_is_help=True)
app.add_typer(sessions, name="sessions")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the session.", autocompletion=session_names)]
NewName = Annotated[str, typer.Argument(metavar="NEW", help="The new name.")]


@sessions.command("list", epilog="Example: kvedit sessions list")
def sessions_list(json: Json = False) -> None:
    """List the sessions, with what they hold and which one is current."""
    from kvedit.cli import tables
    from kvedit.store.home import Home

    found = Home.default().list()
    here.give({"sessions": [asdict(item) for item in found]}, json, lambda: tables.show_sessions(found))


@sessions.command("use", epilog="Example: kvedit sessions use contract")
def sessions_use(name: Name, json: Json = False) -> None:
    """Make a session the current one."""
    from kvedit.store.home import Home

    Home.default().use(name)
    here.name = None
    here.give({"name": name}, json, lambda: render.say(f"The current session is '{name}'."))


@sessions.command("copy", epilog="Example: kvedit sessions copy contract contract-2")
def sessions_copy(name: Name, new: NewName, json: Json = False) -> None:
    """Copy a session. The copies share the cache on disk until they part."""
    from kvedit.store.home import Home

    Home.default().copy(name, new)
    here.give({"name": name, "new": new}, json, lambda: render.say(f"Copied '{name}' to '{new}'."))


@sessions.command("rename", epilog="Example: kvedit sessions rename contract lease")
def sessions_rename(name: Name, new: NewName, json: Json = False) -> None:
    """Give a session another name."""
    from kvedit.store.home import Home

    Home.default().rename(name, new)
    here.drop()
    here.give({"name": name, "new": new}, json, lambda: render.say(f"Renamed '{name}' to '{new}'."))


@sessions.command("remove", epilog="Example: kvedit sessions remove contract --yes")
def sessions_remove(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove a session from the disk, with its past. Your own file stays."""
    from kvedit.store.home import Home

    home = Home.default()
    store = home.store(name)
    if not store.exists() and not store.folder.is_dir():
        raise SessionError(f"There is no session '{name}'.", "Run `kvedit sessions list` to see them.")
    if not yes:
        if not sys.stdin.isatty() or json:
            raise UsageError(f"Removing '{name}' cannot be undone.", "Give --yes to remove it.")
        if not typer.confirm(f"Remove session '{name}' and all its revisions?", err=True):
            raise typer.Exit(1)
    freed = home.remove(name)
    here.drop()
    here.give(
        {"name": name, "freed_bytes": freed},
        json,
        lambda: render.say(f"Removed '{name}', {render.size(freed)}."),
    )


@sessions.command("compact", epilog="Example: kvedit sessions compact")
def sessions_compact(session: SessionName = None, json: Json = False) -> None:
    """Drop segments that no revision reaches: what killed or failed commands left behind."""

    opened = here.session(session)
    freed = opened.compact()
    size = opened.status().size_bytes
    here.give(
        {"freed_bytes": freed, "size_bytes": size},
        json,
        lambda: render.say(f"Freed {render.size(freed)}; the session takes {render.size(size)}."),
    )


@sessions.command("check", epilog="Example: kvedit sessions check")
def sessions_check(session: SessionName = None, json: Json = False) -> None:
    """Verify checksums, lengths, ids and counts of every revision, and say what is wrong."""
    from kvedit.cli import tables

    with render.progressing("check", "files and texts") as progress:
        opened = here.session(session)
        checked = opened.check(progress)
    here.give(
        {
            "name": opened.name,
            "revisions": checked.revisions,
            "segments": checked.segments,
            "findings": checked.findings,
        },
        json,
        lambda: tables.show_check(checked, opened.status().size_bytes),
    )
    if checked.findings:
        raise typer.Exit(3)
