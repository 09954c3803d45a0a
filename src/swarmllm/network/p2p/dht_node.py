"""This peer's node of the swarm's DHT: joins it, stores and reads records.

`p2p/peer` owns it. `p2p/block_directory` defines the meaning of records, `p2p/records` which are valid,
`p2p/dht_protocol` the calls between nodes. hivemind's background tasks have no owner, and cancelling its calls halfway
would leave tasks that wait for ever. So its coroutines run to their end here, also if nobody waits for them any more.
`close()` makes calls in progress fail, which ends everything.

`AddressBook` keeps peers that were met in a file, to rejoin a swarm whose initial peers are all gone. People know a
swarm by its initial peers, so the file lists peers under the ids of the initial peers. An entry counts as much as an
initial peer: it is dialled, and must prove its id. The node uses the file when nobody else answers.
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
"""Longest time of one call to one node. A look-up makes several in parallel."""
NODES_AT_ONCE = 8
"""Nodes that one look-up asks at a time. It waits for them even if all are frozen or dead, because others may be known
only to them. hivemind's 4 are too few in a chaos run, where servers die every few seconds."""
DIAL_TIMEOUT_S = 5.0
LOOK_ON_S = 0.1
"""Seconds between two checks for nodes that haven't answered."""
JOIN_GRACE_S = 0.3
"""Seconds to wait for the other initial peers after one has answered."""
NEIGHBOURS_TIMEOUT_S = 1.0
"""Seconds that joining waits to meet the neighbours in the DHT. The rest goes on in the background."""
MAX_CLOCK_DIFFERENCE_S = 3.0
"""hivemind's limit."""
CLOSE_TURNS = 100
"""Turns of the event loop for hivemind's tasks to end in. Measured: they need about 10."""

Result = TypeVar("Result")

