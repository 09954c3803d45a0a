"""What the swarm is told of this server, as of now. `announcer` asks for it, and so do the metrics."""

import socket
from collections.abc import Sized
from dataclasses import dataclass, field

from swarmllm.data_structures import MAX_DIGESTS, ServerInfo, ServerState, Span
from swarmllm.network.p2p.peer import Peer
from swarmllm.server.device.device import free_bytes, hardware_name
from swarmllm.server.device.niceness import MAX_MS, Niceness
from swarmllm.server.device.throughput import least_worth_asking_for
from swarmllm.server.peers.links import Links
from swarmllm.server.peers.other_servers import Successors, Twins
from swarmllm.server.sessions.kv_cache import CacheBudget
from swarmllm.server.settings import ServerConfig
from swarmllm.server.span_loader import Loaded, SpanLoader
from swarmllm.version import __version__

MAX_WAKE_S = MAX_MS / 1e3
MOST_NAME = 64
"""Characters of a server's name that others take."""


@dataclass(eq=False)
class OwnRecord:
    """The state of this server, which `span_life` keeps true, and where the figures beside it come from."""

    config: ServerConfig
    peer: Peer
    loader: SpanLoader
    niceness: Niceness
    links: Links
    successors: Successors
    span: Span
    state: ServerState = ServerState.JOINING
    claim: Span | None = None
    """Blocks to which this server is about to move."""
    loaded: Loaded | None = None
    asleep: ServerInfo | None = None
    """What was last announced of blocks that nobody has used since, while they aren't in memory."""
    sessions: Sized = ()
    """Those on the blocks that are loaded."""
    twins: Twins = field(default_factory=Twins)

    @property
    def budget(self) -> CacheBudget:
        """The room for sessions; none while no blocks are loaded."""
        return CacheBudget(0) if self.loaded is None else self.loaded.budget

    def describe(self) -> ServerInfo:
        """What is to be announced now."""
        if self.asleep is not None:
            return self.asleep.model_copy(update={"addrs": self.peer.addrs, "identity_shared": self.twins.seen})
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
            version=__version__,
            public_name=self._host_name() if config.public_name is None else config.public_name,
            hardware=hardware_name(self.loader.device, config.tensor_parallel),
            memory_left_bytes=max(0, free_bytes(self.loader.device)),
            machine=config.machine,
            instance=self.twins.instance,
            identity_shared=self.twins.seen,
            adapters=self.loader.adapters.names,
            inner_states=True,
            claim=None if claim is None else (claim.start, claim.end),
            relays_for=0 if self.peer.relay is None else self.peer.relay.num_reservations,
        )
        return info if self.loaded is None else self.niceness.announced(self._with_figures(info, self.loaded))

    def _host_name(self) -> str:
        """The host's name, and the end of the peer id: a host may run several servers, and hosts may share a name."""
        end = self.peer.peer_id[-4:]
        return f"{socket.gethostname()[: MOST_NAME - len(end) - 2]} …{end}"

    def fall_asleep(self, wake_s: float) -> None:
        """Go on announcing what is known of the blocks, and what it takes to load them."""
        wake_s = min(wake_s, MAX_WAKE_S)
        self.asleep = self.describe().model_copy(update={"wake_s": round(wake_s, 3), "queue_ms": 1e3 * wake_s})
        self.loaded = None

    def _with_figures(self, info: ServerInfo, loaded: Loaded) -> ServerInfo:
        thread = self.loader.executor.thread
        throughput, mbps = loaded.throughput, self.links.mbps(self.peer.peer_id)
        network_tokens_per_s = float("inf") if mbps is None else mbps * 1e6 / 8 / loaded.inputs.hidden_bytes
        return info.model_copy(
            update={
                "throughput": self.config.throughput or min(throughput.forward_tokens_per_s, network_tokens_per_s),
                "batch_tokens": min(
                    least_worth_asking_for(throughput.piece_ms_per_block), self.config.max_batch_tokens
                ),
                "round_trips": self.successors.announced,
                "decode_ms_per_block": min(MAX_MS, thread.pace * throughput.decode_ms_per_block),
                "decode_ms_per_block_batch8": min(MAX_MS, thread.pace * throughput.decode_ms_per_block_batch8),
                "context_ms_per_block_per_1k": min(MAX_MS, thread.pace * throughput.context_ms_per_block_per_1k),
                "queue_ms": min(thread.load.queue_ms, MAX_MS),
                "step_ms_p95": round(min(thread.step_ms_p95, MAX_MS), 3),
                "tokens_served": thread.load.num_tokens,
                "failures_seen": thread.load.num_failures,
                "num_sessions": len(self.sessions),
                "cache_tokens_left": self.budget.left_bytes // loaded.bytes_per_token,
                "traits": loaded.parts.traits,
                "weights": loaded.parts.digests if len(self.span) <= MAX_DIGESTS else "",
            }
        )
