"""The `openai` package and plain HTTP against a gateway, unchanged: what it answers, and what it says when it can't."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from web_gateway import NAME, RunningGateway, server_metrics, wait_until

from swarmllm import LocalSwarm
from swarmllm.gateway.apis.openai import OpenAIAnswer
from swarmllm.gateway.apis.request_bodies import CompletionRequest
from swarmllm.gateway.engine.generation import GenerationOptions
from swarmllm.gateway.sampling import SamplingOptions, TokenLogprob
from swarmllm.gateway.text import TextPiece

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about a fox."}]
PROMPT = "Once upon a time"


def test_completions_equal_the_local_model(gateway: RunningGateway, greedy: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPT).input_ids
    answer = gateway.openai.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == greedy(ids, 24)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 24)


def test_chat_uses_the_chat_template(gateway: RunningGateway, greedy: Any, tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = gateway.openai.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=24, temperature=0)
    assert answer.choices[0].message.content == greedy(ids, 24)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(ids)


def test_prompts_may_be_tokens_and_several(gateway: RunningGateway, greedy: Any, tokenizer: Any) -> None:
    prompts = [tokenizer(text).input_ids for text in (PROMPT, "The sun", "A fox and a hen")]
    answer = gateway.openai.completions.create(model=NAME, prompt=prompts, max_tokens=6, temperature=0)
    assert [choice.text for choice in answer.choices] == [greedy(ids, 6) for ids in prompts]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 18


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_brings_the_same_as_a_whole_answer(gateway: RunningGateway, n: int) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 20, "seed": 5, "n": n, "temperature": 0.8}
    whole = gateway.openai.chat.completions.create(**asked)
    chunks = list(gateway.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert mine[0].delta.role == "assistant"
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason]
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 20


def test_a_seed_gives_the_same_text_under_load(gateway: RunningGateway) -> None:
    def ask(seed: int) -> list[str]:
        answer = gateway.openai.completions.create(model=NAME, prompt=PROMPT, max_tokens=16, seed=seed, n=2)
        return [choice.text for choice in answer.choices]

    alone = {seed: ask(seed) for seed in range(3)}
    with ThreadPoolExecutor(9) as threads:
        together = list(threads.map(ask, [0, 1, 2] * 3))
    assert together == [alone[seed] for seed in [0, 1, 2] * 3]
    assert len({text for texts in alone.values() for text in texts}) == 6


def test_a_temperature_next_to_0_takes_the_likeliest_token(
    gateway: RunningGateway, greedy: Any, tokenizer: Any
) -> None:
    for temperature in (1e-6, 1e-40, 1e-310):
        answer = gateway.http.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "temperature": temperature}
        )
        assert answer.json()["choices"][0]["text"] == greedy(
            tokenizer(PROMPT).input_ids, 1
        )  # the next ones are equally likely


def test_32_requests_at_once(gateway: RunningGateway, greedy: Any, tokenizer: Any) -> None:
    starts = ["Once", "The fox", "A red hen", "In the house"] * 8
    expected = {start: greedy(tokenizer(start).input_ids, 12) for start in set(starts)}

    def ask(start: str) -> str:
        stream = gateway.openai.completions.create(model=NAME, prompt=start, max_tokens=12, temperature=0, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(ask, starts)) == [expected[start] for start in starts]


def test_stop_strings_end_the_text_before_them(gateway: RunningGateway) -> None:
    asked: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    text = gateway.openai.completions.create(**asked).choices[0].text
    middle = text[12:16]
    expected = text[: text.index(middle)]
    answer = gateway.openai.completions.create(**asked, stop=["never seen", middle]).choices[0]
    assert (answer.text, answer.finish_reason) == (expected, "stop")
    streamed = list(gateway.openai.completions.create(**asked, stop=middle, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_have_the_bytes_of_parts_of_characters(gateway: RunningGateway, tokenizer: Any) -> None:
    fox = tokenizer("\N{FOX FACE}", add_special_tokens=False).input_ids
    assert len(fox) == 4
    asked: Any = {"messages": MESSAGES, "max_tokens": 1, "temperature": 0, "logit_bias": {str(fox[0]): 100}}
    chat = gateway.openai.chat.completions.create(model=NAME, **asked, logprobs=True, top_logprobs=20)
    (first,) = chat.choices[0].logprobs.content
    assert (first.token, first.bytes) == (r"\xf0", [0xF0])
    assert all(bytes(top.bytes).decode(errors="backslashreplace") == top.token for top in first.top_logprobs)


def test_offsets_are_those_of_the_text_that_is_returned(gateway: RunningGateway, tokenizer: Any) -> None:
    prompt = "a\N{FOX FACE}b"
    asked: Any = {"model": NAME, "prompt": prompt, "temperature": 0, "echo": True, "logprobs": 2, "max_tokens": 6}
    answer = gateway.openai.completions.create(**asked).choices[0]
    found = answer.logprobs
    ids = tokenizer(prompt).input_ids
    assert found.tokens[0] == "<s>"
    assert found.tokens[2:6] == [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\xa6", r"bytes:\x8a"]
    assert found.text_offset[: len(ids)] == [0, 0, 1, 1, 1, 1, 2]
    assert answer.text.startswith(prompt)
    for offset, token in zip(found.text_offset[len(ids) :], found.tokens[len(ids) :], strict=True):
        assert answer.text[offset:].startswith(token)
    chunks = [chunk.choices[0] for chunk in gateway.openai.completions.create(**asked, stream=True)]
    assert [offset for chunk in chunks if chunk.logprobs for offset in chunk.logprobs.text_offset] == found.text_offset
    by_id = gateway.openai.completions.create(**asked, extra_body={"return_tokens_as_token_ids": True}).choices[0]
    assert by_id.logprobs.tokens[: len(ids)] == [f"token_id:{token}" for token in ids]
    assert all(len(top) == 2 for top in by_id.logprobs.top_logprobs[1:])


def test_two_tokens_of_one_name_are_both_there(gateway: RunningGateway, tokenizer: Any) -> None:
    model = gateway.gateway.models.first
    request = CompletionRequest.model_validate({"prompt": "x", "logprobs": 3})
    answer = OpenAIAnswer(request, model, [[1]], GenerationOptions(sampling=SamplingOptions(seed=0), max_tokens=1))
    same = {5: b"\xf0", 6: b"\xf0", 7: None, 8: "é".encode()}
    piece = TokenLogprob(5, -0.1, ((5, -0.1), (6, -1.0), (8, -2.0)), same)
    answer.add(TextPiece(0, "x", piece, "length"))
    (top,) = answer.whole()["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {r"bytes:\xf0": -0.1, "token_id:6": -1.0, "é": -2.0}


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_of_no_token_has_its_log_probabilities(gateway: RunningGateway, echo: bool) -> None:
    body = {"prompt": "Tom", "max_tokens": 0, "logprobs": 1, "echo": echo}
    whole = gateway.post("/v1/completions", **body)["choices"][0]["logprobs"]
    chunks = [one["choices"][0]["logprobs"] for one in gateway.events("/v1/completions", **body)]
    assert [one for one in chunks if one is not None] == [whole]


def test_top_logprobs_go_with_logprobs(gateway: RunningGateway) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "top_logprobs": 2}
    for more in ({}, {"logprobs": False}):
        answer = gateway.http.post("/v1/chat/completions", json={**body, **more})
        assert answer.status_code == 400
        assert "top_logprobs needs logprobs" in answer.json()["error"]["message"]
    assert gateway.http.post("/v1/chat/completions", json={**body, "top_logprobs": 0}).status_code == 200


def test_the_end_of_text_ends_the_answer(gateway: RunningGateway) -> None:
    chat = gateway.openai.chat.completions.create(model=NAME, messages=MESSAGES, seed=1, temperature=0.2)
    assert chat.choices[0].finish_reason == "stop"
    assert "</s>" not in (chat.choices[0].message.content or "")


def test_logprobs_are_those_of_the_local_model(gateway: RunningGateway, local: Any, tokenizer: Any) -> None:
    import torch

    ids = tokenizer(PROMPT).input_ids
    answer = gateway.openai.completions.create(model=NAME, prompt=PROMPT, max_tokens=0, echo=True, logprobs=2)
    found = answer.choices[0].logprobs
    with torch.no_grad():
        expected = local(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    assert found.token_logprobs[0] is None
    for position, logprob in enumerate(found.token_logprobs[1:]):
        assert logprob == pytest.approx(float(expected[position, ids[position + 1]]), abs=0.02)
    assert answer.choices[0].text == PROMPT
    assert answer.usage.completion_tokens == 0

    chat = gateway.openai.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=4, temperature=0
    )
    for token in chat.choices[0].logprobs.content:
        assert token.logprob == max(top.logprob for top in token.top_logprobs)
        assert len(token.top_logprobs) == 4
        assert bytes(token.bytes).decode() == token.token


def test_echo_brings_the_prompt_and_goes_on_from_it(gateway: RunningGateway, greedy: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPT).input_ids
    asked: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 0}
    answer = gateway.openai.completions.create(**asked).choices[0]
    assert answer.text == PROMPT + greedy(ids, 5)
    assert len(answer.logprobs.tokens) == len(ids) + 5
    chunks = list(gateway.openai.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.text


def test_logit_bias_rules_tokens_out(gateway: RunningGateway, tokenizer: Any) -> None:
    asked: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    likeliest = gateway.openai.completions.create(**asked, logprobs=1).choices[0]
    (token,) = tokenizer(likeliest.text, add_special_tokens=False).input_ids
    without = gateway.openai.completions.create(**asked, logit_bias={str(token): -100}).choices[0]
    assert without.text != likeliest.text


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(gateway: RunningGateway, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "hen"]}, "legs": {"type": "integer", "minimum": 2, "maximum": 4}},
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    asked: Any = {
        "model": NAME,
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}},
    }
    if stream:
        chunks = gateway.openai.chat.completions.create(**asked, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = gateway.openai.chat.completions.create(**asked).choices[0].message.content
    answer = json.loads(text)
    assert answer["animal"] in ("fox", "hen")
    assert 2 <= answer["legs"] <= 4


def test_models(gateway: RunningGateway) -> None:
    assert [model.id for model in gateway.openai.models.list()] == [NAME]
    assert gateway.openai.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        gateway.openai.models.retrieve("somebody/else")


def test_a_byte_order_mark_is_left_out(gateway: RunningGateway) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1})
    assert gateway.http.post("/v1/completions", content=body.encode("utf-8-sig")).status_code == 200
    refused = gateway.http.post("/v1/completions", content=body.encode("utf-16"))
    assert refused.status_code == 400
    assert "it is in UTF-16: send it in UTF-8" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": PROMPT, "temperature": -1}, 400, "temperature"),
        ({"prompt": PROMPT, "n": 5}, 400, "n can be at most 4"),
        ({"prompt": PROMPT, "max_tokens": 5000}, 400, "maximum is 2048 tokens"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [999_999_999]}, 400, "tokens"),
        ({"prompt": PROMPT, "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"prompt": PROMPT, "logit_bias": {"9" * 5000: 1}}, 400, "is not a token id"),
        ({"prompt": [PROMPT] * 33}, 400, "at most 32 items"),
        ({"prompt": PROMPT, "suffix": "end"}, 400, "suffix"),
        ({"prompt": PROMPT, "model": "other"}, 404, "'other' is not served here"),
        ({"prompt": PROMPT, "stop": [""]}, 400, "stop"),
        ({"prompt": 'x"' * 600_000}, 413, "larger than"),
        ([1], 400, "object"),
    ],
)
def test_unusable_requests_get_openais_errors(gateway: RunningGateway, body: Any, status: int, words: str) -> None:
    response = gateway.http.post("/v1/completions", json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert words in error["message"]
    assert {"message", "type", "param", "code"} == error.keys()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "schema can't be used",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_unusable_chats_get_openais_errors(gateway: RunningGateway, more: Any, words: str) -> None:
    response = gateway.http.post("/v1/chat/completions", json={"messages": MESSAGES, **more})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_the_openai_package_raises_its_own_errors(gateway: RunningGateway) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        gateway.openai.completions.create(model=NAME, prompt=PROMPT, max_tokens=10**6)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "prompt"


def test_unknown_paths_and_methods(gateway: RunningGateway) -> None:
    assert gateway.http.get("/v1/nothing").status_code == 404
    assert gateway.http.get("/v1/completions").status_code == 405
    assert gateway.http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_frees_the_session_everywhere(gateway: RunningGateway, swarm: LocalSwarm, stream: bool) -> None:
    """Also while no token comes: the request is not read any further, only dropped."""
    cancelled = gateway.figure("swarmllm_gateway_cancelled_total")
    body = {"prompt": PROMPT, "max_tokens": 2000, "stream": stream, "logit_bias": {"2": -100}, "temperature": 0}
    with gateway.http.stream("POST", "/v1/completions", json=body) if stream else _abandoned(gateway, body) as response:
        if response is not None:
            next(response.iter_lines())
    wait_until(lambda: gateway.gateway.engine.num_under_way == 0, "the generation ended")
    assert gateway.figure("swarmllm_gateway_cancelled_total") == cancelled + 1
    for server in swarm.servers:
        wait_until(
            lambda server=server: server_metrics(server)["swarmllm_server_sessions"] == 0, "the session was freed"
        )
        assert server_metrics(server)["swarmllm_server_cache_leased_bytes"] == 0


class _abandoned:  # noqa: N801  a context manager
    """Sends a request, and closes the connection while the answer is being computed."""

    def __init__(self, gateway: RunningGateway, body: Any) -> None:
        self._gateway, self._body = gateway, body

    def __enter__(self) -> None:
        import socket
        from urllib.parse import urlsplit

        url = urlsplit(self._gateway.url)
        data = json.dumps(self._body).encode()
        with socket.create_connection((url.hostname, url.port)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            wait_until(lambda: self._gateway.gateway.engine.num_under_way == 1, "the generation began")

    def __exit__(self, *_: object) -> None:
        pass


def test_a_full_queue_says_429_and_when_to_come_back(gateway: RunningGateway) -> None:
    engine = gateway.gateway.engine
    many = ["word"] * 32
    begun = threading.Event()

    def hold() -> None:
        body = {"prompt": many, "max_tokens": 1000, "stream": True, "logit_bias": {"2": -100}}
        with gateway.http.stream("POST", "/v1/completions", json=body) as response:
            begun.set()
            for _ in response.iter_lines():
                if done.is_set():
                    return

    done = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    try:
        wait_until(lambda: engine.num_under_way == 32, "the queue was filled")
        response = gateway.http.post("/v1/completions", json={"prompt": ["a"] * 5})
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        assert int(response.headers["retry-after"]) > 0
    finally:
        done.set()
        thread.join()
    wait_until(lambda: engine.num_under_way == 0, "the generations ended")
    assert gateway.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_events_and_traces_come_when_asked_for(gateway: RunningGateway) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "swarm_events": True}
    headers = {"X-Swarm-Trace": "1"}
    swarm = gateway.http.post("/v1/chat/completions", json=body, headers=headers).json()["swarm"]
    (route,) = swarm["events"]
    assert route["event"] == "route"
    assert [hop["blocks"] for hop in route["route"]] == [[0, 4], [4, 8]]
    (trace,) = swarm["traces"]
    assert [hop["blocks"] for hop in trace["hops"]] == [[0, 4], [4, 8]]
    assert all(hop["num_steps"] == 4 and hop["compute_ms"] > 0 for hop in trace["hops"])
    assert trace["first_token_ms"] >= trace["pipeline_construct_ms"] > 0
    plain = gateway.http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).json()
    assert "swarm" not in plain


@pytest.mark.lane("trainers")
def test_langchain_uses_it_as_it_uses_openai(gateway: RunningGateway, greedy: Any, tokenizer: Any) -> None:
    import langchain_openai as langchain

    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    asked: Any = {"base_url": f"{gateway.url}/v1", "api_key": "none", "model": NAME, "temperature": 0}
    chat = langchain.ChatOpenAI(**asked, max_tokens=24)
    said = [(message["role"], message["content"]) for message in MESSAGES]
    answer = chat.invoke(said)
    assert answer.content == greedy(ids, 24)
    assert answer.usage_metadata["output_tokens"] == 24
    assert "".join(chunk.content for chunk in chat.stream(said)) == answer.content
    text = langchain.OpenAI(**asked, max_tokens=6).invoke(PROMPT)
    assert text == greedy(tokenizer(PROMPT).input_ids, 6)
