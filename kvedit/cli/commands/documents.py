"""Commands for the whole document: load, show, status, export, diff, sync, edit."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from difflib import unified_diff
from pathlib import Path
from typing import Annotated

import typer

from kvedit.cli import output
from kvedit.cli.command import Reply, change_reply, command
from kvedit.cli.options import (
    ENCODING_NAMES,
    Device,
    Dtype,
    Encoding,
    ModelName,
    SessionName,
    check_place,
    one_of,
)
from kvedit.cli.progress import loading
from kvedit.cli.workspace import here
from kvedit.errors import KveditError, UsageError
from kvedit.names import DEFAULT_MODEL


@command(example="kvedit load contract.md --system 'Answer in one sentence.'")
def load(
    file: Annotated[str, typer.Argument(help="Document to read; - reads standard input.")],
    model: ModelName = DEFAULT_MODEL,
    session: Annotated[
        str | None, typer.Option("--session", "-s", metavar="NAME", help="Name. Default: from the file.")
    ] = None,
    encoding: Encoding = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System text of the prompt.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace a session of the same name.")] = False,
) -> Reply:
    """Read a document into a model's cache, as a new session that becomes the current one."""
    check_place(device, dtype)
    from kvedit.session.session import Session
    from kvedit.timing import Timings

    document, timings = here.document(file, encoding), Timings()
    with loading() as (report, progress):
        opened = Session.load(
            document,
            model=model,
            name=session or _name_after(file),
            system=system,
            device=device,
            dtype=dtype,
            force=force,
            timings=timings,
            progress=progress,
            report=report,
        )
    here.hold(opened)
    prefill, speed = timings.phases["prefill"], opened.manifest.prefill_tokens_per_s
    phases = {name: phase.seconds for name, phase in timings.phases.items()}
    return Reply(
        {**asdict(opened.status()), "seconds": phases, "prefill_tokens_per_s": speed},
        lambda: output.say(
            f"Loaded {output.count(opened.document.line_count, 'line')}, {len(opened.rows):,} tokens in "
            f"{output.seconds(prefill.seconds)} ({prefill.tokens_per_s or 0:,.0f} tokens/s) "
            f"into session '{opened.name}'."
        ),
    )


@command(example="kvedit show --lines 35-45")
def show(
    lines: Annotated[
        str | None, typer.Option("--lines", "-l", metavar="A-B", help="7, 40-60, 40- or -5. Default: all.")
    ] = None,
    session: SessionName = None,
) -> Reply:
    """Print the current document with line numbers."""
    from kvedit.text.document import LineRange

    chosen = LineRange.parse(lines) if lines is not None else LineRange(None, None)
    document = here.session(session).document
    first, last = chosen.resolve(document.line_count) if lines or document.line_count else (0, 0)
    numbered = list(enumerate(document.lines(first, last), start=first + 1))
    width = len(str(document.line_count))

    def human() -> None:
        for number, text in numbered:
            output.out(f"{number:>{width}}  {text}")

    return Reply({"lines": [{"number": number, "text": text} for number, text in numbered]}, human)


@command(example="kvedit status --json")
def status(session: SessionName = None) -> Reply:
    """Show the session's size, and how many rows are exact, refreshed, stale or missing."""
    from kvedit.cli import tables

    current = here.session(session).status()
    return Reply(asdict(current), lambda: tables.show_status(current))


@command(example="kvedit export -o contract-2.md")
def export(
    file: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="File to write. Default: stdout.")
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Use another encoding; utf-8-sig and utf-16 add a byte order mark.",
            autocompletion=one_of(ENCODING_NAMES),
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    session: SessionName = None,
) -> Reply:
    """Write the current document with its original encoding, line endings and byte order mark."""
    from kvedit.store.files import replace_file

    document = here.session(session).document
    document = document if encoding is None else document.recoded(encoding)
    data, source = document.encode(), document.source
    record = {"file": file, "size_bytes": len(data), "encoding": source.encoding, "bom": source.bom}
    if file is None or file == "-":
        text = document.text
        return Reply({**record, "file": None, "text": text}, lambda: output.out_bytes(data, text))
    path = here.path(file)
    if path.exists() and not force:
        raise UsageError(f"{file} already exists.", "Use --force to replace it, or choose another name.")
    if not path.parent.is_dir():
        raise UsageError(f"There is no folder {path.parent}.", "Create it first, or choose another name.")
    replace_file(path, data)
    return Reply(record, lambda: output.say(output.one_line(f"Wrote {output.size(len(data))} to {file}.")))


