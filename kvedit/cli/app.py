"""The Typer app: each verb's options, and the one boundary that turns errors into messages.

Imports no torch; a verb's work lives in `kvedit.cli.verbs`, loaded when it runs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvedit import __version__
from kvedit.errors import KveditError


class Boundary(TyperGroup):
    """Print a `KveditError` as fact and remedy, and leave with its exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        from kvedit.cli import render

        try:
            return super().invoke(ctx)
        except KveditError as error:
            render.show_error(error, as_json=ctx.meta.get("json", False))
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
            if os.environ.get("KVEDIT_DEBUG") or type(error).__module__.startswith(("typer", "click")):
                raise
            render.say(
                f"Error: kvedit failed in a way it should not: {type(error).__name__}: {error}.\n"
                "Please report it, with the traceback that KVEDIT_DEBUG=1 shows."
            )
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Boundary,
    help="Edit a long document in a local model's context, and ask again on a budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models = typer.Typer(help="The models that kvedit knows, and getting them.", no_args_is_help=True)
app.add_typer(models, name="models")


def _remember_json(ctx: typer.Context, value: bool) -> bool:
    ctx.meta["json"] = value
    return value


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"kvedit {__version__}")
        raise typer.Exit


SessionName = Annotated[
    str | None,
    typer.Option("--session", "-s", metavar="NAME", help="Session to use; else the last one loaded."),
]
Json = Annotated[
    bool, typer.Option("--json", callback=_remember_json, help="Print one JSON object on stdout.")
]


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: kvedit load contract.md --system 'Answer in one sentence.'")
def load(
    file: Annotated[str, typer.Argument(help="Document to read; - is standard input.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Alias, folder, .gguf file or hub id.")
    ] = "smollm2-135m",
    session: Annotated[
        str | None, typer.Option("--session", "-s", metavar="NAME", help="Name it; else after the file.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System text of the prompt.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace a session of the same name.")] = False,
    json: Json = False,
) -> None:
    """Read a document into a model's cache; a session appears."""
    from kvedit.cli import verbs

    verbs.load(file, model, session, system, device, dtype, force, json)


@app.command(epilog="Example: kvedit delete --lines 40-60 --lines 7")
def delete(
    lines: Annotated[
        list[str],
        typer.Option("--lines", "-l", metavar="A-B", help="7, 40-60, 40- or -5; repeat it, or use commas."),
    ],
    session: SessionName = None,
    json: Json = False,
) -> None:
    """Delete lines. The document changes; nothing is computed yet.

    Every range counts the lines as they were before the command.
    """
    from kvedit.cli import verbs

    verbs.delete(lines, session, json)


@app.command(epilog="Example: kvedit ask 'When must fees be paid?' --budget 5%")
def ask(
    question: Annotated[str, typer.Argument(help="What to ask; - is standard input.")],
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="5%|128t|0|full",
            help="Rows to refresh, of those after the first edit. Default: 5%, at least 64t.",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="What ranks rows: sur, sur-plain, sur-rows, sur-window, bm25 or random.")
    ] = "sur",
    executor: Annotated[str, typer.Option(help="auto, packed, interval or direct.")] = "auto",
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of answer at most. Default: 256, or what fits.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For sampling and random policies.")] = 0,
    no_keep: Annotated[bool, typer.Option("--no-keep", help="Leave the session as it is.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The session's model, at another place.")
    ] = None,
    session: SessionName = None,
    json: Json = False,
) -> None:
    """Repair the cache on a budget and answer.

    The answer goes to stdout; timings and counts go to stderr.
    """
    from kvedit.cli import verbs

    verbs.ask(
        question,
        budget,
        policy,
        executor,
        max_new_tokens,
        temperature,
        seed,
        not no_keep,
        model,
        session,
        json,
    )


@app.command(epilog="Example: kvedit show --lines 35-45")
def show(
    lines: Annotated[
        str | None, typer.Option("--lines", "-l", metavar="A-B", help="7, 40-60, 40- or -5; else all.")
    ] = None,
    session: SessionName = None,
    json: Json = False,
) -> None:
    """Print the document as it is now, with its line numbers."""
    from kvedit.cli import verbs

    verbs.show(lines, session, json)


@app.command(epilog="Example: kvedit status --json")
def status(session: SessionName = None, json: Json = False) -> None:
    """Say what the session holds, and how much of it is exact, refreshed, stale or missing."""
    from kvedit.cli import verbs

    verbs.status(session, json)


@models.command("list", epilog="Example: kvedit models list")
def models_list(json: Json = False) -> None:
    """List the models that kvedit knows, and those it has converted."""
    from kvedit.cli import verbs

    verbs.models_list(json)


@models.command("pull", epilog="Example: kvedit models pull smollm2-135m")
def models_pull(
    name: Annotated[str, typer.Argument(help="Alias, hub id, or .gguf file to convert.")], json: Json = False
) -> None:
    """Get a model, and convert it if need be, so that it is at hand."""
    from kvedit.cli import verbs

    verbs.models_pull(name, json)
