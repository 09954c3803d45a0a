"""The messages of a chat, and the tools that it may call: their fields, and what chat templates get of them.

Part of `request_bodies`.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from swarmllm.gateway.requests.unknown_fields import ANYTHING, Body, Harmless

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class ImageUrl(Body):
    harmless: ClassVar[Harmless] = {"detail": ANYTHING}  # the model's own processor chooses the size
    url: str = Field(description="data:image/…;base64,…")


class ContentPart(Body):
    harmless: ClassVar[Harmless] = {"cache_control": ANYTHING, "annotations": ([],)}
    type: str
    text: str = ""
    image_url: ImageUrl | None = Field(None, description="For models that see.")

    @model_validator(mode="after")
    def _is_text_or_picture(self) -> "ContentPart":
        if self.type not in ("text", "image_url"):
            raise ValueError(f"parts of type {self.type[:32]!r} can't be read here: leave them out")
        if (self.type == "image_url") != (self.image_url is not None):
            raise ValueError("a part has an image_url if it is of type image_url, and only then")
        return self


class CalledFunction(Body):
    name: ToolName
    arguments: str = "{}"


class EarlierCall(Body):
    """A call in an earlier answer."""

    harmless: ClassVar[Harmless] = {
        "index": ANYTHING
    }  # of a stream's pieces, which some programs send back as they are
    id: Annotated[str, Field(max_length=128)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it: with the arguments themselves, not their JSON."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")},
        }

    @model_validator(mode="after")
    def _is_json(self) -> "EarlierCall":
        try:
            known = isinstance(json.loads(self.function.arguments or "{}"), dict)
        except (ValueError, RecursionError):
            known = False
        if not known:
            raise ValueError("the arguments of a call are a JSON object")
        return self


class Function(Body):
    harmless: ClassVar[Harmless] = {"strict": ANYTHING}
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """What the model may call."""

    harmless: ClassVar[Harmless] = {"cache_control": ANYTHING}
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.schema_of_parameters()}}

    def schema_of_parameters(self) -> dict[str, Any]:
        return self.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class NamedFunction(Body):
    name: ToolName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatMessage(Body):
    harmless: ClassVar[Harmless] = {
        **dict.fromkeys(("refusal", "audio", "function_call"), ()),
        "annotations": ([],),
        "cache_control": ANYTHING,
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=128)] | None = Field(None, description="Of what a tool has found.")
    name: str | None = Field(None, description="For templates that know it.")
    reasoning_content: str | None = Field(None, description="Of an earlier answer, for templates that know it.")

    @model_validator(mode="after")
    def _of_its_role(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the assistant can have tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a message has the role tool if it has a tool_call_id, and only then")
        return self

    def picture_urls(self) -> list[str]:
        """Those of its pictures, in order."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if part.image_url is not None]

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it; pictures are parts of type "image"."""
        content = self.content or ""
        text: Any = content if isinstance(content, str) else "".join(part.text for part in content)
        if not isinstance(content, str) and self.picture_urls():
            text = [{"type": "image"} if part.image_url else {"type": "text", "text": part.text} for part in content]
        found = {"role": "system" if self.role == "developer" else self.role, "content": text}
        more = {
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "tool_call_id": self.tool_call_id,
        }
        return found | {name: value for name, value in more.items() if value is not None}


def picture_urls(messages: Sequence[ChatMessage]) -> list[str]:
    """Those of all pictures, in order."""
    return [url for message in messages for url in message.picture_urls()]
