"""The checks of `swarmllm doctor`: this machine as a server would use it, the network as servers and clients would.

They need torch. They change nothing on the machine, except that they create a missing identity, so that its owner can
tell others the peer id. `doctor` calls them in their order.
"""

import asyncio
import fcntl
import itertools
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import psutil
import torch
from huggingface_hub.constants import HF_HUB_CACHE

from swarmllm.command_line import one_line
from swarmllm.commands.doctor_findings import DoctorConfig, Finding, bad, note, ok
from swarmllm.config import default_cache_dir
from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError, SwarmError
from swarmllm.files import user_path
from swarmllm.models.architecture import check_supported, stacks
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint, resolve_dtype
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.skeleton import block_bytes
from swarmllm.models.quantization import resolve_quantization
from swarmllm.models.quantization.loading import resolve_activations
from swarmllm.network.p2p.addresses import split_initial_peer
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.discovery import find_peers, find_swarm_here, initial_peers_of
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.server.device import device as memory
from swarmllm.server.device.device import resolve_device
from swarmllm.server.downloads import in_background
from swarmllm.swarm.block_map import describe_shared_identities
from swarmllm.swarm.stacks import describe_blocks

FINEST_FIRST = ("none", "int8", "q6_k", "q5_k", "q4_k", "q3.5", "int3", "int2")
"""Formats of the weights by their bits."""
FREE_PERCENT = round(100 * (1 - memory.FREE_SHARE))
MIN_FREE_DISK_BYTES = 5 << 30
"""Assumed: less than one file of a checkpoint that is worth a swarm."""

DIAL_TIMEOUT_S = 3.0
MAX_SERVERS = 64
"""Most servers of one model to dial."""


def check_device(config: DoctorConfig) -> Iterator[Finding]:
    """Check that torch sees the machine's GPU."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield ok(f"cuda:{index} is a {name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    elif not has_nvidia_gpu():
        yield ok("no GPU here: blocks run on the CPU")
    elif torch.version.cuda is None:
        yield bad(
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} is built without CUDA: "
            "install a build with it, see https://pytorch.org/get-started/locally"
        )
    else:
        yield bad(
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} can't use it: update its driver for "
            f"CUDA {torch.version.cuda}, and look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )


def has_nvidia_gpu() -> bool:
    """True if the kernel has an NVIDIA device, whatever torch says."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg"))


def check_model(config: DoctorConfig) -> Iterator[Finding]:
    """Check that the checkpoint can be served, and count the blocks that fit into the memory."""
    if not config.model:
        return
    try:
        checkpoint = open_checkpoint(config.model, revision=config.revision, cache_dir=default_cache_dir())
        check_supported(checkpoint.config)
        dtype, quantization = _dtype_of(checkpoint, config), resolve_quantization(config.quant_type)
        sizes = block_bytes(checkpoint, dtype, quantization)
    except SwarmError as error:
        yield bad(one_line(error))
        return
    of_stacks = ", ".join(f"{one.role} 0:{len(one.span)}" for one in stacks(checkpoint.config) if one.role)
    blocks = f"{checkpoint.num_blocks} blocks" + (f" ({of_stacks})" if of_stacks else "")
    yield ok(f"{checkpoint.name}: {blocks}, {_known_as(checkpoint)}")
    cache_bytes = memory.COUNTED_TOKENS * memory.cache_bytes_per_token(checkpoint.config, dtype)
    try:
        for device in map(resolve_device, config.device):
            resolve_activations(config.activations, device, quantization, comes_packed=checkpoint.comes_packed)
            yield memory_finding(sizes, cache_bytes, memory.usable_bytes(device), config.offload)
    except ConfigurationError as error:
        yield bad(one_line(error))


def _dtype_of(checkpoint: Checkpoint, config: DoctorConfig) -> torch.dtype:
    try:
        return resolve_dtype(checkpoint, config.dtype)
    except BlockWeightsNotFoundError as error:
        # The weights are read only for a dtype that config.json lacks.
        raise ConfigurationError(
            f"config.json of {checkpoint.name} names no dtype, and there are no weights to read it from: "
            "add --dtype bfloat16, or whatever the model is published in"
        ) from error


def _known_as(checkpoint: Checkpoint) -> str:
    try:
        return f"fingerprint {fingerprint(checkpoint)[:12]}"
    except BlockWeightsNotFoundError:
        return "a config without weights"


