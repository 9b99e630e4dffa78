"""Test names are short enough to read in a report of failures."""

from __future__ import annotations

import ast

from support.pages import ROOT


def test_test_names_are_under_60_characters() -> None:
    names = [
        f"{path.name}::{node.name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_") and len(node.name) >= 60
    ]
    assert names == []
