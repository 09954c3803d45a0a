"""/tokenize and /detokenize: what the tokenizer itself says."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from web_gateway import NAME, RunningGateway

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
TEXT = "Once upon a time, a fox\nmet a hen."


def test_prompts_and_chats(gateway: RunningGateway, tokenizer: Any) -> None:
    found = gateway.post("/tokenize", model=NAME, prompt=TEXT, return_token_strs=True)
    ids = tokenizer(TEXT).input_ids
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 2048)
    assert found["token_strs"] == [tokenizer.decode([one]) for one in ids]
    plain = gateway.post("/tokenize", prompt=TEXT, add_special_tokens=False)["tokens"]
    assert plain == tokenizer(TEXT, add_special_tokens=False).input_ids
    chat = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert gateway.post("/tokenize", messages=MESSAGES)["tokens"] == chat
    assert gateway.post("/detokenize", tokens=chat)["prompt"] == tokenizer.decode(chat)


@given(text=st.text("abc .,\n", max_size=30))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_and_back(gateway: RunningGateway, text: str) -> None:
    tokens = gateway.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert gateway.post("/detokenize", tokens=tokens)["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "give a prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "give a prompt or messages"),
        ("/tokenize", {"prompt": "a", "add_special_token": True}, "did you mean 'add_special_tokens'?"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "a"}}]}, "need messages"),
        ("/detokenize", {"tokens": [99_999_999]}, "the model has only"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_what_is_refused(gateway: RunningGateway, path: str, body: dict[str, Any], words: str) -> None:
    response = gateway.http.post(path, json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
