"""Looks of `swarmllm doctor` at this machine, as a server would use it.

Only an identity that doesn't exist is made, so that its owner can tell others the peer id.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch
from huggingface_hub.constants import HF_HUB_CACHE

from swarmllm.command_line import one_line
from swarmllm.commands.doctor.findings import DoctorConfig, Finding, bad, note, ok
from swarmllm.config import default_cache_dir
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.files import user_path
from swarmllm.models.architecture import check_supported, stacks
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.dtypes import resolve_dtype
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.skeleton import block_bytes
from swarmllm.models.quantization import resolve_quantization
from swarmllm.network.p2p.identity import Identity
from swarmllm.server.device import memory
from swarmllm.server.device.device import resolve_device

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
    yield ok(f"{checkpoint.name}: {blocks}, fingerprint {fingerprint(checkpoint)[:12]}")
    cache_bytes = memory.COUNTED_TOKENS * memory.cache_bytes_per_token(checkpoint.config, dtype)
    try:
        for device in map(resolve_device, config.device):
            yield memory_finding(sizes, cache_bytes, memory.usable_bytes(device), config.offload)
    except ConfigurationError as error:
        yield bad(one_line(error))


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
