"""The APIs of Anthropic and Ollama, and /v1/responses: the same text as the local model's, each in its own shape.

Their own clients are tried too: `openai` always, `anthropic` and `ollama` where they are installed
(`make test-trainers`).
"""

import json
from typing import Any

import openai
import pytest
from test_tools import TOOLS
from web_gateway import NAME, RunningGateway, running_gateway

from swarmllm import LocalSwarm
from swarmllm.gateway.apis.anthropic import MessagesRequest
from swarmllm.gateway.apis.ollama import OllamaChat
from swarmllm.gateway.apis.responses import Item, ResponsesRequest, StoredResponses
from swarmllm.gateway.errors import ApiError

pytestmark = pytest.mark.rotates(3)

SAID = "Tell me a story about a fox."
MESSAGES: list[Any] = [{"role": "user", "content": SAID}]
PLAIN: dict[str, Any] = {"model": NAME, "messages": MESSAGES}


@pytest.fixture(scope="module")
def story(greedy: Any, tokenizer: Any) -> str:
    """The likeliest 24 tokens."""
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    return str(greedy(ids, 24))


# ---------------------------------------------------------------------- fields


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("/v1/messages", {"max_tokens": 8, "top_k2": 1}, "did you mean 'top_k'?"),
        ("/v1/messages", {}, "max_tokens"),
        ("/v1/messages", {"max_tokens": 8, "model": "other"}, "not served here"),
        ("/v1/messages", {"max_tokens": 8, "container": "x"}, "container is not supported"),
        (
            "/v1/messages",
            {"max_tokens": 8, "messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "blocks of type 'document' can't be read here",
        ),
        ("/v1/responses", {"messages": None, "input": SAID, "background": True}, "background can only be false"),
        ("/v1/responses", {"messages": None, "input": SAID, "tools": [{"type": "web_search"}]}, "tools"),
        ("/v1/responses", {"messages": None, "input": SAID, "previous_response_id": "x"}, "no response 'x'"),
        ("/v1/responses", {"messages": None, "input": SAID, "reasoning": {"effort": "low"}}, "nothing that"),
        ("/api/chat", {"options": {"mirostat": 3}}, "mirostat"),
        ("/api/chat", {"think": True}, "does not think"),
        ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict: give at least 1, or -1"),
        ("/api/chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty: Input should be greater than or"),
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature: Input should be"),
        ("/api/chat", {"format": {"x": "y" * 70000}}, "format: the JSON schema is longer"),
        ("/api/chat", {"think": "low"}, "think of embedded is nothing that"),
        ("/api/chat", {"format": {"type": "wrong"}}, "format: the JSON schema can't be used"),
        ("/v1/messages", {"max_tokens": 8, "output_config": {"effort": "low"}}, "output_config.effort of embedded"),
        ("/v1/responses", {"messages": None, "input": SAID, "reasoning": {"effort": "low"}}, "reasoning.effort of"),
        ("/v1/messages", {"max_tokens": 8, "stop_sequences": [""]}, "stop_sequences.0: String should have at least 1"),
        ("/v1/responses", {"messages": None, "input": [{"role": "user"}]}, "input.0: a message of the role user needs"),
        (
            "/v1/responses",
            {"messages": None, "input": SAID, "text": {"format": {"type": "json_schema"}}},
            'text.format: give {"type": "json_schema"',
        ),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options: only streams have them"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": None}]},
            "messages.0: a message of the role",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": []}]}, "the role system needs content"),
        ("/v1/chat/completions", {"stop": ""}, "stop: String should have at least 1 character"),
        (
            "/api/generate",
            {"messages": None, "prompt": "a", "suffix": "b"},
            "has no tokens for the text between two others",
        ),
        ("/v1/embeddings", {"messages": None, "input": "a"}, "gives no embeddings"),
        ("/api/embed", {"messages": None, "input": "a"}, "gives no embeddings"),
    ],
)
def test_errors_in_each_shape(gateway: RunningGateway, path: str, more: dict[str, Any], words: str) -> None:
    response = gateway.http.post(path, json={**PLAIN, **more})
    assert response.status_code in (400, 404), response.text
    found = response.json()
    message = found["error"] if path.startswith("/api/") else found["error"]["message"]
    assert words in message
    assert (found.get("type") == "error") == path.startswith("/v1/messages")


# ---------------------------------------------------------------------- Anthropic's


