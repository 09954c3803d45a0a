"""Multiaddresses as text: which to announce, which to believe, and which can be listened on.

Used by `p2p/daemon` and `p2p/peer`. `relay/messages` handles addresses through relays.
"""

import ipaddress
import logging
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress

from swarmllm.config import require_address
from swarmllm.data_structures import MAX_ADDRS
from swarmllm.errors import ConfigurationError
from swarmllm.network.p2p._hivemind import Multiaddr
from swarmllm.network.p2p.identity import is_peer_id
from swarmllm.network.relay.messages import is_circuit, pack_circuit

logger = logging.getLogger(__name__)

MAX_ADDR_LENGTH = 256
MAX_ADDRS_LENGTH = 2048
"""Most characters of all addresses together: a quarter of a record."""
DOCKER_NETWORKS = ipaddress.ip_network("172.16.0.0/12")
"""Docker takes its networks from these addresses first. A home or an office seldom does."""


def pack_addrs(addrs: Iterable[str]) -> list[bytes]:
    """Encode other peers' addresses for the daemon, direct ones and those through relays. Skips nonsense."""
    packed = []
    for addr in addrs:
        try:
            packed.append(pack_circuit(addr) if is_circuit(addr) else Multiaddr(addr.partition("/p2p/")[0]).to_bytes())
        except ValueError:
            logger.debug("skipped the address %r", addr)
    return packed


def best_addrs(addrs: Iterable[str]) -> tuple[str, ...]:
    """The addresses that a server may announce. Those that reach it from most places come first.

    A host with containers or virtual machines has an address in each of their networks, where no other peer is.
    """
    found, length = [], 0
    for addr in sorted(addrs, key=_reach):
        length += len(addr)
        if len(addr) <= MAX_ADDR_LENGTH and length <= MAX_ADDRS_LENGTH:
            found.append(addr)
    return tuple(found[:MAX_ADDRS])


def is_loopback(addr: str) -> bool:
    """True if only this machine can reach an address."""
    return addr.startswith(("/ip4/127.", "/ip6/::1/"))


def hosts_of(addrs: Iterable[str]) -> tuple[str, ...]:
    """The IP addresses in these addresses."""
    parted = (addr.split("/") for addr in addrs)
    return tuple(dict.fromkeys(parts[2] for parts in parted if parts[1:2] in (["ip4"], ["ip6"])))


def _reach(addr: str) -> int:
    """Rank an address; smaller means that it is reachable from more places.

    -1 through a relay, 0 from everywhere, 1 from the own network, 2 (perhaps) from containers, 3 from this machine, 4
    from almost nowhere.
    """
    if is_circuit(addr):
        return -1
    try:
        ip = ipaddress.ip_address(addr.split("/")[2])
    except (IndexError, ValueError):
        return 0  # a host name, so somebody chose it
    if ip.is_loopback:
        return 3
    if ip.is_link_local:
        return 4
    if not ip.is_private:
        return 0
    return 2 if ip in DOCKER_NETWORKS else 1


def check_tcp_maddr(maddr: str, *, announced: bool = False) -> None:
    """Raise ConfigurationError unless this is a TCP address. An announced one must name its port."""
    try:
        parsed = Multiaddr(maddr)
        is_tcp = "tcp" in parsed and "udp" not in parsed
    except ValueError as error:
        raise ConfigurationError(f"the address {maddr!r} is wrong: {error}") from None
    if not is_tcp:  # libp2p would prefer QUIC if both are offered; it measured slower
        raise ConfigurationError(f"the address {maddr!r} must be one of TCP, like /ip4/0.0.0.0/tcp/31337")
    if announced and parsed["tcp"] == "0":
        raise ConfigurationError(f"the address {maddr!r} is to be announced, so its port can't be 0")


def check_port_is_free(maddr: str) -> None:
    """Raise ConfigurationError if the port is taken. p2pd would start, and share the port by SO_REUSEPORT."""
    parts = maddr.split("/")
    family = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}.get(parts[1])
    if family is None or parts[3:4] != ["tcp"] or parts[4] == "0":
        return
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((parts[2], int(parts[4])))
        except OSError as error:
            raise ConfigurationError(f"can't listen on {maddr}: {error.strerror}; choose another port") from None


def on_port(maddrs: Iterable[str], port: int | None) -> tuple[str, ...]:
    """These addresses to listen on, with this port in place of any free one; unchanged if another program has it."""
    maddrs = tuple(maddrs)
    if port is None or not 0 < port < 1 << 16:
        return maddrs
    chosen = tuple(f"{one.removesuffix('/0')}/{port}" if one.endswith("/tcp/0") else one for one in maddrs)
    try:
        for one in chosen:
            check_port_is_free(one)
    except ConfigurationError:
        return maddrs
    return chosen


def port_of(addrs: Iterable[str]) -> int | None:
    """The TCP port on which a peer with these addresses listens; None: they don't tell.

    A relay has a port of its own, and a router may have another one for addresses of the world.
    """
    for addr in sorted(addrs, key=_reach, reverse=True):
        parts = addr.split("/")
        if parts[3:4] == ["tcp"] and parts[4].isdecimal() and not is_circuit(addr):
            return int(parts[4])
    return None


def split_initial_peer(maddr: str) -> tuple[str, str]:
    """Split an initial peer's multiaddress into peer id and address.

    Raises:
        ConfigurationError: it is not such an address.
    """
    require_address(maddr)
    addr, _, peer_id = maddr.partition("/p2p/")
    if not is_peer_id(peer_id):
        raise ConfigurationError(f"the initial peer {maddr!r} is wrong: {peer_id} is not the peer id of any key")
    try:
        Multiaddr(addr)
    except ValueError as error:
        raise ConfigurationError(f"the address of the initial peer {maddr!r} is wrong: {error}") from None
    return peer_id, addr


def usable_peers(maddrs: Iterable[str]) -> list[str]:
    """Leave out addresses that can't be initial peers. Other peers claim them, or a file has kept them.

    Nobody can join through a relay, so the addresses of hidden peers are left out, too.
    """
    found = []
    for maddr in maddrs:
        with suppress(ConfigurationError):
            split_initial_peer(maddr)
            found.append(maddr)
    return found


def check_addresses(
    initial_peers: Sequence[str], host_maddrs: Sequence[str], announce_maddrs: Sequence[str], *, listens: bool
) -> None:
    """Raise ConfigurationError if one of them is unusable."""
    for maddr in initial_peers:
        split_initial_peer(maddr)
    for maddr in host_maddrs:
        check_tcp_maddr(maddr)
    for maddr in announce_maddrs:
        check_tcp_maddr(maddr, announced=True)
    for maddr in host_maddrs if listens else ():
        check_port_is_free(maddr)
