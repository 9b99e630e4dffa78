"""Output: messages and progress on stderr, answers and JSON on stdout."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

from rich import filesize
from rich.console import Console
from rich.text import Text

from kvedit.errors import KveditError

if TYPE_CHECKING:
    from kvedit.repair.reports import Answer, Change, Healed, Purge

PHASES = {
    "load": "load",
    "selection": "selection",
    "shift": "shift",
    "refresh": "refresh",
    "question": "question prefill",
    "decode": "decode",
    "save": "save",
}


# Text from the user, a model or the file system is data. On a terminal, characters that could
# control it are shown as marks; a pipe gets the text unchanged. Tables and errors are for people and
# use one line per text, so they always show marks. JSON has the text unchanged.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed, and characters that change text direction."""


def visible(text: str) -> str:
    """Replace characters that could control a terminal with marks, one column each."""
    return _UNSAFE.sub(_mark, text)


def _mark(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def one_line(text: str) -> str:
    """Make a text one line, with marks for line feeds too."""
    return visible(text).replace("\n", "\u240a").replace("\t", " ")


def cell(text: str) -> Text:
    """Return a text as a table cell or title, without interpreting markup."""
    return Text(one_line(text))


def is_watched(stream: TextIO) -> bool:
    """Whether a stream is a terminal. FORCE_COLOR alone does not make it one."""
    return stream.isatty()


def console() -> Console:
    """Return a new console on stderr, which uses the current stream and environment."""
    return plain_or_not(sys.stderr)


def plain_or_not(stream: TextIO) -> Console:
    """Return a console on a stream. With NO_COLOR it has no styles, not even bold."""
    return Console(
        file=stream,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


def say(text: str) -> None:
    """Print a message on stderr, wrapped at words on a terminal."""
    console().print(visible(text), soft_wrap=not is_watched(sys.stderr))


def out(text: str, end: str = "\n") -> None:
    """Print a result on stdout."""
    if is_watched(sys.stdout):
        text = visible(text)
    sys.stdout.write(text + end)
    sys.stdout.flush()


def out_bytes(data: bytes, text: str) -> None:
    """Write a document's bytes to stdout, or its text to a terminal."""
    if is_watched(sys.stdout):
        out(text, end="")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def out_diff(line: str) -> None:
    """Print a line of a diff on stdout, coloured on a terminal."""
    screen = plain_or_not(sys.stdout)
    if not screen.is_terminal:
        out(line)
        return
    style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
    screen.print(Text(visible(line), style=style or ""), soft_wrap=True)


def out_json(record: dict[str, Any]) -> None:
    """Print one JSON object on stdout, in ASCII."""
    sys.stdout.write(json.dumps({"schema_version": 1, **record}) + "\n")
    sys.stdout.flush()


def show_error(error: KveditError, *, as_json: bool) -> None:
    """Print fact and remedy on stderr; with `as_json`, also as JSON on stdout."""
    if as_json:
        parts = {"kind": error.kind, "fact": error.fact, "remedy": error.remedy, "exit_code": error.exit_code}
        out_json({"error": parts})
    say(f"Error: {one_line(error.fact)}\n{one_line(error.remedy)}")


def seconds(value: float) -> str:
    """Format a time: `12 ms`, `1.42 s`, `3 min 20 s`."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"
    if value < 120:
        return f"{value:.2f} s"
    return f"{int(value) // 60} min {int(value) % 60} s"


def change_text(change: Change) -> str:
    """Describe what an edit changed."""
    if not change.command:
        return "Nothing was changed."
    verb, removed, added = change.command.partition(" ")[0], change.removed_lines, change.added_lines
    more = f"{abs(change.token_change):,} {'more' if change.token_change > 0 else 'fewer'}"
    if verb in ("undo", "redo", "checkout"):
        what = (
            f"At revision {change.revision}: {count(change.lines, 'line')}, {count(change.tokens, 'token')}"
        )
    elif verb == "move":
        what = f"Moved {count(added, 'line')}"
    elif not added and removed:
        what = f"Deleted {count(removed, 'line')}, {count(abs(change.token_change), 'token')}"
    elif not removed:
        what = f"Inserted {count(added, 'line')}, {count(abs(change.token_change), 'token')}"
    else:
        what = f"Replaced {count(removed, 'line')} by {added:,}, tokens: {more}"
    missing = f"; to compute: {count(change.missing, 'row')}" if change.missing else ""
    left = f"A full replay would take about {seconds(change.replay_s)}."
    if not change.stale and not change.missing:
        return f"{what}. Every row is {'exact' if not change.suffix else 'fresh'}."
    return f"{what}.\nStale now: {count(change.stale, 'row')}{missing}. {left}"


def healed_text(healed: Healed) -> str:
    """Describe what healing did."""
    done = f"Healed {count(healed.rows, 'row')} in {seconds(healed.seconds)}"
    if healed.frontier == healed.tokens:
        return f"{done}; all {healed.tokens:,} rows are exact."
    stop = "Interrupted. " if healed.finished == "interrupted" else ""
    return f"{stop}{done}; {healed.frontier:,} of {healed.tokens:,} rows are exact."


def purge_text(done: Purge) -> str:
    """Describe what a purge did."""
    return (
        f"Recomputed {count(done.tokens, 'row')} in {seconds(done.seconds)} and dropped "
        f"{count(done.revisions, 'revision')}, {size(done.freed_bytes)}.\n"
        f"The session takes {size(done.size_bytes)}, and every row is exact."
    )


def count(number: int, noun: str) -> str:
    """Format a count: `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def answer_json(answer: Answer, question: str) -> dict[str, Any]:
    """Return an answer as a JSON record; docs/using.md lists the keys."""
    phases = {
        name: {"seconds": phase.seconds, "tokens": phase.tokens, "tokens_per_s": phase.tokens_per_s}
        for name in PHASES
        if (phase := answer.timings.phases.get(name)) is not None
    }
    return {
        "question": question,
        "answer": answer.text,
        "answer_ids": list(answer.ids),
        "finish_reason": answer.finish_reason,
        "policy": answer.options.policy,
        "executor": answer.executor,
        "seed": answer.options.seed,
        "temperature": answer.options.temperature,
        "budget": {
            "asked": answer.options.budget.text,
            "rows": answer.budget_rows,
            "suffix_rows": answer.suffix,
        },
        "rows": {
            "missing": answer.missing,
            "refreshed": answer.refreshed,
            "reused": answer.reused,
            "total": answer.tokens,
        },
        "options": answer.options.record(),
        "runs": answer.runs,
        "kept": answer.kept,
        "timings": phases,
        "total_s": answer.timings.seconds(),
        "first_token_s": answer.first_token_s,
        "repair_s": answer.repair_s,
        "replay_estimate_s": answer.replay_s,
        "replay_ratio": answer.replay_s / answer.repair_s if answer.repair_s else None,
    }


def size(count: int) -> str:
    """Format bytes: `184.6 MB`."""
    return filesize.decimal(count)
