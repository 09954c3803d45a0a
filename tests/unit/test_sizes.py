"""No file, function or class grows beyond what can be taken in at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "swarmllm"
FILES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ATTRIBUTES, MAX_PARAMETERS = 350, 40, 13, 8

NODES = [(path, node) for path, tree in FILES.items() for node in ast.walk(tree)]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def function_lines(function: Function) -> int:
    """From `def` to the end, without the docstring."""
    assert function.end_lineno is not None
    first = function.body[0]
    text = 0
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        text = first.end_lineno - first.lineno + 1
    return function.end_lineno - function.lineno + 1 - text


def is_of_fields(cls: ast.ClassDef) -> bool:
    """Whether it only lists what users or peers may say: settings, inputs, what is parsed. Such lists may be long."""
    frozen = any("frozen=True" in ast.unparse(decorator) for decorator in cls.decorator_list)
    return frozen or cls.name == "BlockInputs" or any(ast.unparse(base) in PARSED for base in cls.bases)


PARSED = {"PeerModel", "Body", "BaseModel"}
while more := {
    node.name
    for tree in FILES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
    and node.name not in PARSED
    and PARSED & {ast.unparse(base) for base in node.bases}
}:
    PARSED |= more


def attributes(cls: ast.ClassDef) -> set[str]:
    """What its instances hold: annotated in the class, or assigned to `self`."""
    found = {
        part.target.id
        for part in cls.body
        if isinstance(part, ast.AnnAssign)
        and isinstance(part.target, ast.Name)
        and "ClassVar" not in ast.unparse(part.annotation)
    }
    for node in ast.walk(cls):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                    found.add(part.attr)
    return found


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, node in NODES:
        if isinstance(node, ast.ClassDef):
            yield f"{path.relative_to(SOURCE)}: {node.name}", node


def functions() -> Iterator[tuple[str, Function]]:
    for path, node in NODES:
        if isinstance(node, Function):
            yield f"{path.relative_to(SOURCE)}: {node.name}", node


def test_files() -> None:
    long = {path: lines for path in FILES if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long


def test_functions() -> None:
    long = {name: lines for name, one in functions() if (lines := function_lines(one)) > MAX_FUNCTION_LINES}
    assert not long


def test_classes() -> None:
    large = {
        name: len(held)
        for name, one in classes()
        if len(held := attributes(one)) > MAX_ATTRIBUTES and not is_of_fields(one)
    }
    assert not large


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
