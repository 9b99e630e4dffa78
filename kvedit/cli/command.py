"""Commands: how they are registered, and the one place that prints results and reports errors.

Imports no torch: each command imports what it needs when it runs.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from kvedit.cli import output
from kvedit.cli.options import option_parameter, options_of
from kvedit.cli.workspace import here
from kvedit.errors import KveditError, UsageError
from kvedit.repair.options import Options, spelling

if TYPE_CHECKING:
    from kvedit.repair.reports import Change


@dataclass(frozen=True, slots=True)
class Reply:
    """What a command returns.

    Attributes:
        record: The result as JSON values.
        show: Prints the result for a person.
        exit_code: The exit code; not 0 if the command completed with a finding.
    """

    record: dict[str, Any]
    show: Callable[[], None]
    exit_code: int = 0


class Boundary(TyperGroup):
    """Print an error as fact and remedy, and exit with its code."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Parse the options before the command."""
        if os.environ.get("NO_COLOR"):  # Typer would still print bold in help texts
            from typer import rich_utils

            rich_utils.COLOR_SYSTEM = None
        try:
            return super().make_context(*args, **more)
        except Exception as error:
            raise _reported(error, here.as_json) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        here.record = here.failure = None
        try:
            return super().invoke(ctx)
        except KveditError as error:
            report(error, ctx.meta.get("json", here.as_json))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            output.say("Interrupted; the session is intact.")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader is gone (`kvedit show | head`): exit quietly, and let Python flush the rest
            # to the null device.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if hasattr(error, "format_message"):
                raise _reported(error, ctx.meta.get("json", here.as_json)) from None
            if os.environ.get("KVEDIT_DEBUG"):
                raise
            output.say(
                f"Error: Unexpected error; this is a bug in kvedit: {type(error).__name__}: {error}.\n"
                "Please report it, with the traceback that KVEDIT_DEBUG=1 shows."
            )
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Boundary,
    help="Edit a long document in a local model's context, and ask again on a budget.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(
    name: str | None = None, *, example: str, group: typer.Typer = app
) -> Callable[[Callable[..., Reply | None]], Callable[..., None]]:
    """Register a function as a command, with `--json` added and its reply printed.

    A parameter annotated with `Options` becomes one command-line option per field of `Options`.
    With `Annotated[Options, test]`, only fields for which `test(spelling)` is true are used.

    Args:
        name: The command's name; the function's name if `None`.
        example: An example command line for the help.
        group: The Typer app to add it to.
    """

    def register(function: Callable[..., Reply | None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []
        expanded: dict[str, list[Field[Any]]] = {}
        for parameter in inspect.signature(function).parameters.values():
            hint = hints[parameter.name]
            if getattr(hint, "__origin__", hint) is Options:
                tests = getattr(hint, "__metadata__", ())
                wanted = [each for each in fields(Options) if all(test(spelling(each)) for test in tests)]
                expanded[parameter.name] = wanted
                parameters += map(option_parameter, wanted)
            else:
                parameters.append(parameter.replace(annotation=hint, kind=parameter.KEYWORD_ONLY))

        def run(json: bool, **given: Any) -> None:
            for key, wanted in expanded.items():
                given[key] = options_of({each.name: given.pop(each.name) for each in wanted})
            here.streams = not (json or here.quiet)
            reply = function(**given)
            if reply is not None:
                give(reply, json)

        signature = inspect.Signature([*parameters, _JSON])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        group.command(name, epilog=f"Example: {example}")(run)
        return run

    return register


def give(reply: Reply, as_json: bool) -> None:
    """Print a reply, as JSON or for a person, and exit with its code unless that is 0."""
    here.record = reply.record
    if not here.quiet:
        if as_json:
            output.out_json(reply.record)
        else:
            reply.show()
    if reply.exit_code:
        raise typer.Exit(reply.exit_code)


def change_reply(change: Change) -> Reply:
    """Return the reply of an editing command."""
    return Reply(asdict(change), lambda: output.say(output.change_text(change)))


def report(error: KveditError, as_json: bool) -> None:
    """Print an error and remember it for the record of a replay."""
    here.failure = error
    output.show_error(error, as_json=as_json and not here.quiet)


def _remember_json(ctx: typer.Context, value: bool) -> bool:
    ctx.meta["json"] = value or here.as_json
    return value or here.as_json


_JSON = inspect.Parameter(
    "json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--json", callback=_remember_json, help="Print one JSON object on stdout.")
    ],
)


def _reported(error: Exception, as_json: bool) -> Exception:
    """Print a parser error as fact and remedy; return the exception to raise instead."""
    if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
        return error
    fact, context = error.format_message().rstrip(), getattr(error, "ctx", None)
    path = "kvedit" if context is None else context.command_path
    refused = UsageError(fact if fact.endswith((".", "?")) else f"{fact}.", f"Run `{path} --help` for usage.")
    report(refused, as_json)
    return typer.Exit(refused.exit_code)
