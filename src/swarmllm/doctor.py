"""`swarmllm doctor`: looks at what a server or client of this machine needs, and names what to mend.

Each check returns findings: it listens on the port and opens the files that a server would, and asks the swarm as a
client would. Only an identity that does not exist is made, so that its owner can tell others the peer id. The exit code
is 1 if anything is wrong.
"""

import asyncio
import fcntl
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from packaging.requirements import Requirement

from swarmllm import __version__
from swarmllm.command_line import Parser, add_initial_peers_flags, one_line, run_command
from swarmllm.config import ServerConfig, default_cache_dir, default_initial_peers
from swarmllm.errors import ConfigurationError, SwarmError

if TYPE_CHECKING:
    from swarmllm.network.peer import Peer

EXAMPLES = """examples:
  swarmllm doctor                                     # this machine, and the local network
  swarmllm doctor --model M --port 31337              # as a server would start
  swarmllm doctor --initial_peers /ip4/…/tcp/…/p2p/…   # whether a swarm can be reached from here
"""

DIAL_TIMEOUT_S = 3.0
MEMORY_SHARE = 0.8
"""Of the free memory, as the server takes it for blocks when their number isn't given."""
MIN_FREE_DISK_BYTES = 5 << 30
"""Assumed: less than one file of a checkpoint that is worth a swarm."""
MAX_SERVERS = 64
"""Of the swarm's servers that are dialled."""


class Verdict(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    BAD = "BAD"


@dataclass(frozen=True)
class Finding:
    """One line of the report; what is not OK names the mend."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What to look at; named as the flags of the commands that it is about."""

    model: str | None = None
    revision: str | None = None
    initial_peers: tuple[str, ...] = ()
    swarm_name: str | None = None
    lan_discovery: bool = True
    port: int | None = None
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce_maddrs: tuple[str, ...] | None = None
    identity_path: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quant_type: str = "auto"

    def server(self) -> ServerConfig:
        """What a server with these flags would be told.

        Raises:
            ConfigurationError: they can't work.
        """
        return ServerConfig(
            model=self.model or "",
            new_swarm=not self.initial_peers,
            **{
                name: getattr(self, name)
                for name in (
                    "initial_peers",
                    "swarm_name",
                    "port",
                    "host_maddrs",
                    "announce_maddrs",
                    "identity_path",
                    "device",
                    "dtype",
                    "quant_type",
                )
            },
        )


def ok(text: str) -> Finding:
    return Finding(Verdict.OK, text)


def note(text: str) -> Finding:
    return Finding(Verdict.NOTE, text)


def bad(text: str) -> Finding:
    return Finding(Verdict.BAD, text)


# ---------------------------------------------------------------------------------------------- this machine


def check_versions(config: DoctorConfig) -> Iterator[Finding]:
    """Python, and every package that swarmllm requires."""
    if sys.platform != "linux":
        yield note(f"this is {platform.system()}: swarmllm has been tried on Linux only")
    wrong = list(wrong_versions(importlib.metadata.requires("swarmllm") or ()))
    yield from map(bad, wrong)
    if not wrong:
        python = platform.python_version()
        yield ok(f"swarmllm {__version__} on Python {python}; all packages are of versions that it was tested with")


def wrong_versions(
    requirements: Sequence[str], installed: Callable[[str], str] = importlib.metadata.version
) -> Iterator[str]:
    """A sentence for each requirement (extras aside) that is missing or outside its range."""
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        mend = f'pip install "{requirement.name}{requirement.specifier}"'
        try:
            version = installed(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement.name} is not installed: {mend}"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} is {version}, which has not been tested: {mend}"


def check_device(config: DoctorConfig) -> Iterator[Finding]:
    """Whether torch sees the GPU that the machine has."""
    import torch

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
    """Whether the kernel has an NVIDIA device, whatever torch says."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg"))


def check_model(config: DoctorConfig) -> Iterator[Finding]:
    """Whether the checkpoint can be served, and how many of its blocks fit into the memory."""
    if config.model is None:
        return
    import torch

    from swarmllm.models.architecture import check_supported
    from swarmllm.models.checkpoint import open_checkpoint
    from swarmllm.models.dtypes import resolve_dtype
    from swarmllm.models.quantization import resolve_quantization

    try:
        checkpoint = open_checkpoint(config.model, revision=config.revision, cache_dir=default_cache_dir())
        check_supported(checkpoint.config)
        dtype = resolve_dtype(checkpoint, config.dtype)
        block_bytes = checkpoint.block_bytes(dtype, resolve_quantization(checkpoint.config, config.quant_type))
    except SwarmError as error:
        yield bad(one_line(error))
        return
    yield ok(f"{checkpoint.name}: {checkpoint.num_blocks} blocks, fingerprint {checkpoint.fingerprint[:12]}")
    if config.device != "cpu" and torch.cuda.is_available():
        yield memory_finding(block_bytes, torch.cuda.mem_get_info()[0], "the GPU")
    else:
        yield memory_finding(block_bytes, psutil.virtual_memory().available, "this machine")


def memory_finding(block_bytes: Sequence[int], free_bytes: int, where: str) -> Finding:
    """How many blocks fit, as a server without `--num_blocks` counts them."""
    largest = max(block_bytes)
    fit = min(int(free_bytes * MEMORY_SHARE) // largest, len(block_bytes))
    sizes = f"a block takes {largest / 1e6:.1f} MB, {free_bytes / 1e9:.2f} GB of {where}'s memory are free"
    if fit == 0:
        return bad(f"not even one block fits: {sizes}; end other programs, or choose --quant_type nf4")
    return ok(f"{fit} of {len(block_bytes)} blocks fit: {sizes}")


def check_disk(config: DoctorConfig) -> Iterator[Finding]:
    """Where downloads go."""
    from huggingface_hub.constants import HF_HUB_CACHE

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
    """Whether the key can be read, and is nobody else's at the moment."""
    if config.identity_path is None:
        return
    from swarmllm.network.identity import Identity

    path = Path(config.identity_path).expanduser()
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
    """Who holds the lock on this file; None if nobody does."""
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


# ---------------------------------------------------------------------------------------------- the network


async def check_listening(config: DoctorConfig) -> list[Finding]:
    """Whether a server could start here, and at which addresses others would look for it."""
    from swarmllm.network.peer import Peer

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
                "these addresses are of a local network: machines outside reach a server here only if a port is "
                "forwarded to it and named, by --port 31337 --announce_maddrs /ip4/PUBLIC_IP/tcp/31337"
            )
        )
    if config.port is None:
        findings.append(note("each start takes another port: choose one by --port, and let it in through the firewall"))
    return findings


