"""The `doctor` command: does this model work here, and how fast is it?"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvedit.cli import output
from kvedit.cli.command import Reply, command
from kvedit.cli.options import MODEL_NAMES, Device, Dtype, check_place, one_of
from kvedit.cli.progress import working
from kvedit.names import DEFAULT_MODEL

if TYPE_CHECKING:
    from kvedit.repair.doctor import Health

_MEANING = {
    "forward pass": "logits with those of transformers",
    "end of context": "the same, at the last positions",
    "rotation": "keys with the model's own",
    "shift": "layer 0 with a fresh prefill's",
    "full budget": "all layers with a fresh prefill's",
    "greedy tokens": "8 tokens with a fresh prefill's",
    "packed, interval": "two ways to refresh the same rows",
}


@command(example="kvedit doctor smollm2-135m")
def doctor(
    model: Annotated[
        str,
        typer.Argument(help="Alias, folder, .gguf file or hub id.", autocompletion=one_of(MODEL_NAMES)),
    ] = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> Reply:
    """Test a model on 64 tokens: is it repaired exactly, and how fast is it here?

    The exit code is 4 if the model is refused or a check fails.
    """
    check_place(device, dtype)
    with working("Loading the model") as report:
        from kvedit.checkpoint.opening import open_stock
        from kvedit.checkpoint.resolve import resolve
        from kvedit.repair.doctor import examine

        stock = open_stock(resolve(model, report), device=device, dtype=dtype)
        report("Testing the model")
        found = examine(stock)
    options = {"device": device, "dtype": dtype}
    record: dict[str, Any] = {"model": model, "passed": found.passed, **asdict(found), "asked": options}
    for check in record["checks"]:  # JSON has no NaN
        check["figure"] = check["figure"] if math.isfinite(check["figure"]) else None
    return Reply(record, lambda: _show(model, found, options), 0 if found.passed else 4)


def _show(name: str, found: Health, options: dict[str, str]) -> None:
    """Print the checks and the figures of this machine on stdout."""
    screen = output.plain_or_not(sys.stdout)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("check", "result"):
        table.add_column(heading, no_wrap=True)
    for heading in ("off by", "limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("compares")
    for check in found.checks:
        style = "" if check.passed else "bold red"
        result = "pass" if check.passed else "FAIL"
        figures = (f"{number:.2g}" for number in (check.figure, check.limit))
        table.add_row(check.name, result, *figures, _MEANING[check.name], style=style)
    screen.print(table)
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for row in _facts(name, found, options):
        facts.add_row(*row)
    screen.print()
    screen.print(facts)
    failed = [check.name for check in found.checks if not check.passed]
    if failed:
        output.say(
            f"{len(failed)} of {len(found.checks)} checks failed: {', '.join(failed)}.\n"
            "Do not use this model with kvedit here; try another --dtype or --device, or another model."
        )


def _facts(name: str, found: Health, options: dict[str, str]) -> list[tuple[str, str]]:
    machine = found.machine
    reasons = {
        "device": "the first available of cuda, mps, cpu",
        "dtype": "default: float32 on a CPU, bfloat16 elsewhere",
    }
    why = {key: reasons[key] if options[key] == "auto" else "as given" for key in reasons}
    loads = [f"{load.tokens:,} tokens in {output.seconds(load.seconds)}" for load in machine.estimates]
    return [
        ("model", name),
        ("device", f"{machine.device} ({why['device']})"),
        ("dtype", f"{machine.dtype} ({why['dtype']})"),
        ("threads", str(machine.threads)),
        (
            "prefill",
            f"{machine.prefill_tokens_per_s:,.0f} tokens/s, measured on {machine.timed_tokens} tokens",
        ),
        ("load", f"about {', '.join(loads)}" if loads else "short texts only"),
        ("memory", f"{output.size(machine.weights_bytes)} of weights"),
        ("", f"{output.size(machine.cache_bytes)} of cache per 1,000 tokens"),
        ("context", f"{machine.context_length:,} tokens"),
    ]
