"""Requests that ordinary programs send, as their own code makes them: each is answered, and says which fields made no
difference.

Where the shapes come from, as of November 2026, is said with each. Lengths are made short.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from test_access import Socket
from web_gateway import NAME, WITH_TOOLS, RunningGateway, running_gateway

from swarmllm import LocalSwarm

SAID = "Tell me a story about a fox."
SHORT = 4
SERVERS_ROOM = 65536
"""The servers' --attn_cache_tokens."""
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "The file"}},
    "required": ["path"],
}
READ_FILE = {"name": "read_file", "description": "Read a file", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": READ_FILE}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
SYSTEM = {"role": "system", "content": "You are a careful programmer."}
USER = {"role": "user", "content": SAID}
EPHEMERAL = {"type": "ephemeral"}

REQUESTS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    # Open WebUI, backend/open_webui/utils/payload.py and routers/openai.py: a chat with its settings filled in.
    "Open WebUI, chat": (
        "/v1/chat/completions",
        {
            "stream": True,
            "model": NAME,
            "messages": [SYSTEM, USER],
            "temperature": 0.8,
            "top_p": 0.9,
            "max_tokens": SHORT,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "seed": 1,
            "stop": ["</s>"],
            "stream_options": {"include_usage": True},
        },
        [],
    ),
    # routers/tasks.py: titles, tags and follow-ups are asked for like this, with the metadata left out.
    "Open WebUI, title": (
        "/v1/chat/completions",
        {"model": NAME, "messages": [USER], "stream": False, "max_completion_tokens": SHORT},
        [],
    ),
    # routers/ollama.py and convert_payload_openai_to_ollama: the same to a connection of Ollama's kind.
    "Open WebUI, as of Ollama": (
        "/api/chat",
        {
            "model": f"{NAME}:latest",
            "messages": [USER],
            "stream": True,
            "keep_alive": "5m",
            "options": {
                "temperature": 0.8,
                "num_ctx": 131072,
                "num_predict": SHORT,
                "repeat_last_n": 64,
                "num_batch": 512,
                "use_mmap": True,
                "num_gpu": 99,
                "num_thread": 8,
            },
        },
        [
            *("keep_alive", "options.num_batch", "options.num_ctx", "options.num_gpu", "options.num_thread"),
            *("options.repeat_last_n", "options.use_mmap"),
        ],
    ),
    # LibreChat, docs/configuration/librechat_yaml/object_structure/default_params: custom endpoints share OpenAI's.
    "LibreChat, chat": (
        "/v1/chat/completions",
        {
            "model": NAME,
            "temperature": 1,
            "top_p": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "user": "LibreChat_User_ID",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": SHORT,
            "messages": [{"role": "system", "content": "Be kind.", "name": "instructions"}, USER],
        },
        ["user"],
    ),
    # packages/api/src/endpoints/openai/llm.ts: what its model settings can add.
    "LibreChat, with model settings": (
        "/v1/chat/completions",
        {
            "model": NAME,
            "messages": [{"role": "user", "content": [{"type": "text", "text": SAID}]}],
            "stream": True,
            "user": "65a",
            "verbosity": "low",
            "max_tokens": SHORT,
        },
        ["user", "verbosity"],
    ),
    # Continue, core/llm/llms/Ollama.ts: _getModelFileParams and _streamChat.
    "Continue, chat by Ollama": (
        "/api/chat",
        {
            "model": NAME,
            "messages": [SYSTEM, USER],
            "options": {"num_predict": SHORT, "num_ctx": 32768, "num_thread": 4, "stop": ["\n\n\n"]},
            "keep_alive": 1800,
            "stream": True,
        },
        ["keep_alive", "options.num_ctx", "options.num_thread"],
    ),
    # core/llm/llms/Ollama.ts: autocompletion of models that have no form for a suffix is a raw prompt.
    "Continue, autocompletion by Ollama": (
        "/api/generate",
        {
            "model": NAME,
            "prompt": "def fox(",
            "raw": True,
            "options": {"temperature": 0.01, "num_predict": SHORT, "stop": ["\n\n"], "num_ctx": 32768},
            "keep_alive": 1800,
            "stream": True,
        },
        ["keep_alive", "options.num_ctx"],
    ),
    # packages/openai-adapters/src/apis/OpenAI.ts: modifyChatBody.
    "Continue, chat": (
        "/v1/chat/completions",
        {
            "model": NAME,
            "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": SAID}]}],
            "max_tokens": SHORT,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [TOOL],
            "parallel_tool_calls": False,
        },
        [],
    ),
    # aider, aider/models.py: send_completion by litellm, which sends temperature 0 and streams.
    "aider, chat": (
        "/v1/chat/completions",
        {
            "model": NAME,
            "messages": [SYSTEM, USER, {"role": "assistant", "content": "Ok."}, USER],
            "temperature": 0,
            "stream": True,
            "max_tokens": SHORT,
        },
        [],
    ),
    # aider/coders/chat_chunks.py: add_cache_control puts it on the last part of a message.
    "aider, with --cache-prompts": (
        "/v1/chat/completions",
        {
            "model": NAME,
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "You are careful.", "cache_control": EPHEMERAL}],
                },
                {**USER, "cache_control": EPHEMERAL},
            ],
            "temperature": 0,
            "max_tokens": SHORT,
        },
        ["messages[].cache_control", "messages[].content[].cache_control"],
    ),
    # aider by Ollama, as litellm's ollama_chat makes it: num_ctx grows with the chat.
    "aider, by Ollama": (
        "/api/chat",
        {
            "model": NAME,
            "messages": [SYSTEM, USER],
            "options": {"num_ctx": 40960, "temperature": 0, "num_predict": SHORT},
            "stream": True,
        },
        ["options.num_ctx"],
    ),
    # Cline, src/core/api/providers/openai.ts: createMessage, with a tool's result behind a call.
    "Cline, chat": (
        "/v1/chat/completions",
        {
            "model": NAME,
            "messages": [
                SYSTEM,
                {"role": "user", "content": [{"type": "text", "text": SAID}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "print(1)"},
            ],
            "temperature": 0,
            "max_tokens": SHORT,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [TOOL],
        },
        [],
    ),
    # src/core/api/providers/anthropic.ts: system and messages are cached, thoughts have a budget.
    "Cline, by Anthropic's API": (
        "/v1/messages",
        {
            "model": NAME,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "max_tokens": SHORT,
            "system": [{"text": "You are careful.", "type": "text", "cache_control": EPHEMERAL}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": SAID, "cache_control": EPHEMERAL}]},
                {"role": "assistant", "content": "Which one?"},
                {"role": "user", "content": SAID, "cache_control": EPHEMERAL},
            ],
            "tools": [{"name": "read_file", "input_schema": PARAMETERS, "cache_control": EPHEMERAL}],
            "stream": True,
        },
        [
            *("messages[].cache_control", "messages[].content[].cache_control", "system[].cache_control"),
            *("thinking.budget_tokens", "tools[].cache_control"),
        ],
    ),
    # Zed, crates/open_ai/src/open_ai.rs: Request, RequestMessage.
    "Zed, chat": (
        "/v1/chat/completions",
        {
            "model": NAME,
            "messages": [SYSTEM, USER, {"role": "assistant", "content": []}, USER],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": SHORT,
            "temperature": 1.0,
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "prompt_cache_key": "5c1e",
        },
        ["prompt_cache_key"],
    ),
    # crates/ollama/src/ollama.rs: ChatRequest.
    "Zed, by Ollama": (
        "/api/chat",
        {
            "model": f"{NAME}:latest",
            "messages": [
                SYSTEM,
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "read_file", "arguments": {"path": "a.py"}}}],
                    "thinking": None,
                },
                {"role": "tool", "tool_name": "read_file", "content": "print(1)"},
            ],
            "stream": True,
            "keep_alive": -1,
            "options": {"num_ctx": 16384, "num_predict": SHORT, "stop": [], "temperature": 1.0, "top_p": None},
            "tools": [TOOL],
            "think": None,
        },
        ["keep_alive", "options.num_ctx"],
    ),
    # Programs that fill in all of OpenAI's fields, such as SillyTavern.
    "all that is known": (
        "/v1/chat/completions",
        {"model": NAME, "messages": [USER], "max_tokens": SHORT, "best_of": 1, "n": 1, "metadata": {"a": "b"}},
        ["metadata"],
    ),
    "/v1/responses": (
        "/v1/responses",
        {
            "model": NAME,
            "input": [{"role": "user", "content": [{"type": "input_text", "text": SAID, "detail": None}]}],
            "text": {"verbosity": "high"},
            "max_output_tokens": SHORT,
        },
        ["text.verbosity"],
    ),
}


