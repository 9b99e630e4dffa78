"""Commands that edit lines: insert, append, replace, delete, move. None of them runs the model."""

from __future__ import annotations

from typing import Annotated

import typer

from kvedit.cli.command import Reply, change_reply, command
from kvedit.cli.options import Encoding, SessionName
from kvedit.cli.workspace import here
from kvedit.errors import UsageError

Text = Annotated[str | None, typer.Argument(help="The new text; - reads standard input.")]
FromFile = Annotated[
    str | None, typer.Option("--file", "-f", metavar="FILE", help="Read the text from a file.")
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact", "-e", help=r"Read \n, \r, \t, \\ and \uXXXX in TEXT, and do not add a line ending."
    ),
]
Lines = Annotated[str, typer.Option("--lines", "-l", metavar="A-B", help="7, 40-60, 40- or -5.")]
After = Annotated[
    int, typer.Option("--after", "-a", metavar="N", help="Line to place it after; 0 is the top.")
]


@command(example="kvedit insert --after 12 'Fees are due within thirty days.'")
def insert(
    after: After,
    text: Text = None,
    file: FromFile = None,
    encoding: Encoding = None,
    exact: Exact = False,
    session: SessionName = None,
) -> Reply:
    """Insert lines after a line."""
    new, exact = _new_text(text, file, encoding, exact)
    return change_reply(here.session(session).insert(new, after=after, exact=exact))


@command(example="kvedit append --file annex.md")
def append(
    text: Text = None,
    file: FromFile = None,
    encoding: Encoding = None,
    exact: Exact = False,
    session: SessionName = None,
) -> Reply:
    """Insert lines at the end."""
    new, exact = _new_text(text, file, encoding, exact)
    return change_reply(here.session(session).append(new, exact=exact))


@command(example="kvedit replace --lines 7 'Fees are due within ten days.'")
def replace(
    lines: Lines,
    text: Text = None,
    file: FromFile = None,
    encoding: Encoding = None,
    exact: Exact = False,
    session: SessionName = None,
) -> Reply:
    """Replace lines with new text."""
    new, exact = _new_text(text, file, encoding, exact)
    return change_reply(here.session(session).replace(lines, new, exact=exact))


@command(example="kvedit delete --lines 40-60 --lines 7")
def delete(
    lines: Annotated[
        list[str],
        typer.Option("--lines", "-l", metavar="A-B", help="7, 40-60, 40- or -5. Repeat it, or use commas."),
    ],
    session: SessionName = None,
) -> Reply:
    """Delete lines. The document changes; nothing is computed yet.

    Each range counts lines as they were before the command.
    """
    ranges = [part for text in lines for part in text.split(",")]
    return change_reply(here.session(session).delete(*ranges))


@command(example="kvedit move --lines 8-12 --after 30")
def move(lines: Lines, after: After, session: SessionName = None) -> Reply:
    """Move lines after line N, counted before the move."""
    return change_reply(here.session(session).move(lines, after=after))


def _new_text(text: str | None, file: str | None, encoding: str | None, exact: bool) -> tuple[str, bool]:
    """Read a new text from TEXT, a file or standard input."""
    from kvedit.text.edits import unescape

    if (text is None) == (file is None):
        raise UsageError(
            "The new text is given twice." if text is not None else "The new text is missing.",
            "Use TEXT, --file FILE, or - for standard input.",
        )
    if file is not None or text == "-":
        return here.document(file or "-", encoding).text, exact
    assert text is not None
    if encoding is not None:
        raise UsageError("--encoding is for a file, not for TEXT.", "Leave it out, or use --file FILE.")
    return (unescape(text), True) if exact else (text, False)
