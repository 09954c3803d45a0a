"""Looks of `swarmllm doctor` at the network: it listens as a server would, and asks the swarm as a client would."""

import asyncio
import re
import time
from collections.abc import Sequence
from ipaddress import ip_address

from swarmllm.command_line import one_line
from swarmllm.commands.doctor.findings import DoctorConfig, Finding, bad, note, ok
from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.network.p2p.addresses import split_initial_peer
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.discovery import find_peers, initial_peers_of
from swarmllm.network.p2p.peer import Peer
from swarmllm.swarm.block_map import describe_shared_identities
from swarmllm.swarm.stacks import describe_blocks

DIAL_TIMEOUT_S = 3.0
MAX_SERVERS = 64
"""Servers of one model that are dialled, at most."""


async def check_listening(config: DoctorConfig) -> list[Finding]:
    """Whether a server could start here, and at which addresses others would look for it."""
    try:
        server = config.server()
        peer = await Peer.create(host_maddrs=server.listen_maddrs, announce_maddrs=server.announce_maddrs)
    except SwarmError as error:
        return [bad(one_line(error))]
    async with peer:
        findings = [ok(f"p2pd runs and listens: {', '.join(peer.addrs)}")]
        ips = [ip_address(match[1]) for addr in peer.addrs if (match := re.match(r"/ip[46]/([^/]+)/", addr))]
    if all(ip.is_loopback for ip in ips):
        findings.append(
            note("only this machine can reach these addresses: listen with --host_maddrs /ip4/0.0.0.0/tcp/0")
        )
    elif not any(ip.is_global for ip in ips):
        findings.append(
            note(
                "these addresses are of a local network: machines outside reach a server here if the router maps a "
                "port when it is asked, or through relays; faster is a port that is forwarded to it and named, by "
                "--port 31337 --announce_maddrs /ip4/PUBLIC_IP/tcp/31337"
            )
        )
    if config.port is None:
        findings.append(note("each start takes another port: choose one by --port, and let it in through the firewall"))
    return findings


async def check_swarm(config: DoctorConfig) -> list[Finding]:
    """Whether the initial peers, or those of the local network, can be reached, agree on the time, and have servers."""
    findings: list[Finding] = []
    peers = config.initial_peers
    if not peers:
        if not config.lan_discovery:
            return [note("no initial peers were given, so no swarm was looked at: --initial_peers names them")]
        found = await find_peers(lambda _: False)
        if not found:
            return [note("no swarm was found on the local network: --initial_peers names peers elsewhere")]
        findings += [ok(f"on the local network: {p.peer_id} serves {p.model} at {p.maddrs[0]}") for p in found]
        if len({one.fingerprint for one in found}) > 1:
            return [*findings, note("these are several swarms: name peers of one by --initial_peers to look at it")]
        peers = initial_peers_of(found)
    else:
        try:
            split = [split_initial_peer(maddr) for maddr in peers]
        except ConfigurationError as error:
            return [bad(one_line(error))]
        dials = [dial(addr) for _, addr in split]
        for (_, addr), problem in zip(split, await asyncio.gather(*dials), strict=True):
            findings.append(ok(f"{addr} takes connections") if problem is None else bad(f"{addr}: {problem}"))
    return findings + await _look_into(peers, config.swarm_name)


async def _look_into(initial_peers: Sequence[str], swarm_name: str | None) -> list[Finding]:
    asked_at = time.monotonic()
    try:
        peer = await Peer.create(initial_peers=initial_peers, client_mode=True)
    except SwarmError as error:  # says so as well when this machine's clock is wrong
        return [bad(one_line(error))]
    async with peer:
        took_s = time.monotonic() - asked_at
        joined = ok(f"joined the swarm in {took_s:.1f} s; this machine's clock agrees with it within 3 s")
        return [joined, *await _look_at_servers(peer, swarm_name)]


async def _look_at_servers(peer: Peer, swarm_name: str | None) -> list[Finding]:
    """Whether every server of the swarm can be dialled from here."""
    directory = BlockDirectory(peer, swarm_name)
    findings: list[Finding] = []
    records = {record.fingerprint: record for record in (await directory.models()).values()}
    if not records:
        return [note("the swarm serves no model yet")]
    for record in records.values():
        servers = (await directory.servers(record.fingerprint))[:MAX_SERVERS]
        missing = SwarmSnapshot(record.num_blocks, servers).missing_blocks()
        if missing:
            which = describe_blocks(missing, record.encoder_blocks)
            findings.append(note(f"{record.name}: nobody serves {len(missing)} of {record.num_blocks} blocks: {which}"))
        results = await asyncio.gather(*(_dial_server(peer, server) for server in servers))
        for server, problem in zip(servers, results, strict=True):
            if problem is not None:
                mend = "see the firewall, --port and --announce_maddrs there"
                findings.append(bad(f"server {server.peer_id} of {record.name}: {problem}; {mend}"))
            elif server.relayed:
                findings.append(
                    note(f"server {server.peer_id} of {record.name} is reached through a relay: see --port there")
                )
        findings += map(bad, describe_shared_identities(SwarmSnapshot(record.num_blocks, servers)))
        reached = sum(problem is None for problem in results)
        findings.append(ok(f"{record.name}: {reached} of {len(servers)} servers take connections from here"))
    return findings


async def _dial_server(peer: Peer, server: ServerInfo) -> str | None:
    """None if this server can be reached, through its relays if nobody can dial it; else what is wrong."""
    if not server.relayed:
        return await _dial_any(server.addrs)
    try:
        stream = await peer.open_stream(server.peer_id, server.addrs)
    except SwarmError as error:
        return f"it is reached through relays only, and {one_line(error)}"
    stream.abort()
    return None


async def _dial_any(addrs: Sequence[str]) -> str | None:
    """None if one of the addresses can be dialled; else what is wrong with all of them."""
    problems = await asyncio.gather(*map(dial, addrs))
    if not problems:
        return "it announces no address"
    return None if None in problems else "; ".join(f"{addr}: {p}" for addr, p in zip(addrs, problems, strict=True))


async def dial(addr: str) -> str | None:
    """None if something takes TCP connections at this multiaddress; else why not, and what to mend."""
    match = re.fullmatch(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})", addr)
    if match is None:
        return None  # of a kind that only libp2p knows; joining tells
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(match[1], int(match[2]))
    except TimeoutError:
        return "no answer: the machine is off, the address is wrong, or a firewall drops what comes to this port"
    except ConnectionRefusedError:
        return "the machine is there, but nothing listens on this port: start the peer, or mend the port"
    except (OSError, OverflowError) as error:
        return f"can't be dialled: {getattr(error, 'strerror', None) or error}"
    writer.transport.abort()
    return None
