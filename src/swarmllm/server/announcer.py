"""Keep the swarm informed of this server: its record, announced twice per `update_period` and when its load changes.

`OwnRecord` fills the record in; the metrics read it as well. `p2p/block_directory` defines and signs records.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarmllm.config import RECORD_PERIODS, RENEWAL_PERIODS
from swarmllm.data_structures import MAX_DIGESTS, ModelRecord, ServerInfo, ServerState, Span
from swarmllm.errors import SwarmError
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.peer import Peer
from swarmllm.server.device.device import free_bytes, hardware_name
from swarmllm.server.device.niceness import MAX_MS
from swarmllm.server.device.throughput import least_worth_asking_for
from swarmllm.server.peers.links import Links
from swarmllm.server.peers.other_servers import Successors, Twins
from swarmllm.server.settings import ServerConfig
from swarmllm.server.span_loader import SpanLoader
from swarmllm.server.streams.serving import Access, Serving
from swarmllm.version import __version__

logger = logging.getLogger(__name__)

MAX_WAKE_S = MAX_MS / 1e3
MOST_NAME = 64
"""Most characters of a server's name in a record."""

LOOKS_PER_RENEWAL = 6
"""Number of looks at the load between two announcements: one every 5 s with the usual update period."""
LEAST_SHARE = 0.01
"""Share of the speed that counts as more than none, and less than the smallest share that a server computes."""
LEAST_MS = 0.01
"""Milliseconds of a block that count as more than none."""
LEAST_TOKENS_PER_S = 0.1
DELAYS_S = (0.0, 1.0, 3.0)
"""Seconds before each try of the first announcement: on a busy machine, nodes may answer too late once."""
NOTABLE_QUEUE_MS = 50.0
"""Shorter queues change few routes. Assumed: round trips through the internet are as long."""


@dataclass(eq=False)
class OwnRecord:
    """The state of this server, kept true by `span_life`, and the objects from which the record is filled in."""

    config: ServerConfig
    peer: Peer
    loader: SpanLoader
    access: Access
    links: Links
    successors: Successors
    span: Span
    """Blocks that this server has chosen."""
    state: ServerState = ServerState.JOINING
    claim: Span | None = None
    """Blocks to which this server is about to move."""
    twins: Twins = field(default_factory=Twins)

    def describe(self) -> ServerInfo:
        """Fill in the record as of now."""
        sleep, serving = self.access.sleep, self.access.serving
        if sleep is not None:
            return sleep.record.model_copy(update={"addrs": self.peer.addrs, "identity_shared": self.twins.seen})
        config, claim = self.config, self.claim
        info = ServerInfo(
            peer_id=self.peer.peer_id,
            addrs=self.peer.addrs,
            start=self.span.start,
            end=self.span.end,
            state=self.state,
            max_batch_tokens=config.max_batch_tokens,
            dtype=str(self.loader.dtype).removeprefix("torch."),
            quant_type=self.loader.quantization.quant_type,
            activations=self.loader.activations,
            version=__version__,
            public_name=self._host_name() if config.public_name is None else config.public_name,
            hardware=hardware_name(self.loader.device, config.tensor_parallel),
            memory_left_bytes=max(0, free_bytes(self.loader.device)),
            machine=config.machine,
            instance=self.twins.instance,
            identity_shared=self.twins.seen,
            adapters=self.loader.adapters.names,
            inner_states=True,
            replays_steps=True,
            claim=None if claim is None else (claim.start, claim.end),
            relays_for=0 if self.peer.relay is None else self.peer.relay.num_reservations,
        )
        if serving is None:
            return info
        return self.loader.device_thread.niceness.announced(self._with_figures(info, serving))

    def _host_name(self) -> str:
        """Return the host's name and the end of the peer id: a host may run several servers, and hosts may share a
        name."""
        end = self.peer.peer_id[-4:]
        return f"{socket.gethostname()[: MOST_NAME - len(end) - 2]} …{end}"

    def describe_asleep(self, wake_s: float) -> ServerInfo:
        """Fill in the record for blocks that leave the memory now, and are loaded again in `wake_s`."""
        wake_s = min(wake_s, MAX_WAKE_S)
        return self.describe().model_copy(update={"wake_s": round(wake_s, 3), "queue_ms": 1e3 * wake_s})

    def _with_figures(self, info: ServerInfo, serving: Serving) -> ServerInfo:
        thread = self.loader.device_thread
        throughput, mbps = serving.throughput, self.links.mbps(self.peer.peer_id) or self.successors.mbps
        network_tokens_per_s = float("inf") if mbps is None else mbps * 1e6 / 8 / serving.inputs.hidden_bytes
        computed_tokens_per_s = throughput.forward_tokens_per_s / thread.forward_pace
        return info.model_copy(
            update={
                "throughput": self.config.throughput or min(computed_tokens_per_s, network_tokens_per_s),
                "batch_tokens": min(
                    least_worth_asking_for(throughput.batch_ms_per_block), self.config.max_batch_tokens
                ),
                "round_trips": self.successors.announced,
                "decode_ms_per_block": min(MAX_MS, thread.pace * throughput.decode_ms_per_block),
                "decode_ms_per_block_batch8": min(MAX_MS, thread.pace * throughput.decode_ms_per_block_batch8),
                "context_ms_per_block_per_1k": min(MAX_MS, thread.pace * throughput.context_ms_per_block_per_1k),
                "queue_ms": min(thread.load.queue_ms, MAX_MS),
                "step_ms_p50": round(min(thread.step_ms_p50, MAX_MS), 3),
                "step_ms_p95": round(min(thread.step_ms_p95, MAX_MS), 3),
                "token_ms": round(min(thread.token_ms, MAX_MS), 3),
                "tokens_served": thread.load.num_tokens,
                "failures_seen": thread.load.num_failures,
                "num_sessions": len(serving.sessions),
                "cache_tokens_left": serving.cache_tokens_left,
                "traits": serving.traits,
                "weights": serving.digests if len(self.span) <= MAX_DIGESTS else "",
            }
        )