MAX_SWARMS = 32
MAX_KEPT_PEERS = 16
"""Most peers kept for a swarm: those met last."""
MAX_KEPT_ADDRS = 3
MAX_INITIAL_ADDRS = 256
"""Most later added initial peers whose addresses are kept. Assumed."""
MAX_AGE_S = 30 * 86400.0
MAX_BYTES = 1 << 20
"""A larger file is no address book."""
RENEWAL_S = 600.0
"""Seconds until the file is written again although no new peer was met."""


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
        """Peers whose records are kept before those of others, because this process has met them."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._join_lock = asyncio.Lock()
        self._said_alone = False

    async def start(self, *, hidden: bool = False) -> None:
        """Start the node and join the swarm of the initial peers, if there are any. `hidden`: until `show()`.

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
            # Every read wants the latest records, so caches would only cost.
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
        """Store one text of this peer under each key. True if some node took every key."""
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
            # Ask all nodes around the key, because each may know only some of the records.
            asking = self._spawn(self._node.find_nearest_nodes([key_id], await_all_tasks=False))
            while not asking.done() and not look.waits_in_vain(time.monotonic(), self._node.num_workers):
                await asyncio.wait([asking], timeout=LOOK_ON_S)
            if asking.done():
                await asking
        found = look.records.find(look.key, time.time())
        return {owner: msgpack.unpackb(record.value[:-SIGNATURE_BYTES])[1] for owner, record in found.items()}

    def knows(self, peer_id: str) -> bool:
        """True if this node was met, and hasn't failed to answer since."""
        return self._node is not None and PeerID.from_base58(peer_id) in self._node.protocol.routing_table

    @property
    def is_alone(self) -> bool:
        """True if none of the nodes that were met answers any more."""
        return self._node is None or not self._node.protocol.routing_table.uid_to_peer_id

    def known_peers(self) -> list[str]:
        """The nodes that were met lately: first the initial peers, then the others in any order."""
        if self._node is None:
            return []
        nodes = {peer.to_base58() for peer in self._node.protocol.routing_table.uid_to_peer_id.values()}
        first = [peer_id for peer_id in dict.fromkeys(peer_id for peer_id, _ in self.initial_peers) if peer_id in nodes]
        return [*first, *(nodes - set(first))]

    def add_initial_peers(self, maddrs: Sequence[str]) -> None:
        """Use these as initial peers as well, before the known ones, when none of the nodes answers."""
        parted = [split_initial_peer(maddr) for maddr in maddrs]
        others = [(peer_id, addr) for peer_id, addr in parted if peer_id != self._identity.peer_id]
        self.initial_peers = list(dict.fromkeys([*others, *self.initial_peers]))[: max(MAX_INITIAL_ADDRS, len(others))]

    async def meet(self, maddrs: Sequence[str]) -> None:
        """Greet these peers, as far as they aren't known, and then the neighbours that they know."""
        peers = [split_initial_peer(maddr) for maddr in maddrs]
        strangers = [peer for peer in peers if peer[0] != self._identity.peer_id and not self.knows(peer[0])]
        answered, _ = await self._meet(strangers)
        if answered:
            await self._meet_neighbours()

    def met(self, peer_id: str, addrs: Sequence[str]) -> None:
        """Note that this peer was reached and has these addresses."""
        if self._book is not None and self._book.note(peer_id, addrs):
            self._spawn(asyncio.to_thread(self._book.write))

    def hide(self) -> None:
        """Stop telling others that this is a node, because they can't call it."""
        self._node.protocol.node_info = dht_pb2.NodeInfo()

    async def show(self) -> None:
        """Tell them again, unless in client mode."""
        if not self._client_mode:
            self._node.protocol.node_info = dht_pb2.NodeInfo(node_id=self._node.node_id.to_bytes())
            await self._meet_neighbours()

    # Joining

    async def _join(self) -> None:
        """Meet the initial peers, or peers once met through them, and then the neighbours in the DHT."""
        clock_differences_s, failures = await self._meet(self.initial_peers)
        if clock_differences_s and failures:
            # A peer may have addresses in networks that this machine isn't part of. One that works is enough.
            logger.warning("some initial peers can't be reached: %s", _list_failures(failures))
        if not clock_differences_s and self._book is not None:
            clock_differences_s, _ = await self._meet(await asyncio.to_thread(self._book.peers))
            if clock_differences_s:
                logger.warning(
                    "none of the initial peers answers: %s; joined through %s, saved in %s",
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
        """Greet these peers; return the seconds that this machine's clock is ahead of theirs, and the failures by
        address."""
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
        """Seconds that this machine's clock is ahead of the peer's, or the failure."""
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
        # The peer read its clock between these two moments.
        return float(min(max(response.dht_time, asked_at), answered_at) - response.dht_time)

    async def _rejoin_if_alone(self) -> None:
        """Rejoin after an outage of the network: the routing table is empty then, and nothing else would fill it."""
        if not self.is_alone or not self.initial_peers:
            self._said_alone = False
            return
        async with self._join_lock:
            if self.is_alone:
                try:
                    await self._join()
                except SwarmError as error:
                    # Callers retry twice a second, so this is logged once per outage.
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
            task.exception()  # mark it as seen, also if its caller is gone

    async def _to_its_end(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return await asyncio.shield(self._spawn(coroutine))

    async def close(self) -> None:
        """End everything in progress. The daemon must be ended right after."""
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
    """The last line of the daemon's message. Its other lines repeat peer and address."""
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
    """The entries of one swarm in the file. Any number of processes share the file; the last writer wins."""

    def __init__(self, path: Path, initial_peers: Iterable[str], clock: Callable[[], float] = time.time) -> None:
        """`initial_peers` are peer ids."""
        self.path = path
        self._swarms = tuple(dict.fromkeys(initial_peers))
        self._clock = clock
        self._met: dict[str, tuple[float, list[str]]] = {}
        self._written_at = 0.0
        self._writing = threading.Lock()

    def note(self, peer_id: str, addrs: Sequence[str]) -> bool:
        """Note that this peer was reached and has these addresses. True: time to `write()`."""
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
        """Add the new entries to the file. Blocks; errors are logged."""
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
                logger.warning("can't save the known peers: %s", error)

    def _read(self) -> dict[str, dict[str, tuple[float, list[str]]]]:
        """The valid entries of the file."""
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
