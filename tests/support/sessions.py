"""A document of fees, and the workspace of the process."""

from __future__ import annotations

from dataclasses import fields

from kvedit.cli.workspace import Workspace, here

FEE_LINES = [f"Line {number}: the fees of item {number} are {number * 37}." for number in range(1, 31)]


def reset_workspace() -> None:
    """Make the workspace of this process as it is at its start."""
    for field in fields(Workspace):
        setattr(here, field.name, getattr(Workspace(), field.name))
