"""Multiaddresses as libp2p's daemon reads and writes them: those through relays, which hivemind writes wrongly.

    /ip4/203.0.113.7/tcp/31337                            a peer that can be dialled
    /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…/p2p-circuit  one that can be reached through the peer 12D3KooW…

Pure. Bytes and text come from other peers, so everything is checked: what makes no sense is a ValueError.
"""

import ipaddress

import base58

from swarmllm.network.relay.wire import read_varint, varint

IP4, TCP, IP6, P2P, CIRCUIT = 4, 6, 41, 421, 290
NAMES = {"dns": 53, "dns4": 54, "dns6": 55}
FIXED_BYTES = {IP4: 4, TCP: 2, IP6: 16, CIRCUIT: 0, 480: 0, 477: 0, 478: 0, 448: 0, 460: 0, 461: 0, 273: 2}
"""What follows each of these numbers of multicodec: of addresses that a daemon may see its peers at."""
COUNTED = {P2P, *NAMES.values(), 449}
"""After these, a length and as many bytes."""
MAX_ADDRESS_BYTES = 512


def pack_circuit(addr: str) -> bytes:
    """The address through a relay.

    Raises:
        ValueError: it is none.
    """
    direct, _, relay = addr.removesuffix("/p2p-circuit").partition("/p2p/")
    parts = direct.split("/")
    if not addr.endswith("/p2p-circuit") or len(parts) != 5 or parts[0] or parts[3] != "tcp":
        raise ValueError(f"{addr!r} is no address through a relay")
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
        raise ValueError(f"{kind} {host!r} is no host")
    return varint(NAMES[kind]) + varint(len(host.encode())) + host.encode()


def circuit_through(relay_addr: str, relay_id: str) -> str:
    """The address of a peer that has reserved a place at that relay."""
    return f"{relay_addr}/p2p/{relay_id}/p2p-circuit"


def is_circuit(addr: str) -> bool:
    """Whether an address, as text, leads through a relay."""
    return "/p2p-circuit" in addr


def came_from(addr: bytes) -> tuple[str, bool]:
    """Where a connection comes from, as the daemon says: its host ("" if it says none), and whether through a relay.

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
    """The part of the internet that an address as text is in: /16 of IPv4, /32 of IPv6, or its host's name."""
    kind, _, rest = addr[1:].partition("/")
    host = rest.partition("/")[0]
    if kind not in ("ip4", "ip6"):
        return host
    try:
        return str(ipaddress.ip_network(f"{host}/{16 if kind == 'ip4' else 32}", strict=False))
    except ValueError:
        return host
