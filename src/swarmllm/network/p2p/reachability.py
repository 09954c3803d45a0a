"""Whether others can dial this server; and if not, how it is reached all the same.

A server asks up to four peers that it knows to dial it (libp2p's AutoNAT). Who can't be dialled is *hidden*: a client
of the DHT with places at relays, whose addresses it announces before its own. `p2p/peer` starts with what is found out,
and this module looks again all the time:

    any peer gets through                              public
    silence, or all who tried failed                   hidden
    nobody to ask, or none who can tell (one network)  as it was; public at the start
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import base58

from swarmllm.errors import PeerUnreachableError, SwarmError
from swarmllm.network.p2p._hivemind import P2PDaemonError, PeerID
from swarmllm.network.p2p.addresses import best_addrs, is_loopback, pack_addrs
from swarmllm.network.p2p.daemon import Daemon
from swarmllm.network.p2p.dht_node import Dht
from swarmllm.network.relay.guest import RelayGuest, RelayPeer
from swarmllm.network.relay.service import BUFFER_BYTES, ByteStream
from swarmllm.network.relay.wire import AUTONAT, HOP, dial_me, read_message, was_dialled

logger = logging.getLogger(__name__)

NUM_ASKED = 4
SILENCE_S = 4.0
"""Measured: who gets through says so in 0.24 s, who doesn't only after 15 s."""
FIRST_LOOK_S = 15.0
"""A router that maps ports has done so by then; measured: after 10.5 s."""
LOOK_S = 45.0
"""Between looks; libp2p answers three a minute."""
LOOKS_TO_HIDE = 2
"""In a row that find a public server hidden before it believes it: a busy peer is silent, too."""


class Reachability:
    """How this peer is reached. `hidden`: not by dialling it, as was found out or said."""

    def __init__(self, daemon: Daemon, dht: Dht, own_id: str, *, hidden: bool, looks: bool) -> None:
        self._daemon, self._dht, self._own_id = daemon, dht, own_id
        self.hidden = hidden
        self._looks = looks
        self.find_relays: Callable[[], Sequence[RelayPeer]] = tuple
        """Who else may be asked to relay, after the initial peers."""
        self._guest: RelayGuest | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def addrs(self) -> tuple[str, ...]:
        """What to announce, the best ones first."""
        direct = self._daemon.addrs
        if not self.hidden:
            return direct
        through_relays = () if self._guest is None else self._guest.addrs
        # Neighbours in the same home or office dial the others; loopback addresses would mean other machines there.
        return best_addrs([*through_relays, *(addr for addr in direct if not is_loopback(addr))])

    async def start(self) -> None:
        """Return when others can reach this peer, if they ever can."""
        loop = asyncio.get_running_loop()
        if self.hidden:
            await self._hide()
        elif self._looks:
            await self._show()
        if self._looks:
            self._tasks.append(loop.create_task(self._look_again(), name="look whether others can dial this peer"))

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Relays

    async def _show(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        self._guest = self._keeping = None
        await self._dht.show()

    async def _hide(self) -> None:
        self._dht.hide()
        self._guest = RelayGuest(self._open_hop, self._relay_peers)
        await self._guest.fill()
        if not self._guest.relays:
            logger.warning(
                "others can't dial this peer, and no peer relays for it yet: forward a port and name it by "
                "--announce_maddrs, or have a peer with a public address join, like `swarmllm dht`"
            )
        self._keeping = asyncio.get_running_loop().create_task(self._guest.run(), name="keep places at relays")
        self._tasks.append(self._keeping)
        self._keeping.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("no more places at relays are asked for, restart this server", exc_info=error)

    def _relay_peers(self) -> list[RelayPeer]:
        found: dict[str, list[str]] = {}
        for peer_id, addr in self._dht.initial_peers:
            found.setdefault(peer_id, []).append(addr)
        first = [RelayPeer(peer_id, best_addrs(addrs)) for peer_id, addrs in found.items()]
        return [*first, *(relay for relay in self.find_relays() if relay.peer_id not in (*found, self._own_id))]

    async def _open_hop(self, relay: RelayPeer) -> ByteStream:
        target = base58.b58decode(relay.peer_id)
        try:
            await self._daemon.connect(target, pack_addrs(relay.addrs))
            return await self._daemon.open_stream(target, HOP, BUFFER_BYTES)
        except P2PDaemonError as error:
            raise PeerUnreachableError(f"the relay can't be reached: {error}", relay.peer_id) from None

    # Looking

    async def is_hidden(self) -> bool | None:
        """Whether nobody can dial this peer; None: nobody can tell."""
        asked = [peer_id for peer_id in self._dht.known_peers() if peer_id != self._own_id][:NUM_ASKED]
        answers = await asyncio.gather(*(_can_dial(self._daemon, self._own_id, peer_id) for peer_id in asked))
        if True in answers:
            return False
        return True if False in answers else None

    async def _look_again(self) -> None:
        times_hidden, pause_s = 0, FIRST_LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = LOOK_S
            try:
                await self._daemon.read_addrs()  # a router may have mapped a port, or the machine has moved
                hidden = await self.is_hidden()
            except (SwarmError, P2PDaemonError) as error:
                logger.debug("could not look whether others can dial this peer: %s", error)
                continue
            times_hidden = times_hidden + 1 if hidden and not self.hidden else 0
            if hidden is False and self.hidden:
                await self._change(hidden=False)
            elif times_hidden == LOOKS_TO_HIDE:
                await self._change(hidden=True)

    async def _change(self, *, hidden: bool) -> None:
        logger.warning("others can't dial this peer any more" if hidden else "others can dial this peer now")
        self.hidden = hidden
        await (self._hide() if hidden else self._show())


async def _can_dial(daemon: Daemon, own_id: str, by: str) -> bool | None:
    """Whether that peer can dial this one; None: it can't tell."""
    try:
        async with asyncio.timeout(SILENCE_S):
            reader, writer = await daemon.open_stream(PeerID.from_base58(by).to_bytes(), AUTONAT, BUFFER_BYTES)
    except (P2PDaemonError, SwarmError, TimeoutError):
        return None
    try:
        async with asyncio.timeout(SILENCE_S):
            writer.write(dial_me(base58.b58decode(own_id), pack_addrs(daemon.addrs)))
            return was_dialled(await read_message(reader))
    except TimeoutError:
        return False
    except (OSError, EOFError, ValueError):
        return None
    finally:
        writer.transport.abort()
