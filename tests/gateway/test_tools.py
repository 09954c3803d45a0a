"""Tools: what each family of models writes is read however it is cut, calls can be forced, and openai uses it."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_gateway import NAME, RunningGateway

from swarmllm.errors import ConfigurationError
from swarmllm.gateway.output_parsing import FORMS, CallForm, CallReader, ToolCall, form_of

pytestmark = pytest.mark.rotates(3)

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    },
    "clock": {"type": "object", "properties": {}},
}
ARGUMENTS = {"city": "7 <Höfe>", "days": 3, "where": {"x": [1, None, True]}}
CALLS = [("weather", ARGUMENTS), ("clock", {})]
JSON = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in CALLS]
CODER = """<tool_call>
<function=weather>
<parameter=city>
7 <Höfe>
</parameter>
<parameter=days>
3
</parameter>
<parameter=where>
{"x": [1, null, true]}
</parameter>
</function>
</tool_call>
<tool_call>
<function=clock>
</function>
</tool_call>"""
GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>7 <Höfe></arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
<arg_key>where</arg_key>
<arg_value>{"x": [1, null, true]}</arg_value>
</tool_call>
<tool_call>clock
</tool_call>"""
PLAIN = [json.dumps(arguments, ensure_ascii=False) for _, arguments in CALLS]
BEGIN, CALL, SEP, CALL_END, END = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
WRITTEN = [
    ("<arg_key>", GLM),
    ("<function=", CODER),
    ("<tool_call>", f"<tool_call>\n{JSON[0]}\n</tool_call>\n<tool_call>\n{JSON[1]}\n</tool_call>"),
    ("<tool_call>", f"<tool_call>{JSON[0]}</tool_call><tool_call>{JSON[1]}"),
    ("[TOOL_CALLS]", f"[TOOL_CALLS][{JSON[0]}, {JSON[1]}]"),
    ("[TOOL_CALLS]", f"[TOOL_CALLS]weather[ARGS]{PLAIN[0]}[TOOL_CALLS]clock[CALL_ID]a1[ARGS]{PLAIN[1]}"),
    ("<｜tool▁calls▁begin｜>", f"{BEGIN}{CALL}weather{SEP}{PLAIN[0]}{CALL_END}{CALL}clock{SEP}{{}}{CALL_END}{END}"),
    (
        "<｜tool▁calls▁begin｜>",
        (
            f"{BEGIN}{CALL}function{SEP}weather\n```json\n{PLAIN[0]}\n```{CALL_END}\n"
            f"{CALL}function{SEP}clock\n```json\n{{}}\n```{CALL_END}{END}"
        ),
    ),
    ('"parameters"', "; ".join(JSON).replace('"arguments"', '"parameters"')),
    ('"parameters"', "<|python_tag|>" + "\n".join(JSON)),
]


def form(sign: str) -> CallForm:
    return next(one for one in FORMS if one.sign == sign)


def read(reader: CallReader, text: str, cuts: list[int]) -> str:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    taken = [reader.take(text[a:b], last=False) for a, b in itertools.pairwise(places)]
    taken.append(reader.take("", last=True))
    pieces = [piece for _, added in taken for piece in added]
    for place, call in enumerate(reader.calls):
        mine = [piece for piece in pieces if piece.place == place]
        assert [piece.is_new for piece in mine] == [True] + [False] * (len(mine) - 1)
        assert "".join(piece.arguments for piece in mine) == call.arguments
    return "".join(said for said, _ in taken)


@given(
    case=st.sampled_from(WRITTEN),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    before=st.sampled_from(["", "I look.", "Is 1 < 2?\n\n", "<tool", "[TOOL", "{"]),
)
def test_calls_are_read_however_they_are_cut(case: tuple[str, str], cuts: list[int], before: str) -> None:
    sign, text = case
    reader = CallReader(form(sign), SCHEMAS)
    if before and form(sign).begin == "{":
        assert read(reader, f"Well: {text}", cuts) == f"Well: {text}", "an object within a text is text"
        return
    said = read(reader, before + text, cuts)
    assert [(call.name, json.loads(call.arguments)) for call in reader.calls] == CALLS
    assert said == before.rstrip()


@given(
    sign=st.sampled_from([one.sign for one in FORMS]),
    text=st.text(max_size=30)
    | st.sampled_from(
        ["<tool_call>" + "[" * 9999, "<tool_call>", "<tool_call>{", "[TOOL_CALLS] x", '{"name": 1}', "{}", "{"]
    ),
    cuts=st.lists(st.integers(0, 30), max_size=5),
)
def test_other_text_is_no_call(sign: str, text: str, cuts: list[int]) -> None:
    reader = CallReader(form(sign), SCHEMAS)
    said = read(reader, text, cuts)
    assert not reader.calls
    assert "".join(said.split()) == "".join(text.split())


def test_nothing_is_held_back_for_long() -> None:
    reader = CallReader(form("<tool_call>"), SCHEMAS)
    assert reader.take("A story <", last=False) == ("A story", [])
    assert reader.take("3 ", last=False) == (" <3", [])
    assert reader.take("x", last=False) == (" x", [])


@pytest.mark.parametrize(("sign", "text"), WRITTEN)
def test_arguments_come_while_they_are_written(sign: str, text: str) -> None:
    """Long before the call has ended: character by character, or value by value where that is the form."""
    reader = CallReader(form(sign), SCHEMAS)
    pieces = [piece for letter in text for piece in reader.take(letter, last=False)[1]]
    assert sum(piece.place == 0 for piece in pieces) > (10 if "{" in form(sign).begin + text[:40] else 3)
    assert pieces[0].name == "weather"


