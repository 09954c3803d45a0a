"""Opening streams to other peers: directly, or through the relays that they name.

Part of `p2p/peer`. libp2p's daemon dials all addresses of a peer, those through relays half a second later, and uses
the connection that it has for all further streams. It takes a circuit through a frozen relay for alive for half a
minute, so a peer behind a relay that fell silent is dialled anew.
"""

import asyncio
from collections.abc import Sequence

from swarmllm.errors import PeerTimeoutError, PeerUnreachableError
from swarmllm.network.p2p._hivemind import P2PDaemonError, PeerID
from swarmllm.network.p2p.addresses import pack_addrs
from swarmllm.network.p2p.daemon import Daemon, reason_of
from swarmllm.network.p2p.incoming import other_end
from swarmllm.network.relay.service import Caller
from swarmllm.network.relay.wire import is_circuit

CIRCUIT_S = 3.0
"""More time, where the peer may be behind a relay: that is dialled first, and then asks the peer. Assumed."""
MAX_SILENT = 1024
"""Peers behind relays that are kept in mind."""


class Dialler:
    """Opens streams at one protocol."""

    def __init__(self, daemon: Daemon, protocol: str) -> None:
        self._daemon, self._protocol = daemon, protocol
        self._silent: dict[str, None] = {}  # a set in the order of time

    def fell_silent(self, peer_id: str) -> None:
        """A stream to this peer, through a relay, has ended since nothing came: the relay may be what is frozen."""
        self._silent[peer_id] = None
        if len(self._silent) > MAX_SILENT:
            del self._silent[next(iter(self._silent))]

    async def open(
        self, peer_id: str, addrs: Sequence[str], timeout_s: float
    ) -> tuple[Caller, asyncio.StreamReader, asyncio.StreamWriter]:
        """A new stream to that peer, and how it is reached. Without addresses the swarm is asked for them.

        Raises:
            PeerUnreachableError: the peer can't be dialled, or serves no such streams; or this peer's daemon died.
            PeerTimeoutError: it did not answer in time.
        """
        target = PeerID.from_base58(peer_id).to_bytes()
        may_be_relayed = any(map(is_circuit, addrs))
        if may_be_relayed:
            timeout_s += CIRCUIT_S
        try:
            async with asyncio.timeout(timeout_s):
                if peer_id in self._silent:
                    del self._silent[peer_id]
                    await self._daemon.disconnect(target)
                if packed := pack_addrs(addrs):
                    await self._daemon.connect(target, packed)
                reader, writer, addr = await self._daemon.open_stream_told(target, self._protocol)
        except P2PDaemonError as error:
            raise PeerUnreachableError(f"the peer {peer_id} can't be reached: {reason_of(error)}", peer_id) from None
        except TimeoutError:
            if may_be_relayed:
                self.fell_silent(peer_id)
            raise PeerTimeoutError(f"the peer {peer_id} did not answer in {timeout_s:g} s", peer_id) from None
        return other_end(peer_id, addr), reader, writer
