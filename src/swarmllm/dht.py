"""`swarmllm dht`: a bootstrap peer. It keeps part of the DHT and lets others join through it; it serves no blocks.

Worth its while as an address that stays: with `--port` and `--identity_path` its multiaddress is the same after each
start, and so is the invite that it prints.
"""

import asyncio
import hashlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swarmllm.command_line import Parser, add_network_flags, run_command, stop_event, unless_stopped
from swarmllm.config import PeerConfig
from swarmllm.errors import ConfigurationError, PeerUnreachableError
from swarmllm.invite import Invite

if TYPE_CHECKING:
    from swarmllm.network.peer import Peer

logger = logging.getLogger(__name__)

NAMED_BY_THIS_PEER = "?"
"""Stands for a private swarm's name until this peer's key is known, from which it follows; the same at each start."""

EXAMPLES = """examples:
  swarmllm dht --port 31337 --identity_path bootstrap.key
  swarmllm dht --initial_peers /ip4/…/tcp/…/p2p/…          # one more, for a swarm that exists
  swarmllm dht --port 31337 --identity_path bootstrap.key --invite --model DIR_OR_HUB_ID
"""


def build_parser() -> Parser:
    """Flags named as the fields of PeerConfig, which give their defaults; and what the invite says."""
    parser = Parser(prog="swarmllm dht", description="A peer that others join through.", epilog=EXAMPLES)
    add = parser.add_argument
    add("--initial_peers", nargs="+", metavar="MADDR", help="peers of a swarm to join, or an invite; none: a new one")
    add_network_flags(parser)
    invite = parser.add_argument_group("an invite: one word that others give as --initial_peers")
    add = invite.add_argument
    add("--invite", action="store_true", help="print one")
    add("--model", help="that it is for, so that the others need no --model")
    add("--allowed_servers", nargs="+", metavar="PEER", help="peer ids of servers to use")
    add("--allowed_clients", nargs="+", metavar="PEER", help="peer ids that servers should serve")
    add("--private", action="store_true", help="of a swarm that only those find who have the invite")
    return parser


async def run_bootstrap_peer(config: PeerConfig, invite: Invite | None = None) -> None:
    """Be a peer until SIGINT or SIGTERM. `invite` is printed with this peer's addresses in front of its own.

    Raises:
        SwarmError: it can't start, or its peer-to-peer daemon died.
    """
    from swarmllm.network.peer import Peer  # after the flags: --help needs no hivemind

    stop = stop_event(stop_on_stdin_eof=config.stop_on_stdin_eof)
    joined = await unless_stopped(
        stop,
        Peer.create(
            initial_peers=config.initial_peers,
            host_maddrs=config.listen_maddrs,
            announce_maddrs=config.announce_maddrs,
            identity_path=config.identity_path,
        ),
    )
    if joined is None:
        logger.info("leaving")
        return
    async with joined as peer:
        print(f"swarmllm: join with --initial_peers {' '.join(peer.join_maddrs)}", flush=True)
        if invite is not None:
            print(f"swarmllm: invite others with --initial_peers {_complete(invite, peer)}", flush=True)
        stopped = asyncio.ensure_future(stop.wait())
        died = asyncio.ensure_future(peer.daemon_exited())
        try:
            await asyncio.wait({stopped, died}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            died.cancel()
        if not stop.is_set():
            raise PeerUnreachableError(
                "the peer-to-peer daemon (p2pd) died, so nobody can reach this peer: start it again", peer.peer_id
            )
        logger.info("leaving")


def _complete(invite: Invite, peer: "Peer") -> Invite:
    """The invite with this peer's addresses; those of this machine alone only if there are no others."""
    reachable = [maddr for maddr in peer.join_maddrs if not maddr.startswith(("/ip4/127.", "/ip6/::1/"))]
    name = invite.swarm_name
    if name == NAMED_BY_THIS_PEER:  # nobody else can sign this, so nobody can guess it
        name = hashlib.blake2b(peer.sign(b"swarmllm name of a private swarm 1\x00"), digest_size=16).hexdigest()
    initial_peers = tuple(dict.fromkeys([*(reachable or peer.join_maddrs), *invite.initial_peers]))
    return replace(invite, initial_peers=initial_peers, swarm_name=name)


def parse_dht(argv: Sequence[str]) -> tuple[PeerConfig, Invite | None]:
    """The settings, and the invite to print if one is asked for.

    Raises:
        ConfigurationError, SystemExit(2): they can't work.
    """
    settings = build_parser().parse_settings(argv)
    wanted, private = settings.pop("invite", False), settings.pop("private", False)
    said = {name: settings.pop(name, None) for name in ("model", "allowed_servers", "allowed_clients")}
    config = PeerConfig(**settings)
    if not wanted:
        for name, value in said.items():
            if value is not None:
                raise ConfigurationError(f"--{name} is for the invite: give --invite too")
        if private:
            raise ConfigurationError("--private is for the invite: give --invite too")
        return config, None
    servers, clients = (None if said[name] is None else tuple(said[name]) for name in list(said)[1:])
    return config, Invite(
        initial_peers=config.initial_peers,
        model=said["model"],
        allowed_servers=servers,
        allowed_clients=clients,
        # Who joined by an invite to a private swarm invites others to the same one.
        swarm_name=config.swarm_name or (NAMED_BY_THIS_PEER if private else None),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""

    async def run() -> None:
        await run_bootstrap_peer(*parse_dht(sys.argv[1:] if argv is None else argv))

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
