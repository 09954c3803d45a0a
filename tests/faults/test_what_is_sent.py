"""Everything that a client of a llama sends, byte by byte, while a server is there that asks for more.

All bytes of all streams of this process are read back as messages: what isn't listed here isn't sent.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_server import Fault, program
from swarm_models import OPTIONS, connected, load_local, prompt
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.network.wire.frames import FrameDecoder, Message, MessageType
from swarmllm.network.wire.stream import FrameStream
from swarmllm.network.wire.tensor_codec import decode_tensors

pytestmark = pytest.mark.rotates(3, whole_file=True)

SENT: dict[MessageType, set[str]] = {
    MessageType.HELLO: {"min_version", "max_version", "software", "fingerprint", "encodings"},
    MessageType.PING: {"n"},
    MessageType.PONG: {"n"},
    MessageType.MOVED: set(),
    MessageType.OPEN: {
        "id", "session", "token", "start", "end", "batch_size", "max_length", "epoch", "adapter", "served_adapter",
        "compression", "source_length", "record_past",
    },
    MessageType.LINK: {"id", "session", "epoch", "successor"},
    MessageType.STEP: {
        "id", "session", "epoch", "position", "batch_size", "seq_len", "tensors", "rows", "batch_index", "ones_mask",
        "replay_hops", "timings", "inner", "whole", "pieces",
    },
    MessageType.FORWARD: {
        "id", "start", "end", "batch_size", "seq_len", "tensors", "ones_mask", "adapter", "served_adapter", "keep",
        "forward", "source", "target", "lean", "compression", "inner",
    },
}  # fmt: skip
"""Fields of headers by the message's type."""
SENT[MessageType.BACKWARD] = SENT[MessageType.FORWARD]
EMPTY: dict[str, object] = {
    "adapter": None, "served_adapter": None, "source_length": 0, "batch_index": None, "rows": 0, "replay_hops": 0,
    "timings": (), "inner": None, "whole": False, "pieces": (),
}  # fmt: skip
"""The values of some of these fields, for a model without adapters, beams and encoder outputs."""
NAMES = re.compile(r"auto|none|int8|[0-9a-f]{32}|[0-9a-f]{64}|/[a-z0-9/.]+|12D3KooW\w+|[0-9.]+(\.?dev\w*)?(\+\w+)?")
"""Texts in headers: settings, random ids, the checkpoint's fingerprint, addresses and ids of servers, the version."""
TENSORS = {"hidden_states", "attention_mask", "position_ids", "grad_outputs"}


class Recorder:
    """The bytes of each stream that this process writes to, as messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._decoders: dict[FrameStream, FrameDecoder] = {}
        self.sent: list[tuple[str, Message]] = []
        self.raw = bytearray()
        write = FrameStream._write

        def recorded(stream: FrameStream, frame: bytes) -> None:
            decoder = self._decoders.setdefault(stream, FrameDecoder())
            self.raw += frame
            self.sent += [(stream.peer_id, message) for message in decoder.feed(frame)]
            write(stream, frame)

        monkeypatch.setattr(FrameStream, "_write", recorded)

    def check(self, hidden_size: int, secrets: list[Tensor]) -> set[MessageType]:
        """Fail if anything was sent that isn't listed; the kinds of messages that were."""
        assert not any(decoder.unfinished for decoder in self._decoders.values())
        for _, message in self.sent:
            assert set(message.header) == SENT[message.type], message.type
            for name, value in message.header.items():
                assert value == EMPTY.get(name, value), (message.type, name)
                for text in texts_in(value) if name != "tensors" else ():
                    assert NAMES.fullmatch(text), (message.type, name, text)
            self._check_payload(message, hidden_size)
        for ids in secrets:
            for row in ids:
                for dtype in (torch.int64, torch.int32, torch.int16):
                    assert row[:4].to(dtype).numpy().tobytes() not in self.raw
        return {message.type for _, message in self.sent}

    def _check_payload(self, message: Message, hidden_size: int) -> None:
        tensors = decode_tensors(message.header.get("tensors", ()), message.payload, max_bytes=1 << 30)
        batch_size, seq_len = message.header.get("batch_size"), message.header.get("seq_len")
        for name, tensor in tensors.items():
            assert name in TENSORS
            match name:
                case "attention_mask":
                    assert tensor.dtype == torch.int64
                    assert set(tensor.unique().tolist()) <= {0, 1}
                case "position_ids":
                    assert tensor.dtype == torch.int64
                    assert int(tensor.max()) < 64
                    assert (tensor.diff(dim=-1) >= 0).all()
                case _:
                    assert tensor.shape == (batch_size, seq_len, hidden_size)
                    assert tensor.dtype == torch.float32


def texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from texts_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_in(one)


@pytest.fixture(scope="module")
def local(llama: Path) -> PreTrainedModel:
    return load_local(llama)


@pytest.fixture(scope="module")
def prying(llama: Path) -> Iterator[tuple[LocalSwarm, str]]:
    """Two honest servers, and one of all blocks that boasts, and asks for the text; the latter's peer id."""
    with LocalSwarm(llama, spans=[(0, 3), (3, 6)], **OPTIONS) as swarm:
        server = swarm.add_server((0, 6), program=program(Fault.PRYING), **OPTIONS)
        yield swarm, server.peer_id


@pytest.mark.parametrize("local_blocks", [None, "0:2,5:6"])
def test_all_that_a_client_sends(
    llama: Path,
    local: PreTrainedModel,
    prying: tuple[LocalSwarm, str],
    local_blocks: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swarm, liar = prying
    one, two = prompt(1, 9, seed=31), prompt(2, 7, seed=32)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    recorder = Recorder(monkeypatch)
    with connected(llama, swarm.initial_peers, local_blocks=local_blocks) as model:
        for options in ({"input_ids": one}, {"input_ids": two, "attention_mask": mask}):
            wanted: Any = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(model.generate(**options, **wanted), local.generate(**options, **wanted))
        loss, expected = (which(input_ids=one, labels=one, use_cache=False).loss for which in (model, local))
        torch.testing.assert_close(loss, expected)
        loss.backward()
        hidden_size = model.config.hidden_size
    kinds = recorder.check(hidden_size, [one, two])
    assert kinds >= {MessageType.HELLO, MessageType.OPEN, MessageType.STEP, MessageType.FORWARD}
    to_liar = {message.type for peer_id, message in recorder.sent if peer_id == liar}
    assert to_liar - {MessageType.PING, MessageType.PONG} == {MessageType.HELLO}
