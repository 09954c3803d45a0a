"""A package's docstring is its map: whoever looks for the place of a change finds every file in it."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "swarmllm"
PACKAGES = [init.parent for init in sorted(SOURCE.rglob("__init__.py"))]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.relative_to(SOURCE.parent)))
def test_a_package_s_docstring_names_its_files_and_rooms(package: Path) -> None:
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    named = set(re.findall(r"^ *(\w+/?)  +\S", text, re.MULTILINE))
    files = {path.stem for path in package.glob("*.py")} - {"__init__"}
    rooms = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert named == files | rooms


DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in (SOURCE.parents[1] / "docs").glob("*.md")),
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_a_document_names_are_there(name: str) -> None:
    root = SOURCE.parents[1]
    text = (root / name).read_text()
    paths = set(re.findall(r"`((?:\w+/)+(?:\w+\.(?:py|md|cfg|toml))?)`", text))
    paths.discard("benchmarks/results/")  # made by benchmarks
    missing = {path for path in paths if not any((base / path).exists() for base in (SOURCE, root, root / "src"))}
    assert not missing


def test_what_the_picture_of_a_token_s_way_shows_is_there() -> None:
    picture = (SOURCE.parents[1] / "docs" / "architecture.md").read_text().split("```")[1]
    names = set(re.findall(r"[a-z_]+/[a-z_]*|[a-z]+_[a-z_]+", picture)) - {"remote_blocks"}  # the attribute of a model
    assert len(names) > 7
    assert not {name for name in names if not any(SOURCE.rglob(f"{name.rstrip('/')}*"))}


def test_no_module_imports_the_root_of_the_package() -> None:
    """The root's names are for users: it imports the rooms that define them, so this would be a circle."""
    importing = [
        path
        for path in SOURCE.rglob("*.py")
        if re.search(r"from swarmllm import|import swarmllm\b", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.ImportFrom) and node.module == "swarmllm")
        or (isinstance(node, ast.Import) and any(alias.name == "swarmllm" for alias in node.names))
    ]
    assert not importing
