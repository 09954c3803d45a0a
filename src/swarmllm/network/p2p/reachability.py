"""Can others dial this server? If not, relays let them reach it.

A server asks up to four peers that it knows to dial it (libp2p's AutoNAT). If nobody can, it is *hidden*: a client of
the DHT that reserves a place at up to three relays, and announces its addresses through them before its own. `p2p/peer`
starts with the first result, and this module checks again all the time:

    any peer gets through                                public
    silence, or every peer that tried has failed         hidden
    nobody to ask, or nobody can tell (one network)      no change; public at the start

A reservation is a stream that stays open and is renewed every few seconds. When it ends, or a renewal isn't answered,
that relay is gone and another one is asked at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import base58

from swarmllm.errors import PeerUnreachableError, SwarmError
from swarmllm.network.p2p._hivemind import P2PDaemonError, PeerID
from swarmllm.network.p2p.addresses import best_addrs, is_loopback, pack_addrs
from swarmllm.network.p2p.daemon import Daemon
from swarmllm.network.p2p.dht_node import Dht
from swarmllm.network.relay.messages import (
    AUTONAT,
    HOP,
    HopKind,
    Status,
    circuit_through,
    dial_me,
    network_of,
    number,
    read_message,
    reserve,
    was_dialled,
)
from swarmllm.network.relay.service import BUFFER_BYTES, ByteStream

logger = logging.getLogger(__name__)

NUM_ASKED = 4
SILENCE_S = 4.0
"""Measured: a peer that gets through says so in 0.24 s, one that doesn't only after 15 s."""
FIRST_LOOK_S = 15.0
"""Seconds until the first check. A router that maps ports has done so by then; measured: after 10.5 s."""
LOOK_S = 45.0
"""Seconds between checks. libp2p answers three a minute."""
LOOKS_TO_HIDE = 2
"""Checks in a row that must fail before a public server counts as hidden. A busy peer is silent, too."""

NUM_RELAYS = 3
"""Reservations at a time, so that the death of one relay is not noticed."""
RENEWAL_S = 10.0
"""Seconds between renewals, which also show that the relay is still there."""
ANSWER_S = 5.0
"""Seconds to reach a relay, and for its answer."""
RETRY_S = 15.0
"""Seconds until relays that failed or refused are asked again; `ALONE_S` if there is no relay at all."""
ALONE_S = 2.0
ADDRS_PER_RELAY = 2
"""Most addresses to use for one relay. More would fill the record."""


@dataclass(frozen=True)
class RelayPeer:
    """A peer that others can dial, so it may be a relay."""

    peer_id: str
    addrs: tuple[str, ...]
    """The best ones first."""


OpenHop = Callable[[RelayPeer], Awaitable[ByteStream]]


class Reachability:
    """Knows how this peer is reached. `hidden`: not by dialling, as was found out or set."""

    def __init__(self, daemon: Daemon, dht: Dht, own_id: str, *, hidden: bool, looks: bool) -> None:
        self._daemon, self._dht, self._own_id = daemon, dht, own_id
        self.hidden = hidden
        self._looks = looks
        self.find_relays: Callable[[], Sequence[RelayPeer]] = tuple
        """More peers to ask for a reservation, after the initial peers."""
        self._guest: RelayGuest | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def addrs(self) -> tuple[str, ...]:
        """The addresses to announce, the best ones first."""
        direct = self._daemon.addrs
        if not self.hidden:
            return direct
        through_relays = () if self._guest is None else self._guest.addrs
        # Neighbours in the same home or office dial the others. Loopback addresses would mean other machines there.
        return best_addrs([*through_relays, *(addr for addr in direct if not is_loopback(addr))])

    async def start(self) -> None:
        """Return when others can reach this peer, or can't be made to."""
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
        self._keeping = asyncio.get_running_loop().create_task(
            self._guest.keep_reservations(), name="keep reservations at relays"
        )
        self._tasks.append(self._keeping)
        self._keeping.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("this server asks for no more reservations at relays; restart it", exc_info=error)

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

    # Checking

    async def is_hidden(self) -> bool | None:
        """True if nobody can dial this peer; None if nobody can tell."""
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
    """True if that peer can dial this one; None: it can't tell."""
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


