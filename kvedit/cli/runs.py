"""Output of a bench: a live table while it runs, its summary, and a comparison of two runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table

from kvedit.cli.output import cell, console, count, is_watched, one_line, say, seconds
from kvedit.timing import clock

_EVERY_S = 10.0  # between two lines without a terminal


@contextmanager
def live_run(arms: Sequence[str], total: int) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """Show a table of the results so far, updated after each case."""
    screen = console()
    records: list[dict[str, Any]] = []
    start, printed = clock(), clock()

    def left(done: int) -> str:
        spent = clock() - start
        return f"{done} of {count(total, 'case')}, about {seconds(spent / done * (total - done))} left"

    if not is_watched(sys.stderr):

        def print_line(done: int, record: dict[str, Any]) -> None:
            nonlocal printed
            if clock() - printed >= _EVERY_S or done == total:
                printed = clock()
                say(left(done))

        yield print_line
        return
    with Live(console=screen, transient=True, auto_refresh=False) as live:

        def show(done: int, record: dict[str, Any]) -> None:
            records.append(record)
            table = _table(left(done))
            for arm in arms:
                table.add_row(arm, *_so_far([item["arms"][arm] for item in records], records))
            live.update(table, refresh=True)

        yield show


def _table(title: str) -> Table:
    return _columns(title, ("right", "change of log p", "recovered", "to answer"))


def _columns(title: str, headings: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=cell(title), title_justify="left")
    table.add_column("arm")
    for heading in headings:
        table.add_column(cell(heading), justify="right")
    return table


def _so_far(results: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> list[str]:
    change = sum(abs(result["logp_change"]) for result in results)
    lost = sum(abs(record["arms"]["shift"]["logp_change"]) for record in records)
    times = sorted(sum(result["seconds"].values()) for result in results)
    return [
        f"{sum(result['em'] for result in results)}/{len(results)}",
        f"{change / len(results):.3f}",
        f"{100 * (1 - change / lost):.0f}%" if lost else "",
        seconds(times[len(times) // 2]),
    ]


def show_run(summary: dict[str, Any], folder: Path) -> None:
    """Print the summary of a run and the path of its report."""
    for name, part in {"": summary, **summary.get("datasets", {}), **summary.get("places", {})}.items():
        title = count(part["cases"], "case")
        table = _table(f"{name}: {title}" if name else title)
        for arm_name, arm in part["arms"].items():
            table.add_row(
                arm_name,
                f"{arm['em']['right']}/{arm['cases']}",
                _interval(arm["logp_change"], 1, 3),
                _interval(arm["recovery"], 100, 0, "%"),
                seconds(arm["latency_s"]),
            )
        console().print(table)
    say(one_line(f"The report is {folder / 'report.html'}."))


def show_comparison(found: dict[str, Any]) -> None:
    """Print the differences between two runs."""
    table = _columns(
        count(found["cases"], "shared case"), ("right", "change of log p", "repaired", "regressed")
    )
    for name, arm in found["arms"].items():
        table.add_row(
            name,
            _interval(arm["em"], 100, 1, " points"),
            _interval(arm["logp_change"], 1, 3),
            str(arm["transitions"]["repaired"]),
            str(arm["transitions"]["regressed"]),
        )
    console().print(table)
    for side in ("first", "second"):
        if missing := found[f"cases_only_in_{side}"]:
            say(f"Only in the {side} run: {count(len(missing), 'case')}.")


def _interval(estimate: dict[str, Any], scale: float, digits: int, unit: str = "") -> str:
    """Format a value with its interval."""
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    if value is None:
        return ""
    shown = f"{scale * value:.{digits}f}{unit}"
    return shown if low is None else f"{shown} ({scale * low:.{digits}f} to {scale * high:.{digits}f})"


def show_executor(summary: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    """Print how the executors compare for each shape."""
    shapes = summary["shapes"]
    others = list(dict.fromkeys(name for shape in shapes for name in shape["refresh_over_packed"]))
    table = _columns(
        "refresh, medians", ("budget", "rows", "runs", "packed", *(f"{name} / packed" for name in others))
    )
    table.columns[0].header = "context"
    for shape in shapes:
        packed = shape["refresh_s"].get("packed")
        ratios = [shape["refresh_over_packed"].get(name) for name in others]
        table.add_row(
            f"{shape['context']:,}",
            shape["budget"],
            f"{shape['rows']:,}",
            f"{shape['runs']:,}",
            seconds(packed["median"]) if packed else "",
            *(f"{ratio['median']:.1f} x" if ratio else "" for ratio in ratios),
        )
    console().print(table)
    best = max(
        (shape["refresh_over_packed"].get("interval", {"median": 0})["median"] for shape in shapes), default=0
    )
    if best:
        machine = config["machine"]["gpu"] or config["machine"]["processor"]
        say(
            f"At most {best:.1f} x faster than interval on {machine}; "
            "the paper reports up to 16.1 x for Qwen3-8B on one H100."
        )
    say(one_line(f"The report is {folder / 'report.html'}."))


def show_numerics(summary: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    """Print how far each path deviates from the first."""
    table = _columns(
        "replays against the first path", ("largest logit gap", "argmax differs", "answers differ")
    )
    table.columns[0].header = "path"
    for path in summary["paths"]:
        table.add_row(
            path["name"],
            f"{path['logit_max']:.2e}",
            f"{100 * path['argmax_disagreement']:.2f}%",
            f"{100 * path['sequence_disagreement']:.0f}%",
        )
    console().print(table)
    say(one_line(f"The report is {folder / 'report.html'}."))


def show_evidence(summary: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    """Print the share of selected rows that lie in the evidence."""
    sets = summary["datasets"]
    table = _columns("selected rows in the evidence", list(sets))
    arms = list(dict.fromkeys(arm for part in sets.values() for arm in part["arms"]))
    for arm in arms:
        shares = [part["arms"].get(arm) for part in sets.values()]
        table.add_row(arm, *("" if share is None else f"{share['value']:.2f}" for share in shares))
    console().print(table)
    say(one_line(f"The report is {folder / 'report.html'}."))


SHOW = {"executor": show_executor, "numerics": show_numerics, "evidence": show_evidence}
