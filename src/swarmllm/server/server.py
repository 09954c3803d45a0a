"""The life of a server process: join the swarm, run what goes on all the time, serve blocks, leave politely.

Called by `server/__main__`. One event loop in the main thread, one TaskGroup here, one device thread (`device/`). What
is done with blocks is told in `span_life`.
"""

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from swarmllm.command_line import first_error, stop_event, unless_stopped
from swarmllm.config import address_book_path
from swarmllm.data_structures import ModelRecord, Span
from swarmllm.errors import ConfigurationError, PeerUnreachableError
from swarmllm.models.architecture import check_supported, stacks
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.skeleton import block_bytes
from swarmllm.models.quantization import resolve_quantization
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.discovery import LanAnnouncement, find_swarm
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.relay.service import RelayRules
from swarmllm.server.announcer import Announcer, OwnRecord
from swarmllm.server.device.device_thread import Executor
from swarmllm.server.device.niceness import Niceness, give_way
from swarmllm.server.device.scheduler import Budget
from swarmllm.server.downloads import in_background
from swarmllm.server.metrics import ServerMetrics, serve_metrics
from swarmllm.server.peers.links import Links, Targets
from swarmllm.server.peers.other_servers import OtherServers, Successors, Twins, greet_twin
from swarmllm.server.peers.peer_limits import PeerLimits, Standing
from swarmllm.server.settings import ServerConfig
from swarmllm.server.span_life import FAREWELL_S, SpanLife, at_most
from swarmllm.server.span_loader import SpanLoader
from swarmllm.server.streams.connection import StreamHandler
from swarmllm.server.streams.serving import Access

logger = logging.getLogger(__name__)

LOW_PRIORITY = 10
"""Priority in the sense of POSIX. Linux then leaves a tenth of a core to a program beside one that wants all of it. At
19 it would be a seventieth, also for answering pings and passing on what has been computed."""


async def serve(config: ServerConfig) -> None:
    """Run a server until SIGINT, SIGTERM, or (if asked for) the end of standard input.

    Raises:
        SwarmError: it can't start, or its peer-to-peer daemon died.
    """
    stop = stop_event(stop_on_stdin_eof=config.stop_on_stdin_eof)
    if config.nice:
        os.nice(LOW_PRIORITY)  # before there are threads and children, which inherit it
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    checkpoint = await unless_stopped(stop, in_background(lambda: _open(config)))
    if checkpoint is None:
        logger.info("leaving")
        return
    _check_span(config, checkpoint)
    logger.info(
        "%s has %d blocks (fingerprint %s)", checkpoint.name, checkpoint.num_blocks, fingerprint(checkpoint)[:12]
    )
    twins = Twins(config.update_period)
    peer = await unless_stopped(stop, _join(config, checkpoint, twins))
    if peer is None:
        logger.info("leaving")
        return
    try:
        logger.info("peer %s listens at %s", peer.peer_id, ", ".join(peer.addrs))
        async with LanAnnouncement(
            peer.peer_id,
            peer.addrs if config.announces_on_lan else (),
            model=checkpoint.public_name,
            fingerprint=fingerprint(checkpoint),
        ) as announcement:
            await Server(config, checkpoint, peer, announcement, twins).run(stop)
    finally:
        await peer.close()


def _open(config: ServerConfig) -> Checkpoint:
    """With its fingerprint, for which a disk may need a while; the next who asks gets it at once."""
    checkpoint = open_checkpoint(config.model, revision=config.revision, token=config.token, cache_dir=config.cache_dir)
    check_supported(checkpoint.config)
    fingerprint(checkpoint)
    return checkpoint


async def _join(config: ServerConfig, checkpoint: Checkpoint, twins: Twins) -> Peer:
    initial_peers = config.initial_peers
    if config.identity_path is not None:
        identity = Identity.load_or_create(config.identity_path)
        if (maddr := await greet_twin(identity, initial_peers)) is not None:
            twins.tell(f"it answers at {maddr}")
    if not initial_peers and not config.new_swarm:
        initial_peers = await find_swarm(checkpoint.public_name, fingerprint(checkpoint))
    relay = RelayRules(mbps=config.relay_mbps, servers=config.allowed_servers, clients=config.allowed_clients)
    return await Peer.create(
        initial_peers=initial_peers,
        host_maddrs=config.listen_maddrs,
        announce_maddrs=config.announce_maddrs,
        identity_path=config.identity_path,
        relay=relay if config.relay else None,
        reachability=config.reachability,
        address_book=address_book_path(),
    )


def _check_span(config: ServerConfig, checkpoint: Checkpoint) -> None:
    """Raises ConfigurationError if the model lacks the blocks; before anybody can hear of this server."""
    name, num_blocks = checkpoint.name, checkpoint.num_blocks
    if config.block_indices is not None and config.block_indices[1] > num_blocks:
        start, end = config.block_indices
        raise ConfigurationError(f"block_indices {start}:{end} is outside {name}, which has blocks 0:{num_blocks}")
    if config.num_blocks is not None and config.num_blocks > num_blocks:
        raise ConfigurationError(f"num_blocks {config.num_blocks} is too many: {name} has {num_blocks}")


