"""What an edit makes of a text, written line by line: the reference of the tests."""

from __future__ import annotations


def split(text: str) -> list[str]:
    """The lines with their endings."""
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def ending(line: str) -> str:
    return next((end for end in ("\r\n", "\n") if line.endswith(end)), "")


def usual_ending(lines: list[str]) -> str:
    ended = [line for line in lines if line.endswith("\n")]
    return "\r\n" if ended and all(line.endswith("\r\n") for line in ended) else "\n"


def with_endings(text: str, newline: str) -> list[str]:
    """New lines as a document takes them: each with its ending, the last one too."""
    lines = text.replace("\r\n", "\n").split("\n")
    return [line + newline for line in (lines[:-1] if text.endswith("\n") else lines)]


def inserted(text: str, after: int, new: str, exact: bool) -> str:
    lines = split(text)
    if exact:
        return "".join([*lines[:after], new, *lines[after:]])
    added = with_endings(new, usual_ending(lines))
    if lines and after == len(lines) and not ending(lines[-1]):  # an open end stays one
        added[-1] = added[-1].removesuffix(usual_ending(lines))
        lines[-1] += usual_ending(lines)
    return "".join([*lines[:after], *added, *lines[after:]])


def replaced(text: str, first: int, last: int, new: str, exact: bool) -> str:
    """Lines `first..last` count from 1."""
    lines = split(text)
    added = [new] if exact else with_endings(new, usual_ending(lines))
    if not exact and not ending(lines[last - 1]):
        added[-1] = added[-1].removesuffix(usual_ending(lines))
    return "".join([*lines[: first - 1], *added, *lines[last:]])


def moved(text: str, first: int, last: int, after: int) -> str:
    lines = split(text)
    block = lines[first - 1 : last]
    rest = lines[: first - 1] + lines[last:]
    at = after if after < first else after - len(block)
    lines = [*rest[:at], *block, *rest[at:]]
    for place, line in enumerate(lines[:-1]):
        if not ending(line):  # the line that was last gets the ending of the one that is
            lines[place] += ending(lines[-1])
            lines[-1] = lines[-1].removesuffix(ending(lines[-1]))
    return "".join(lines)
