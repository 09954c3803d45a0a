"""The flag of one setting: what a dataclass says about a field, in the words of argparse.

`command_line` makes all flags by it. A field's metadata may name an `alias` of its flag, or say that help doesn't show
it (`hidden`), or that there is none (`flag` is False).
"""

import argparse
import ast
import itertools
import linecache
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args

from swarmllm.config import parse_block_indices
from swarmllm.errors import ConfigurationError


def flag_names(field: Field[Any]) -> list[str]:
    """`--name`, or `--no_name` of what is on by default; and its alias if it has one."""
    first = f"--no_{field.name}" if field.default is True else f"--{field.name}"
    return [first, *(f"--{field.metadata[key]}" for key in ("alias",) if key in field.metadata)]


def argparse_options(field: Field[Any], hint: Any) -> dict[str, Any]:
    """How to read values of this type, and what stands for them on the screen."""
    if hint is bool:
        return {"action": "store_false" if field.default is True else "store_true"}
    options: dict[str, Any] = {"required": field.default is MISSING and field.default_factory is MISSING}
    is_optional = isinstance(hint, UnionType)
    (kind,) = (kind for kind in (get_args(hint) if is_optional else (hint,)) if kind is not NoneType)
    metavar = field.name.rpartition("_")[2].upper()
    if kind == tuple[int, int]:
        return {**options, "type": _reader(parse_block_indices), "metavar": "A:B"}
    if kind == tuple[str, ...]:
        return {**options, "nargs": "+", "action": "extend", "metavar": metavar.removesuffix("S")}
    if kind is str:
        return {**options, "metavar": metavar}
    return {**options, "type": _reader(kind, is_optional=is_optional), "metavar": "N" if kind is int else "X"}


def _reader(parse: Callable[[str], Any], *, is_optional: bool = False) -> Callable[[str], Any]:
    """`parse` with a sentence for what it can't read; `auto` is None where that is a value."""
    wanted = f"a {'whole ' if parse is int else ''}number{' or auto' if is_optional else ''}"

    def read(text: str) -> Any:
        try:
            return None if is_optional and text == "auto" else parse(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"give {wanted}, not {text!r}") from None

    return read


def flag_help(field: Field[Any], owner: type, *, at_length: bool) -> str:
    """The docstring under the field, or its first sentence; and the default where it says something."""
    if field.metadata.get("hidden"):
        return argparse.SUPPRESS
    text = (
        docstrings(owner).get(field.name, "").replace("; None = ", "; without it, ").replace("None = ", "Without it, ")
    )
    if not at_length:
        text = text.partition(". ")[0].removesuffix(".")
    if field.default is True:
        text = f"Turns this off: {text}" if at_length else f"Don't {text[:1].lower()}{text[1:]}"
    default = field.metadata.get("default", field.default)
    if isinstance(default, tuple):
        default = " ".join(value if value.strip() else repr(value) for value in default)
    if default not in (MISSING, None, "") and not isinstance(default, bool) and str(default) not in text:
        text += f" (default: {default})"
    return text.replace("%", "%%")


@cache
def docstrings(owner: type) -> dict[str, str]:
    """What is written under the fields of a class, by their names; nothing where its source isn't at hand."""
    module = vars(sys.modules[owner.__module__])
    tree = ast.parse("".join(linecache.getlines(module["__file__"], module)))
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__), [])
    return {
        above.target.id: " ".join(str(below.value.value).split())
        for above, below in itertools.pairwise(body)
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
