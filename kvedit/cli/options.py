"""Parameters shared by commands, and those built from the fields of `Options`.

Imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import Field, fields
from typing import Annotated, Any

import typer

from kvedit.cli.workspace import here
from kvedit.errors import KveditError, UsageError, check_one_of
from kvedit.names import DEFAULT_MODEL, DEVICE_NAMES, DTYPE_NAMES
from kvedit.repair.options import Options, flags, spelling

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
"""Suggestions for completion; every encoding that Python supports works."""


def declared(name: str) -> Any:
    """Return Typer's declaration of the option that a field of `Options` has on the command line."""
    each = next(each for each in fields(Options) if each.name == name)
    known = spelling(each)
    suggested = known.choices or known.examples
    return typer.Option(
        *flags(each),
        metavar=known.metavar,
        help=known.help,
        autocompletion=one_of(suggested) if suggested else None,
    )


def option_parameter(each: Field[Any]) -> inspect.Parameter:
    """Return the command-line parameter of a field of `Options`; its default stands for "not given"."""
    parse = spelling(each).parse
    switch = isinstance(each.default, bool)
    kind: Any = bool if switch else (parse if parse in (int, float) else str) | None
    return inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if switch else None,
        annotation=Annotated[kind, declared(each.name)],
    )


def options_of(given: dict[str, Any]) -> Options:
    """Return the options of a question: as given, else from the settings, else the defaults.

    Args:
        given: Values of the parameters from `option_parameter`, by field name.

    Raises:
        UsageError: A value is invalid, or two options exclude each other.
    """
    typed: dict[str, Any] = {}
    for each in fields(Options):
        value = given.get(each.name)
        if value is None or value is False:
            continue
        known = spelling(each)
        typed[each.name] = not known.negative if value is True else known.parse(value)
    chosen = {**here.settings.options, **typed}
    if not chosen.get("keep", True) and "conversation" not in typed:
        chosen.pop("conversation", None)  # --no-keep overrides the setting
    return Options(**chosen)


def session_names(incomplete: str) -> list[str]:
    """Return the session names that begin with `incomplete`."""
    from kvedit.store.home import Home

    with suppress(KveditError):
        return [store.name for store in Home.default().stores() if store.name.startswith(incomplete)]
    return []


def one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completion function for a list of names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def check_place(device: str, dtype: str) -> None:
    """Raise `UsageError` for an unknown device or dtype."""
    check_one_of("device", device, DEVICE_NAMES)
    check_one_of("dtype", dtype, DTYPE_NAMES)


SessionName = Annotated[
    str | None,
    typer.Option(
        "--session",
        "-s",
        metavar="NAME",
        help="Session to use. Default: the current session.",
        autocompletion=session_names,
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
        help="auto, cpu, cuda or mps; map spreads a large model over several devices.",
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
        help="Open the session's model from this name or path instead.",
        autocompletion=one_of(MODEL_NAMES),
    ),
]
Encoding = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Encoding of the input: cp1252, utf-16-le, ... Default: by its BOM, else UTF-8.",
        autocompletion=one_of(ENCODING_NAMES),
    ),
]
Question = Annotated[list[str], typer.Argument(help="The question; - reads standard input.")]


def question_of(words: list[str]) -> str:
    """Join the words of a question, or read it from standard input.

    Raises:
        UsageError: It is empty.
    """
    question = here.document("-").text.strip() if words == ["-"] else " ".join(words)
    if not question.strip():
        raise UsageError("The question is empty.", "Write it in quotes: kvedit ask 'When is it due?'.")
    return question
