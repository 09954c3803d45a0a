"""The life of a server process: open the checkpoint, join the swarm, serve blocks, leave.

Called by `server/__main__`. One event loop in the main thread, one TaskGroup here, one device thread (`device/`).
`span_life` loads blocks, serves them and moves to others.
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
from swarmllm.data_structures import ModelRecord, Span, printable
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
from swarmllm.server.device.device_thread import DeviceThread
from swarmllm.server.device.niceness import give_way
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
"""POSIX niceness. If another program wants all of a core, Linux leaves a tenth of it to this one. At 19 it would be a
seventieth, also for answering pings and passing on outputs."""


async def serve(config: ServerConfig) -> None:
    """Run a server until SIGINT, SIGTERM, or (if asked for) the end of standard input.

    Raises:
        SwarmError: it can't start, or its peer-to-peer daemon died.
    """
    stop = stop_event(stop_on_stdin_eof=config.stop_on_stdin_eof)
    _limit_process(config)
    twins = Twins(config.update_period)
    checkpoint = await unless_stopped(stop, in_background(partial(_open_checkpoint, config)))
    peer = None if checkpoint is None else await unless_stopped(stop, _join_swarm(config, checkpoint, twins))
    if checkpoint is None or peer is None:
        logger.info("leaving")
        return
    async with peer:
        logger.info("peer %s listens at %s", peer.peer_id, ", ".join(peer.addrs))
        try:
            await _serve_blocks(config, checkpoint, peer, twins, stop)
        except BaseExceptionGroup as group:
            raise first_error(group) from None


async def _serve_blocks(
    config: ServerConfig, checkpoint: Checkpoint, peer: Peer, twins: Twins, stop: asyncio.Event
) -> None:
    """Serve blocks of the checkpoint, one span after the other, until told to stop; then leave the swarm."""
    directory = BlockDirectory(peer, config.swarm_name)
    others = OtherServers(
        peer,
        directory,
        fingerprint=fingerprint(checkpoint),
        num_blocks=checkpoint.num_blocks,
        allowed=config.allowed_servers,
        twins=twins,
    )
    peer.prefer_records(others.verified.__contains__)
    standing = Standing(config.priority_clients, others.verified.__contains__)
    access = Access(config.allowed_clients, PeerLimits(standing))
    device_thread = DeviceThread(Budget(max_sessions=config.max_batch_sessions))
    try:
        loader = SpanLoader(config, checkpoint, device_thread, access.limits)
        span = await _choose_span(config, peer, others, loader)
        async with _lan_announcement(config, checkpoint, peer) as lan, asyncio.TaskGroup() as tasks:
            targets = Targets(others.announced, others.open_stream)
            others.on_seen = targets.see
            links = Links(targets.open, tasks)
            successors = Successors(others.look, others.open_stream, config.update_period)
            peer.find_relays(lambda: others.relays(dict(successors.announced)))
            record = OwnRecord(config, peer, loader, access, links, successors, span, twins=twins)
            announcer = Announcer(
                directory, _model_record(checkpoint), record.describe, config.update_period, others.look_for_twins
            )
            with _background(tasks, record, announcer):
                await peer.serve_streams(_stream_handler(checkpoint, record))
                await announcer.announce()  # as JOINING, before others find this server on the local network
                lan.start()
                await SpanLife(record, announcer, others, partial(_print_online, checkpoint, record)).run(stop)
            await at_most(FAREWELL_S, announcer.withdraw())
            await links.close()
    finally:
        await others.verified.close()
        await device_thread.close()


def _limit_process(config: ServerConfig) -> None:
    if config.nice:
        os.nice(LOW_PRIORITY)  # before there are threads and children, which inherit it
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)


def _open_checkpoint(config: ServerConfig) -> Checkpoint:
    """Open the checkpoint, check that this server can serve it, and compute its fingerprint, which may take a while.

    Raises:
        SwarmError: it can't be served.
    """
    checkpoint = open_checkpoint(config.model, revision=config.revision, token=config.token, cache_dir=config.cache_dir)
    check_supported(checkpoint.config)
    short, name, num_blocks = fingerprint(checkpoint)[:12], checkpoint.name, checkpoint.num_blocks
    if config.block_indices is not None and config.block_indices[1] > num_blocks:
        start, end = config.block_indices
        raise ConfigurationError(f"block_indices {start}:{end} is outside {name}, which has blocks 0:{num_blocks}")
    if config.num_blocks is not None and config.num_blocks > num_blocks:
        raise ConfigurationError(f"num_blocks {config.num_blocks} is too many: {name} has {num_blocks}")
    logger.info("%s has %d blocks (fingerprint %s)", name, num_blocks, short)
    return checkpoint


async def _join_swarm(config: ServerConfig, checkpoint: Checkpoint, twins: Twins) -> Peer:
    initial_peers = config.initial_peers
    if config.identity_path is not None:
        identity = Identity.load_or_create(config.identity_path)
        if (maddr := await greet_twin(identity, initial_peers)) is not None:
            twins.report(f"it answers at {maddr}")
            twins.greet = partial(greet_twin, identity, [maddr])
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
        direct_port=config.direct_port,
    )


async def _choose_span(config: ServerConfig, peer: Peer, others: OtherServers, loader: SpanLoader) -> Span:
    """Return the blocks that the owner names, or else the blocks that the swarm lacks most."""
    if config.block_indices is None:
        return loader.choose_span(await others.look())
    if peer.is_hidden:  # it dials all others, so that they can reach it through these connections
        await others.look()
    return Span(*config.block_indices)


def _lan_announcement(config: ServerConfig, checkpoint: Checkpoint, peer: Peer) -> LanAnnouncement:
    addrs = peer.addrs if config.announces_on_lan else ()
    name = checkpoint.public_name
    return LanAnnouncement(peer.peer_id, addrs, model=name, fingerprint=fingerprint(checkpoint))


def _model_record(checkpoint: Checkpoint) -> ModelRecord:
    return ModelRecord(
        name=checkpoint.public_name,
        fingerprint=fingerprint(checkpoint),
        num_blocks=checkpoint.num_blocks,
        encoder_blocks=stacks(checkpoint.config)[0].span.end if checkpoint.config.is_encoder_decoder else 0,
        block_bytes=max(block_bytes(checkpoint, quantization=resolve_quantization("auto"))),
    )


def _stream_handler(checkpoint: Checkpoint, record: OwnRecord) -> StreamHandler:
    return StreamHandler(
        record.access,
        record.links,
        fingerprint=fingerprint(checkpoint),
        compression=record.config.compression,
        greeted=partial(record.twins.note_greeting, record.peer.peer_id),
    )


@contextmanager
def _background(tasks: asyncio.TaskGroup, record: OwnRecord, announcer: Announcer) -> Iterator[None]:
    """Run the tasks that go on all the time, within; if one of them fails, so does the server."""
    config, peer, device_thread = record.config, record.peer, record.loader.device_thread
    metrics = serve_metrics(config.metrics_host, config.metrics_port, ServerMetrics(record))
    running = [
        tasks.create_task(_watch_daemon(peer), name="watch the daemon"),
        tasks.create_task(device_thread.watch(), name="watch the device thread"),
        tasks.create_task(announcer.announce_forever(), name="announce"),
        tasks.create_task(record.successors.ping_forever(peer.peer_id, lambda: record.span), name="ping successors"),
        tasks.create_task(metrics, name="serve metrics"),
        tasks.create_task(record.twins.greet_while_seen(), name="greet another process with this identity"),
    ]
    if config.nice:
        giving_way = give_way(device_thread.niceness, partial(_wanted_cores, record), config.update_period)
        running.append(tasks.create_task(giving_way, name="give way"))
    yield
    for task in running:
        task.cancel()


async def _watch_daemon(peer: Peer) -> None:
    await peer.daemon_exited()
    raise PeerUnreachableError("the peer-to-peer daemon (p2pd) died, so nobody can reach this server: start it again")


def _print_online(checkpoint: Checkpoint, record: OwnRecord) -> None:
    blocks = f"[{record.span.start}, {record.span.end})"
    name = printable(checkpoint.name)  # programs read these lines, and a path may have line breaks
    print(f"swarmllm: serving blocks {blocks} of {name} as {record.peer.peer_id}", flush=True)
    print(f"swarmllm: join with --initial_peers {' '.join(record.peer.join_maddrs)}", flush=True)


def _wanted_cores(record: OwnRecord) -> int:
    """Number of cores that computing would keep busy."""
    if record.loader.device.type != "cpu":
        return 1
    serving = record.access.serving
    return (0 if serving is None else serving.throughput.num_threads) or torch.get_num_threads()
