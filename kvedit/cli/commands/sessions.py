"""The `sessions` commands: list, use, copy, rename, remove, compact, check."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from kvedit.cli import output
from kvedit.cli.command import Reply, app, command
from kvedit.cli.options import SessionName, session_names
from kvedit.cli.progress import progressing
from kvedit.cli.workspace import here
from kvedit.errors import SessionError, UsageError

sessions = typer.Typer(help="List and manage sessions.", no_args_is_help=True)
app.add_typer(sessions, name="sessions")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The session.", autocompletion=session_names)]
NewName = Annotated[str, typer.Argument(metavar="NEW", help="The new name.")]


@command("list", example="kvedit sessions list", group=sessions)
def sessions_list() -> Reply:
    """List the sessions with their sizes, and mark the current one."""
    from kvedit.cli import tables
    from kvedit.store.home import Home

    found = Home.default().list()
    return Reply({"sessions": [asdict(item) for item in found]}, lambda: tables.show_sessions(found))


@command("use", example="kvedit sessions use contract", group=sessions)
def sessions_use(name: Name) -> Reply:
    """Make a session the current one."""
    from kvedit.store.home import Home

    Home.default().use(name)
    here.name = None
    return Reply({"name": name}, lambda: output.say(f"The current session is '{name}'."))


@command("copy", example="kvedit sessions copy contract contract-2", group=sessions)
def sessions_copy(name: Name, new: NewName) -> Reply:
    """Copy a session. The copies share the cache on disk until they diverge."""
    from kvedit.store.home import Home

    Home.default().copy(name, new)
    return Reply({"name": name, "new": new}, lambda: output.say(f"Copied '{name}' to '{new}'."))


@command("rename", example="kvedit sessions rename contract lease", group=sessions)
def sessions_rename(name: Name, new: NewName) -> Reply:
    """Rename a session."""
    from kvedit.store.home import Home

    Home.default().rename(name, new)
    here.drop()
    return Reply({"name": name, "new": new}, lambda: output.say(f"Renamed '{name}' to '{new}'."))


@command("remove", example="kvedit sessions remove contract --yes", group=sessions)
def sessions_remove(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> Reply:
    """Remove a session and its history from the disk. Your own file stays."""
    from kvedit.store.home import Home

    home = Home.default()
    store = home.store(name)
    if not store.exists() and not store.folder.is_dir():
        raise SessionError(f"There is no session '{name}'.", "Run `kvedit sessions list` to see them.")
    if not yes:
        if not sys.stdin.isatty() or not here.streams:
            raise UsageError(f"Removing '{name}' cannot be undone.", "Use --yes to remove it.")
        if not typer.confirm(f"Remove session '{name}' and all its revisions?", err=True):
            raise typer.Exit(1)
    freed = home.remove(name)
    here.drop()
    return Reply(
        {"name": name, "freed_bytes": freed}, lambda: output.say(f"Removed '{name}', {output.size(freed)}.")
    )


@command("compact", example="kvedit sessions compact", group=sessions)
def sessions_compact(session: SessionName = None) -> Reply:
    """Remove segments that no revision uses, left behind by killed or failed commands."""
    opened = here.session(session)
    freed = opened.compact()
    size = opened.status().size_bytes
    return Reply(
        {"freed_bytes": freed, "size_bytes": size},
        lambda: output.say(f"Freed {output.size(freed)}; the session takes {output.size(size)}."),
    )


@command("check", example="kvedit sessions check", group=sessions)
def sessions_check(session: SessionName = None) -> Reply:
    """Verify checksums, lengths, ids and counts of every revision, and report problems."""
    from kvedit.cli import tables

    with progressing("check", "files and texts") as progress:
        opened = here.session(session)
        checked = opened.check(progress)
    return Reply(
        {
            "name": opened.name,
            "revisions": checked.revisions,
            "segments": checked.segments,
            "findings": checked.findings,
        },
        lambda: tables.show_check(checked, opened.status().size_bytes),
        exit_code=3 if checked.findings else 0,
    )
