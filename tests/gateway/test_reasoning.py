"""Thoughts are kept apart from answers, however the text is cut."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from test_parts import Bytes
from web_gateway import NAME, RunningGateway

from swarmllm.gateway.engine.generation import _Row
from swarmllm.gateway.output_parsing import PlainReader, ReasoningReader
from swarmllm.gateway.text import Spelling, StopFinder

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]
PLAIN = st.text("ab<\n /t>hink", max_size=20).filter(lambda text: "</think>" not in text and "<think>" not in text)


class _Characters:
    """Text whose tokens are characters."""

    def add(self, token: int) -> str:
        return chr(token)

    def end(self) -> str:
        return ""


def read(reader: ReasoningReader, text: str, cuts: list[int]) -> tuple[str, str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [reader.take(text[a:b], last=False) for a, b in itertools.pairwise(places)]
    pieces.append(reader.take("", last=True))
    return "".join(thoughts for thoughts, _ in pieces), "".join(said for _, said in pieces)


@given(thoughts=PLAIN, said=PLAIN, begun=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_thoughts_and_answer(thoughts: str, said: str, begun: bool, cuts: list[int]) -> None:
    text = f"{thoughts}</think>\n\n{said}" if begun else f"\n<think>\n{thoughts}\n</think>\n\n{said}"
    assert read(ReasoningReader(begun=begun), text, cuts) == (thoughts.strip(), said.lstrip())


@given(text=PLAIN, cuts=st.lists(st.integers(0, 30), max_size=5))
def test_without_thoughts_and_without_an_end(text: str, cuts: list[int]) -> None:
    assert read(ReasoningReader(begun=False), text, cuts) == ("", text)
    thoughts, said = read(ReasoningReader(begun=True), text, cuts)
    assert (thoughts.strip(), said) == (text.strip(), "")


def test_over_the_api(thinking: RunningGateway) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    message = thinking.openai.chat.completions.create(**asked).choices[0].message
    assert message.content == ""
    assert message.reasoning_content
    deltas = [chunk.choices[0].delta for chunk in thinking.openai.chat.completions.create(**asked, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert not any(delta.content for delta in deltas)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    answer = thinking.openai.chat.completions.create(**asked, response_format=schema).choices[0].message
    assert answer.content in ('"a"', '"b"'), "what follows a schema is the answer"


def test_stop_does_not_look_into_thoughts(thinking: RunningGateway) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    whole = thinking.openai.chat.completions.create(**asked).choices[0]
    word = whole.message.reasoning_content.split()[3]
    for more in ({"stop": word}, {"stop": [word, "</think>"]}):
        choice = thinking.openai.chat.completions.create(**asked, **more).choices[0]
        assert choice.message.reasoning_content == whole.message.reasoning_content
        assert choice.finish_reason == "length"


@given(
    thoughts=PLAIN,
    said=st.text("ab<\n /t", max_size=12),
    stop=st.text("abt", min_size=1, max_size=2),
    begun=st.booleans(),
)
def test_stop_texts_are_searched_in_the_answer(thoughts: str, said: str, stop: str, begun: bool) -> None:
    text = f"{thoughts}</think>{said}" if begun else f"<think>{thoughts}</think>{said}"
    row = _Row(_Characters(), StopFinder([stop]), PlainReader(ReasoningReader(begun=begun), None), Spelling(Bytes()))
    found_thoughts = found = ""
    for place, character in enumerate(text):
        more, new, _ = row.take(ord(character), last=place == len(text) - 1)
        found_thoughts, found = found_thoughts + more, found + new
        if row.stops.stopped_by is not None:
            break
    said = said.lstrip()
    assert found == said.partition(stop)[0]
    assert (row.stops.stopped_by is not None) == (stop in said)
    assert found_thoughts == thoughts.strip()