@pytest.fixture(scope="module")
def asked(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """A gateway of a model whose template knows tools."""
    with running_gateway(swarm.initial_peers, default_max_tokens=SHORT, chat_template=WITH_TOOLS) as gateway:
        yield gateway


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_of_ordinary_programs(asked: RunningGateway, name: str) -> None:
    path, body, unused = REQUESTS[name]
    answer = asked.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text
    assert [one for one in answer.headers.get("x-unused-fields", "").split(", ") if one] == unused
    if "stream_options" in body:
        pieces = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        assert json.loads(pieces[-1])["usage"]["completion_tokens"] == SHORT


def test_requests_before_a_chat(asked: RunningGateway) -> None:
    http, model = asked.http, asked.gateway.models.first
    listed = http.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == [NAME]
    (running,) = http.get("/api/ps").json()["models"]
    assert (running["name"], running["context_length"], running["size_vram"]) == (NAME, model.max_length, 0)
    assert running["expires_at"] > "2026"
    assert running["digest"] == http.get("/api/tags").json()["models"][0]["digest"]
    for asking in ({"model": NAME}, {"name": f"{NAME}:latest"}):  # Continue calls it by name
        shown = http.post("/api/show", json=asking).json()
        assert "tools" in shown["capabilities"]
        assert "insert" not in shown["capabilities"]
    assert http.post("/api/show", json={}).status_code == 400


def test_a_hint_changes_nothing(asked: RunningGateway) -> None:
    body = {"model": NAME, "messages": [USER], "max_tokens": 12, "temperature": 0}
    plain = asked.http.post("/v1/chat/completions", json=body)
    assert "x-unused-fields" not in plain.headers
    hinted = asked.http.post("/v1/chat/completions", json={**body, "verbosity": "high", "best_of": 1, "user": "x"})
    assert hinted.json()["choices"] == plain.json()["choices"]
    assert hinted.headers["x-unused-fields"] == "user, verbosity"
    many = {**body, "messages": [{**USER, "cache_control": EPHEMERAL}] * 40}
    assert asked.http.post("/v1/chat/completions", json=many).headers["x-unused-fields"] == "messages[].cache_control"


def test_a_websocket_says_it_at_the_end(asked: RunningGateway) -> None:
    with closing(Socket(asked.url)) as socket:
        for number, more in enumerate(({"verbosity": "low"}, {})):
            socket.ask({"id": number, "prompt": SAID, "max_tokens": 1, **more})
            while "done" not in (last := socket.answer()):
                assert "error" not in last
            assert last == {"done": True, "request": number} | ({"unused_fields": ["verbosity"]} if more else {})


def test_fields_that_could_change_the_answer_are_refused(asked: RunningGateway) -> None:
    for path, more in (
        ("/v1/chat/completions", {"best_of": 2}),
        ("/v1/completions", {"best_of": 3, "n": 2}),
        ("/api/chat", {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}),
    ):
        body = {"model": NAME, "prompt": SAID} if path == "/v1/completions" else {"model": NAME, "messages": [USER]}
        assert asked.http.post(path, json={**body, **more}).status_code == 400


def test_a_lenient_gateway_names_unknown_fields(swarm: LocalSwarm) -> None:
    with running_gateway(swarm.initial_peers, lenient=True) as gateway:
        body = {"prompt": SAID, "max_tokens": 1, "provider": {"order": []}, "tränsforms\n": []}
        answer = gateway.http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.headers["x-unused-fields"]) == (200, "provider")


def test_the_length_is_that_of_the_model_as_far_as_servers_have_room(asked: RunningGateway) -> None:
    model = asked.gateway.models.first
    assert model.max_length == model.swarm.config.max_position_embeddings
    model.longest = 1 << 20
    assert model.swarm.swarm.look_ups.snapshot.cache_room() <= model.max_length <= SERVERS_ROOM
    model.longest = model.swarm.config.max_position_embeddings
