"""Commands that edit lines: insert, append, replace, delete, move. None of them computes anything."""

from __future__ import annotations

from typing import Annotated

import typer

from kvedit.cli.command import Reply, change_reply, command
from kvedit.cli.options import Encoding, SessionName
from kvedit.cli.workspace import here
from kvedit.errors import UsageError

Text = Annotated[str | None, typer.Argument(help="The new text; - is standard input.")]
FromFile = Annotated[
    str | None, typer.Option("--file", "-f", metavar="FILE", help="Take the text from a file.")
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact", "-e", help=r"Read \n, \r, \t, \\ and \uXXXX in TEXT, and add no line ending to it."
    ),
]
Lines = Annotated[str, typer.Option("--lines", "-l", metavar="A-B", help="7, 40-60, 40- or -5.")]
After = Annotated[
    int, typer.Option("--after", "-a", metavar="N", help="Line that comes before it; 0 is the top.")
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
    """Insert lines after the last one."""
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
        typer.Option("--lines", "-l", metavar="A-B", help="7, 40-60, 40- or -5; repeat it, or use commas."),
    ],
    session: SessionName = None,
) -> Reply:
    """Delete lines. The document changes; nothing is computed yet.

    Every range counts the lines as they were before the command.
    """
    ranges = [part for text in lines for part in text.split(",")]
    return change_reply(here.session(session).delete(*ranges))


@command(example="kvedit move --lines 8-12 --after 30")
def move(lines: Lines, after: After, session: SessionName = None) -> Reply:
    """Move lines to stand after another, which is counted before the move."""
    return change_reply(here.session(session).move(lines, after=after))


def _new_text(text: str | None, file: str | None, encoding: str | None, exact: bool) -> tuple[str, bool]:
    """Take a new text from where it was given."""
    from kvedit.text.edits import unescape

    if (text is None) == (file is None):
        raise UsageError(
            "The new text is given twice." if text is not None else "There is no text to put in.",
            "Give a TEXT, --file FILE, or - for standard input.",
        )
    if file is not None or text == "-":
        return here.document(file or "-", encoding).text, exact
    assert text is not None
    if encoding is not None:
        raise UsageError("--encoding is for a file, and TEXT is none.", "Leave it out, or give --file FILE.")
    return (unescape(text), True) if exact else (text, False)
