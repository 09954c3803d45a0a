"""This peer's node of the swarm's DHT: joining it, and storing and reading the records of peers.

`p2p/peer` owns it; `p2p/block_directory` says what the records mean, `p2p/records` which ones are valid,
`p2p/dht_protocol` what nodes do for each other. hivemind's background tasks have no owner, and cancelling its calls
half-way would leave tasks that wait for ever. So its coroutines run to their end here even if nobody waits for them
any more, and `close()` makes the calls that are under way fail, which ends everything.

`AddressBook` keeps peers that were met, on disk: where to join a swarm whose initial peers are all gone. People know a
swarm by its initial peers, so peers that were met there are kept under their ids. An entry counts as much as an
initial peer that somebody named: it is dialled, and proves its id. The node asks the book when nobody else answers.
"""

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from swarmllm.errors import ConfigurationError, PeerUnreachableError, SwarmError
from swarmllm.files import replace_file
from swarmllm.network.p2p._hivemind import DHTID, DHTNode, P2PDaemonError, P2PHandlerError, PeerID, dht_pb2
from swarmllm.network.p2p.addresses import pack_addrs, split_initial_peer
from swarmllm.network.p2p.daemon import BACKOFF, FAILED_BEFORE, Daemon
from swarmllm.network.p2p.dht_protocol import BoundedProtocol, bound, node_id_of
from swarmllm.network.p2p.identity import SIGNATURE_BYTES, Identity
from swarmllm.network.p2p.records import RecordValidator, nobody
from swarmllm.network.relay.messages import is_circuit

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0
"""Longest time of one call to one node; a look-up makes several in parallel."""
NODES_AT_ONCE = 8
"""Nodes that one look-up asks at a time. Where all of them are frozen, or dead while anybody's p2pd is frozen, it waits
for them, as others may hide behind. hivemind's 4 are too few in a chaos run, whose servers die every few seconds."""
DIAL_TIMEOUT_S = 5.0
LOOK_ON_S = 0.1
"""Seconds from one look at who hasn't answered yet to the next."""
JOIN_GRACE_S = 0.3
"""Seconds that the other initial peers may take once one has answered."""
NEIGHBOURS_TIMEOUT_S = 1.0
"""Seconds that joining waits for the neighbours in the DHT to be met; the rest goes on meanwhile."""
MAX_CLOCK_DIFFERENCE_S = 3.0
"""hivemind's limit."""
CLOSE_TURNS = 100
"""Turns of the event loop that hivemind's tasks get to end in; measured, they need about 10."""

Result = TypeVar("Result")

MAX_SWARMS = 32
MAX_KEPT_PEERS = 16
"""Peers of a swarm that are kept: the ones that were met last."""
MAX_KEPT_ADDRS = 3
MAX_INITIAL_ADDRS = 256
"""Addresses of initial peers that are added later may not grow without bound. Assumed."""
MAX_AGE_S = 30 * 86400.0
MAX_BYTES = 1 << 20
"""A larger file isn't one of these."""
RENEWAL_S = 600.0
"""Seconds until it is written again, though nobody new was met."""


