"""gpt-oss: its channels are thoughts, answer and calls, however the text is cut; and how much it thinks can be said."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tools import TOOLS
from web_gateway import NAME, RunningGateway, running_gateway

from swarmllm import LocalSwarm
from swarmllm.gateway.output_parsing import HarmonyReader

pytestmark = pytest.mark.rotates(3, whole_file=True)

WEATHER = '{"city": "<|Höfe|> & </x>", "days": 3}'
TEXT = (
    "<|channel|>analysis<|message|>Need the <weather>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
    f"<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{WEATHER}<|call|>"
    "<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}"
)
ANSWER = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>It rains.\n"
MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]


def read(reader: HarmonyReader, text: str, cuts: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    taken = [reader.take(text[a:b], last=False) for a, b in itertools.pairwise(places)]
    taken.append(reader.take("", last=True))
    calls: dict[int, list[str]] = {}
    for piece in [piece for _, _, pieces in taken for piece in pieces]:
        calls.setdefault(piece.place, [piece.name, ""])[1] += piece.arguments
    found = [(name, arguments) for name, arguments in calls.values()]
    return "".join(one[0] for one in taken), "".join(one[1] for one in taken), found


@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_channels_however_they_are_cut(cuts: list[int]) -> None:
    calls = [("weather", WEATHER), ("clock", "{}")]
    assert read(HarmonyReader(), TEXT, cuts) == ("Need the <weather>.", "I look.", calls)
    assert read(HarmonyReader(most=1), TEXT, cuts)[2] == calls[:1]
    assert read(HarmonyReader(), ANSWER, cuts) == ("Hm", "It rains.\n", [])
    assert read(HarmonyReader(has_begun=True), " on <|x|>.<|return|>", cuts) == ("", " on <|x|>.", [])


@given(text=st.text("ab<|> ", max_size=20), cuts=st.lists(st.integers(0, 20), max_size=4))
def test_an_unknown_form_is_text(text: str, cuts: list[int]) -> None:
    assert read(HarmonyReader(), text, cuts) == ("", text, [])


def test_text_comes_at_once() -> None:
    reader = HarmonyReader()
    assert reader.take("<|channel|>analysis<|message|>I th", last=False) == ("I th", "", [])
    assert reader.take("ink <|", last=False) == ("ink ", "", [])
    reader.take("end|><|start|>assistant<|channel|>commentary to=functions.a json<|message|>", last=False)
    assert reader.take('{"x"', last=False)[2][0].arguments == '{"x"'


TEMPLATE = """{# <|channel|> {{ tools }} #}Effort {{ reasoning_effort or "medium" }}.
{%- for message in messages %}{{ message.role }}: {{ message.thinking }} {{ message.content }}
{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""


@pytest.fixture(scope="module")
def harmonic(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """A model whose template writes channels."""
    with running_gateway(swarm.initial_peers, chat_template=TEMPLATE) as gateway:
        yield gateway


def test_forced_calls(harmonic: RunningGateway) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200}
    for seed in range(3):
        answer = harmonic.openai.chat.completions.create(**asked, tool_choice="required", seed=seed).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name != "weather" or arguments["city"] in ("Rome", "Oslo")
        assert not answer.message.content


def test_a_schema_is_that_of_the_answer(harmonic: RunningGateway) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    asked: Any = {"model": NAME, "messages": MESSAGES, "response_format": schema}
    assert harmonic.openai.chat.completions.create(**asked).choices[0].message.content in ('"a"', '"b"')
    model = harmonic.gateway.models.first
    assert model.decode(model.encode_chat(MESSAGES, {})).endswith("<|start|>assistant")


def test_efforts_and_earlier_thoughts(harmonic: RunningGateway, gateway: RunningGateway) -> None:
    from swarmllm.gateway.apis.chat_request import ChatRequest

    model = harmonic.gateway.models.first
    earlier = [*MESSAGES, {"role": "assistant", "content": "x", "reasoning_content": "so"}, *MESSAGES]
    asked = ChatRequest.model_validate({"messages": earlier, "reasoning_effort": "high"})
    text = model.decode(asked.prompt(model))
    assert "Effort high." in text
    assert "assistant: so x" in text
    for url, effort, words in (
        (harmonic, "minimal", "can be low, medium, high"),
        (gateway, "low", "nothing that its chat template knows"),
    ):
        body = {"messages": MESSAGES, "reasoning_effort": effort}
        response = url.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]


def test_going_on_with_the_last_message(gateway: RunningGateway, local: Any, tokenizer: Any) -> None:
    """The text is the same as if the model had written the beginning itself."""
    asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = gateway.openai.chat.completions.create(**asked).choices[0].message.content
    cut = whole[: whole.index(" ", len(whole) // 2)]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    asked["messages"] = [*MESSAGES, {"role": "assistant", "content": cut}]
    rest = gateway.openai.chat.completions.create(**asked, extra_body=going_on).choices[0].message.content
    assert (cut + rest).startswith(whole)
    body = {"messages": MESSAGES, **going_on}
    response = gateway.http.post("/v1/chat/completions", json=body)
    assert "needs a text of the assistant" in response.json()["error"]["message"]
