"""The messages of circuit relay v2, and multiaddresses as libp2p's daemon reads and writes them.

Messages are protobuf, each after its length. There are so few that no generator is needed:

    HOP, to a relay      RESERVE                 → STATUS, when the reservation ends
                         CONNECT (target)        → STATUS, and if it is OK, the bytes of the circuit
    STOP, to a target    CONNECT (caller)        → STATUS, and if it is OK, the bytes of the circuit
    AUTONAT              DIAL (me, addresses)    → DIAL_RESPONSE: whether that worked

hivemind writes addresses through relays wrongly:

    /ip4/203.0.113.7/tcp/31337                            a peer that can be dialled
    /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…/p2p-circuit  one that can be reached through the peer 12D3KooW…

Pure except for `read_message`. Everything comes from other peers, so everything is checked. Nonsense raises ValueError.
"""

import asyncio
import ipaddress
from collections.abc import Sequence
from enum import IntEnum

import base58

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
AUTONAT = "/libp2p/autonat/1.0.0"
MAX_MESSAGE_BYTES = 4096
"""The specification's limit."""
MAX_VARINT_BYTES = 10

IP4, TCP, IP6, P2P, CIRCUIT = 4, 6, 41, 421, 290
NAMES = {"dns": 53, "dns4": 54, "dns6": 55}
FIXED_BYTES = {IP4: 4, TCP: 2, IP6: 16, CIRCUIT: 0, 480: 0, 477: 0, 478: 0, 448: 0, 460: 0, 461: 0, 273: 2}
"""Bytes after each of these multicodec numbers, in addresses at which a daemon may see its peers."""
COUNTED = {P2P, *NAMES.values(), 449}
"""After these numbers follow a length and as many bytes."""
MAX_ADDRESS_BYTES = 512


class HopKind(IntEnum):
    """Kinds of messages at HOP. At STOP, CONNECT is 0 and STATUS 1."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class Status(IntEnum):
    """Answers of a relay."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400


Fields = dict[int, list[int | bytes]]


def varint(number: int) -> bytes:
    """Encode a number with seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Decode the number at this position; return it and its end.

    Raises:
        ValueError: there is none.
    """
    number = 0
    for index, byte in enumerate(data[position : position + MAX_VARINT_BYTES]):
        number |= (byte & 127) << 7 * index
        if byte < 128:
            return number, position + index + 1
    raise ValueError("a number is cut off")


def encode(*fields: tuple[int, int | bytes]) -> bytes:
    """Encode a message, without its length, from (number of the field, value)."""
    encoded = b""
    for number, value in fields:
        if isinstance(value, int):
            encoded += varint(number << 3) + varint(value)
        else:
            encoded += varint(number << 3 | 2) + varint(len(value)) + value
    return encoded


def decode(data: bytes) -> Fields:
    """Decode a message into the values of each field, in their order.

    Raises:
        ValueError: this is no message.
    """
    fields: Fields = {}
    position = 0
    while position < len(data):
        tag, position = read_varint(data, position)
        value: int | bytes
        value, position = read_varint(data, position)
        if tag & 7 == 2:
            end = position + value
            if end > len(data):
                raise ValueError("a message ends too soon")
            value, position = data[position:end], end
        elif tag & 7:
            raise ValueError(f"a message has a field of an unknown kind, {tag & 7}")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def number(fields: Fields, field: int) -> int | None:
    """The value of a numeric field; None if it is missing.

    Raises:
        ValueError: the field isn't numeric.
    """
    value = fields.get(field, [None])[-1]
    if isinstance(value, bytes):
        raise ValueError(f"field {field} of a message is not a number")
    return value


def text(fields: Fields, field: int) -> bytes:
    """The value of a field of bytes, which may be a message; b"" if it is missing.

    Raises:
        ValueError: the field is numeric.
    """
    value = fields.get(field, [b""])[-1]
    if isinstance(value, int):
        raise ValueError(f"field {field} of a message is a number")
    return value


def framed(message: bytes) -> bytes:
    """Put the length before a message."""
    return varint(len(message)) + message


async def read_message(reader: asyncio.StreamReader) -> Fields:
    """Read the next message.

    Raises:
        ValueError: it makes no sense, or is too long.
        EOFError, OSError: the stream has ended.
    """
    prefix = b""
    while not prefix or prefix[-1] > 127:
        if len(prefix) == 2:  # a third byte would mean more than MAX_MESSAGE_BYTES
            raise ValueError("a message is too long")
        prefix += await reader.readexactly(1)
    length, _ = read_varint(prefix, 0)
    if length > MAX_MESSAGE_BYTES:
        raise ValueError("a message is too long")
    return decode(await reader.readexactly(length))


