"""Messages and addresses of circuit relay v2, which strangers send."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.network.p2p._hivemind import Multiaddr
from swarmllm.network.p2p.addresses import pack_addrs
from swarmllm.network.relay.messages import (
    MAX_MESSAGE_BYTES,
    HopKind,
    Status,
    came_from,
    circuit_through,
    decode,
    encode,
    framed,
    hop_status,
    is_circuit,
    number,
    pack_circuit,
    read_message,
    reserve,
    stop_connect,
    text,
    varint,
)

RELAY = "12D3KooWGRYpkGaDx4gAX4e8D3GUdVyM6z9ejguV9e6RigTPvRch"
RELAY_BYTES = bytes.fromhex("0024080112206238")
"""How its id begins."""


async def read(data: bytes) -> dict[int, list[int | bytes]]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await read_message(reader)


async def test_what_is_written_is_read() -> None:
    assert number(await read(reserve()), 1) == HopKind.RESERVE
    answer = await read(hop_status(Status.OK, 1_800_000_000.7))
    assert (number(answer, 1), number(answer, 5)) == (HopKind.STATUS, Status.OK)
    assert decode(text(answer, 3)) == {1: [1_800_000_000]}
    assert number(answer, 4) is None  # no limit: Go would cut the circuit by it
    assert text(decode(text(await read(stop_connect(b"source")), 2)), 1) == b"source"


@given(st.lists(st.tuples(st.integers(1, 15), st.integers(0, 2**63) | st.binary(max_size=200)), max_size=9))
def test_any_fields_come_back(fields: list[tuple[int, int | bytes]]) -> None:
    expected: dict[int, list[int | bytes]] = {}
    for name, value in fields:
        expected.setdefault(name, []).append(value)
    assert decode(encode(*fields)) == expected


@given(st.binary(max_size=300))
def test_garbage_is_a_value_error_or_a_message(data: bytes) -> None:
    for parse in (decode, came_from):
        try:
            parse(data)
        except ValueError:
            continue
    try:
        fields = decode(data)
    except ValueError:
        return
    for name in fields:
        for as_kind in (number, text):
            try:
                as_kind(fields, name)
            except ValueError:
                continue


@pytest.mark.parametrize(
    "data",
    [
        varint(MAX_MESSAGE_BYTES + 1) + bytes(MAX_MESSAGE_BYTES + 1),
        b"\xff" * 20,
        framed(b"\x0d\x00\x00\x00\x00"),  # a field of four bytes: no message of relays has one
        framed(b"\x12\x7f"),
    ],
)
async def test_messages_that_make_no_sense(data: bytes) -> None:
    with pytest.raises(ValueError, match="message"):
        await read(data)


async def test_a_message_that_ends_too_soon() -> None:
    with pytest.raises(EOFError):
        await read(reserve()[:-1])


@pytest.mark.parametrize(
    ("direct", "host"),
    [
        ("/ip4/203.0.113.7/tcp/41474", "203.0.113.7"),  # a port whose bytes are those of /p2p-circuit
        ("/ip6/2001:db8::1/tcp/31337", "2001:db8::1"),
    ],
)
def test_an_address_through_a_relay_is_told_from_a_direct_one(direct: str, host: str) -> None:
    assert came_from(Multiaddr(direct).to_bytes()) == (host, False)
    through = circuit_through(direct, RELAY)
    assert is_circuit(through)
    assert came_from(pack_circuit(through)) == (host, True)
    assert came_from(b"") == ("", False)


def test_names_are_packed_as_hivemind_packs_them() -> None:
    for direct in ("/dns4/relay.example/tcp/31337", "/dns/relay.example/tcp/1", "/ip4/1.2.3.4/tcp/65535"):
        packed = pack_circuit(circuit_through(direct, RELAY))
        assert packed.startswith(Multiaddr(direct).to_bytes() + varint(421) + bytes([38]) + RELAY_BYTES[:4])
        assert packed.endswith(varint(290))


@pytest.mark.parametrize(
    "addr",
    [
        "/p2p-circuit",
        f"/p2p/{RELAY}/p2p-circuit",
        f"/ip4/1.2.3.4/tcp/0/p2p/{RELAY}/p2p-circuit",
        f"/ip4/1.2.3.4/tcp/-1/p2p/{RELAY}/p2p-circuit",
        f"/ip4/1.2.3.400/tcp/1/p2p/{RELAY}/p2p-circuit",
        f"/ip4/1.2.3.4/udp/1/p2p/{RELAY}/p2p-circuit",
        f"/unix/1.2.3.4/tcp/1/p2p/{RELAY}/p2p-circuit",
        "/ip4/1.2.3.4/tcp/1/p2p/no/id/p2p-circuit",
        f"/ip4/1.2.3.4/tcp/1/p2p/{RELAY}/p2p-circuit/p2p/{RELAY}/p2p-circuit",
        f"/dns4/{'x' * 256}/tcp/1/p2p/{RELAY}/p2p-circuit",
        "/p2p-circuit" * 1000,
    ],
)
def test_addresses_of_others_that_make_no_sense_are_skipped(addr: str) -> None:
    good = "/ip4/1.2.3.4/tcp/5"
    assert pack_addrs([addr, good]) == [Multiaddr(good).to_bytes()]
