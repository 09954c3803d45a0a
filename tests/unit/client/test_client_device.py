"""`--device` of clients: ids go where the client's own part of the model is."""

from typing import Any

import pytest
import torch

from swarmllm.client.text_generation import Conversation
from swarmllm.gateway.settings import GatewayConfig


class AskedError(Exception):
    """Holds the devices of a call's tensors."""


class Elsewhere:
    """A model on a device that this machine needs not have."""

    device = torch.device("meta")

    def generate(self, ids: Any, *, attention_mask: Any, **_: Any) -> None:
        raise AskedError({ids.device.type, attention_mask.device.type})


class Tokenizer:
    chat_template = None
    eos_token_id = 2

    def __call__(self, text: str, **_: Any) -> Any:
        return type("Encoded", (), {"input_ids": [1, 5]})


def test_a_conversation() -> None:
    session = type("Session", (), {"max_length": 9})()
    with pytest.raises(AskedError) as asked:
        Conversation(Elsewhere(), Tokenizer(), session, {"max_new_tokens": 2}).reply("hello")  # type: ignore[arg-type]
    assert asked.value.args == ({"meta"},)


def test_models_of_a_gateway() -> None:
    config = GatewayConfig(model=("a", "b"), device="cuda:1")
    assert [client.device for _, client in config.each_model()] == ["cuda:1", "cuda:1"]