def test_messages(gateway: RunningGateway, story: str) -> None:
    asked = {**PLAIN, "max_tokens": 24, "temperature": 0}
    found = gateway.post("/v1/messages", **asked)
    assert found["content"] == [{"type": "text", "text": story}]
    assert (found["stop_reason"], found["usage"]["output_tokens"]) == ("max_tokens", 24)
    told = gateway.events("/v1/messages", **asked)
    kinds = [one["type"] for one in told]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(one["delta"].get("text", "") for one in told if one["type"] == "content_block_delta") == story
    count = gateway.post("/v1/messages/count_tokens", messages=MESSAGES)  # without a model: the first one
    assert count["input_tokens"] == found["usage"]["input_tokens"]
    word = story.split()[4]
    stopped = gateway.post("/v1/messages", **{**asked, "stop_sequences": ["@@", word]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", word)
    begun = story[: story.index(" ", 20)]
    going_on = [*MESSAGES, {"role": "assistant", "content": begun}]
    on = gateway.post("/v1/messages", **{**asked, "messages": going_on})["content"][0]["text"]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    same = gateway.post("/v1/chat/completions", **{**asked, "messages": going_on, **more})
    assert on == same["choices"][0]["message"]["content"]


def test_calls_of_tools_in_blocks(tooled: RunningGateway) -> None:
    tool = {"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}
    asked = {**PLAIN, "max_tokens": 200, "tools": [tool], "tool_choice": {"type": "any"}, "top_k": 1}
    found = tooled.post("/v1/messages", **asked)
    (call,) = found["content"]
    assert (found["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "weather")
    assert call["input"]["city"] in ("Rome", "Oslo")
    told = tooled.events("/v1/messages", **asked)
    deltas = [one["delta"]["partial_json"] for one in told if one["type"] == "content_block_delta"]
    assert len(deltas) > 3
    assert json.loads("".join(deltas)) == call["input"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "dry", "is_error": True}
    messages = [*MESSAGES, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    chat = MessagesRequest.model_validate({**asked, "messages": messages}).as_chat(tooled.gateway.models.first)
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool"]
    assert chat.messages[-1].content == "Error: dry"


def test_thoughts_in_blocks(thinking: RunningGateway) -> None:
    asked = {**PLAIN, "max_tokens": 16, "temperature": 0, "thinking": {"type": "adaptive"}}
    thought, text = thinking.post("/v1/messages", **asked)["content"]
    assert (thought["type"], text) == ("thinking", {"type": "text", "text": ""})
    told = thinking.events("/v1/messages", **asked)
    assert "".join(one["delta"].get("thinking", "") for one in told if "delta" in one) == thought["thinking"]
    refused = thinking.http.post("/v1/messages", json={**asked, "thinking": {"type": "disabled"}})
    assert "can't be told not to think" in refused.json()["error"]["message"]
    assert thinking.events("/api/chat", **{**PLAIN, "options": {"num_predict": 4}})[0]["message"]["thinking"]
    kinds = [one["type"] for one in thinking.events("/v1/responses", input=SAID, max_output_tokens=8)]
    assert "response.reasoning_text.delta" in kinds


@pytest.mark.lane("trainers")
def test_anthropics_client(gateway: RunningGateway, story: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)
    asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 24}
    asked["extra_body"] = {"temperature": 0}
    assert client.messages.create(**asked).content[0].text == story
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == story
        assert stream.get_final_message().stop_reason == "max_tokens"
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(**{**asked, "model": "other"})
    client.close()


# ---------------------------------------------------------------------- OpenAI's items


def test_responses_by_openais_client(gateway: RunningGateway, story: str) -> None:
    asked: Any = {"model": NAME, "temperature": 0, "max_output_tokens": 24}
    first = gateway.openai.responses.create(input=SAID, **asked)
    assert first.output_text == story
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert gateway.openai.responses.retrieve(first.id).output_text == story
    second = gateway.openai.responses.create(input="And then?", previous_response_id=first.id, **asked)
    both = [*MESSAGES, {"role": "assistant", "content": story}, {"role": "user", "content": "And then?"}]
    chat = gateway.openai.chat.completions.create(model=NAME, messages=both, max_tokens=24, temperature=0)
    assert second.output_text == chat.choices[0].message.content
    assert [item.type for item in gateway.openai.responses.input_items.list(second.id)] == ["message"] * 3
    stateless = gateway.openai.responses.create(input=both, store=False, **asked)
    assert stateless.output_text == second.output_text
    gateway.openai.responses.delete(second.id)
    for name in (second.id, stateless.id):
        with pytest.raises(openai.NotFoundError):
            gateway.openai.responses.retrieve(name)
    asked["max_output_tokens"] = 800  # the likeliest text ends before
    with gateway.openai.responses.stream(input=SAID, **asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text
    assert text.startswith(story)


def test_items_of_calls(tooled: RunningGateway) -> None:
    asked: Any = {"model": NAME, "input": SAID, "tool_choice": "required", "temperature": 0}
    asked["tools"] = [{"type": "function", **TOOLS[0]["function"]}]
    (call,) = tooled.openai.responses.create(**asked).output
    assert (call.type, call.name) == ("function_call", "weather")
    with tooled.openai.responses.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (same,) = stream.get_final_response().output
    assert len(pieces) > 3
    assert "".join(pieces) == same.arguments == call.arguments
    found = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    items = [*MESSAGES, call.model_dump(exclude_none=True), found]
    chat = ResponsesRequest.model_validate({"input": items}).as_chat([])
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool"]


def test_stored_responses_are_bounded_and_private() -> None:
    stored = StoredResponses(300)
    for name in "abc":
        stored.keep(name, "me", {"output": "x" * 100}, [])
    with pytest.raises(ApiError, match="no response 'a'"):
        stored.get("a", "me")
    with pytest.raises(ApiError):
        stored.get("c", "you")
    stored.keep("d", "me", {"output": "x" * 1000}, [])
    assert stored.get("b", "me").response == {"output": "x" * 100}
    stored.forget("b", "me")
    with pytest.raises(ApiError):
        stored.get("b", "me")


# ---------------------------------------------------------------------- Ollama's


def test_ollamas_chat(gateway: RunningGateway, story: str) -> None:
    asked: dict[str, Any] = {**PLAIN, "model": f"{NAME}:latest", "options": {"temperature": 0, "num_predict": 24}}
    *lines, last = gateway.events("/api/chat", **asked)
    assert "".join(line["message"]["content"] for line in lines) == story
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 24)
    whole = gateway.post("/api/chat", **{**asked, "stream": False})
    assert whole["message"]["content"] == story
    generated = gateway.post("/api/generate", **{**asked, "messages": None, "prompt": SAID, "stream": False})
    assert generated["response"] == story
    raw = {"model": NAME, "prompt": "Once", "raw": True, "stream": False, "options": asked["options"]}
    direct = gateway.openai.completions.create(model=NAME, prompt="Once", max_tokens=24, temperature=0)
    assert gateway.post("/api/generate", **raw)["response"] == direct.choices[0].text
    assert gateway.post("/api/generate", model=NAME)["done_reason"] == "load"
    schema = {"enum": ["a", "b"]}
    assert gateway.post("/api/chat", **{**PLAIN, "format": schema, "stream": False})["message"]["content"] in (
        '"a"',
        '"b"',
    )
    (listed,) = gateway.http.get("/api/tags").json()["models"]
    assert listed["name"] == NAME
    shown = gateway.post("/api/show", model=NAME)
    assert (shown["capabilities"], shown["model_info"]["llama.context_length"]) == (["completion"], 2048)
    assert gateway.http.get("/api/version").json()["version"]


def test_ollamas_calls(tooled: RunningGateway) -> None:
    earlier = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]}
    messages = [*MESSAGES, earlier, {"role": "tool", "tool_name": "weather", "content": "dry"}]
    asked = OllamaChat.model_validate({"model": NAME, "messages": messages, "tools": TOOLS})
    chat = asked.asked(tooled.gateway.models.first)
    calls = chat.messages[1].tool_calls
    assert calls is not None
    assert chat.messages[2].tool_call_id == calls[0].id
    assert tooled.events("/api/chat", **{**asked.model_dump(exclude_none=True), "options": {"num_predict": 4}})[-1][
        "done"
    ]


@pytest.mark.lane("trainers")
def test_ollamas_client(gateway: RunningGateway, story: str) -> None:
    import ollama

    client = ollama.Client(host=gateway.url)
    options = {"temperature": 0, "num_predict": 24}
    assert client.chat(model=NAME, messages=MESSAGES, options=options).message.content == story
    assert (
        "".join(p.message.content for p in client.chat(model=NAME, messages=MESSAGES, options=options, stream=True))
        == story
    )
    assert client.generate(model=NAME, prompt=SAID, options=options).response == story
    assert [model.model for model in client.list().models] == [NAME]
    assert client.show(NAME).template
    with pytest.raises(ollama.ResponseError, match="gives no embeddings"):
        client.embed(model=NAME, input="a")
    client._client.close()


def test_keys_in_each_apis_own_header(swarm: LocalSwarm, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("secret\n")
    with running_gateway(swarm.initial_peers, api_keys_file=str(tmp_path / "keys")) as gateway:
        for path in ("/v1/messages", "/v1/responses", "/api/chat", "/api/tags", "/v1/embeddings"):
            assert gateway.http.post(path, json={}).status_code == 401
        asked = {**PLAIN, "max_tokens": 1}
        assert gateway.http.post("/v1/messages", json=asked, headers={"x-api-key": "secret"}).status_code == 200
        wrong = gateway.http.post("/v1/messages", json=asked, headers={"x-api-key": "wrong"})
        assert wrong.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("content", [None, [], [{"type": "reasoning_text", "text": "Hm."}]])
def test_thoughts_of_earlier_answers(content: list[dict[str, str]] | None) -> None:
    """Whole, or in short where an answer of another service has only that."""
    short = [{"type": "summary_text", "text": "In short."}]
    messages: list[dict[str, Any]] = []
    Item.model_validate({"type": "reasoning", "content": content, "summary": short}).add_to(messages)
    assert messages[0]["reasoning_content"] == ("Hm." if content else "In short.")