class Server:
    """What of a server lives as long as its process; `span_life` has the rest."""

    def __init__(
        self, config: ServerConfig, checkpoint: Checkpoint, peer: Peer, announcement: LanAnnouncement, twins: Twins
    ) -> None:
        self._config, self._checkpoint, self._peer, self._announcement = config, checkpoint, peer, announcement
        self._twins = twins
        self._directory = BlockDirectory(peer, config.swarm_name)
        self._others = OtherServers(
            peer,
            self._directory,
            fingerprint=fingerprint(checkpoint),
            num_blocks=checkpoint.num_blocks,
            allowed=config.allowed_servers,
            twins=twins,
        )
        self._niceness = Niceness()
        self._executor = Executor(Budget(max_sessions=config.max_batch_sessions), self._niceness)
        standing = Standing(config.priority_clients, self._others.verified.__contains__)
        self._access = Access(config.allowed_clients, PeerLimits(standing))

    async def run(self, stop: asyncio.Event) -> None:
        """Return when the server has left."""
        self._peer.prefer_records(self._others.verified.__contains__)
        try:
            loader = SpanLoader(self._config, self._checkpoint, self._executor)
            indices = self._config.block_indices
            if (
                indices is None or self._peer.is_hidden
            ):  # who is hidden dials all others, so that they come back that way
                snapshot = await self._others.look()
            span = loader.choose_span(snapshot) if indices is None else Span(*indices)
            async with asyncio.TaskGroup() as tasks:
                await self._run(tasks, loader, span, stop)
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            await self._others.verified.close()
            await self._executor.close()

    async def _run(self, tasks: asyncio.TaskGroup, loader: SpanLoader, span: Span, stop: asyncio.Event) -> None:
        config, peer, others, checkpoint = self._config, self._peer, self._others, self._checkpoint
        targets = Targets(others.announced, others.open_stream)
        others.on_seen = targets.see
        links = Links(targets.open, tasks)
        successors = Successors(others.look, others.open_stream, config.update_period)
        peer.find_relays(lambda: others.relays(dict(successors.announced)))
        record = OwnRecord(config, peer, loader, self._niceness, links, successors, span, twins=self._twins)
        model = ModelRecord(
            name=checkpoint.public_name,
            fingerprint=fingerprint(checkpoint),
            num_blocks=checkpoint.num_blocks,
            encoder_blocks=stacks(checkpoint.config)[0].span.end if checkpoint.config.is_encoder_decoder else 0,
            block_bytes=max(block_bytes(checkpoint, quantization=resolve_quantization("auto"))),
        )
        announcer = Announcer(self._directory, model, record.describe, config.update_period)
        with self._background(tasks, record, announcer):
            await peer.serve_streams(
                StreamHandler(
                    self._access,
                    links,
                    fingerprint=fingerprint(checkpoint),
                    compression=config.compression,
                    greeted=partial(self._twins.note_greeting, peer.peer_id),
                )
            )
            await announcer.announce()  # as one that is joining, before anybody finds this server on the network
            self._announcement.start()
            life = SpanLife(record, self._access, announcer, others, partial(self._tell_online, record))
            await life.run(stop)
        await at_most(FAREWELL_S, announcer.withdraw())
        await links.close()

    @contextmanager
    def _background(self, tasks: asyncio.TaskGroup, record: OwnRecord, announcer: Announcer) -> Iterator[None]:
        """What goes on all the time, within; if any of it fails, so does the server."""
        config, peer = self._config, self._peer
        metrics = ServerMetrics(self._access, self._executor, record)
        running = [
            tasks.create_task(self._watch_daemon(), name="watch the daemon"),
            tasks.create_task(self._executor.watch(), name="watch the device thread"),
            tasks.create_task(announcer.run(), name="announce"),
            tasks.create_task(record.successors.run(peer.peer_id, lambda: record.span), name="ping successors"),
            tasks.create_task(serve_metrics(config.metrics_host, config.metrics_port, metrics), name="serve metrics"),
        ]
        if config.nice:
            giving_way = give_way(self._niceness, partial(_wanted_cores, record), config.update_period)
            running.append(tasks.create_task(giving_way, name="give way"))
        yield
        for task in running:
            task.cancel()

    async def _watch_daemon(self) -> None:
        await self._peer.daemon_exited()
        raise PeerUnreachableError(
            "the peer-to-peer daemon (p2pd) died, so nobody can reach this server: start it again"
        )

    def _tell_online(self, record: OwnRecord) -> None:
        blocks = f"[{record.span.start}, {record.span.end})"
        print(f"swarmllm: serving blocks {blocks} of {self._checkpoint.name} as {self._peer.peer_id}", flush=True)
        print(f"swarmllm: join with --initial_peers {' '.join(self._peer.join_maddrs)}", flush=True)


def _wanted_cores(record: OwnRecord) -> int:
    """Cores that computing would keep busy."""
    if record.loader.device.type != "cpu":
        return 1
    num_threads = 0 if record.loaded is None else record.loaded.throughput.num_threads
    return num_threads or torch.get_num_threads()
