"""Conversations: each turn computes only what is new, and what went wrong in a turn harms no later one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from swarm_models import VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from swarmllm.client.text_generation import Conversation
from swarmllm.errors import SessionLengthExceededError

OPTIONS = {"max_new_tokens": 6, "do_sample": False}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def words(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are w0, w1, …, and the two roles; the ids of a text and its words are one to one."""
    vocabulary = {f"w{index}": index for index in range(VOCABULARY)}
    for role, index in (("user", 10), ("assistant", 11)):
        vocabulary[role] = vocabulary.pop(f"w{index}")
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


def continued_locally(local: PreTrainedModel, text: str) -> str:
    tokenizer = words()
    ids = torch.tensor([tokenizer(text).input_ids])
    output = local.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)[0]
    return str(tokenizer.decode(output[ids.shape[1] :]))


@pytest.fixture
def session(model: Any) -> Iterator[Any]:
    """A session of 200 tokens that notes how many it computed, as `computed`."""
    with model.inference_session(max_length=200) as session:
        session.computed = 0
        run = session.run_step

        def counting(inputs: Any, part: Any = None) -> Any:
            session.computed += inputs.seq_len
            return run(inputs, part)

        session.run_step = counting
        yield session


def test_a_text_goes_on(model: Any, local: PreTrainedModel, session: Any) -> None:
    conversation = Conversation(model, words(), session, OPTIONS)
    text = ""
    for said in ("w5 w6 w7", "w8", "w9 w20 w21"):
        text = f"{text} {said}".strip()
        answer = conversation.reply(said)
        assert answer == continued_locally(local, text)
        text += f" {answer}"
    assert session.computed == session.position == len(text.split()) - 1


def test_a_template_is_used(model: Any, local: PreTrainedModel, session: Any) -> None:
    conversation = Conversation(model, words(TEMPLATE), session, OPTIONS)
    text = ""
    for said in ("w5 w6 w7", "w8"):
        text = f"{text} user {said} assistant".strip()
        answer = conversation.reply(said)
        assert answer == continued_locally(local, text)
        text += f" {answer}"
    assert session.computed == len(text.split()) - 1


class Interrupting:
    """A streamer during whose third token the user presses Ctrl-C."""

    def __init__(self) -> None:
        self._num_calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._num_calls += 1
        if self._num_calls == 4:
            raise KeyboardInterrupt

    def end(self) -> None: ...


def test_an_interrupted_turn_leaves_no_trace(model: Any, local: PreTrainedModel, session: Any) -> None:
    conversation = Conversation(model, words(), session, OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        conversation.reply("w30 w31 w32 w33", streamer=Interrupting())
    first = conversation.reply("w5 w6")
    assert first == continued_locally(local, "w5 w6")
    with pytest.raises(KeyboardInterrupt):
        conversation.reply("w30 w31 w32 w33", streamer=Interrupting())
    assert conversation.reply("w7") == continued_locally(local, f"w5 w6 {first} w7")


def test_a_full_conversation(model: Any, local: PreTrainedModel) -> None:
    with model.inference_session(max_length=12) as session:
        conversation = Conversation(model, words(), session, OPTIONS)
        conversation.reply("w5 w6")
        assert conversation.cut == "it has the 6 tokens of max_new_tokens"
        assert len(conversation.reply("w7").split()) == 3  # 2 + 6 + 1 are 9 of 12
        assert conversation.cut == "the conversation has reached its 12 tokens"
        with pytest.raises(SessionLengthExceededError, match="its 12 tokens"):
            conversation.reply("w8")
        conversation.clear()
        assert conversation.reply("w9") == continued_locally(local, "w9")


def test_an_answer_without_a_limit_goes_up_to_the_context_and_the_session_grows_with_it(
    model: Any, local: PreTrainedModel
) -> None:
    with model.remote_blocks.new_session(1, 16, grows=True) as session:
        options = {**OPTIONS, "max_new_tokens": None}
        conversation = Conversation(model, words(), session, options, max_length=40)
        answer = conversation.reply("w5 w6")
        assert len(answer.split()) == 38
        assert conversation.cut == "the conversation has reached its 40 tokens"
        expected = local.generate(torch.tensor([[5, 6]]), max_new_tokens=38, do_sample=False)[0, 2:].tolist()
        assert answer == words().decode(expected)


def test_an_answer_that_the_model_ends_is_not_cut(model: Any, local: PreTrainedModel) -> None:
    ends_with = local.generate(torch.tensor([[5, 6]]), max_new_tokens=6, do_sample=False)[0, -1].item()
    before, model.generation_config.eos_token_id = model.generation_config.eos_token_id, [ends_with]
    try:
        with model.inference_session(max_length=40) as session:
            conversation = Conversation(model, words(), session, OPTIONS)
            conversation.reply("w5 w6")
            assert conversation.cut is None
    finally:
        model.generation_config.eos_token_id = before
