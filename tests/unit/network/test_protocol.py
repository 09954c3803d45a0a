"""The greeting, and errors on the wire."""

import asyncio

import pytest

from swarmllm.errors import (
    ConfigurationError,
    PeerError,
    PeerTimeoutError,
    PeerUnreachableError,
    RemoteProtocolError,
    ServerOverloadedError,
    SwarmError,
    WeightsMismatchError,
)
from swarmllm.network.wire import protocol
from swarmllm.network.wire.protocol import (
    FrameStream,
    HelloHeader,
    MessageType,
    hello,
    raise_error,
    send_error,
    welcome,
)

Streams = tuple[FrameStream, FrameStream]


async def outcome(coroutine):
    try:
        return await coroutine
    except SwarmError as error:
        return error


async def greet(streams: Streams, hello_options=None, **welcome_options):
    client, server = streams
    return await asyncio.gather(
        outcome(hello(client, **(hello_options or {}))), outcome(welcome(server, **welcome_options))
    )


async def test_both_sides_learn_about_each_other(streams: Streams) -> None:
    welcomed, greeted = await greet(
        streams, {"fingerprint": "abc", "software": "1.0"}, info={"start": 0}, software="2.0"
    )
    assert (welcomed.version, welcomed.software, welcomed.info) == (1, "2.0", {"start": 0})
    assert (greeted.fingerprint, greeted.software, greeted.max_version) == ("abc", "1.0", 1)
    assert [stream.encodings for stream in streams] == [{"int8"}, {"int8"}]


async def test_older_peers_understand_no_encodings(streams: Streams) -> None:
    client, server = streams
    await client.send(MessageType.HELLO, {"min_version": 1, "max_version": 1})
    await welcome(server)
    assert server.encodings == frozenset()

    await client.receive()

    await server.send(MessageType.WELCOME, {"version": 1})
    await hello(client)
    assert client.encodings == frozenset()


async def test_newer_peers_with_more_versions_and_fields_are_understood(streams: Streams) -> None:
    client, server = streams
    header = {"min_version": 1, "max_version": 9, "compression": {"level": 3}, "software": "9.0"}
    await client.send(MessageType.HELLO, header)
    assert (await welcome(server)).max_version == 9
    message = await client.receive()
    assert (message.type, message.header["version"]) == (MessageType.WELCOME, 1)


@pytest.mark.parametrize("versions", [{"min_version": 2, "max_version": 3}, {"min_version": 0, "max_version": 0}])
async def test_incompatible_versions_fail_on_both_sides(
    streams: Streams, versions: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = streams
    await client.send(MessageType.HELLO, versions)
    with pytest.raises(RemoteProtocolError, match="update the older side"):
        await welcome(server)
    message = await client.receive()
    with pytest.raises(RemoteProtocolError, match="update the older side"):
        raise_error(message.header, client.peer_id)


async def test_a_server_may_not_choose_a_version_that_was_not_offered(streams: Streams) -> None:
    client, server = streams
    await server.send(MessageType.WELCOME, {"version": 2})
    with pytest.raises(RemoteProtocolError, match="version 2"):
        await hello(client)


async def test_a_server_can_refuse_a_client(streams: Streams) -> None:
    def accept(header: HelloHeader) -> None:
        raise WeightsMismatchError(f"this server has other weights than {header.fingerprint}")

    results = await greet(streams, {"fingerprint": "abc"}, accept=accept)
    assert [type(result) for result in results] == [WeightsMismatchError] * 2
    assert str(results[0]) == "this server has other weights than abc"


@pytest.mark.parametrize(
    "header",
    [{}, {"min_version": "1", "max_version": 1}, {"min_version": 1, "max_version": 1, "software": "x" * 65}],
)
async def test_a_hello_that_makes_no_sense_is_refused(streams: Streams, header: dict[str, object]) -> None:
    client, server = streams
    await client.send(MessageType.HELLO, header)
    with pytest.raises(RemoteProtocolError, match="HelloHeader"):
        await welcome(server)
    assert (await client.receive()).type is MessageType.ERROR


async def test_anything_but_a_greeting_is_refused(streams: Streams) -> None:
    client, server = streams
    await client.send(MessageType.STEP, {})
    with pytest.raises(RemoteProtocolError, match="STEP instead of HELLO"):
        await welcome(server)


async def test_a_peer_that_never_greets_is_given_up(streams: Streams) -> None:
    client, server = streams
    with pytest.raises(PeerTimeoutError, match="no HELLO"):
        await welcome(server, timeout_s=0.01)
    with pytest.raises(PeerTimeoutError, match="no WELCOME"):
        await hello(client, timeout_s=0.01)


async def test_errors_keep_their_class_and_message(streams: Streams) -> None:
    client, server = streams
    await send_error(server, ServerOverloadedError("no room " * 1000), id=4)
    message = await client.receive()
    assert message.header["id"] == 4
    with pytest.raises(ServerOverloadedError, match="no room") as caught:
        raise_error(message.header, client.peer_id)
    assert caught.value.peer_id == client.peer_id


def test_an_error_blames_its_sender_and_no_third_peer() -> None:
    with pytest.raises(PeerUnreachableError) as caught:
        raise_error({"code": "unreachable", "message": "gone", "peer_id": "third"}, "second")
    assert caught.value.peer_id == "second"


def test_unknown_codes_of_newer_peers_become_a_plain_error() -> None:
    with pytest.raises(PeerError, match="out of coffee"):
        raise_error({"code": "coffee", "message": "out of coffee"}, "second")
    with pytest.raises(ConfigurationError):
        raise_error({"code": "configuration", "message": "no"}, "second")
    with pytest.raises(RemoteProtocolError, match="ErrorHeader"):
        raise_error({"code": 7}, "second")


def test_versions_are_in_order() -> None:
    assert 1 <= protocol.MIN_PROTOCOL_VERSION <= protocol.PROTOCOL_VERSION
