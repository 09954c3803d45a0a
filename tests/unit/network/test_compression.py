"""Compression of tensors: which, for which peers, and when; tests/properties has the bounds."""

import asyncio
from typing import Any

import pytest
import torch

from swarmllm.errors import RemoteProtocolError
from swarmllm.network.wire.compression import (
    AUTO_BELOW_MBPS,
    BLOCK,
    MEASURED_BYTES,
    CompressedTensor,
    as_received,
    compress,
    compressed,
    compressed_bytes,
    pays,
)
from swarmllm.network.wire.stream import FrameStream
from swarmllm.network.wire.tensor_codec import decode_tensors, encode_tensors

Streams = tuple[FrameStream, FrameStream]


def hidden(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def test_half_the_bytes_and_less_than_a_hundredth_of_error() -> None:
    tensor = hidden(4, 16, 256)
    small = compress(tensor)
    assert small is not None
    assert compressed_bytes((4, 16, 256), torch.bfloat16) <= 0.54 * tensor.nbytes
    assert relative_error(small.decompress(), tensor) < 0.01


def test_channels_of_outliers_survive_and_spare_their_neighbours() -> None:
    tensor = hidden(64, 512)
    outliers = torch.zeros(512, dtype=torch.bool)
    outliers[[3, 130, 400]] = True
    tensor[:, outliers] *= 500
    small = compress(tensor)
    assert small is not None
    received = small.decompress()
    assert relative_error(received[:, outliers], tensor[:, outliers]) < 0.002
    assert relative_error(received[:, ~outliers], tensor[:, ~outliers]) < 0.01


@pytest.mark.parametrize(
    ("setting", "num_bytes", "mbps", "expected"),
    [
        ("none", 1 << 30, 1.0, False),
        ("int8", 1, None, True),
        ("int8", 1, 1e5, True),
        ("int4", 1 << 30, 1.0, False),  # of a newer peer
        ("auto", 1 << 30, None, False),
        ("auto", MEASURED_BYTES, AUTO_BELOW_MBPS - 1, True),
        ("auto", MEASURED_BYTES - 1, AUTO_BELOW_MBPS - 1, False),
        ("auto", 1 << 30, AUTO_BELOW_MBPS, False),
    ],
)
def test_when_it_pays(setting: str, num_bytes: int, mbps: float | None, expected: bool) -> None:
    assert pays(setting, num_bytes, mbps) is expected


async def test_only_hidden_states_and_only_for_peers_that_understand(streams: Streams) -> None:
    client, _ = streams
    tensors = {"hidden_states": hidden(2, 3, 64), "attention_mask": torch.ones(2, 3), "adapter": torch.ones(9)}
    assert await compressed(tensors, client, "int8") == tensors

    client.encodings = frozenset(("int8",))
    assert await compressed(tensors, client, "none") == tensors
    outgoing = await compressed(tensors, client, "int8")
    assert {name for name, tensor in outgoing.items() if isinstance(tensor, CompressedTensor)} == {"hidden_states"}
    assert outgoing["attention_mask"] is tensors["attention_mask"]


async def test_what_has_been_seen_is_only_compressed_if_that_changes_nothing(streams: Streams) -> None:
    client, _ = streams
    client.encodings = frozenset(("int8",))
    exact = {"hidden_states": hidden(2, 3, 640)}
    assert await compressed(exact, client, "int8", exactly=True) == exact

    rounded = as_received(await compressed(exact, client, "int8"))
    again = await compressed(rounded, client, "int8", exactly=True)
    assert isinstance(again["hidden_states"], CompressedTensor)
    assert torch.equal(as_received(again)["hidden_states"], rounded["hidden_states"])


async def test_large_tensors_are_compressed_beside_the_event_loop(streams: Streams) -> None:
    client, _ = streams
    client.encodings = frozenset(("int8",))
    tensors = {"grad_outputs": hidden(4, 512, 512)}
    outgoing = await compressed(tensors, client, "int8")
    assert relative_error(as_received(outgoing)["grad_outputs"], tensors["grad_outputs"]) < 0.01
    await asyncio.get_running_loop().shutdown_default_executor()


def test_tensors_of_both_kinds_share_a_message() -> None:
    tensors = {"raw": torch.arange(5), "compressed": hidden(3, 100), "odd": torch.ones(3, dtype=torch.bool)}
    small = compress(tensors["compressed"])
    assert small is not None
    descriptors, chunks = encode_tensors({**tensors, "compressed": small})
    received = decode_tensors(descriptors, b"".join(chunks), max_bytes=1 << 20)
    assert list(received) == list(tensors)
    assert torch.equal(received["compressed"], small.decompress())
    assert torch.equal(received["raw"], tensors["raw"])
    assert torch.equal(received["odd"], tensors["odd"])


SIZE = compressed_bytes((2, 64), torch.bfloat16)  # 136


@pytest.mark.parametrize(
    ("descriptor", "payload", "reason"),
    [
        (("t", "int8/int64", (2, 64), SIZE), bytes(144), "dtype"),
        (("t", "int4/bfloat16", (2, 64), SIZE), bytes(144), "dtype"),
        (("t", "int8/bfloat16", (), 4), bytes(16), "nothing to compress"),
        (("t", "int8/bfloat16", (0, 64), 0), b"", "nothing to compress"),
        (("t", "int8/bfloat16", (2, 64), 256), bytes(256), "size"),
        (("t", "int8/bfloat16", (1 << 19, 1 << 19), SIZE), bytes(144), "size"),
        (("t", "int8/bfloat16", (2, 64), SIZE), bytes(135) + bytes([BLOCK]) + bytes(8), "no block"),
    ],
)
def test_packed_tensors_of_strangers_are_checked(descriptor: Any, payload: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode_tensors([descriptor], payload, max_bytes=1000, peer_id="somebody")
