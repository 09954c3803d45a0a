"""`--device` of clients: ids go where the client's own part of the model is, and what servers get leaves it once."""

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmllm.client.batches.batch_runner import RemoteCall
from swarmllm.client.session.chain import ActivationNoise, Chain
from swarmllm.client.text_generation import Conversation
from swarmllm.data_structures import Span
from swarmllm.gateway.settings import GatewayConfig
from swarmllm.models.boundary import block_inputs
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs


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


class Loop:
    """Runs what it is given, in place of a client's event loop."""

    def run_coroutine(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)


class Servers(Chain):
    """They note the devices of the tensors that they are sent, and answer in host memory."""

    def __init__(self) -> None:
        self.view = SimpleNamespace(loop=Loop())  # type: ignore[assignment]
        self.noise = ActivationNoise(0.0)
        self.devices: list[set[str]] = []

    async def _step(self, inputs: BlockInputs) -> Tensor:
        self.devices.append({tensor.device.type for tensor in inputs.tensors().values()})
        return torch.zeros(inputs.hidden_states.shape)

    async def _send(self, inputs: BlockInputs, position: int) -> None:
        await self._step(inputs)

    async def _receive(self) -> Tensor:
        return torch.zeros(1, 2, 3)

    def forward(self, inputs: BlockInputs, span: Span, *, keep: bool) -> tuple[Tensor, Any]:
        return asyncio.run(self._step(inputs)), None

    def backward(self, stages: Any, grad_outputs: Tensor) -> dict[str, Tensor]:
        self.devices.append({grad_outputs.device.type})
        return {"hidden_states": torch.zeros(grad_outputs.shape)}


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were waited for at each time that the host waited for the device."""
    waits: list[int] = []

    def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
        waits.append(len(tensors))
        return [torch.ones(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    for place in (block_inputs, sys.modules[RemoteCall.__module__]):
        monkeypatch.setattr(place, "in_host_memory", fetch)
    return waits


def on_device(**more: Any) -> BlockInputs:
    hidden, mask = torch.zeros(1, 2, 3, device="meta", **more), torch.ones(1, 2, dtype=torch.long, device="meta")
    return BlockInputs(hidden_states=hidden, batch_size=1, seq_len=2, attention_mask=mask)


def test_a_step_leaves_the_device_with_one_wait_and_returns_to_it(fetched: list[int]) -> None:
    chain = Servers()
    output = chain.run_step(on_device())
    assert (output.device.type, chain.devices, fetched) == ("meta", [{"cpu"}], [2])


def test_a_guessed_step_too(fetched: list[int]) -> None:
    chain = Servers()
    chain.send(on_device(), 0)
    assert (chain.receive().device.type, chain.devices, fetched) == ("meta", [{"cpu"}], [2])


def test_a_batch_and_its_gradients_too(fetched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[RemoteCall.__module__], "_scales_losses", lambda: True)  # reads no gradient
    chain, inputs = Servers(), on_device(requires_grad=True)
    hidden = inputs.hidden_states
    output = RemoteCall.apply(chain, inputs, Span(0, 1), True, hidden, *[None] * len(BESIDE))  # type: ignore[no-untyped-call]
    assert (output.device.type, chain.devices, fetched) == ("meta", [{"cpu"}], [2])
    output.sum().backward()
    assert hidden.grad is not None
    assert (hidden.grad.device.type, chain.devices[1:], fetched[1:]) == ("meta", [{"cpu"}], [1])


def test_a_client_without_a_device_copies_nothing(fetched: list[int]) -> None:
    inputs = BlockInputs(hidden_states=torch.zeros(1, 2, 3), batch_size=1, seq_len=2)
    assert inputs.on_host() is inputs
    assert fetched == []
