"""The life of a server process: find out what to serve, load it, announce it, serve until told to stop, leave politely.

Called by `server/__main__`. One event loop in the main thread, one TaskGroup here, one device thread (`executor`).

    JOINING   the span is chosen and announced, the blocks are loading
    ONLINE    streams are served
    LEAVING   announced; no new sessions, the others are handed over, running steps end; then the record is withdrawn
              and the process exits, or the server becomes JOINING with other blocks (`rebalancer`)
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME

from swarmllm import __version__
from swarmllm.command_line import stop_event, unless_stopped
from swarmllm.config import ServerConfig
from swarmllm.data_structures import ModelRecord, ServerInfo, ServerState, Span, SwarmSnapshot
from swarmllm.errors import ConfigurationError, PeerUnreachableError, SwarmError
from swarmllm.models.architecture import check_supported
from swarmllm.models.block_span import BlockSpan, load_block_span, span_tensor_names
from swarmllm.models.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.dtypes import resolve_dtype
from swarmllm.models.quantization import resolve_quantization
from swarmllm.network.block_directory import BlockDirectory
from swarmllm.network.discovery import LanAnnouncement, find_swarm
from swarmllm.network.peer import Peer
from swarmllm.network.protocol import FrameStream
from swarmllm.network.verified_peers import VerifiedPeers
from swarmllm.server.announcer import Announcer
from swarmllm.server.courtesy import MAX_MS, Courtesy
from swarmllm.server.device import num_blocks_that_fit, resolve_device
from swarmllm.server.downloads import in_background
from swarmllm.server.dummy_inputs import dummy_inputs
from swarmllm.server.executor import Executor, Priority
from swarmllm.server.handler import StreamHandler
from swarmllm.server.kv_cache import CacheBudget
from swarmllm.server.links import Links
from swarmllm.server.machine_load import give_way
from swarmllm.server.metrics import ServerMetrics, serve_metrics
from swarmllm.server.network_speed import NetworkSpeed
from swarmllm.server.prefix_cache import PrefixCache
from swarmllm.server.rebalancer import Rebalancer
from swarmllm.server.scheduler import Budget
from swarmllm.server.served_adapters import ServedAdapters
from swarmllm.server.session_table import SessionTable
from swarmllm.server.successors import Successors
from swarmllm.server.targets import Targets
from swarmllm.server.throughput import (
    Throughput,
    ThroughputCache,
    measure_throughput,
    prefill_tokens_beside_decode,
)
from swarmllm.swarm.placement import choose_span
from swarmllm.swarm.plausible import plausible

logger = logging.getLogger(__name__)

FAREWELL_S = 1.0
"""Seconds for telling the DHT, twice. If all servers leave at once nobody listens, and each call would time out."""
DRAIN_S = 2.5
"""Seconds for sessions to be handed over, and again for running steps to end, when the server is told to stop: it must
be gone within 10."""
HAND_OVER_S = 15.0
"""The same when it moves to other blocks. Assumed: longer than any step, shorter than anybody's patience."""
CONNECT_TIMEOUT_S = 5.0
LOADING_FAILURES = (SwarmError, OSError, MemoryError, RuntimeError)
"""Of other blocks; torch says by a RuntimeError that memory is out."""
LOW_PRIORITY = 10
"""Linux then leaves a tenth of a core to a program beside one that wants all of it. At 19 it would be a seventieth,
also for answering pings and passing on what has been computed."""
"""Of POSIX. Under load such a process gets about 1/70 of the time of one with priority 0 (Linux)."""