def test_one_call_at_most_where_that_is_asked_for() -> None:
    reader = CallReader(form("<tool_call>"), SCHEMAS, most=1)
    read(reader, WRITTEN[2][1], [])
    assert [call.name for call in reader.calls] == ["weather"]


def tokenizer_of(template: Any) -> Any:
    return SimpleNamespace(chat_template=template)


def test_the_template_tells_the_form() -> None:
    for one in FORMS:
        assert form_of("M", tokenizer_of(f"{{{{ tools }}}} … {one.sign} …")) is one
    assert form_of("M", tokenizer_of({"default": "x", "tool_use": "{{ tools }} <tool_call>"})).sign == "<tool_call>"
    with pytest.raises(ConfigurationError, match="the chat template of M knows no tools"):
        form_of("M", tokenizer_of("{{ messages }}"))
    with pytest.raises(ConfigurationError, match="in a form that isn't known here"):
        form_of("M", tokenizer_of("{{ tools }} %%call%%"))


# ---------------------------------------------------------------------- through a gateway

MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Rome", "Oslo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]


def called(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls(tooled: RunningGateway, choice: Any) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    for seed in range(3):
        answer = tooled.openai.chat.completions.create(**asked, seed=seed).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        ((name, arguments),) = called(answer.message)
        assert name == "weather" or choice == "required"
        if name == "weather":
            assert arguments["city"] in ("Rome", "Oslo")
            assert 1 <= arguments["days"] <= 9
        assert answer.message.tool_calls[0].id.startswith("call_")


def test_streamed_calls(tooled: RunningGateway) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "tools": TOOLS[:1], "tool_choice": "required", "seed": 1}
    with tooled.openai.chat.completions.stream(**asked) as stream:
        answer = stream.get_final_completion().choices[0]
    ((name, arguments),) = called(answer.message)
    assert name == "weather"
    assert arguments["city"] in ("Rome", "Oslo")
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content
    whole = tooled.openai.chat.completions.create(**asked).choices[0]
    assert called(whole.message) == called(answer.message)


def test_a_whole_turn(tooled: RunningGateway) -> None:
    """The call, what the tool found, and the answer to that, as agents send them."""
    asked: Any = {"model": NAME, "tools": TOOLS, "max_tokens": 60, "temperature": 0}
    first = tooled.openai.chat.completions.create(messages=MESSAGES, tool_choice="required", **asked).choices[0].message
    (call,) = first.tool_calls
    found = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "blue"}'}
    earlier = first.model_dump()
    if call.function.name == "clock":
        earlier["tool_calls"][0]["function"]["arguments"] = '{"city": "Rome"}'
    answer = tooled.openai.chat.completions.create(messages=[*MESSAGES, earlier, found], **asked).choices[0]
    assert answer.finish_reason in ("stop", "length")
    assert answer.message.content
    assert not answer.message.tool_calls


def test_variables_of_the_template(tooled: RunningGateway) -> None:
    model = tooled.gateway.models.first
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    text = model.decode(model.encode_chat(messages, {}, TOOLS))
    assert "Tools: weather clock" in text
    assert "<tool_call>Oslo</tool_call>" in text
    assert "Tools" not in model.decode(model.encode_chat(messages, {}))


def test_a_text_with_tools_is_a_text(tooled: RunningGateway) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = tooled.openai.chat.completions.create(**asked, tools=TOOLS).choices[0]
    chunks = list(tooled.openai.chat.completions.create(**asked, tools=TOOLS, stream=True))
    assert whole.message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert whole.message.tool_calls is None
    plain = tooled.openai.chat.completions.create(**asked).choices[0].message.content
    assert (
        tooled.openai.chat.completions.create(**asked, tools=TOOLS, tool_choice="none").choices[0].message.content
        == plain
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "two tools have the same name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "which is none of the tools",
        ),
        ({"tool_choice": "required"}, "there are no tools"),
        (
            {"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"},
            "both constrain the answer: give one of them",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "a tool_call_id"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "a"}}]}]},
            "only",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parametres": {}}}]}, "did you mean 'parameters'?"),
        ({"functions": [{"name": "a"}]}, "replaced by tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"description": "x" * 70_000}}}],
                "tool_choice": "required",
            },
            "so no call can be forced",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}],
                "tool_choice": "required",
            },
            "tool_choice: the grammar can't be used",
        ),
    ],
)
def test_unusable_tools(tooled: RunningGateway, more: dict[str, Any], words: str) -> None:
    response = tooled.http.post("/v1/chat/completions", json={"messages": MESSAGES, **more})
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]


def test_a_model_without_tools_says_so(gateway: RunningGateway) -> None:
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        gateway.openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS)


def test_a_stream_brings_arguments_in_pieces(tooled: RunningGateway) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "tools": TOOLS[:1], "tool_choice": "required", "seed": 1}
    chunks = list(tooled.openai.chat.completions.create(**asked, stream=True))
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [bool(piece.function.name) for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert len(pieces) > 3
    assert json.loads("".join(piece.function.arguments for piece in pieces))["city"] in ("Rome", "Oslo")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_calls_are_equal_by_value() -> None:
    assert ToolCall("a", "{}") == ToolCall("a", "{}")
