"""Become a member of a swarm of machines: by an invite, by joining one of the local network, or by founding one.

`find_membership` decides at the start of `swarmllm up`, and `note_membership` writes that down once nothing can refuse
the machine any more:

    an invite is given        its swarm
    the state directory       the swarm in which this machine was before
    the local network         an open swarm; of several, the one with the smallest id
    nothing of these          a new swarm, open or private

Machines that start at the same moment may each found a swarm. So a founder announces its swarm, looks once more, and
joins an open swarm with a smaller id. Until it has looked, it lets nobody in: others would be left in a swarm that it
leaves.

A member of an open swarm gives the swarm key to machines that ask for it (JOIN), if they call from an address of a
network of this machine. The stream is encrypted. So in an open swarm everybody in the local network can become a
member. A private swarm gives its key to nobody, and isn't announced.
"""

import asyncio
import ipaddress
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmllm.data_structures import printable
from swarmllm.errors import ConfigurationError, PeerError, SwarmError
from swarmllm.invite import Invite
from swarmllm.machines.state import StateDirectory
from swarmllm.network.p2p.addresses import usable_peers
from swarmllm.network.p2p.discovery import FoundPeer, find_machines, initial_peers_of
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.relay.service import Caller
from swarmllm.network.wire.stream import abort_transport

logger = logging.getLogger(__name__)

JOIN_PROTOCOL = "/swarmllm/join/1"
"""libp2p's name for streams of JOIN: one line of JSON each way."""
MAX_LINE_BYTES = 4096
JOIN_TIMEOUT_S = 10.0
MOST_LOOKS, WAIT_S = 15, 1.0
"""Looks at the local network, and seconds between two, while a member says that it will answer soon."""
SECOND_LOOK_S = 5.0
"""Seconds for which a founder looks for another swarm that began at the same time."""
MAX_ADDRESSES = 64


@dataclass(frozen=True)
class Membership:
    """The swarm of this machine."""

    key: Identity
    """The swarm key, with its private half."""
    name: str
    """For people."""
    is_open: bool
    """True if machines of the local network become members by asking."""
    initial_peers: tuple[str, ...] = ()
    """Addresses of other members, as far as they are known."""

    @property
    def swarm_id(self) -> str:
        return self.key.peer_id

    def invite(self, addresses: Sequence[str]) -> Invite:
        """The invite that makes its holder a member."""
        raw = self.key.key.private_bytes_raw().hex()
        return Invite(initial_peers=tuple(addresses)[:MAX_ADDRESSES], swarm_name=self.swarm_id, member_key=raw)


def key_of_hex(text: str) -> Identity:
    """The swarm key in an invite."""
    return Identity.of_key(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text)))


def read_membership(invite: Invite) -> Membership:
    """The swarm of an invite.

    Raises:
        ConfigurationError: it is an invite of another kind, or not whole.
    """
    if invite.member_key is None:
        raise ConfigurationError(
            "this invite is for clients and servers of a model, and makes no machine a member: "
            "copy the word from `swarmllm up` or from its page"
        )
    key = key_of_hex(invite.member_key)
    if not invite.initial_peers:
        raise ConfigurationError("the invite has no addresses of other machines: copy a new one from a machine's page")
    if invite.swarm_name != key.peer_id:
        raise ConfigurationError("the invite is damaged: its key belongs to another swarm; copy the whole word again")
    return Membership(key, "", is_open=False, initial_peers=invite.initial_peers)


async def find_membership(
    state: StateDirectory,
    join: Callable[[], Awaitable[Membership | None]],
    *,
    invite: Invite | None,
    private: bool,
    name: str,
) -> Membership:
    """Choose a swarm, as the table above says. The state directory stays as it is.

    Args:
        join: joins a swarm of the local network, if there is one.
        name: of a new swarm, for people.

    Raises:
        ConfigurationError: the invite is of no use, or this machine can't found a private swarm.
    """
    if invite is not None:
        return read_membership(invite)
    if (before := state.swarm_key()) is not None:
        said = state.read("swarm.json", {})
        if private and not (said.get("name") and said.get("open") is False):  # a guest of a swarm knows no name of it
            swarm = printable(str(said.get("name") or before.peer_id[-8:]))
            raise ConfigurationError(
                f"this machine is in the swarm {swarm} already, and didn't found it with --private: leave --private "
                f"out, or remove {state.swarm_key_path} first, to leave that swarm"
            )
        known = tuple(usable_peers(one for one in state.read("peers.json", []) if isinstance(one, str)))
        return Membership(before, str(said.get("name", "")), said.get("open") is True, known)
    return (None if private else await join()) or Membership(Identity.generate(), name, is_open=not private)


def note_membership(state: StateDirectory, swarm: Membership) -> None:
    """Note the swarm in the state directory. What it held about another swarm is forgotten.

    Raises:
        ConfigurationError: it can't be written.
    """
    before = state.swarm_key()
    if before is not None and before.peer_id != swarm.swarm_id:
        logger.warning("this machine leaves the swarm %s for %s", before.peer_id[-8:], swarm.swarm_id[-8:])
    state.enter_swarm(swarm.key, name=swarm.name, is_open=swarm.is_open)
    if swarm.initial_peers:
        state.write("peers.json", list(swarm.initial_peers))


