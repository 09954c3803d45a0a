"""A package's docstring is its map: whoever looks for the place of a change finds every file in it."""

import ast
import re
from collections import Counter
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


def test_the_way_of_a_token_is_told_in_a_page_and_few_words() -> None:
    """`tests/faults/test_way_of_a_token.py` compares the files of its picture with a token's."""
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    words = re.findall(r"^\| \*(\w+)\*", text, re.MULTILINE)
    used = Counter(word for path in SOURCE.rglob("*.py") for word in re.findall("[a-z]+", path.read_text()))
    assert len(text.splitlines()) <= 100
    assert 20 <= len(set(words)) == len(words) <= 40
    assert not {word for word in words if used[word] < 5}


def test_contributing_says_where_to_add_things() -> None:
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    places = dict(re.findall(r"^\| (an? [^|`]+) \| (.*)$", text, re.MULTILINE))
    for what in (
        "quantization format",
        "message between peers",
        "decoding method",
        "cost of routes",
        "route of the gateway",
    ):
        paths = re.findall(r"`([\w/.]+)`", places[f"a {what}"])
        assert paths
        assert not [path for path in paths if not (SOURCE / path).exists()], what


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