class Dht:
    """A node of the DHT. In client mode it asks others and stores nothing for them."""

    def __init__(
        self,
        daemon: Daemon,
        identity: Identity,
        initial_peers: Sequence[str],
        *,
        client_mode: bool,
        address_book: Path | None = None,
    ) -> None:
        self._daemon = daemon
        self._identity = identity
        self._client_mode = client_mode
        self.initial_peers: list[tuple[str, str]] = []
        """Peer ids and addresses."""
        self.add_initial_peers(initial_peers)
        known_by = [peer_id for peer_id, _ in self.initial_peers]
        self._book = None if address_book is None else AddressBook(address_book, known_by)
        self._node: Any = None
        self._protocol: BoundedProtocol | None = None
        self.prefers: Callable[[str], bool] = nobody
        """Peers that this process knows better than by their records, which are kept before those of others."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._join_lock = asyncio.Lock()
        self._said_alone = False

    async def start(self, *, hidden: bool = False) -> None:
        """Start the node and join the swarm of the initial peers, if there are any; `hidden`: until `show()`.

        Raises:
            PeerUnreachableError: none of them answered.
            ConfigurationError: this machine's clock is wrong.
        """
        self._node = await DHTNode.create(
            p2p=self._daemon.p2p,
            node_id=node_id_of(self._daemon.p2p.peer_id),
            client_mode=self._client_mode,
            record_validator=RecordValidator(self._identity),
            wait_timeout=CALL_TIMEOUT_S,
            num_workers=NODES_AT_ONCE,
            # Every read asks for the latest, so caches would only cost.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
        )
        self._protocol = bound(self._node, lambda peer_id: peer_id == self._identity.peer_id or self.prefers(peer_id))
        if hidden:
            self.hide()
        if self.initial_peers:
            await self._join()

    async def store(self, texts: dict[str, str], expiration: float) -> bool:
        """Store one text of this peer under each key. True if every key was taken by some node."""
        await self._rejoin_if_alone()
        stored: dict[Any, bool] = await self._to_its_end(
            self._node.store_many(
                list(texts),
                [[key, text] for key, text in texts.items()],
                expiration,
                subkeys=[self._identity.peer_id] * len(texts),
                exclude_self=self._client_mode,
            )
        )
        return all(stored.values())

    async def read(self, key: str) -> dict[str, str]:
        """The texts under this key, by the peer id of their owner."""
        await self._rejoin_if_alone()
        if self._protocol is None:
            raise RuntimeError("the node has not been started")
        key_id = DHTID.generate(key)
        with self._protocol.looking(key_id) as look:
            # All nodes around the key are asked: each may know only some of the records.
            asking = self._spawn(self._node.find_nearest_nodes([key_id], await_all_tasks=False))
            while not asking.done() and not look.waits_in_vain(time.monotonic(), self._node.num_workers):
                await asyncio.wait([asking], timeout=LOOK_ON_S)
            if asking.done():
                await asking
        found = look.records.find(look.key, time.time())
        return {owner: msgpack.unpackb(record.value[:-SIGNATURE_BYTES])[1] for owner, record in found.items()}

    def knows(self, peer_id: str) -> bool:
        """True if this is a node that has been met, and hasn't failed to answer since."""
        return self._node is not None and PeerID.from_base58(peer_id) in self._node.protocol.routing_table

    @property
    def is_alone(self) -> bool:
        """True if none of the nodes that were met answers any more."""
        return self._node is None or not self._node.protocol.routing_table.uid_to_peer_id

    def known_peers(self) -> list[str]:
        """The nodes that were met lately, initial peers first, the others in any order."""
        if self._node is None:
            return []
        nodes = {peer.to_base58() for peer in self._node.protocol.routing_table.uid_to_peer_id.values()}
        first = [peer_id for peer_id in dict.fromkeys(peer_id for peer_id, _ in self.initial_peers) if peer_id in nodes]
        return [*first, *(nodes - set(first))]

    def add_initial_peers(self, maddrs: Sequence[str]) -> None:
        """Join through these as well, before those that are known, when none of the nodes answers."""
        parted = [split_initial_peer(maddr) for maddr in maddrs]
        others = [(peer_id, addr) for peer_id, addr in parted if peer_id != self._identity.peer_id]
        self.initial_peers = list(dict.fromkeys([*others, *self.initial_peers]))[: max(MAX_INITIAL_ADDRS, len(others))]

    def met(self, peer_id: str, addrs: Sequence[str]) -> None:
        """This peer was reached, and says that it has these addresses."""
        if self._book is not None and self._book.note(peer_id, addrs):
            self._spawn(asyncio.to_thread(self._book.write))

    def hide(self) -> None:
        """Say no longer to others that this is a node, as they can't ask it anything."""
        self._node.protocol.node_info = dht_pb2.NodeInfo()

    async def show(self) -> None:
        """Say so again, if it isn't in client mode."""
        if not self._client_mode:
            self._node.protocol.node_info = dht_pb2.NodeInfo(node_id=self._node.node_id.to_bytes())
            await self._meet_neighbours()

    # Joining

    async def _join(self) -> None:
        """Meet the initial peers, or those that were met through them once, and then the own neighbours."""
        clock_differences_s, failures = await self._meet(self.initial_peers)
        if clock_differences_s and failures:
            # A peer may have addresses in networks that this machine isn't part of; one that works is enough.
            logger.warning("some initial peers can't be reached: %s", _list_failures(failures))
        if not clock_differences_s and self._book is not None:
            clock_differences_s, _ = await self._meet(await asyncio.to_thread(self._book.peers))
            if clock_differences_s:
                logger.warning(
                    "none of the initial peers answers: %s; joined instead by %s, met there earlier and kept in %s",
                    _list_failures(failures),
                    ", ".join(f"{addr}/p2p/{peer_id}" for peer_id, addr in clock_differences_s),
                    self._book.path,
                )
        if not clock_differences_s:
            raise PeerUnreachableError(f"none of the initial peers can be reached: {_list_failures(failures)}")
        _judge_clock(tuple(clock_differences_s.values()))
        await self._meet_neighbours()

    async def _meet(
        self, peers: Sequence[tuple[str, str]]
    ) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], str]]:
        """Seconds that this machine's clock is ahead of theirs, and why others can't be reached by any address."""
        greetings = {self._spawn(self._greet(*peer)): peer for peer in peers}
        pending = set(greetings)
        clock_differences_s: dict[tuple[str, str], float] = {}
        failures: dict[tuple[str, str], str] = {}
        reached: set[str] = set()
        timeout_s: float | None = None  # each greeting has its own
        while pending:
            done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                peer_id, addr = greetings[task]
                answer = task.result()
                if isinstance(answer, str):
                    failures[peer_id, addr] = answer
                else:
                    reached.add(peer_id)
                    clock_differences_s[peer_id, addr] = answer
            if clock_differences_s:
                timeout_s = JOIN_GRACE_S
        return clock_differences_s, {peer: answer for peer, answer in failures.items() if peer[0] not in reached}

    async def _meet_neighbours(self) -> None:
        meeting = self._spawn(self._node.find_nearest_nodes([self._node.node_id]))
        await asyncio.wait([meeting], timeout=NEIGHBOURS_TIMEOUT_S)

    async def _greet(self, peer_id: str, addr: str) -> float | str:
        """Seconds that this machine's clock is ahead of the peer's, or what failed."""
        protocol = self._node.protocol
        target = PeerID.from_base58(peer_id)
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await self._daemon.connect(target.to_bytes(), pack_addrs([addr]))
            asked_at = time.time()
            request = dht_pb2.PingRequest(peer=protocol.node_info)
            response = await protocol.get_stub(target).rpc_ping(request, timeout=CALL_TIMEOUT_S)
            answered_at = time.time()
        except TimeoutError:
            return "no answer"
        except (P2PDaemonError, P2PHandlerError, SwarmError) as error:
            return _reason(error)
        self._node.blacklist.register_success(target)
        if response.peer.node_id:
            await protocol.update_routing_table(node_id_of(target), target)
        # The peer looked at its clock somewhere between the two moments.
        return float(min(max(response.dht_time, asked_at), answered_at) - response.dht_time)

    async def _rejoin_if_alone(self) -> None:
        """After an outage of the network the routing table is empty, and nobody else would fill it."""
        if not self.is_alone or not self.initial_peers:
            self._said_alone = False
            return
        async with self._join_lock:
            if self.is_alone:
                try:
                    await self._join()
                except SwarmError as error:
                    # Whoever waits for the swarm tries twice a second: said once for each outage.
                    logger.log(logging.DEBUG if self._said_alone else logging.WARNING, "this peer is alone: %s", error)
                    self._said_alone = True

    # Tasks

    def _spawn(self, coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, even if whoever waited has gone

    async def _to_its_end(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return await asyncio.shield(self._spawn(coroutine))

    async def close(self) -> None:
        """End what is under way; the daemon is to be ended right after."""
        if self._node is not None:
            self._node.is_alive = False
        control = self._daemon.p2p._client.control
        gone = P2PDaemonError("this peer is closed")

        async def refuse(*_: object) -> bytes:
            raise gone

        control.call_unary_handler = refuse
        for call in tuple(control._pending_calls.values()):
            if not call.done():
                call.set_exception(gone)
        for _ in range(CLOSE_TURNS):
            await asyncio.sleep(0)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _list_failures(failures: Mapping[tuple[str, str], str]) -> str:
    return "; ".join(f"{addr}/p2p/{peer_id} ({answer})" for (peer_id, addr), answer in failures.items())


def _reason(error: Exception) -> str:
    """The last part of what the daemon says in several lines, each naming peer and address again."""
    lines = [line.strip(" *") for line in str(error).splitlines() if line.strip(" *")]
    reasons = dict.fromkeys(re.sub(r"^\[[^]]*\]\s*", "", line) for line in lines[1:]) or {"".join(lines): None}
    return ", ".join(FAILED_BEFORE if reason == BACKOFF else reason for reason in reasons)


def _judge_clock(differences_s: Sequence[float]) -> None:
    wrong = [difference for difference in differences_s if abs(difference) > MAX_CLOCK_DIFFERENCE_S]
    if not wrong:
        return
    sentence = (
        f"this machine's clock differs by {max(wrong, key=abs):+.1f} s from that of {len(wrong)} of "
        f"{len(differences_s)} initial peers, but records in the DHT expire by the clock, so peers must agree within "
        f"{MAX_CLOCK_DIFFERENCE_S:g} s; set it by NTP"
    )
    if len(wrong) == len(differences_s):
        raise ConfigurationError(sentence)
    logger.warning("%s", sentence)


class AddressBook:
    """The file's part about one swarm. Any number of processes share the file; who writes last is right."""

    def __init__(self, path: Path, initial_peers: Iterable[str], clock: Callable[[], float] = time.time) -> None:
        """`initial_peers` are peer ids."""
        self.path = path
        self._swarms = tuple(dict.fromkeys(initial_peers))
        self._clock = clock
        self._met: dict[str, tuple[float, list[str]]] = {}
        self._written_at = 0.0
        self._writing = threading.Lock()

    def note(self, peer_id: str, addrs: Sequence[str]) -> bool:
        """This peer was reached, and says that it has these addresses. Returns whether it is time to `write()`."""
        direct = [addr for addr in addrs if not is_circuit(addr)][:MAX_KEPT_ADDRS]
        if not self._swarms or not direct or peer_id in self._swarms:
            return False
        now, is_new = self._clock(), peer_id not in self._met
        self._met[peer_id] = now, direct
        self._met = _newest(self._met, MAX_KEPT_PEERS, now)
        if not is_new and now - self._written_at < RENEWAL_S:
            return False
        self._written_at = now
        return True

    def peers(self) -> list[tuple[str, str]]:
        """Peer ids and addresses, the last met first."""
        found: dict[str, tuple[float, list[str]]] = {}
        for swarm in self._swarms:
            found.update(self._read().get(swarm, {}))
        found = _newest({**found, **self._met}, MAX_KEPT_PEERS, self._clock())
        return [(peer_id, addr) for peer_id, (_, addrs) in found.items() for addr in addrs]

    def write(self) -> None:
        """Add what was noted. Blocks; what fails is logged."""
        with self._writing:
            kept, now = self._read(), self._clock()
            for swarm in self._swarms:
                kept[swarm] = _newest({**kept.get(swarm, {}), **self._met}, MAX_KEPT_PEERS, now)
            last = {swarm: max((at for at, _ in peers.values()), default=0.0) for swarm, peers in kept.items()}
            swarms = sorted((swarm for swarm in kept if kept[swarm]), key=lambda swarm: -last[swarm])[:MAX_SWARMS]
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.path, json.dumps({swarm: kept[swarm] for swarm in swarms}), durable=False)
            except OSError as error:
                logger.warning("peers that were met can't be kept: %s", error)

    def _read(self) -> dict[str, dict[str, tuple[float, list[str]]]]:
        """What the file says, but for what makes no sense."""
        try:
            if self.path.stat().st_size > MAX_BYTES:
                raise ValueError("it is too large")
            swarms = json.loads(self.path.read_text())
            return {
                str(swarm): {peer_id: entry for peer_id, said in peers.items() if (entry := _entry(peer_id, said))}
                for swarm, peers in swarms.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            logger.warning("%s is not read: %s", self.path, error)
            return {}


def _entry(peer_id: str, said: Any) -> tuple[float, list[str]] | None:
    try:
        met_at, addrs = said
        for addr in addrs:
            split_initial_peer(f"{addr}/p2p/{peer_id}")
        return float(met_at), [str(addr) for addr in addrs[:MAX_KEPT_ADDRS]]
    except (ConfigurationError, OverflowError, TypeError, ValueError):
        return None


def _newest(peers: dict[str, tuple[float, list[str]]], number: int, now: float) -> dict[str, tuple[float, list[str]]]:
    fresh = [(at, peer_id) for peer_id, (at, _) in peers.items() if now - MAX_AGE_S < at <= now]
    return {peer_id: peers[peer_id] for _, peer_id in sorted(fresh, reverse=True)[:number]}
