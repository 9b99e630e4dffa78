"""The `models` commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvedit.cli import output
from kvedit.cli.command import Reply, app, command
from kvedit.cli.options import MODEL_NAMES, one_of
from kvedit.cli.progress import working

models = typer.Typer(help="List and download models.", no_args_is_help=True)
app.add_typer(models, name="models")


@command("list", example="kvedit models list", group=models)
def models_list() -> Reply:
    """List the models that kvedit knows and those it has converted."""
    from kvedit.checkpoint.resolve import ALIASES, find, models_folder

    known: list[dict[str, Any]] = [
        {"name": name, "about": alias.about, "directory": str(found) if (found := find(name)) else None}
        for name, alias in ALIASES.items()
    ]
    known += [
        {"name": path.name, "about": "converted from GGUF", "directory": str(path)}
        for path in sorted(models_folder().glob("[!.]*"))
        if path.is_dir() and path.name not in ALIASES
    ]

    def human() -> None:
        for model in known:
            output.out(output.one_line(f"{model['name']}  {model['about']}"))
            missing = f"not downloaded; run `kvedit models pull {model['name']}`"
            output.out(output.one_line(f"  {model['directory'] or missing}"))

    return Reply({"models": known}, human)


@command("pull", example="kvedit models pull smollm2-135m", group=models)
def models_pull(
    name: Annotated[
        str,
        typer.Argument(help="Alias, hub id, or .gguf file to convert.", autocompletion=one_of(MODEL_NAMES)),
    ],
) -> Reply:
    """Download a model, or convert a .gguf file, for later use."""
    with working("Finding the model") as report:
        from kvedit.checkpoint.resolve import resolve

        directory = resolve(name, report)
    return Reply(
        {"name": name, "directory": str(directory)},
        lambda: output.say(output.one_line(f"The model {name} is in {directory}.")),
    )