async def join_open_swarm(
    open_peer: Callable[[], AbstractAsyncContextManager[Peer]],
    name: str,
    *,
    below: str | None = None,
    timeout_s: float | None = None,
) -> Membership | None:
    """Join an open swarm of the local network, of several the one with the smallest id; None: none lets this machine
    in.

    Args:
        open_peer: opens the peer that asks.
        name: of this machine, for people.
        below: only swarms with smaller ids than this one.
    """
    async with AsyncExitStack() as stack:
        peer: Peer | None = None
        for _ in range(MOST_LOOKS):
            swarms: dict[str, list[FoundPeer]] = {}
            for member in await find_machines(
                lambda member: below is None or member.fingerprint < below, timeout_s=timeout_s
            ):
                if below is None or member.fingerprint < below:
                    swarms.setdefault(member.fingerprint, []).append(member)
            if not swarms:
                return None
            if peer is None:
                peer = await stack.enter_async_context(open_peer())
            joined, must_wait = await _ask_all(peer, swarms, name)
            if joined is not None or not must_wait:
                return joined
            await asyncio.sleep(WAIT_S)
        return None


async def _ask_all(peer: Peer, swarms: Mapping[str, Sequence[FoundPeer]], name: str) -> tuple[Membership | None, bool]:
    """Ask the members of these swarms, those of the smallest id first. True: one of them wants to be asked later."""
    for swarm_id in sorted(swarms):
        for member in swarms[swarm_id]:
            try:
                joined = await ask_to_join(peer, member.peer_id, member.maddrs, swarm_id, name)
            except SwarmError as error:
                logger.warning("%s at %s doesn't let this machine in: %s", member.model, member.maddrs[0], error)
                continue
            if joined is None:
                return None, True
            key, swarm_name = joined
            return Membership(key, swarm_name, is_open=True, initial_peers=initial_peers_of(swarms[swarm_id])), False
    return None, False


async def ask_to_join(
    peer: Peer, member: str, addrs: Sequence[str], swarm_id: str, name: str
) -> tuple[Identity, str] | None:
    """Ask a member for the swarm key. Returns the key and the swarm's name; None: ask again later.

    Raises:
        PeerError: it can't be reached, or doesn't give the key of this swarm.
        ConfigurationError: it refuses.
    """
    addrs = [addr.partition("/p2p/")[0] for addr in addrs]
    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            reader, writer = await peer.open_protocol(JOIN_PROTOCOL, member, addrs)
            try:
                await _write_line(writer, {"swarm": swarm_id, "name": name})
                answer = await _read_line(reader)
            finally:
                abort_transport(writer.transport)
    except (TimeoutError, OSError, ValueError) as error:
        raise PeerError(f"the machine {member} gives no answer that makes sense: {error!r}", member) from None
    if answer.get("wait") == swarm_id:
        return None
    if isinstance(refusal := answer.get("refused"), str):
        raise ConfigurationError(printable(refusal[:200]))
    try:
        key = key_of_hex(str(answer.get("member_key")))
    except ValueError:
        raise PeerError(f"the machine {member} gives no swarm key", member) from None
    if key.peer_id != swarm_id:
        raise PeerError(f"the machine {member} gives the key of another swarm", member)
    return key, printable(str(answer.get("name", ""))[:64])


class Doorkeeper:
    """Answers JOIN: gives the swarm key of an open swarm to machines of the own network."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.is_settled = True
        """False while this machine may still leave the swarm that it has just founded."""
        self.num_joined = 0

    async def serve(self, caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one stream."""
        with suppress(TimeoutError, ValueError):
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                asked = await _read_line(reader)
                await _write_line(writer, self._answer(caller, asked))
                await reader.read(1)  # until the caller has read the answer and hangs up

    def _answer(self, caller: Caller, asked: dict[str, object]) -> dict[str, str]:
        swarm = self._membership
        if asked.get("swarm") != swarm.swarm_id:
            return {"refused": "this machine is in another swarm"}
        if not swarm.is_open:
            return {"refused": "this swarm is private: ask a member for an invite"}
        if caller.through_relay or not is_of_own_network(caller.host, own_networks()):
            logger.warning("refused the swarm key to %s, which calls from %s", caller.peer_id, caller.host or "a relay")
            return {"refused": "only machines of the same local network join without an invite"}
        if not self.is_settled:
            return {"wait": swarm.swarm_id}
        self.num_joined += 1
        logger.info("%s at %s joins the swarm", printable(str(asked.get("name", ""))[:64]), caller.host)
        return {"member_key": swarm.key.key.private_bytes_raw().hex(), "name": swarm.name}


def is_of_own_network(host: str, networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    """True if this is a private address in one of these networks."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_private and any(ip in network for network in networks)


def own_networks() -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """The networks of this machine's interfaces."""
    found: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.netmask:
                with suppress(ValueError):
                    ip = ipaddress.ip_address(one.address.partition("%")[0])
                    mask = ipaddress.ip_address(one.netmask)
                    length = bin(int(mask)).count("1")
                    found.append(ipaddress.ip_network(f"{ip}/{length}", strict=False))
    return found


async def _write_line(writer: asyncio.StreamWriter, content: dict[str, str]) -> None:
    writer.write(json.dumps(content).encode() + b"\n")
    await writer.drain()


async def _read_line(reader: asyncio.StreamReader) -> dict[str, object]:
    """Raises: ValueError: it isn't a line with a table, or too long."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > MAX_LINE_BYTES or not (chunk := await reader.read(MAX_LINE_BYTES)):
            raise ValueError("the line is too long, or not whole")
        line += chunk
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("the line is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("the line is no table")
    return found
