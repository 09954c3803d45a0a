"""Programs of others that speak OpenAI's API: openai's helper for tools, langchain, and Open WebUI's requests.

langchain runs in `make test-trainers`, because it needs many other packages. litellm has no test: its botocore can't be
installed together with jupyter_client (litellm 1.110, 2026-11).
"""

import json
from typing import Any, Literal

import pydantic
import pytest
from openai import pydantic_function_tool
from test_tools import MESSAGES, TOOLS
from web_gateway import NAME, RunningGateway

pytestmark = pytest.mark.rotates(3, whole_file=True)

SAID: Any = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def story(gateway: RunningGateway) -> str:
    """The likeliest answer, as httpx gets it."""
    asked = {"model": NAME, "messages": SAID, "temperature": 0, "max_tokens": 24}
    return str(gateway.http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"])


class Weather(pydantic.BaseModel, extra="forbid"):
    """How the weather is in a city."""

    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


class Fox(pydantic.BaseModel, extra="forbid"):
    """The subject of a story."""

    legs: int = pydantic.Field(ge=2, le=4)
    red: bool


# ---------------------------------------------------------------------- openai


def test_openais_helper_parses_calls(tooled: RunningGateway) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "tool_choice": "required", "max_tokens": 200, "seed": 2}
    asked["tools"] = [pydantic_function_tool(Weather, name="weather")]
    completion = tooled.openai.chat.completions.parse(**asked)
    (call,) = completion.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    with tooled.openai.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def test_openais_helper_parses_answers(gateway: RunningGateway) -> None:
    asked: Any = {"model": NAME, "messages": SAID, "response_format": Fox, "max_tokens": 100, "seed": 1}
    parsed = gateway.openai.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Fox)
    with gateway.openai.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


# ---------------------------------------------------------------------- Open WebUI

# Bodies like those that Open WebUI 0.6 sends to a server of OpenAI's API for one turn with a tool (2026-11): the chat
# with the user's settings, the same after the tool has answered (with the pieces' `index` in the calls), and, not
# streamed, the tasks for a title, tags and what to ask next.
SETTINGS = {"temperature": 0, "top_p": 0.9, "max_tokens": 60, "seed": 7, "stop": ["###"], "frequency_penalty": 0.0}
TASK = '### Task:\nGenerate a concise title.\n### Output:\n{ "title": "your title here" }\n### Chat History:\n'


def test_open_webui_finds_the_models(gateway: RunningGateway) -> None:
    listed = gateway.http.get(
        "/v1/models", headers={"Authorization": "Bearer none", "Content-Type": "application/json"}
    )
    assert [model["id"] for model in listed.json()["data"]] == [NAME]
    assert gateway.http.get("/api/version").status_code == 200  # as an Ollama server
    assert gateway.http.get("/api/tags").json()["models"][0]["name"] == NAME


def chunks_of(gateway: RunningGateway, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, read line by line as Open WebUI passes them on."""
    headers = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "Z", "X-OpenWebUI-Chat-Id": "1"}
    with gateway.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers) as answer:
        lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200, lines
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_open_webuis_turn(tooled: RunningGateway) -> None:
    user = {"role": "user", "content": "How is the weather in Rome?"}
    body = {"model": NAME, "messages": [{"role": "system", "content": "Be short."}, user], **SETTINGS}
    body["stream_options"] = {"include_usage": True}
    chunks = chunks_of(tooled, body)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text
    assert chunks[-1]["usage"]["completion_tokens"] > 0

    called = chunks_of(tooled, {**body, "max_tokens": 200, "tools": TOOLS[:1], "tool_choice": "required"})
    pieces = [one for chunk in called if chunk["choices"] for one in chunk["choices"][0]["delta"].get("tool_calls", ())]
    arguments = "".join(piece["function"].get("arguments", "") for piece in pieces)
    call = {**pieces[0], "function": {**pieces[0]["function"], "arguments": arguments}}
    assert call["index"] == 0
    after = [
        *body["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "dry"},
    ]
    assert chunks_of(tooled, {**body, "messages": after, "tools": TOOLS[:1]})[-1]["usage"]["completion_tokens"] > 0


def test_open_webuis_tasks(gateway: RunningGateway) -> None:
    for more in ({"max_tokens": 50}, {"max_completion_tokens": 50}):
        body = {"model": NAME, "messages": [{"role": "user", "content": TASK}], "stream": False, **more}
        answer = gateway.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]


# ---------------------------------------------------------------------- langchain


@pytest.mark.lane("trainers")
def test_langchain_binds_tools(tooled: RunningGateway) -> None:
    import langchain_openai as langchain

    asked: Any = {"base_url": f"{tooled.url}/v1", "api_key": "none", "model": NAME, "seed": 2, "max_tokens": 200}
    bound = langchain.ChatOpenAI(**asked).bind_tools([Weather], tool_choice="required")
    said = [("user", "How is the weather in Rome?")]
    answer = bound.invoke(said)
    (call,) = answer.tool_calls
    assert call["name"] == "Weather"
    assert Weather.model_validate(call["args"])
    whole = None
    for chunk in bound.stream(said):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [(call["name"], call["args"])]
    found = {"role": "tool", "tool_call_id": call["id"], "content": "dry"}
    assert langchain.ChatOpenAI(**asked).bind_tools([Weather]).invoke([*said, answer, found]).content
    shaped = langchain.ChatOpenAI(**asked).with_structured_output(Fox, method="json_schema").invoke(said)
    assert isinstance(shaped, Fox)
