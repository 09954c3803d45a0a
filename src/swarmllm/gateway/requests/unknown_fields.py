"""Fields of requests that are not honoured: refused by name, unless what they say makes no difference to the answer.

`request_bodies` lists for each kind of object which of OpenAI's and vLLM's other fields make none, and with which
values. Called by the routes for each request that has passed its checks.
"""

import difflib
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from swarmllm.gateway.errors import ApiError

MOST_NAMES = 32
"""Characters of an unknown name that are repeated, and fields that the header names."""


class Anything:
    """Stands for any value."""

    def __contains__(self, value: object) -> bool:
        return True


ANYTHING = Anything()
"""A hint: it is taken whatever it says, and named in the header `X-Unused-Fields`."""
Harmless = dict[str, tuple[Any, ...] | Anything]
"""By name, the values that change nothing about the answer; None is always one. Any other value is refused."""


def _fail_fast(schema: Any) -> None:
    """Else a list of 240,000 wrong things makes as many errors, and that in each type that a field may have."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = [*schema.values()]
    if isinstance(schema, list | tuple):
        for one in schema:
            _fail_fast(one)


class Body(BaseModel):
    """A part of a request's JSON."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    harmless: ClassVar[Harmless] = {}

    def hints(self) -> list[str]:
        """Names of fields of its own that made no difference, beside those that are harmless with any value."""
        return []

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """What pydantic makes of the fields, but each list is given up at the first thing that is wrong in it."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @classmethod
    def known_names(cls) -> list[str]:
        """The names of all fields that it may have."""
        return [*(field.alias or name for name, field in cls.model_fields.items()), *cls.harmless]


def refuse_unknown(body: Body, *, lenient: bool) -> None:
    """Raises ApiError for the first field that isn't honoured; `lenient`: only for those that are known."""
    for part, path, name, value in _extras(body):
        harmless = part.harmless.get(name)
        if value is None or (harmless is not None and value in harmless):
            continue
        where = f"{path}{name}" if harmless is not None else f"{path}{name[:MOST_NAMES]}"
        if harmless is not None:
            allowed = " or ".join(repr(one) for one in harmless) if isinstance(harmless, tuple) and harmless else ""
            reason = f"can only be {allowed} here" if allowed else "is not supported here"
            raise ApiError(400, f"{where} {reason}: leave it out", param=where, code="unsupported_parameter")
        if not lenient:
            near = difflib.get_close_matches(name[:MOST_NAMES], part.known_names(), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise ApiError(400, f"unknown field {where!r}: {hint}", param=where, code="unknown_parameter")


def unused_fields(body: Body) -> list[str]:
    """Paths of fields that were taken although they make no difference to the answer; who asked is told of them."""
    found = set()
    for part, path in _parts(body, ""):
        extras = [name for name, value in (part.model_extra or {}).items() if value is not None]
        names = [*part.hints(), *(name for name in extras if part.harmless.get(name, ANYTHING) is ANYTHING)]
        found |= {re.sub(r"\[\d+\]", "[]", path) + name[:MOST_NAMES] for name in names}
    return sorted(path for path in found if re.fullmatch(r"[\w.\[\]-]+", path, re.ASCII))[:MOST_NAMES]


def _extras(body: Body) -> Iterator[tuple[Body, str, str, Any]]:
    """(the object, the path to it, a field's name, its value) of all fields that no class declares."""
    for part, path in _parts(body, ""):
        for name, value in (part.model_extra or {}).items():
            yield part, path, name, value


def _parts(part: Any, path: str) -> Iterator[tuple[Body, str]]:
    """(an object of the request, the path to it), the request itself first."""
    if isinstance(part, list):
        for place, one in enumerate(part if part and isinstance(part[0], Body | list) else ()):  # numbers have none
            yield from _parts(one, f"{path[:-1]}[{place}].")
    if isinstance(part, Body):
        yield part, path
        for name in part.model_fields_set & type(part).model_fields.keys():
            yield from _parts(getattr(part, name), f"{path}{name}.")