# The messages


def reserve() -> bytes:
    """To a relay: keep a place for me."""
    return framed(encode((1, HopKind.RESERVE)))


def hop_status(status: Status, expires_at: float | None = None) -> bytes:
    """A relay's answer. It names no limit: circuits have none except the relay's own."""
    reservation = [] if expires_at is None else [(3, encode((1, int(expires_at))))]
    return framed(encode((1, HopKind.STATUS), *reservation, (5, status)))


def stop_connect(source: bytes) -> bytes:
    """To a target: that peer wants to reach you."""
    return framed(encode((1, 0), (2, encode((1, source)))))


def dial_me(own_id: bytes, addrs: Sequence[bytes]) -> bytes:
    """To any public peer (its libp2p answers): dial me at these addresses."""
    me = encode((1, own_id), *((2, addr) for addr in addrs))
    return framed(encode((1, 0), (2, encode((1, me)))))


def was_dialled(answer: Fields) -> bool | None:
    """The answer to that, True or False; None: it didn't try."""
    return {0: True, 100: False}.get(number(decode(text(answer, 3)), 1) or 0)


def pack_circuit(addr: str) -> bytes:
    """Encode an address through a relay.

    Raises:
        ValueError: it is not such an address.
    """
    direct, _, relay = addr.removesuffix("/p2p-circuit").partition("/p2p/")
    parts = direct.split("/")
    if not addr.endswith("/p2p-circuit") or len(parts) != 5 or parts[0] or parts[3] != "tcp":
        raise ValueError(f"{addr!r} is not an address through a relay")
    kind, host, port = parts[1], parts[2], int(parts[4])
    if not 0 < port < 1 << 16:
        raise ValueError(f"{addr!r} has no port")
    raw = base58.b58decode(relay)
    if not 0 < len(raw) < 64:
        raise ValueError(f"{addr!r} names no relay")
    return b"".join(
        (_pack_host(kind, host), varint(TCP), port.to_bytes(2), varint(P2P), varint(len(raw)), raw, varint(CIRCUIT))
    )


def _pack_host(kind: str, host: str) -> bytes:
    if kind == "ip4":
        return varint(IP4) + ipaddress.IPv4Address(host).packed
    if kind == "ip6":
        return varint(IP6) + ipaddress.IPv6Address(host).packed
    if kind not in NAMES or not 0 < len(host.encode()) < 256:
        raise ValueError(f"{kind} {host!r} is not a host")
    return varint(NAMES[kind]) + varint(len(host.encode())) + host.encode()


def circuit_through(relay_addr: str, relay_id: str) -> str:
    """The address of a peer that has a reservation at this relay."""
    return f"{relay_addr}/p2p/{relay_id}/p2p-circuit"


def is_circuit(addr: str) -> bool:
    """True if an address leads through a relay."""
    return "/p2p-circuit" in addr


def came_from(addr: bytes) -> tuple[str, bool]:
    """The host that a connection comes from ("": not told), and whether it comes through a relay.

    Raises:
        ValueError: these bytes are no address.
    """
    if len(addr) > MAX_ADDRESS_BYTES:
        raise ValueError("an address is too long")
    position, host, through_relay = 0, "", False
    while position < len(addr):
        code, position = read_varint(addr, position)
        if code in COUNTED:
            length, position = read_varint(addr, position)
        elif code in FIXED_BYTES:
            length = FIXED_BYTES[code]
        else:
            raise ValueError(f"an address has a part of an unknown kind, {code}")
        value, position = addr[position : position + length], position + length
        if position > len(addr):
            raise ValueError("an address ends too soon")
        if code in (IP4, IP6):
            host = str(ipaddress.ip_address(value))
        through_relay |= code == CIRCUIT
    return host, through_relay


def network_of(addr: str) -> str:
    """The network of an address: /16 of IPv4, /32 of IPv6, or the host's name."""
    kind, _, rest = addr[1:].partition("/")
    host = rest.partition("/")[0]
    if kind not in ("ip4", "ip6"):
        return host
    try:
        return str(ipaddress.ip_network(f"{host}/{16 if kind == 'ip4' else 32}", strict=False))
    except ValueError:
        return host
