"""The shape of the code: sizes of files and functions, no cycle of imports, empty `__init__` files."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import kvedit

ROOT = Path(kvedit.__file__).parent
FILES = {path.relative_to(ROOT.parent).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(text) for name, text in FILES.items()}
# The public verbs with their documentation, two thirds of its lines; what they do is in the files beside it.
LONG = {"kvedit/session/session.py": 500}


def test_no_file_has_more_than_300_lines() -> None:
    assert {
        name: count for name, text in FILES.items() if (count := text.count("\n")) > LONG.get(name, 300)
    } == {}


def test_no_function_has_more_than_50_lines_of_code() -> None:
    """Without its docstring."""
    long = {}
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                documented = ast.get_docstring(node) is not None
                count = (node.end_lineno or 0) - node.lineno + 1
                if documented:
                    count -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                if count > 50:
                    long[f"{name}: {node.name}"] = count
    assert long == {}


def test_packages_hold_no_logic() -> None:
    for name, tree in TREES.items():
        if name.endswith("/__init__.py") and name != "kvedit/__init__.py":  # that one exports names lazily
            assert [node for node in tree.body if not isinstance(node, ast.Expr)] == [], name


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count too; those for type checking only do not."""
    graph = {module_of(name): imports(tree) - {module_of(name)} for name, tree in TREES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(tree: ast.Module) -> set[str]:
    """The modules of kvedit that a module imports at run time."""
    found: set[str] = set()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvedit"):
            package = str(node.module)
            for alias in node.names:
                module = f"{package}.{alias.name}"
                found.add(module if is_module(module) else package)
        todo += ast.iter_child_nodes(node)
    return found - {"kvedit"}  # its names are lazy


def is_module(name: str) -> bool:
    path = ROOT.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir()