async def check_swarm(config: DoctorConfig) -> list[Finding]:
    """Whether the initial peers, or those of the local network, can be reached, agree on the time, and have servers."""
    findings: list[Finding] = []
    peers = config.initial_peers
    if not peers:
        if not config.lan_discovery:
            return [note("no initial peers were given, so no swarm was looked at: --initial_peers names them")]
        from swarmllm.network.discovery import find_peers, initial_peers_of

        found = await find_peers(lambda _: False)
        if not found:
            return [note("no swarm was found on the local network: --initial_peers names peers elsewhere")]
        findings += [ok(f"on the local network: {p.peer_id} serves {p.model} at {p.maddrs[0]}") for p in found]
        if len({one.fingerprint for one in found}) > 1:
            return [*findings, note("these are several swarms: name peers of one by --initial_peers to look at it")]
        peers = initial_peers_of(found)
    else:
        from swarmllm.network.dht import split_initial_peer

        try:
            split = [split_initial_peer(maddr) for maddr in peers]
        except ConfigurationError as error:
            return [bad(one_line(error))]
        dials = [dial(addr) for _, addr in split]
        for (_, addr), problem in zip(split, await asyncio.gather(*dials), strict=True):
            findings.append(ok(f"{addr} takes connections") if problem is None else bad(f"{addr}: {problem}"))
    return findings + await _look_into(peers, config.swarm_name)


async def _look_into(initial_peers: Sequence[str], swarm_name: str | None) -> list[Finding]:
    from swarmllm.network.peer import Peer

    asked_at = time.monotonic()
    try:
        peer = await Peer.create(initial_peers=initial_peers, client_mode=True)
    except SwarmError as error:  # says so as well when this machine's clock is wrong
        return [bad(one_line(error))]
    async with peer:
        took_s = time.monotonic() - asked_at
        joined = ok(f"joined the swarm in {took_s:.1f} s; this machine's clock agrees with it within 3 s")
        return [joined, *await _look_at_servers(peer, swarm_name)]


