"""Fields of requests about ways to choose tokens, made from the list of them: `request_bodies` takes them over."""

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model

from swarmllm.decoding.options import MAX_BREAKER_CHARS, MAX_BREAKERS, DecodingOptions
from swarmllm.flags import docstrings
from swarmllm.gateway.requests.unknown_fields import Body

_String = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_CHARS)]


def _definition(one: Any) -> tuple[Any, Any]:
    """Type and Field of one option."""
    default, text = one.metadata["default"], docstrings(DecodingOptions)[one.name]
    bounds = {name: one.metadata[name] for name in ("ge", "gt", "le") if name in one.metadata}
    if isinstance(default, tuple):
        kind: Any = Annotated[list[_String], Field(max_length=MAX_BREAKERS)]
    else:
        kind = Annotated[type(default), Field(**bounds)]
    return kind | None, Field(None, description=f"{text} Default: {default!r}.")


if TYPE_CHECKING:

    class DecodingFields(Body):
        """A part of a request."""
else:
    DecodingFields = create_model(
        "DecodingFields", __base__=Body, **{one.name: _definition(one) for one in fields(DecodingOptions)}
    )
