"""`swarmllm dht`: a bootstrap peer. It keeps a share of the DHT and lets others join through it. It serves no blocks.

Useful as a lasting address: with `--port` and `--identity_path`, its multiaddress is the same after each start, and so
is its invite.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swarmllm.command_line import Parser, announced_imports, require_free_ports, run_command, stop_event, unless_stopped
from swarmllm.config import PeerConfig, SwarmConfig, address_book_path, require_addresses
from swarmllm.errors import ConfigurationError, PeerUnreachableError
from swarmllm.invite import Invite, require_peer_ids
from swarmllm.network.relay.service import RelayRules
from swarmllm.process_end import end_process

if TYPE_CHECKING:
    from swarmllm.network.p2p.peer import Peer

logger = logging.getLogger(__name__)

NAMED_BY_THIS_PEER = "?"
"""Stands for a private swarm's name until this peer's key is known. The name follows from the key, so it is the same at
each start."""

EXAMPLES = """examples:
  swarmllm dht --port 31337 --identity_path bootstrap.key
  swarmllm dht --initial_peers ADDRESS     # one more, for a swarm that exists
  swarmllm dht --port 31337 --identity_path boot.key --invite --model M
"""


@dataclass(frozen=True, kw_only=True)
class InviteConfig:
    """An invite: one word that others give as --initial_peers."""

    invite: bool = False
    """Print an invite."""
    model: str | None = None
    """Model of the invite, so that others need no --model."""
    allowed_servers: tuple[str, ...] | None = None
    """Peer ids of servers to use; None = any."""
    allowed_clients: tuple[str, ...] | None = None
    """Peer ids that servers should serve; None = any."""
    private: bool = False
    """Start a private swarm: only peers with the invite find it."""


@dataclass(frozen=True, kw_only=True)
class DhtConfig(InviteConfig, PeerConfig):
    """A bootstrap peer and its invite."""

    def __post_init__(self) -> None:
        for name, default in vars(InviteConfig()).items():
            if getattr(self, name) != default and not self.invite:
                raise ConfigurationError(f"--{name} is for the invite: give --invite too")
        super().__post_init__()
        require_peer_ids(self, "allowed_servers", "allowed_clients")

    def _follow(self, invites: Sequence[Invite]) -> None:
        """A peer that joined by an invite invites to the same swarm, and relays for nobody else."""
        self._follow_lists(invites, "allowed_servers", "allowed_clients")


def build_parser() -> Parser:
    """A flag for each field of DhtConfig."""
    parser = Parser(
        prog="swarmllm dht", description="Run a bootstrap peer, through which others join.", epilog=EXAMPLES
    )
    parser.add_settings(DhtConfig, [SwarmConfig, PeerConfig], InviteConfig, without=["lan_discovery"])
    return parser


async def run_bootstrap_peer(config: DhtConfig, invite: Invite | None = None) -> None:
    """Run the peer until SIGINT or SIGTERM. Prints `invite` with this peer's addresses before its own.

    Raises:
        SwarmError: it can't start, or its peer-to-peer daemon died.
    """
    with announced_imports(torch=False):
        from swarmllm.network.p2p.peer import Peer  # after the flags: --help needs no hivemind

    stop = stop_event(stop_on_stdin_eof=config.stop_on_stdin_eof)
    joined = await unless_stopped(
        stop,
        Peer.create(
            initial_peers=config.initial_peers,
            host_maddrs=config.listen_maddrs,
            announce_maddrs=config.announce_maddrs,
            identity_path=config.identity_path,
            relay=relay_rules(config),
            address_book=address_book_path(),
        ),
    )
    if joined is None:
        logger.info("leaving")
        return
    async with joined as peer:
        print(f"swarmllm: join with --initial_peers {' '.join(peer.join_maddrs)}", flush=True)
        if invite is not None:
            print(f"swarmllm: invite others with --initial_peers {_complete(invite, peer)}", flush=True)
        await unless_stopped(stop, peer.daemon_exited())
        if not stop.is_set():
            raise PeerUnreachableError(
                "the peer-to-peer daemon (p2pd) died, so nobody can reach this peer: start it again", peer.peer_id
            )
        logger.info("leaving")


def relay_rules(config: DhtConfig) -> RelayRules | None:
    """The peers to relay for; None: nobody."""
    if not config.relay:
        return None
    return RelayRules(mbps=config.relay_mbps, servers=config.allowed_servers, clients=config.allowed_clients)


def _complete(invite: Invite, peer: "Peer") -> Invite:
    """Add this peer's addresses to the invite. Loopback addresses are added only if there are no others."""
    reachable = [maddr for maddr in peer.join_maddrs if not maddr.startswith(("/ip4/127.", "/ip6/::1/"))]
    name = invite.swarm_name
    if name == NAMED_BY_THIS_PEER:  # nobody else can make this signature, so nobody can guess the name
        name = hashlib.blake2b(peer.sign(b"swarmllm name of a private swarm 1\x00"), digest_size=16).hexdigest()
    initial_peers = tuple(dict.fromkeys([*(reachable or peer.join_maddrs), *invite.initial_peers]))
    return replace(invite, initial_peers=initial_peers, swarm_name=name)


def parse_dht(argv: Sequence[str] | None) -> tuple[DhtConfig, Invite | None]:
    """The settings, and the invite to print if there should be one.

    Raises:
        ConfigurationError, SystemExit(2): they can't work.
    """
    config = DhtConfig(**build_parser().parse_settings(argv))
    require_addresses(config.initial_peers)
    require_free_ports(config.listen_maddrs)
    if not config.invite:
        return config, None
    return config, Invite(
        initial_peers=config.initial_peers,
        model=config.model,
        allowed_servers=config.allowed_servers,
        allowed_clients=config.allowed_clients,
        # A peer that joined a private swarm by an invite invites others to the same one.
        swarm_name=config.swarm_name or (NAMED_BY_THIS_PEER if config.private else None),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    async def run() -> None:
        await run_bootstrap_peer(*parse_dht(argv))

    return run_command(run, serves=True)


if __name__ == "__main__":
    end_process(main())
