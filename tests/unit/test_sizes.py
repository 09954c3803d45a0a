"""Functions have at most 50 lines, constructors at most 8 parameters. Files have no quota."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "swarmllm"
MAX_FUNCTION_LINES, MAX_PARAMETERS = 50, 8

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache  # and not at import: each process of a run imports this file
def nodes() -> list[tuple[Path, ast.AST]]:
    """All nodes of all files of the package, each with its file."""
    return [(path, node) for path in sorted(SOURCE.rglob("*.py")) for node in ast.walk(ast.parse(path.read_text()))]


def function_lines(function: Function) -> int:
    """From `def` to the end, without the docstring."""
    assert function.end_lineno is not None
    first = function.body[0]
    text = 0
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        text = first.end_lineno - first.lineno + 1
    return function.end_lineno - function.lineno + 1 - text


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, node in nodes():
        if isinstance(node, ast.ClassDef):
            yield f"{path.relative_to(SOURCE)}: {node.name}", node


def functions() -> Iterator[tuple[str, Function]]:
    for path, node in nodes():
        if isinstance(node, Function):
            yield f"{path.relative_to(SOURCE)}: {node.name}", node


def test_functions() -> None:
    long = {name: lines for name, one in functions() if (lines := function_lines(one)) > MAX_FUNCTION_LINES}
    assert not long


def test_constructors() -> None:
    many = {
        name: count
        for name, cls in classes()
        for one in cls.body
        if isinstance(one, ast.FunctionDef) and one.name == "__init__"
        if (count := len(one.args.args) + len(one.args.kwonlyargs) - 1) > MAX_PARAMETERS
    }
    assert not many


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('def f():\n    """One.\n\n    Two.\n    """\n    return 1', 2),
        ("def f(\n    a,\n):\n    b = a\n    return b", 5),
    ],
)
def test_docstrings_do_not_count(text: str, lines: int) -> None:
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert function_lines(function) == lines