@command(example="kvedit diff")
def diff(
    revision: Annotated[
        int | None,
        typer.Option("--revision", "-r", metavar="N", help="Compare revision N with the current text."),
    ] = None,
    session: SessionName = None,
) -> Reply:
    """Show how the file on disk differs from the session: what sync would apply."""
    opened = here.session(session)
    old, new, names = opened.document.text, opened.document.text, ("session", "session")
    if revision is None:
        new, names = opened.source_document().text, ("session", opened.manifest.source)
    else:
        old, names = opened.text_of(revision), (f"revision {revision}", "session")
    left, right = map(output.one_line, names)  # keep each name on one line
    lines = list(unified_diff(old.split("\n"), new.split("\n"), left, right, lineterm=""))

    def human() -> None:
        for line in lines:
            output.out_diff(line)
        if not lines:
            output.say("No difference.")

    return Reply({"from": names[0], "to": names[1], "diff": lines}, human)


@command(example="kvedit sync")
def sync(session: SessionName = None) -> Reply:
    """Apply changes in the file that the session was loaded from."""
    return change_reply(here.session(session).sync())


@command(example="kvedit edit --lines 40-60")
def edit(
    lines: Annotated[
        str | None, typer.Option("--lines", "-l", metavar="A-B", help="Lines to edit. Default: all.")
    ] = None,
    session: SessionName = None,
) -> Reply:
    """Open the text in $VISUAL or $EDITOR, and apply your changes."""
    from kvedit.text.document import LineRange

    opened = here.session(session)
    document = opened.document
    chosen = LineRange.parse(lines) if lines is not None else LineRange(None, None)
    first, last = chosen.resolve(document.line_count) if lines or document.line_count else (0, 0)
    start, stop = document.characters(first, last) if document.line_count else (0, 0)
    before = document.text
    with _in_editor(before[start:stop], Path(opened.manifest.source).suffix) as new:
        # Another process may have edited the session meanwhile; do not overwrite its text.
        opened.update()
        if opened.document.text != before:
            raise KveditError(
                "The session was edited by another process while the editor was open.",
                "Run `kvedit edit` again; nothing was changed.",
            )
        return change_reply(opened.rewrite(before[:start] + new + before[stop:], "edit"))


@contextmanager
def _in_editor(text: str, suffix: str) -> Iterator[str]:
    """Let the user edit a text in their editor. If the block fails, the edited file is kept.

    Raises:
        KveditError: The editor is missing or failed.
        UsageError: The edited file is not text.
    """
    from kvedit.text.encoding import decode

    handle, name = tempfile.mkstemp(prefix="kvedit-", suffix=suffix if suffix[1:].isalnum() else ".txt")
    path, kept = Path(name), False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        _edit_file(name)
        data = path.read_bytes()
        try:
            yield decode(data, "The edited text")[0] if data else ""
        except KveditError as error:
            if data == text.encode():
                raise
            kept = True
            raise type(error)(error.fact, f"{error.remedy} Your text is in {name}.") from None
    finally:
        if not kept:
            path.unlink(missing_ok=True)


def _edit_file(name: str) -> None:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        done = subprocess.run([*shlex.split(editor), name], check=False, stdout=_terminal())
    except (OSError, ValueError) as error:
        raise KveditError(
            f"Cannot start the editor '{editor}': {error}.", "Set VISUAL or EDITOR to another one."
        ) from None
    if done.returncode:
        raise KveditError(
            f"The editor '{editor}' exited with code {done.returncode}; nothing was changed.",
            "Run `kvedit edit` again.",
        )


def _terminal() -> int | None:
    """Return where the editor draws: stdout, or stderr if stdout is redirected."""
    return None if sys.stdout.isatty() else 2


def _name_after(file: str) -> str:
    """Return a session name from a file's stem, with characters not allowed in names replaced."""
    stem = "stdin" if file == "-" else Path(file).stem
    return re.sub(r"[^\w.\-]+", "-", stem).strip("-.")[:64] or "document"
