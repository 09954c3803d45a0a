"""Rules for both ends of a stream: compatible versions, the greeting, errors on the wire.

The side that opened the stream begins with HELLO. The answer is WELCOME, or ERROR and the end. Until then all messages
are small. `wire/messages` describes what follows. Client and server import the whole protocol from here.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn

from pydantic import Field

from swarmllm.data_structures import PeerModel, PeerText
from swarmllm.errors import PeerTimeoutError, RemoteProtocolError, SwarmError, error_from_code
from swarmllm.network.wire.frames import LARGE_TYPES, MAX_MESSAGE_BYTES, Message, MessageType
from swarmllm.network.wire.messages import DirectOffer, ErrorHeader, error_header, parse
from swarmllm.network.wire.stream import FrameStream

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MIN_PROTOCOL_VERSION",
    "PROTOCOL_VERSION",
    "Contribution",
    "DirectOffer",
    "FrameStream",
    "HelloHeader",
    "Message",
    "MessageType",
    "WelcomeHeader",
    "hello",
    "raise_error",
    "send_error",
    "welcome",
]

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
GREETING_TIMEOUT_S = 10.0
ENCODINGS = ("int8",)
"""Encodings of tensors that this version understands (`wire/compression`)."""


async def send_error(stream: FrameStream, error: SwarmError, **ids: object) -> None:
    """Tell the peer about a failure. `ids` name the request or session."""
    await stream.send(MessageType.ERROR, error_header(error, **ids))


def raise_error(header: dict[str, Any], peer_id: str | None) -> NoReturn:
    """Raise the error in an ERROR message of `peer_id`. Even if it names another peer, `peer_id` failed its task."""
    fields = parse(ErrorHeader, header, peer_id)
    raise error_from_code(fields.code, fields.message, peer_id)


Encodings = Annotated[tuple[Annotated[str, Field(max_length=16)], ...], Field(max_length=16)]
"""Encodings of tensors that the sender understands. Older peers name none."""


class Contribution(PeerModel):
    """Proof that a client belongs to a contributor, who runs a server (`p2p/identity`)."""

    server: Annotated[PeerText, Field(max_length=64)]
    """Peer id of the contributor's server."""
    signature: Annotated[bytes, Field(max_length=64)]


class HelloHeader(PeerModel):
    """HELLO: the client's first message."""

    min_version: Annotated[int, Field(ge=0, le=1 << 16)]
    max_version: Annotated[int, Field(ge=0, le=1 << 16)]
    software: Annotated[PeerText, Field(max_length=64)] = ""
    fingerprint: Annotated[PeerText, Field(max_length=128)] = ""
    """The checkpoint that the client wants to run; empty if it doesn't matter."""
    encodings: Encodings = ()
    contribution: Contribution | None = None
    member: Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")] = ""
    """Proof that the caller is a member of a swarm of machines (`machines/records`), for machines."""
    same_identity: bool = False
    """True if the client is about to serve with the key that `contribution` proves."""


class WelcomeHeader(PeerModel):
    """WELCOME: the server's answer."""

    version: Annotated[int, Field(ge=0, le=1 << 16)]
    software: Annotated[PeerText, Field(max_length=64)] = ""
    encodings: Encodings = ()
    info: dict[str, Any] = Field(default_factory=dict)
    """The server's own fields. `parse` them into the expected type."""
    direct: DirectOffer | None = None


async def hello(
    stream: FrameStream,
    *,
    fingerprint: str = "",
    software: str = "",
    contribution: Contribution | None = None,
    member: str = "",
    same_identity: bool = False,
    timeout_s: float = GREETING_TIMEOUT_S,
) -> WelcomeHeader:
    """Greet as the side that opened the stream.

    Raises:
        RemoteProtocolError: no common version, or no greeting in return.
        PeerTimeoutError: no answer in time.
        SwarmError: the server refuses this client; the message has the reason.
    """
    said_at = asyncio.get_running_loop().time()
    await stream.send(
        MessageType.HELLO,
        {
            "min_version": MIN_PROTOCOL_VERSION,
            "max_version": PROTOCOL_VERSION,
            "software": software,
            "fingerprint": fingerprint,
            "encodings": ENCODINGS,
            **({} if contribution is None else {"contribution": contribution.model_dump()}),
            **({"member": member} if member else {}),
            **({"same_identity": True} if same_identity else {}),
        },
    )
    message = await _greeting(stream, MessageType.WELCOME, timeout_s)
    header = parse(WelcomeHeader, message.header, stream.peer_id)
    if not MIN_PROTOCOL_VERSION <= header.version <= PROTOCOL_VERSION:
        raise RemoteProtocolError(f"{stream.peer_id} chose protocol version {header.version}", stream.peer_id)
    stream.encodings = frozenset(header.encodings)
    stream.expect(LARGE_TYPES)
    stream.offered = header.direct
    stream.liveness.timeout.answered(asyncio.get_running_loop().time() - said_at)
    return header


async def welcome(
    stream: FrameStream,
    *,
    info: Mapping[str, Any] | None = None,
    software: str = "",
    accept: Callable[[HelloHeader], None] | None = None,
    timeout_s: float = GREETING_TIMEOUT_S,
) -> HelloHeader:
    """Greet as the side that was called. `accept` refuses the client by raising a SwarmError, which is sent to it.

    Raises:
        RemoteProtocolError: no common version, or no HELLO.
        PeerTimeoutError: no HELLO in time.
        SwarmError: raised by `accept`.
    """
    message = await _greeting(stream, MessageType.HELLO, timeout_s)
    try:
        header = parse(HelloHeader, message.header, stream.peer_id)
        version = min(PROTOCOL_VERSION, header.max_version)
        if version < max(MIN_PROTOCOL_VERSION, header.min_version):
            raise RemoteProtocolError(
                f"no common protocol version: here {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}, "
                f"there {header.min_version} to {header.max_version}; update the older side",
                stream.peer_id,
            )
        if accept is not None:
            accept(header)
    except SwarmError as error:
        await send_error(stream, error)
        raise
    stream.encodings = frozenset(header.encodings)
    stream.expect(LARGE_TYPES)
    fields = {"version": version, "software": software, "encodings": ENCODINGS, "info": dict(info or {})}
    if stream.make_offer is not None:
        fields["direct"] = stream.make_offer().model_dump()
    await stream.send(MessageType.WELCOME, fields)
    return header


async def _greeting(stream: FrameStream, expected: MessageType, timeout_s: float) -> Message:
    try:
        async with asyncio.timeout(timeout_s):
            message = await stream.receive()
    except TimeoutError as error:
        if isinstance(error, PeerTimeoutError):
            raise
        raise PeerTimeoutError(f"no {expected.name} from {stream.peer_id} in {timeout_s:g} s", stream.peer_id) from None
    if message.type is MessageType.ERROR:
        raise_error(message.header, stream.peer_id)
    if message.type is not expected:
        raise RemoteProtocolError(f"{message.type.name} instead of {expected.name}", stream.peer_id)
    return message