async def serve(config: ServerConfig) -> None:
    """Run a server until SIGINT, SIGTERM, or (if asked for) the end of standard input.

    Raises:
        SwarmError: it can't start, or its peer-to-peer daemon died.
    """
    started_at = time.monotonic()
    stop = stop_event(stop_on_stdin_eof=config.stop_on_stdin_eof)
    if config.nice:
        os.nice(LOW_PRIORITY)  # before there are threads and children, which inherit it
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    opening = in_background(
        lambda: open_checkpoint(config.model, revision=config.revision, token=config.token, cache_dir=config.cache_dir)
    )
    checkpoint = await unless_stopped(stop, opening)
    if checkpoint is None:
        logger.info("leaving")
        return
    check_supported(checkpoint.config)
    _check_span(config, checkpoint)
    logger.info(
        "%s has %d blocks (fingerprint %s)", checkpoint.name, checkpoint.num_blocks, checkpoint.fingerprint[:12]
    )
    peer = await unless_stopped(stop, _join(config, checkpoint))
    if peer is None:
        logger.info("leaving")
        return
    try:
        logger.info("peer %s listens at %s", peer.peer_id, ", ".join(peer.addrs))
        async with LanAnnouncement(
            peer.peer_id,
            peer.addrs if config.lan_discovery and not config.initial_peers and not config.swarm_name else (),
            model=checkpoint.public_name,
            fingerprint=checkpoint.fingerprint,
        ) as announcement:
            await _Server(config, checkpoint, peer, announcement).run(stop, started_at)
    finally:
        await peer.close()


async def _join(config: ServerConfig, checkpoint: Checkpoint) -> Peer:
    initial_peers = config.initial_peers
    if not initial_peers and not config.new_swarm:
        initial_peers = await find_swarm(checkpoint.public_name, checkpoint.fingerprint)
    return await Peer.create(
        initial_peers=initial_peers,
        host_maddrs=config.listen_maddrs,
        announce_maddrs=config.announce_maddrs,
        identity_path=config.identity_path,
    )


def _check_span(config: ServerConfig, checkpoint: Checkpoint) -> None:
    """Raises ConfigurationError if the model lacks the blocks; before anybody can hear of this server."""
    name, num_blocks = checkpoint.name, checkpoint.num_blocks
    if config.block_indices is not None and config.block_indices[1] > num_blocks:
        start, end = config.block_indices
        raise ConfigurationError(f"block_indices {start}:{end} is outside {name}, which has blocks 0:{num_blocks}")
    if config.num_blocks is not None and config.num_blocks > num_blocks:
        raise ConfigurationError(f"num_blocks {config.num_blocks} is too many: {name} has {num_blocks}")


