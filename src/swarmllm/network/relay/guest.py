"""The places that a peer which nobody can dial keeps at relays, and the addresses that it has by them.

Run by `p2p/reachability`. A reservation is a stream that stays open: it is renewed there every few seconds, and when it
ends, or a renewal isn't answered, that relay is gone and another one is asked at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from swarmllm.errors import SwarmError
from swarmllm.network.relay.service import ByteStream
from swarmllm.network.relay.wire import HopKind, Status, circuit_through, network_of, number, read_message, reserve

logger = logging.getLogger(__name__)

NUM_RELAYS = 3
"""Reservations at a time: one relay's death is noticed by nobody who has the other addresses."""
RENEWAL_S = 10.0
"""Between renewals, which show as well that the relay is still there."""
ANSWER_S = 5.0
"""For a relay to be reached, and for it to answer."""
RETRY_S = 15.0
"""Until those who failed or refused are asked again; sooner if there is no relay at all."""
ALONE_S = 2.0
ADDRS_PER_RELAY = 2
"""Addresses by which a relay is known, at most; more would fill the record."""


@dataclass(frozen=True)
class RelayPeer:
    """A peer that may be a relay: others can dial it."""

    peer_id: str
    addrs: tuple[str, ...]
    """The best ones first."""


OpenHop = Callable[[RelayPeer], Awaitable[ByteStream]]


class RelayGuest:
    """`open_hop` opens a stream to a peer at HOP, `candidates` says whom to ask, in this order."""

    def __init__(self, open_hop: OpenHop, candidates: Callable[[], Sequence[RelayPeer]]) -> None:
        self._open_hop = open_hop
        self._candidates = candidates
        self._kept: dict[RelayPeer, asyncio.Task[None]] = {}
        self._asked_at: dict[str, float] = {}
        self._changed = asyncio.Event()

    @property
    def relays(self) -> tuple[RelayPeer, ...]:
        """Those at which this peer has a place now."""
        return tuple(self._kept)

    @property
    def addrs(self) -> tuple[str, ...]:
        """Addresses through them: one of each first."""
        numbered = [
            (place, circuit_through(addr, relay.peer_id))
            for relay in self._kept
            for place, addr in enumerate(relay.addrs[:ADDRS_PER_RELAY])
        ]
        return tuple(addr for _, addr in sorted(numbered, key=lambda one: one[0]))

    async def run(self) -> None:
        """Keep places for ever."""
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
        """Ask for places until there are enough, or all candidates have been asked."""
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
            logger.debug("%s is no relay now: %r", relay.peer_id, error)
            return
        try:
            await _renew(reader, writer)
        except BaseException as error:
            writer.transport.abort()
            if not isinstance(error, (OSError, EOFError, TimeoutError, ValueError)):
                raise
            logger.debug("%s keeps no place for this peer: %r", relay.peer_id, error)
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
                        raise ValueError("it says something unasked")
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
    """The next ones to ask: in their order, but first those of networks in which none is yet.

    Who has many addresses in one network would otherwise be all that a peer is reached through.
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
    """Ask for the place, or for more time.

    Raises:
        OSError, EOFError, TimeoutError: the relay is gone.
        ValueError: it doesn't grant it, or would cut circuits soon, as p2pd's own relay does.
    """
    async with asyncio.timeout(ANSWER_S):
        writer.write(reserve())
        answer = await read_message(reader)
    if number(answer, 1) != HopKind.STATUS or number(answer, 5) != Status.OK:
        raise ValueError(f"it answers {number(answer, 5)}")
    if 4 in answer:
        raise ValueError("it limits what passes")