def changed_notably(announced: ServerInfo, now: ServerInfo) -> bool:
    """True if clients would choose other routes if they knew.

    The queue, the free cache, the time of a step or a forward, or the speed that is left for them doubled or halved,
    the addresses changed, or another process was seen with this server's identity.
    """
    if announced.addrs != now.addrs or announced.identity_shared != now.identity_shared:
        return True
    for before, after, floor in (
        (announced.queue_ms, now.queue_ms, NOTABLE_QUEUE_MS),
        (announced.cache_tokens_left, now.cache_tokens_left, now.max_batch_tokens),
        (announced.speed_share, now.speed_share, LEAST_SHARE),
        (announced.decode_ms_per_block, now.decode_ms_per_block, LEAST_MS),
        (announced.throughput, now.throughput, LEAST_TOKENS_PER_S),
    ):
        low, high = sorted((max(before, floor), max(after, floor)))
        if high > 2 * low:
            return True
    return False


class Announcer:
    """Announces the record that `describe` returns."""

    def __init__(
        self,
        directory: BlockDirectory,
        record: ModelRecord,
        describe: Callable[[], ServerInfo],
        period_s: float,
        look_first: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`look_first` is awaited before each renewal."""
        self._directory, self._look_first = directory, look_first
        self._record = record
        self._describe = describe
        self._period_s = period_s
        self._announced: ServerInfo | None = None

    async def announce(self) -> bool:
        """Announce once; False (and a line in the log) if the DHT didn't take it."""
        self._announced = self._describe()
        try:
            ttl_s = RECORD_PERIODS * self._period_s
            return await self._directory.announce(self._record, self._announced, ttl_s=ttl_s)
        except SwarmError as error:
            logger.warning("could not announce this server: %s", error)
            return False

    async def introduce(self) -> bool:
        """Announce this server for the first time, with a few tries; False if the DHT didn't take it."""
        for delay_s in DELAYS_S:
            await asyncio.sleep(delay_s)
            if await self.announce():
                return True
        return False

    async def announce_forever(self) -> None:
        """Announce the record twice per period and after notable changes, for ever."""
        while True:
            for _ in range(LOOKS_PER_RENEWAL):
                await asyncio.sleep(RENEWAL_PERIODS * self._period_s / LOOKS_PER_RENEWAL)
                if self._announced is not None and changed_notably(self._announced, self._describe()):
                    break
            if self._look_first is not None:
                await self._look_first()
            await self.announce()

    async def withdraw(self) -> None:
        """Withdraw the announcement."""
        try:
            await self._directory.withdraw(self._record)
        except SwarmError as error:
            logger.warning("could not withdraw the announcement: %s", error)
