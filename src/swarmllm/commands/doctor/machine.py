"""Looks of `swarmllm doctor` at this machine, as a server would use it.

Only an identity that doesn't exist is made, so that its owner can tell others the peer id.
"""

import fcntl
import itertools
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import torch
from huggingface_hub.constants import HF_HUB_CACHE

from swarmllm.command_line import one_line
from swarmllm.commands.doctor.findings import DoctorConfig, Finding, bad, note, ok
from swarmllm.config import default_cache_dir
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError, SwarmError
from swarmllm.files import user_path
from swarmllm.models.architecture import check_supported, stacks
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.checkpoint.dtypes import resolve_dtype
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.skeleton import block_bytes
from swarmllm.models.quantization import resolve_quantization
from swarmllm.network.p2p.identity import Identity
from swarmllm.server.device import memory
from swarmllm.server.device.device import resolve_device

FINEST_FIRST = ("none", "int8", "int6", "int5", "int4", "q3.5", "int3", "int2")
"""Formats of the weights by their bits."""
FREE_PERCENT = round(100 * (1 - memory.FREE_SHARE))
MIN_FREE_DISK_BYTES = 5 << 30
"""Assumed: less than one file of a checkpoint that is worth a swarm."""


def check_device(config: DoctorConfig) -> Iterator[Finding]:
    """Whether torch sees the GPU that the machine has."""
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
    if not config.model:
        return
    try:
        checkpoint = open_checkpoint(config.model, revision=config.revision, cache_dir=default_cache_dir())
        check_supported(checkpoint.config)
        dtype = resolve_dtype(checkpoint, config.dtype)
        sizes = block_bytes(checkpoint, dtype, resolve_quantization(config.quant_type))
    except SwarmError as error:
        yield bad(one_line(error))
        return
    of_stacks = ", ".join(f"{one.role} 0:{len(one.span)}" for one in stacks(checkpoint.config) if one.role)
    blocks = f"{checkpoint.num_blocks} blocks" + (f" ({of_stacks})" if of_stacks else "")
    yield ok(f"{checkpoint.name}: {blocks}, {_known_as(checkpoint)}")
    cache_bytes = memory.COUNTED_TOKENS * memory.cache_bytes_per_token(checkpoint.config, dtype)
    try:
        for device in map(resolve_device, config.device):
            yield memory_finding(sizes, cache_bytes, memory.usable_bytes(device), config.offload)
    except ConfigurationError as error:
        yield bad(one_line(error))


def _known_as(checkpoint: Checkpoint) -> str:
    try:
        return f"fingerprint {fingerprint(checkpoint)[:12]}"
    except BlockWeightsNotFoundError:
        return "a config without weights"


def check_memory(config: DoctorConfig) -> Iterator[Finding]:
    """Which formats of the weights fit into the machines of `--memory`."""
    if not config.memory:
        return
    try:
        checkpoint = open_checkpoint(config.model, revision=config.revision, cache_dir=default_cache_dir())
        dtype = resolve_dtype(checkpoint, config.dtype)
        formats = {name: max(block_bytes(checkpoint, dtype, resolve_quantization(name))) for name in FINEST_FIRST}
    except SwarmError as error:
        yield bad(one_line(error))
        return
    cache_bytes = memory.COUNTED_TOKENS * memory.cache_bytes_per_token(checkpoint.config, dtype)
    needs = {name: (size + cache_bytes) / 1e9 / memory.FREE_SHARE for name, size in formats.items()}
    yield from bits_that_fit(needs, checkpoint.num_blocks, config.memory)


def bits_that_fit(needs: Mapping[str, float], num_blocks: int, sizes: Sequence[str]) -> Iterator[Finding]:
    """The finest formats in which machines hold all blocks together.

    Args:
        needs: format, the finest first → GB that a block takes, with its cache and what is left free beside it.
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
    """As many machines as possible with the next finer format than `name`, which all can have; None: no machine can."""
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
    """How many blocks fit, as a server without `--num_blocks` counts them, and how many such machines make a swarm.

    `num_offloaded` None: as many as it takes for the whole model.
    """
    if num_offloaded is None:
        num_offloaded = memory.num_to_offload(block_bytes, cache_bytes, usable)
    num_blocks, fit = len(block_bytes), memory.num_blocks_that_fit(block_bytes, cache_bytes, usable, num_offloaded)
    sizes = (
        f"one takes {max(block_bytes) / 1e6:.1f} MB, and {cache_bytes / 1e6:.1f} MB for {memory.COUNTED_TOKENS} tokens "
        f"of cache; {usable / 1e9:.2f} GB may be used"
    )
    if fit == 0:
        return bad(f"not even one block fits: {sizes}; end other programs, or choose --quant_type int4, or int3")
    if num_offloaded > fit:
        return bad(
            f"of the {fit} blocks that fit, {num_offloaded} can't be offloaded: {sizes}; choose a lower --offload"
        )
    machines = -(-num_blocks // fit)
    all_of_them = "the whole model" if machines == 1 else f"{machines} machines like this one hold the model"
    offloaded = f" with {num_offloaded} of them offloaded" if num_offloaded else ""
    return ok(f"{fit} of {num_blocks} blocks fit{offloaded}, {all_of_them}: {sizes}")


def check_disk(config: DoctorConfig) -> Iterator[Finding]:
    """Where downloads go."""
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