def check_memory(config: DoctorConfig) -> Iterator[Finding]:
    """Find the formats of the weights that fit into the machines of `--memory`."""
    if not config.memory:
        return
    try:
        checkpoint = open_checkpoint(config.model, revision=config.revision, cache_dir=default_cache_dir())
        dtype = _dtype_of(checkpoint, config)
        formats = {name: max(block_bytes(checkpoint, dtype, resolve_quantization(name))) for name in FINEST_FIRST}
    except SwarmError as error:
        yield bad(one_line(error))
        return
    cache_bytes = memory.COUNTED_TOKENS * memory.cache_bytes_per_token(checkpoint.config, dtype)
    needs = {name: (size + cache_bytes) / 1e9 / memory.FREE_SHARE for name, size in formats.items()}
    yield from bits_that_fit(needs, checkpoint.num_blocks, config.memory)


def bits_that_fit(needs: Mapping[str, float], num_blocks: int, sizes: Sequence[str]) -> Iterator[Finding]:
    """Find the finest formats in which the machines together hold all blocks.

    Args:
        needs: format, the finest first → GB of one block, with its cache and the memory left free.
        sizes: the machines' memory in GB.
    """
    where = f"{' + '.join(sizes)} GB"
    fit = {name: [int(float(size) // each) for size in sizes] for name, each in needs.items()}
    whole = [name for name, counts in fit.items() if sum(counts) >= num_blocks]
    for name, counts in itertools.takewhile(lambda one: one[0] not in whole, fit.items()):
        short = num_blocks - sum(counts)
        more = f"{math.ceil(10 * short * needs[name]) / 10:g} GB more would hold the other {short}"
        yield note(f"{name}: {sum(counts)} of {num_blocks} blocks fit, {more}")
    counted = f"each block is counted with {memory.COUNTED_TOKENS} tokens of cache, and {FREE_PERCENT} % are left free"
    if not whole:
        yield bad(f"the model fits {where} in no format: add memory, or choose a smaller model; {counted}")
        return
    answer = f"--quant_type {whole[0]}" + (" on each" if len(sizes) > 1 else "")
    mixed = _some_finer(list(fit.items()), whole[0], num_blocks, sizes)
    or_mixed = f", or with {mixed}" if mixed else ""
    yield ok(f"{where} hold all {num_blocks} blocks with {answer}{or_mixed}; {counted}")


def _some_finer(
    fit: Sequence[tuple[str, Sequence[int]]], name: str, num_blocks: int, sizes: Sequence[str]
) -> str | None:
    """A choice of machines that can have the format one finer than `name`; None: no machine can."""
    place = [one for one, _ in fit].index(name)
    if place == 0:
        return None
    (finer, with_finer), (_, counts) = fit[place - 1], fit[place]
    spare, chosen = sum(counts) - num_blocks, []
    for index in sorted(range(len(sizes)), key=lambda index: counts[index] - with_finer[index]):
        if (costs := counts[index] - with_finer[index]) <= spare and with_finer[index] > 0:
            spare -= costs
            chosen.append(index)
    if not chosen:
        return None
    others = [size for index, size in enumerate(sizes) if index not in chosen]
    return f"{finer} on {', '.join(sizes[index] for index in sorted(chosen))} and {name} on {', '.join(others)}"


def memory_finding(block_bytes: Sequence[int], cache_bytes: int, usable: int, num_offloaded: int | None = 0) -> Finding:
    """Count the blocks that fit, as a server without `--num_blocks` does, and the machines of this kind for a whole
    model.

    `num_offloaded` None: as many as the whole model needs.
    """
    if num_offloaded is None:
        num_offloaded = memory.num_to_offload(block_bytes, cache_bytes, usable)
    num_blocks, fit = len(block_bytes), memory.num_blocks_that_fit(block_bytes, cache_bytes, usable, num_offloaded)
    sizes = (
        f"one takes {max(block_bytes) / 1e6:.1f} MB, and {cache_bytes / 1e6:.1f} MB for {memory.COUNTED_TOKENS} tokens "
        f"of cache; {usable / 1e9:.2f} GB may be used"
    )
    if fit == 0:
        return bad(f"not even one block fits: {sizes}; end other programs, or choose --quant_type q4_k, or int3")
    if num_offloaded > fit:
        return bad(
            f"of the {fit} blocks that fit, {num_offloaded} can't be offloaded: {sizes}; choose a lower --offload"
        )
    machines = -(-num_blocks // fit)
    all_of_them = "the whole model" if machines == 1 else f"{machines} machines like this one hold the model"
    offloaded = f" with {num_offloaded} of them offloaded" if num_offloaded else ""
    return ok(f"{fit} of {num_blocks} blocks fit{offloaded}, {all_of_them}: {sizes}")


def check_disk(config: DoctorConfig) -> Iterator[Finding]:
    """Check the disk for downloads."""
    cache = Path(default_cache_dir() or HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        yield bad(f"downloads go to {cache}, where this user can't write: set SWARMLLM_CACHE to another directory")
    elif free < MIN_FREE_DISK_BYTES:
        yield note(
            f"only {free / 1e9:.1f} GB are free where downloads go, {cache}: set SWARMLLM_CACHE to another place"
        )
    else:
        yield ok(f"{free / 1e9:.0f} GB are free for downloads in {cache}")


def check_identity(config: DoctorConfig) -> Iterator[Finding]:
    """Check that the key can be read and is not in use."""
    if config.identity_path is None:
        return
    path = user_path(config.identity_path)
    if not path.exists():
        yield note(f"the identity {path} did not exist: made a new one")
    try:
        identity = Identity.load_or_create(path)
    except ConfigurationError as error:
        yield bad(one_line(error))
        return
    holder = lock_holder(path)
    if holder is None:
        yield ok(f"the identity {path} is {identity.peer_id}, and free")
    else:
        yield bad(f"the identity {path} is in use by {holder}: stop it, or give each peer a file of its own")
    if path.stat().st_mode & 0o077:
        yield note(f"others on this machine can read the key {path}: chmod 600 {path}")


def lock_holder(path: Path) -> str | None:
    """The process that holds the lock on this file; None if there is none."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            return None
    inode = path.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        if match := re.match(rf"\d+: FLOCK\s+\S+\s+\S+\s+(\d+)\s+\S+:{inode}\s", line):
            try:
                return f"process {match[1]} ({' '.join(psutil.Process(int(match[1])).cmdline())[:80]})"
            except psutil.Error:
                return f"process {match[1]}"
    return "another process"


async def check_listening(config: DoctorConfig) -> list[Finding]:
    """Check that a server could start here, and show the addresses at which others would dial it."""
    try:
        server = config.server()
        peer = await Peer.create(host_maddrs=server.listen_maddrs, announce_maddrs=server.announce_maddrs)
    except SwarmError as error:
        return [bad(one_line(error))]
    async with peer:
        findings = [ok(f"p2pd runs and listens: {', '.join(peer.addrs)}")]
        ips = [ip_address(match[1]) for addr in peer.addrs if (match := re.match(r"/ip[46]/([^/]+)/", addr))]
    if all(ip.is_loopback for ip in ips):
        findings.append(
            note("only this machine can reach these addresses: listen with --host_maddrs /ip4/0.0.0.0/tcp/0")
        )
    elif not any(ip.is_global for ip in ips):
        findings.append(
            note(
                "these addresses are of a local network: machines outside reach a server here if the router maps a "
                "port when it is asked, or through relays; faster is a port that is forwarded to it and named, by "
                "--port 31337 --announce_maddrs /ip4/PUBLIC_IP/tcp/31337"
            )
        )
    if config.port is None:
        findings.append(note("each start takes another port: choose one by --port, and let it in through the firewall"))
    return findings


async def check_swarm(config: DoctorConfig) -> list[Finding]:
    """Check that the initial peers, or those of the swarm of this machine or of the local network, can be reached,
    agree on the time, and have servers."""
    findings: list[Finding] = []
    peers = config.initial_peers
    if not peers:
        if not config.lan_discovery:
            return [note("no initial peers were given, so no swarm was checked: name peers with --initial_peers")]
        if (here := await find_swarm_here()) is not None:
            found_here = ok(f"{here.told}; `swarmllm use` shows its machines")
            return [found_here, *await _look_into(here.initial_peers, here.swarm_name)]
        found = await find_peers(lambda _: False)
        if not found:
            return [note("no swarm was found on the local network: --initial_peers names peers elsewhere")]
        machines, found = [p for p in found if p.machines], tuple(p for p in found if not p.machines)
        findings += [
            note(
                f"on the local network: {p.peer_id} at {p.maddrs[0]} is one of the {p.model}; `swarmllm up` joins them"
            )
            for p in machines
        ]
        findings += [ok(f"on the local network: {p.peer_id} serves {p.model} at {p.maddrs[0]}") for p in found]
        if not found:
            return findings
        if len({one.fingerprint for one in found}) > 1:
            return [*findings, note("these are several swarms: name peers of one by --initial_peers to look at it")]
        peers = initial_peers_of(found)
    else:
        try:
            split = [split_initial_peer(maddr) for maddr in peers]
        except ConfigurationError as error:
            return [bad(one_line(error))]
        dials = [dial(addr) for _, addr in split]
        for (_, addr), problem in zip(split, await asyncio.gather(*dials), strict=True):
            findings.append(ok(f"{addr} takes connections") if problem is None else bad(f"{addr}: {problem}"))
    return findings + await _look_into(peers, config.swarm_name)


async def _look_into(initial_peers: Sequence[str], swarm_name: str | None) -> list[Finding]:
    asked_at = time.monotonic()
    try:
        peer = await Peer.create(initial_peers=initial_peers, client_mode=True)
    except SwarmError as error:  # also reports a wrong clock of this machine
        return [bad(one_line(error))]
    async with peer:
        took_s = time.monotonic() - asked_at
        joined = ok(f"joined the swarm in {took_s:.1f} s; this machine's clock agrees with it within 3 s")
        return [joined, *await _look_at_servers(peer, swarm_name)]


async def _look_at_servers(peer: Peer, swarm_name: str | None) -> list[Finding]:
    """Check that every server of the swarm can be dialled from here."""
    directory = BlockDirectory(peer, swarm_name)
    findings: list[Finding] = []
    records = {record.fingerprint: record for record in (await directory.models()).values()}
    if not records:
        return [note("the swarm serves no model yet")]
    for record in records.values():
        servers = (await directory.servers(record.fingerprint))[:MAX_SERVERS]
        missing = SwarmSnapshot(record.num_blocks, servers).missing_blocks()
        if missing:
            which = describe_blocks(missing, record.encoder_blocks)
            findings.append(note(f"{record.name}: nobody serves {len(missing)} of {record.num_blocks} blocks: {which}"))
        results = await asyncio.gather(*(_dial_server(peer, server) for server in servers))
        for server, problem in zip(servers, results, strict=True):
            if problem is not None:
                mend = "see the firewall, --port and --announce_maddrs there"
                findings.append(bad(f"server {server.peer_id} of {record.name}: {problem}; {mend}"))
            elif server.relayed:
                findings.append(
                    note(f"server {server.peer_id} of {record.name} is reached through a relay: see --port there")
                )
        findings += map(bad, describe_shared_identities(SwarmSnapshot(record.num_blocks, servers)))
        reached = sum(problem is None for problem in results)
        findings.append(ok(f"{record.name}: {reached} of {len(servers)} servers take connections from here"))
    return findings


async def _dial_server(peer: Peer, server: ServerInfo) -> str | None:
    """None if this server can be reached, directly or through its relays; else the problem."""
    if not server.relayed:
        return await _dial_any(server.addrs)
    try:
        stream = await peer.open_stream(server.peer_id, server.addrs)
    except SwarmError as error:
        return f"it is reached through relays only, and {one_line(error)}"
    stream.abort()
    return None


async def _dial_any(addrs: Sequence[str]) -> str | None:
    """None if one of the addresses can be dialled; else the problems of all of them."""
    problems = await asyncio.gather(*map(dial, addrs))
    if not problems:
        return "it announces no address"
    return None if None in problems else "; ".join(f"{addr}: {p}" for addr, p in zip(addrs, problems, strict=True))


async def _connected(host: str, port: int) -> asyncio.StreamWriter:
    """Connect to the first address of a host that accepts.

    Names are looked up in a thread: an event loop's own look-up would hold up Ctrl-C while a name server is silent.
    """
    *others, last = {str(place[0]): None for *_, place in await in_background(partial(socket.getaddrinfo, host, None))}
    for address in others:
        with suppress(OSError):
            return (await asyncio.open_connection(address, port))[1]
    return (await asyncio.open_connection(last, port))[1]


async def dial(addr: str) -> str | None:
    """None if something accepts TCP connections at this multiaddress; else the problem and the mend."""
    match = re.fullmatch(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})", addr)
    if match is None:
        return None  # only libp2p knows this kind; joining will tell
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            writer = await _connected(match[1], int(match[2]))
    except TimeoutError:
        return "no answer: the machine is off, the address is wrong, or a firewall drops what comes to this port"
    except ConnectionRefusedError:
        return "the machine is there, but nothing listens on this port: start the peer, or mend the port"
    except (OSError, OverflowError) as error:
        return f"can't be dialled: {getattr(error, 'strerror', None) or error}"
    writer.transport.abort()
    return None