async def _look_at_servers(peer: "Peer", swarm_name: str | None) -> list[Finding]:
    """Whether every server of the swarm can be dialled from here."""
    from swarmllm.data_structures import SwarmSnapshot
    from swarmllm.network.block_directory import BlockDirectory

    directory = BlockDirectory(peer, swarm_name)
    findings: list[Finding] = []
    records = {record.fingerprint: record for record in (await directory.models()).values()}
    if not records:
        return [note("the swarm serves no model yet")]
    for record in records.values():
        servers = (await directory.servers(record.fingerprint))[:MAX_SERVERS]
        missing = SwarmSnapshot(record.num_blocks, servers).missing_blocks()
        if missing:
            findings.append(note(f"{record.name}: nobody serves {len(missing)} of {record.num_blocks} blocks"))
        results = await asyncio.gather(*(_dial_any(server.addrs) for server in servers))
        for server, problem in zip(servers, results, strict=True):
            if problem is not None:
                mend = "see the firewall, --port and --announce_maddrs there"
                findings.append(bad(f"server {server.peer_id} of {record.name}: {problem}; {mend}"))
        reached = sum(problem is None for problem in results)
        findings.append(ok(f"{record.name}: {reached} of {len(servers)} servers take connections from here"))
    return findings


async def _dial_any(addrs: Sequence[str]) -> str | None:
    """None if one of the addresses can be dialled; else what is wrong with all of them."""
    problems = await asyncio.gather(*map(dial, addrs))
    if not problems:
        return "it announces no address"
    return None if None in problems else "; ".join(f"{addr}: {p}" for addr, p in zip(addrs, problems, strict=True))


async def dial(addr: str) -> str | None:
    """None if something takes TCP connections at this multiaddress; else why not, and what to mend."""
    match = re.fullmatch(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})", addr)
    if match is None:
        return None  # of a kind that only libp2p knows; joining tells
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(match[1], int(match[2]))
    except TimeoutError:
        return "no answer: the machine is off, the address is wrong, or a firewall drops what comes to this port"
    except ConnectionRefusedError:
        return "the machine is there, but nothing listens on this port: start the peer, or mend the port"
    except (OSError, OverflowError) as error:
        return f"can't be dialled: {getattr(error, 'strerror', None) or error}"
    writer.transport.abort()
    return None


# ---------------------------------------------------------------------------------------------- the report


MACHINE: dict[str, Callable[[DoctorConfig], Iterator[Finding]]] = {
    "versions": check_versions,
    "device": check_device,
    "model": check_model,
    "disk": check_disk,
    "identity": check_identity,
}
NETWORK: dict[str, Callable[[DoctorConfig], Coroutine[Any, Any, list[Finding]]]] = {
    "network": check_listening,
    "swarm": check_swarm,
}


async def examine(config: DoctorConfig) -> int:
    """Make all checks and print what they find; how many findings are bad."""
    num_bad = 0

    def report(name: str, findings: Sequence[Finding]) -> int:
        for finding in findings:
            print(f"{finding.verdict:<5} {name:<9} {finding.text}", flush=True)
        return sum(finding.verdict is Verdict.BAD for finding in findings)

    for name, check in MACHINE.items():
        num_bad += report(name, list(check(config)))
    for name, look in NETWORK.items():
        num_bad += report(name, await look(config))
    print(f"\n{num_bad} to mend." if num_bad else "\nNothing to mend.")
    return num_bad


def build_parser() -> Parser:
    """Flags named as those of the server."""
    parser = Parser(
        prog="swarmllm doctor", description="Checks this machine and network, and names what to mend.", epilog=EXAMPLES
    )
    add = parser.add_argument
    add("--model", help="whether it can be served here, and how many of its blocks fit")
    add("--revision", help="branch, tag or commit on the hub")
    add_initial_peers_flags(parser)
    add("--port", type=int, help="TCP port that a server would listen on")
    add("--host_maddrs", nargs="+", metavar="MADDR", help="addresses that it would listen on")
    add("--announce_maddrs", nargs="+", metavar="MADDR", help="addresses that it would announce instead")
    add("--identity_path", metavar="FILE", help="key that it would use")
    add("--device", help="cpu: leave the GPU out")
    add("--dtype", "--torch_dtype", help="of weights and activations")
    add("--quant_type", help="none, int8 or nf4; auto = int8")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""

    async def run() -> int:
        from swarmllm.invite import agreed_name, unpack_invites

        settings = build_parser().parse_settings(sys.argv[1:] if argv is None else argv)
        peers, invites = unpack_invites(settings.pop("initial_peers", default_initial_peers()))
        for invite in invites:
            if invite.model is not None:
                settings.setdefault("model", invite.model)
        config = DoctorConfig(initial_peers=peers, swarm_name=agreed_name(invites), **settings)
        return 1 if await examine(config) else 0

    return run_command(run, default_log_level="ERROR")


if __name__ == "__main__":
    sys.exit(main())