class _Server:
    def __init__(self, config: ServerConfig, checkpoint: Checkpoint, peer: Peer, announcement: LanAnnouncement) -> None:
        self._config = config
        self._announcement = announcement
        self._checkpoint = checkpoint
        self._peer = peer
        self._directory = BlockDirectory(peer, config.swarm_name)
        self._device = resolve_device(config.device)
        self._dtype = resolve_dtype(checkpoint, config.dtype)
        self._quantization = resolve_quantization(checkpoint.config, config.quant_type)
        self._state = ServerState.JOINING
        self._span = Span(0, checkpoint.num_blocks)
        self._blocks: BlockSpan | None = None
        self._adapters = ServedAdapters(config.adapters, checkpoint, token=config.token, cache_dir=config.cache_dir)
        self._throughput: Throughput | None = None
        self._courtesy = Courtesy()
        self._budget = CacheBudget(0)
        self._bytes_per_token = self._hidden_bytes = 1
        self._claim: Span | None = None
        self._executor: Executor | None = None
        self._verified = VerifiedPeers(lambda: peer, checkpoint.fingerprint)
        self._handler: StreamHandler | None = None
        self._network = NetworkSpeed(peer.peer_id, self._look, self._open_link, config.update_period)
        self._successors = Successors(self._look, self._open_link, config.update_period)
        self._rebalancer = Rebalancer(
            peer.peer_id,
            # Whoever was told which blocks to serve doesn't move.
            balance_quality=config.balance_quality if config.block_indices is None else 0.0,
            period_s=config.update_period,
        )
        self._announcer = Announcer(
            self._directory,
            ModelRecord(
                name=checkpoint.public_name, fingerprint=checkpoint.fingerprint, num_blocks=checkpoint.num_blocks
            ),
            self._describe,
            config.update_period,
        )

    async def run(self, stop: asyncio.Event, started_at: float) -> None:
        """Go through the states; returns when the server has left."""
        self._peer.prefer_records(self._verified.__contains__)
        self._span = await self._choose_span()
        executor = self._executor = Executor(Budget(max_sessions=self._config.max_batch_sessions), self._courtesy)
        try:
            async with asyncio.TaskGroup() as tasks:
                watchdog = tasks.create_task(self._watch_daemon(), name="watch the daemon")
                computing = tasks.create_task(executor.watch(), name="watch the device thread")
                announcing = tasks.create_task(self._announcer.run(), name="announce")
                measuring = tasks.create_task(self._network.run(), name="measure the network")
                pinging = tasks.create_task(
                    self._successors.run(self._peer.peer_id, lambda: self._span), name="ping successors"
                )
                watching = tasks.create_task(self._give_way(), name="give way")
                links = Links(Targets(self._announced, self._open_link).open, tasks)
                handler = self._handler = StreamHandler(
                    fingerprint=self._checkpoint.fingerprint,
                    executor=executor,
                    links=links,
                    max_batch_tokens=self._config.max_batch_tokens,
                    allowed_clients=self._config.allowed_clients,
                    served_adapters=self._adapters,
                    compression=self._config.compression,
                )
                metrics = ServerMetrics(handler, executor, self._describe, lambda: self._budget)
                reporting = tasks.create_task(
                    serve_metrics(self._config.metrics_host, self._config.metrics_port, metrics), name="serve metrics"
                )
                await self._peer.serve_streams(handler)
                loaded = await self._load(executor, stop)
                while loaded:
                    logger.info("ready %.1f s after the start", time.monotonic() - started_at)
                    target = await self._serve(handler, executor, stop)
                    if target is None:
                        break
                    loaded = await self._load_other(target, executor, stop)
                for task in (watchdog, computing, announcing, measuring, pinging, watching, reporting):
                    task.cancel()
                await _at_most(FAREWELL_S, self._announcer.withdraw())
                await links.close()
        except BaseExceptionGroup as group:
            raise _first_error(group) from None
        finally:
            await self._verified.close()
            await executor.close()

    async def _choose_span(self) -> Span:
        config = self._config
        if config.block_indices is not None:
            return Span(*config.block_indices)
        block_bytes = self._checkpoint.block_bytes(self._dtype, self._quantization)
        wanted = config.num_blocks or num_blocks_that_fit(block_bytes, self._device)
        snapshot = await self._look()
        others = tuple(s for s in snapshot.servers if s.peer_id != self._peer.peer_id)
        span = choose_span(replace(snapshot, servers=others), wanted)
        logger.info("chose blocks %s, which the swarm lacks most (other servers: %d)", span, len(others))
        return span

    async def _load(self, executor: Executor, stop: asyncio.Event) -> bool:
        """Load and measure the blocks; False if told to stop meanwhile."""
        self._state = ServerState.JOINING
        if self._handler is not None:
            self._handler.loading = self._span
        await self._announcer.announce()

        def load() -> None:
            blocks = load_block_span(
                self._checkpoint,
                self._span,
                dtype=self._dtype,
                device=self._device,
                quantization=self._quantization,
                progress=sys.stderr.isatty(),
            )
            self._adapters.load(blocks)
            self._throughput = measure_throughput(blocks, self._measurements())
            executor.limit_prefill_beside_decode(prefill_tokens_beside_decode(self._throughput, len(blocks.span)))
            self._blocks = blocks

        loading = asyncio.ensure_future(executor.run(load, Priority.BATCH))
        await _first_of(loading, stop.wait())
        return loading.done() and loading.result() is not None

    async def _load_other(self, target: Span, executor: Executor, stop: asyncio.Event) -> bool:
        """Load other blocks; those of before if that fails. False if told to stop meanwhile."""
        before = self._span
        self._span, self._blocks, self._claim = target, None, None
        try:
            loaded = await self._load(executor, stop)
        except LOADING_FAILURES as error:
            logger.warning(
                "going back to blocks %s, as loading blocks %s failed: %s", before, target, str(error) or repr(error)
            )
        else:
            self._rebalancer.failed_moves = 0
            return loaded
        self._rebalancer.failed_moves += 1
        self._span = before
        return await self._load(executor, stop)

    async def _can_load(self, target: Span, executor: Executor) -> bool:
        """Whether the files of other blocks are there (on the hub: downloaded now) and hold them."""
        try:
            names = await executor.run(lambda: span_tensor_names(self._checkpoint, target), Priority.BATCH)
            await in_background(lambda: self._checkpoint.tensors(names.value))
        except LOADING_FAILURES as error:
            logger.warning(
                "staying at blocks %s, as blocks %s can't be loaded: %s", self._span, target, str(error) or repr(error)
            )
            return False
        return True

    async def _serve(self, handler: StreamHandler, executor: Executor, stop: asyncio.Event) -> Span | None:
        """Serve the loaded blocks until told to stop (None), or until other blocks need this server more."""
        blocks = self._blocks
        if blocks is None:
            raise RuntimeError("_serve comes after _load")
        hidden_bytes = self._hidden_bytes = dummy_inputs(blocks, 1).hidden_states.nbytes
        self._bytes_per_token = blocks.cache_bytes_per_token + hidden_bytes
        self._budget = CacheBudget(self._bytes_per_token * self._config.attn_cache_tokens)
        pages = self._prefix_cache()
        handler.serve(
            blocks,
            SessionTable(blocks, hidden_bytes, executor, self._budget, pages, compression=self._config.compression),
        )
        self._state = ServerState.ONLINE
        if not await self._announcer.introduce():
            raise PeerUnreachableError("the swarm's DHT doesn't take this server's announcement", self._peer.peer_id)
        print(f"swarmllm: serving blocks {self._span} of {self._checkpoint.name} as {self._peer.peer_id}", flush=True)
        print(f"swarmllm: join with --initial_peers {' '.join(self._peer.join_maddrs)}", flush=True)
        self._announcement.start()
        watching = asyncio.ensure_future(self._watch_adapters(blocks))
        moving = asyncio.ensure_future(
            self._rebalancer.wait_for_move(
                self._look, self._stake_claim, lambda target: self._can_load(target, executor)
            )
        )
        await _first_of(moving, stop.wait())
        watching.cancel()
        target = moving.result() if moving.done() and not moving.cancelled() else None
        logger.info("leaving" if target is None else f"moving from blocks {self._span} to {target}")
        self._state = ServerState.LEAVING
        await _at_most(FAREWELL_S, self._announcer.announce())
        handler.loading = None
        await handler.retire(DRAIN_S if target is None else HAND_OVER_S)
        return target

    async def _watch_adapters(self, blocks: BlockSpan) -> None:
        while self._adapters.watches:
            await asyncio.sleep(self._config.update_period)
            if await self._adapters.refresh(blocks):
                await self._announcer.announce()

    async def _give_way(self) -> None:
        if self._config.nice:
            await give_way(self._courtesy, self._wanted_cores, self._config.update_period)

    def _wanted_cores(self) -> int:
        if self._device.type != "cpu":
            return 1
        return (self._throughput and self._throughput.num_threads) or torch.get_num_threads()

    def _prefix_cache(self) -> PrefixCache | None:
        num_tokens = self._config.prefix_cache_tokens
        if not num_tokens:
            return None
        pages = PrefixCache(self._bytes_per_token * num_tokens)
        logger.info("prompts that begin alike share up to %.1f MB of pages", pages.capacity_bytes / 1e6)
        return pages

    async def _look(self) -> SwarmSnapshot:
        """The swarm now: those of the others that serve what they announce, and this server as it knows itself."""
        own, *others = (await self._announced()).servers
        servers = plausible((*await self._verified.verify(others), own))
        return SwarmSnapshot(num_blocks=self._checkpoint.num_blocks, servers=servers)

    async def _announced(self) -> SwarmSnapshot:
        """This server as it knows itself, and what others say that it wants to know of; they may not be there."""
        allowed = self._config.allowed_servers
        announced = await self._directory.servers(self._checkpoint.fingerprint)
        others = (server for server in announced if server.peer_id != self._peer.peer_id)
        servers = tuple(server for server in others if allowed is None or server.peer_id in allowed)
        return SwarmSnapshot(num_blocks=self._checkpoint.num_blocks, servers=(self._describe(), *servers))

    async def _stake_claim(self, target: Span | None) -> None:
        self._claim = target
        await self._announcer.announce()

    async def _watch_daemon(self) -> None:
        await self._peer.daemon_exited()
        raise PeerUnreachableError(
            "the peer-to-peer daemon (p2pd) died, so nobody can reach this server: start it again"
        )

    async def _open_link(self, other: ServerInfo) -> FrameStream:
        stream, _ = await self._verified.open_stream(other, timeout_s=CONNECT_TIMEOUT_S)
        return stream

    def _measurements(self) -> ThroughputCache:
        """Where earlier starts' measurements are."""
        return ThroughputCache(
            directory=Path(self._config.cache_dir or HF_HOME),
            fingerprint=self._checkpoint.fingerprint,
            quant_type=self._config.quant_type,
            num_threads=self._config.num_threads,
        )

    def _describe(self) -> ServerInfo:
        """What is to be announced now."""
        blocks, throughput = self._blocks, self._throughput
        info = ServerInfo(
            peer_id=self._peer.peer_id,
            addrs=self._peer.addrs,
            start=self._span.start,
            end=self._span.end,
            state=self._state,
            max_batch_tokens=self._config.max_batch_tokens,
            dtype=str(self._dtype).removeprefix("torch."),
            quant_type=self._quantization.quant_type,
            version=__version__,
            public_name=self._config.public_name,
            adapters=self._adapters.names,
            claim=None if self._claim is None else (self._claim.start, self._claim.end),
        )
        if blocks is None or throughput is None:
            return info
        network_tokens_per_s = self._network.tokens_per_s(self._hidden_bytes)
        info = info.model_copy(
            update={
                "throughput": self._config.throughput or min(throughput.forward_tokens_per_s, network_tokens_per_s),
                "network_mbps": self._network.mbps,
                "round_trips": self._successors.announced,
                "decode_ms_per_block": throughput.decode_ms_per_block,
                "decode_ms_per_block_batch8": throughput.decode_ms_per_block_batch8,
                "context_ms_per_block_per_1k": throughput.context_ms_per_block_per_1k,
                "queue_ms": 0.0 if self._executor is None else min(self._executor.load.queue_ms, MAX_MS),
                "cache_tokens_left": self._budget.left_bytes // self._bytes_per_token,
                "traits": blocks.traits,
            }
        )
        return self._courtesy.announced(info)


async def _at_most(timeout_s: float, telling: Coroutine[object, object, object]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await telling


async def _first_of(wanted: "asyncio.Future[Any]", other: Coroutine[Any, Any, object]) -> None:
    """Wait for either; what isn't done then is cancelled."""
    second = asyncio.ensure_future(other)
    try:
        await asyncio.wait({wanted, second}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in (wanted, second):
            future.cancel()


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report: a SwarmError if there is one, else whatever came first."""
    errors = group.subgroup(SwarmError) or group
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
