"""The pages of the documentation, and the commands that they describe."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path
from typing import Any

from typer.main import get_command

from kvedit.cli.app import app

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code(name: str) -> str:
    """The one Python example of a page."""
    (block,) = re.findall(r"^( *)```python\n(.*?)^ *```", read(name), re.DOTALL | re.MULTILINE)
    return textwrap.dedent(block[1])


def script(name: str) -> Any:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> dict[str, Any]:
    """Every command by its words: `ask`, `models list`."""
    found: dict[str, Any] = {}
    for name, command in get_command(app).commands.items():
        for inner, leaf in getattr(command, "commands", {"": command}).items():
            found[f"{name} {inner}".strip()] = leaf
    return found
