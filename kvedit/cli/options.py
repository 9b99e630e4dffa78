"""The Typer app, the options that commands share, and the one boundary that turns errors into messages.

Imports no torch; what a command does is imported when it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kvedit import __version__
from kvedit.cli.workspace import here
from kvedit.errors import KveditError
from kvedit.names import DEFAULT_MODEL, DEFAULT_POLICY, DEVICE_NAMES, DTYPE_NAMES, SUPPORTS
from kvedit.policies.registry import POLICIES

if TYPE_CHECKING:
    from kvedit.repair.reports import Change

POLICY_NAMES = tuple(POLICIES)
MODEL_NAMES = (DEFAULT_MODEL,)
ENCODING_NAMES = (
    "utf-8",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "cp1252",
    "latin-1",
    "cp932",
    "gb18030",
    "big5",
)
"""Some, for completion; any name that Python knows will do."""


class Boundary(TyperGroup):
    """Print an error as fact and remedy, and leave with its exit code."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Parse what stands before the command."""
        if os.environ.get("NO_COLOR"):  # for the help; Typer would leave bold in it
            from typer import rich_utils

            rich_utils.COLOR_SYSTEM = None
        try:
            return super().make_context(*args, **more)
        except Exception as error:
            raise _told(error, here.as_json) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        from kvedit.cli import output as render

        here.record = here.failure = None
        try:
            return super().invoke(ctx)
        except KveditError as error:
            here.failure = error
            render.show_error(error, as_json=ctx.meta.get("json", here.as_json))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            render.say("Interrupted; the session is intact.")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader has gone (`kvedit show | head`): end quietly, and let Python flush what is
            # left to nobody.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if hasattr(error, "format_message"):
                raise _told(error, ctx.meta.get("json", here.as_json)) from None
            if os.environ.get("KVEDIT_DEBUG"):
                raise
            render.say(
                f"Error: Unexpected error; this is a bug in kvedit: {type(error).__name__}: {error}.\n"
                "Please report it, with the traceback that KVEDIT_DEBUG=1 shows."
            )
            raise typer.Exit(1) from None


def _told(error: Exception, as_json: bool) -> Exception:
    """Print what the parser refused, as fact and remedy; give what to raise instead of it."""
    from kvedit.cli import output as render
    from kvedit.errors import UsageError

    if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
        return error
    fact, context = error.format_message().rstrip(), getattr(error, "ctx", None)
    command = "kvedit" if context is None else context.command_path
    told = UsageError(
        fact if fact.endswith((".", "?")) else f"{fact}.", f"Run `{command} --help` to see what it takes."
    )
    here.failure = told
    render.show_error(told, as_json=as_json)
    return typer.Exit(told.exit_code)


app = typer.Typer(
    cls=Boundary,
    help="Edit a long document in a local model's context, and ask again on a budget.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


def _remember_json(ctx: typer.Context, value: bool) -> bool:
    ctx.meta["json"] = value or here.as_json
    return value or here.as_json


def session_names(incomplete: str) -> list[str]:
    """Names of sessions that begin like this, for completion."""
    from kvedit.store.home import Home

    with suppress(KveditError):
        return [store.name for store in Home.default().stores() if store.name.startswith(incomplete)]
    return []


def one_of(names: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Complete one of some names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def check_one_of(option: str, value: str, names: tuple[str, ...]) -> None:
    """Refuse a value that is none of the names."""
    from kvedit.errors import UsageError

    if value not in names:
        raise UsageError(f"{option} cannot be '{value}'.", f"Choose one of {', '.join(names)}.")


def check_place(device: str, dtype: str) -> None:
    """Refuse a device or a dtype that is none."""
    check_one_of("--device", device, DEVICE_NAMES)
    check_one_of("--dtype", dtype, DTYPE_NAMES)


SessionName = Annotated[
    str | None,
    typer.Option(
        "--session",
        "-s",
        metavar="NAME",
        help="Session to use; else the current one.",
        autocompletion=session_names,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", callback=_remember_json, help="Print one JSON object on stdout.")
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        metavar="5%|128t|0|full",
        help="Rows to refresh, of those after the first edit. Default: 5%, at least 64t.",
        autocompletion=one_of(("1%", "2%", "5%", "10%", "64t", "128t", "0", "full")),
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"What ranks rows: {', '.join(POLICY_NAMES)}. Default: {DEFAULT_POLICY}.",
        autocompletion=one_of(POLICY_NAMES),
    ),
]
SupportName = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help=f"How its scores become rows: {', '.join(SUPPORTS)}. Default: the policy's own rule.",
        autocompletion=one_of(SUPPORTS),
    ),
]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help="Alias, folder, .gguf file or hub id.",
        autocompletion=one_of(MODEL_NAMES),
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, cpu, cuda or mps; map spreads a large model over devices.",
        autocompletion=one_of(DEVICE_NAMES),
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, float32, bfloat16 or float16.",
        autocompletion=one_of(DTYPE_NAMES),
    ),
]
ModelPlace = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help="The session's model, at another place.",
        autocompletion=one_of(MODEL_NAMES),
    ),
]
Encoding = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of FILE or standard input: cp1252, utf-16-le, ... Default: UTF-8, or as its BOM says.",
        autocompletion=one_of(ENCODING_NAMES),
    ),
]
Continue = Annotated[bool, typer.Option("--continue", "-c", help="See the conversation, and go on with it.")]
Question = Annotated[list[str], typer.Argument(help="What to ask; - is standard input.")]


def question_of(words: list[str]) -> str:
    """Join the words of a question, or read it from standard input.

    Raises:
        UsageError: It is empty.
    """
    from kvedit.errors import UsageError

    question = here.document("-").text.strip() if words == ["-"] else " ".join(words)
    if not question.strip():
        raise UsageError("The question is empty.", "Write it in quotes: kvedit ask 'When is it due?'.")
    return question


def report_change(change: Change, as_json: bool) -> None:
    """Say what an edit did."""
    from kvedit.cli import output as render

    here.give(asdict(change), as_json, lambda: render.say(render.change_text(change)))