class RelayGuest:
    """Keeps reservations at relays. `open_hop` opens a stream to a peer at HOP, `candidates` are the peers to ask, in
    order."""

    def __init__(self, open_hop: OpenHop, candidates: Callable[[], Sequence[RelayPeer]]) -> None:
        self._open_hop = open_hop
        self._candidates = candidates
        self._kept: dict[RelayPeer, asyncio.Task[None]] = {}
        self._asked_at: dict[str, float] = {}
        self._changed = asyncio.Event()

    @property
    def relays(self) -> tuple[RelayPeer, ...]:
        """Relays at which this peer has a reservation now."""
        return tuple(self._kept)

    @property
    def addrs(self) -> tuple[str, ...]:
        """Addresses through the relays: the best of each first."""
        numbered = [
            (place, circuit_through(addr, relay.peer_id))
            for relay in self._kept
            for place, addr in enumerate(relay.addrs[:ADDRS_PER_RELAY])
        ]
        return tuple(addr for _, addr in sorted(numbered, key=lambda one: one[0]))

    async def keep_reservations(self) -> None:
        """Keep reservations for ever."""
        try:
            while True:
                await self.fill()
                self._changed.clear()
                try:
                    async with asyncio.timeout(RETRY_S if self._kept else ALONE_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            keeping = tuple(self._kept.values())
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    async def fill(self) -> None:
        """Ask for reservations until there are enough, or all candidates were asked."""
        now = asyncio.get_running_loop().time()
        retry_s = RETRY_S if self._kept else ALONE_S
        left = [one for one in self._candidates() if now - self._asked_at.get(one.peer_id, -RETRY_S) >= retry_s]
        self._asked_at = {id: at for id, at in self._asked_at.items() if now - at < RETRY_S}
        while left and len(self._kept) < NUM_RELAYS:
            chosen = choose(left, self._kept, NUM_RELAYS - len(self._kept))
            if not chosen:
                return
            left = [one for one in left if one not in chosen]
            await asyncio.gather(*map(self._ask, chosen))

    async def _ask(self, relay: RelayPeer) -> None:
        self._asked_at[relay.peer_id] = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await self._open_hop(relay)
        except (SwarmError, TimeoutError) as error:
            logger.debug("%s doesn't work as a relay now: %r", relay.peer_id, error)
            return
        try:
            await _renew(reader, writer)
        except BaseException as error:
            writer.transport.abort()
            if not isinstance(error, (OSError, EOFError, TimeoutError, ValueError)):
                raise
            logger.debug("%s gave this peer no reservation: %r", relay.peer_id, error)
            return
        self._kept[relay] = asyncio.get_running_loop().create_task(self._keep(relay, reader, writer))
        logger.info("reached by others through %s", relay.peer_id)

    async def _keep(self, relay: RelayPeer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(RENEWAL_S):
                        if not await reader.read(1):
                            raise EOFError("it hung up")
                        raise ValueError("it sent an unexpected message")
                except TimeoutError:
                    await _renew(reader, writer)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            logger.info("not reached through %s any more: %s", relay.peer_id, str(error) or "no answer")
        finally:
            del self._kept[relay]
            self._asked_at.pop(relay.peer_id, None)
            self._changed.set()
            writer.transport.abort()


def choose(left: Sequence[RelayPeer], kept: Iterable[RelayPeer], num: int) -> list[RelayPeer]:
    """The next peers to ask, in their order, but those in networks without a relay first.

    Otherwise a peer with many addresses in one network could become the only way to reach this one.
    """
    ids = {relay.peer_id for relay in kept}
    networks = {network for relay in kept for network in map(network_of, relay.addrs)}
    chosen: list[RelayPeer] = []
    others: list[RelayPeer] = []
    for relay in left:
        if relay.peer_id in ids:
            continue
        own = set(map(network_of, relay.addrs))
        (others if own & networks else chosen).append(relay)
        ids.add(relay.peer_id)
        networks |= own
    return [*chosen, *others][:num]


async def _renew(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ask for the reservation, or for more time.

    Raises:
        OSError, EOFError, TimeoutError: the relay is gone.
        ValueError: it refuses, or would cut circuits soon, as p2pd's own relay does.
    """
    async with asyncio.timeout(ANSWER_S):
        writer.write(reserve())
        answer = await read_message(reader)
    if number(answer, 1) != HopKind.STATUS or number(answer, 5) != Status.OK:
        raise ValueError(f"it answers {number(answer, 5)}")
    if 4 in answer:
        raise ValueError("it limits the traffic")
