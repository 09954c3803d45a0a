"""Choose, load and measure blocks of the checkpoint, in the device thread. Called by `span_life`."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from swarmllm.config import own_cache_dir
from swarmllm.data_structures import Span, SwarmSnapshot, size_in_words
from swarmllm.errors import ConfigurationError, SwarmError, WeightsMismatchError
from swarmllm.files import user_path
from swarmllm.models.architecture import blocks_class, parts_of
from swarmllm.models.checkpoint.calibration import read_calibration
from swarmllm.models.checkpoint.checkpoint import Checkpoint, resolve_dtype
from swarmllm.models.checkpoint.skeleton import block_bytes, named_blocks, on_meta
from swarmllm.models.parallel.shared import Group
from swarmllm.models.quantization import resolve_quantization
from swarmllm.models.quantization.loading import resolve_activations
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span, span_tensor_names, stage
from swarmllm.models.span.packing import Packer, Packing
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.page_pool import why_no_kernels
from swarmllm.models.span.probe_results import PROBES
from swarmllm.models.span.trials import worthwhile_threads
from swarmllm.server.adapters import ServedAdapters
from swarmllm.server.device.device import (
    COUNTED_TOKENS,
    FREE_SHARE,
    CacheRoom,
    accelerator_of,
    cache_bytes_per_token,
    cache_room,
    free_bytes,
    num_blocks_that_fit,
    num_to_offload,
    resolve_device,
    usable_bytes,
)
from swarmllm.server.device.device_thread import DeviceThread
from swarmllm.server.device.scheduler import Priority
from swarmllm.server.device.throughput import (
    Throughput,
    doubling_tokens,
    measure_throughput,
    prefill_tokens_beside_decode,
)
from swarmllm.server.downloads import in_background
from swarmllm.server.peers.peer_limits import PeerLimits
from swarmllm.server.settings import ServerConfig
from swarmllm.server.streams.input_checks import InputChecks
from swarmllm.server.streams.serving import Serving, StackBlocks
from swarmllm.swarm.placement import choose_span, describe_choice

logger = logging.getLogger(__name__)

LOADING_FAILURES = (SwarmError, OSError, MemoryError, RuntimeError)
"""Errors that loading blocks may raise; torch raises a RuntimeError if memory runs out."""


@dataclass(frozen=True)
class _Measured:
    """Measurements of blocks, without the blocks."""

    span: Span
    ways: tuple[Packing, ...]
    way: Packing
    traced_at_once: int
    throughput: Throughput


class SpanLoader:
    """Loads blocks with the device, the format and the adapters of this server."""

    def __init__(
        self, config: ServerConfig, checkpoint: Checkpoint, device_thread: DeviceThread, limits: PeerLimits
    ) -> None:
        self._config, self._checkpoint, self._limits = config, checkpoint, limits
        self.device_thread = device_thread
        self._last: _Measured | None = None
        self.device = resolve_device(config.device[0])
        device_thread.accelerator = accelerator_of(self.device)
        self._num_threads = config.num_threads or max(1, torch.get_num_threads() // config.tensor_parallel)
        """CPU threads of each process, if several share the blocks."""
        self._usable_bytes = usable_bytes(self.device, config.max_memory)
        self.dtype = resolve_dtype(checkpoint, config.dtype)
        self.quantization = resolve_quantization(config.quant_type)
        wanted = "none" if config.tensor_parallel > 1 else config.activations
        self._activations = resolve_activations(
            wanted, self.device, self.quantization, comes_packed=checkpoint.comes_packed
        )
        self.activations = "none"
        """The rounding of inputs in the blocks that were loaded last."""
        if config.calibration is not None:
            self.quantization = replace(self.quantization, calibration=self._read_calibration(config.calibration))
        alone = config.adapters or config.offload or config.tensor_parallel > 1
        if checkpoint.config.is_encoder_decoder and alone:
            raise ConfigurationError(
                "adapters, offload and tensor_parallel are for models without an encoder: leave them out for this one"
            )
        self.adapters = ServedAdapters(config.adapters, checkpoint, token=config.token, cache_dir=config.cache_dir)

    def _read_calibration(self, path: str) -> dict[str, Tensor]:
        """Read the user's file.

        Raises:
            ConfigurationError: it can't be used.
        """
        if self._checkpoint.comes_packed:
            raise ConfigurationError(
                f"the weights of {self._checkpoint.public_name} are stored in few bits and stay as they are: leave "
                "--calibration out"
            )
        return read_calibration(user_path(path))

    def choose_span(self, others: SwarmSnapshot) -> Span:
        """Choose the blocks that the swarm of all others lacks most, as many as were asked for or fit.

        Raises:
            ConfigurationError: not even one fits.
        """
        sizes = block_bytes(self._checkpoint, self.dtype, self.quantization)
        if self.device.type != "cpu":  # CPU processes share one memory
            sizes = [-(-size // self._config.tensor_parallel) for size in sizes]
        wanted = self._config.num_blocks or self._num_blocks_that_fit(sizes)
        span = choose_span(others, wanted)
        logger.info("chose blocks %s: %s", span, describe_choice(others, span))
        return span

    def _num_blocks_that_fit(self, sizes: list[int]) -> int:
        num_blocks = num_blocks_that_fit(sizes, self._cache_bytes(), self._usable_bytes, self._config.offload or 0)
        if num_blocks == 0:
            raise ConfigurationError(
                f"not even one block fits into the memory of {self.device}: it takes {size_in_words(max(sizes))}, "
                f"{size_in_words(self._usable_bytes)} may be used"
            )
        return num_blocks

    def _cache_bytes(self) -> int:
        """Bytes of sessions that each block is counted with."""
        num_tokens = min(self._config.attn_cache_tokens, COUNTED_TOKENS)
        return num_tokens * cache_bytes_per_token(self._checkpoint.config, self.dtype)

    def _num_offloaded(self, span: Span) -> int:
        if self._checkpoint.config.is_encoder_decoder:  # its blocks share modules
            return 0
        if self._config.offload is not None:
            return self._config.offload
        sizes = block_bytes(self._checkpoint, self.dtype, self.quantization)[span.start : span.end]
        return num_to_offload(sizes, self._cache_bytes(), self._usable_bytes)

    async def load(self, span: Span) -> Serving:
        """Load and measure these blocks.

        Raises:
            SwarmError, OSError, MemoryError, RuntimeError: they can't be loaded.
        """
        return (await self.device_thread.run_call(lambda: self._load(span), Priority.SESSIONLESS)).value

    def changed_files(self) -> list[str]:
        """List the files of weights that have changed since this server opened the checkpoint."""
        return self._checkpoint.opened_files.changed()

    def _check_files(self) -> None:
        """Raise WeightsMismatchError if the files have changed: new blocks would come from another checkpoint than the
        old ones."""
        if changed := self.changed_files():
            raise WeightsMismatchError(describe_changed(self._checkpoint.name, changed))

    def _load(self, span: Span) -> Serving:
        self._check_files()
        num_offloaded = self._num_offloaded(span)
        loaded = self._load_blocks(span, num_offloaded, self._group())
        stacks = [StackBlocks(blocks, InputChecks(blocks)) for blocks in loaded]
        blocks = stacks[-1].blocks
        self.activations = min((one.activations for one in loaded), key=("auto", "int8", "none").index)
        if self._config.activations == "int8" != self.activations:
            raise ConfigurationError(
                "no weights of these blocks can be multiplied by rounded inputs, by their type or because they are too "
                "small to be quantized: leave --activations out"
            )
        if num_offloaded:
            where = "on disk" if self.device.type == "cpu" else "in host memory"
            logger.info("%d of the %d blocks are %s, and come when they compute", num_offloaded, len(span), where)
        self._check_files()  # or blocks of both checkpoints may have been loaded
        self.adapters.load(blocks)
        room = self._room(stacks)
        self._use_pages(blocks, room)
        packer, throughput = self._measured(blocks)
        if len(stacks) > 1:  # only the decoder's blocks were measured
            share = len(blocks.span) / len(span)
            throughput = replace(throughput, forward_tokens_per_s=throughput.forward_tokens_per_s * share)
        self._adopt(throughput, len(span))
        return Serving(
            packer,
            stacks,
            self.device_thread,
            room,
            limits=self._limits,
            settings=self._config,
            offered=self.adapters,
            throughput=throughput,
        )

    def _load_blocks(self, span: Span, num_offloaded: int, group: Group | None) -> list[BlockSpan]:
        """Load the blocks of each stack."""
        checkpoint, own_files = self._checkpoint, Path(self._config.cache_dir or own_cache_dir())
        model = on_meta(blocks_class(checkpoint.config), checkpoint.config)
        with worthwhile_threads(nn.ModuleList(block for _, block in named_blocks(model))):
            return [
                load_block_span(
                    checkpoint,
                    stack_span,
                    dtype=self.dtype,
                    device=self.device,
                    quantization=self.quantization,
                    activations=self._activations,
                    progress=sys.stderr.isatty(),
                    num_offloaded=num_offloaded,
                    offload_dir=own_files,
                    probes_dir=None if group else own_files / PROBES,
                    group=group,
                )
                for stack_span in parts_of(checkpoint.config, span)
            ]

    def _adopt(self, throughput: Throughput, num_blocks: int) -> None:
        """Let the device thread use the measured speed, and compare real forwards with it."""
        beside_decode = prefill_tokens_beside_decode(throughput, num_blocks)
        logger.info("while other sessions decode, prompts go in pieces of %d tokens", beside_decode)
        self.device_thread.adopt(
            doubling_tokens=doubling_tokens(throughput, num_blocks),
            beside_decode=beside_decode,
            step_ms=throughput.step_ms,
            forward_ms=partial(throughput.forward_ms, num_blocks),
        )

    def _group(self) -> Group | None:
        """Start the processes that share these blocks; they end with the blocks."""
        if self._config.tensor_parallel == 1:
            return None
        if self.device.type == "cpu":
            torch.set_num_threads(self._num_threads)
        devices = [resolve_device(name) for name in self._config.device]
        logger.info("%d processes share the blocks: %s", len(devices), ", ".join(map(str, devices)))
        return Group(devices, num_threads=self._num_threads)

    def _use_pages(self, blocks: BlockSpan, room: CacheRoom) -> None:
        """Put the keys and values of all sessions into pages of one pool, if there are kernels for that."""
        if why_not := why_no_kernels(self.device) or blocks.why_not_paged:
            if self.device.type == "cuda":
                logger.info("each session has keys and values of its own, not pages: %s", why_not)
            return
        blocks.pool = blocks.new_pool(1 + max(1, (room.sessions + room.pages) // blocks.page_bytes))
        logger.info("keys and values of all sessions are in %d pages", blocks.pool.num_pages)

    def _measured(self, blocks: BlockSpan) -> tuple[Packer, Throughput]:
        """Find the fastest way of packing, and measure the speed; measurements of the same blocks are used again."""
        last = self._last
        if last is not None and last.span == blocks.span:
            packer = self._packer(blocks, last.ways)
            packer.use(last.way)
            packer.traced_at_once = last.traced_at_once
            return packer, last.throughput
        with stage("trying how sessions can be computed together"):
            packer = self._packer(blocks, right_ways(blocks))
        choose_threads = self._config.num_threads is None and blocks.group is None
        throughput = measure_throughput(packer, choose_threads=choose_threads)
        self._last = _Measured(blocks.span, packer.ways, packer.way, packer.traced_at_once, throughput)
        return packer, throughput

    def _packer(self, blocks: BlockSpan, ways: Sequence[Packing]) -> Packer:
        packer = Packer(blocks, ways)
        if Packing.PAGED not in ways:
            if blocks.pool is not None:
                logger.warning(
                    "each session has keys and values of its own: on pages, the blocks would compute other values"
                )
            blocks.pool = None
        if blocks.pool is not None:
            with stage("recording decode steps"):
                packer.record()
        packer.trace()
        return packer

    def _room(self, stacks: Sequence[StackBlocks]) -> CacheRoom:
        config, sizes = self._config, stacks[-1].blocks.cache_sizes
        num_bytes = sum(stack.blocks.num_bytes for stack in stacks)
        room = cache_room(
            min(self._usable_bytes - num_bytes, int(free_bytes(self.device) * FREE_SHARE)),
            bytes_per_token=sizes.bytes_per_token + stacks[-1].inputs.hidden_bytes,
            bytes_per_session=sizes.bytes_per_session,
            session_tokens=config.attn_cache_tokens,
            prefix_tokens=config.prefix_cache_tokens,
        )
        logger.info(
            "the blocks take %s of memory; %s are for sessions, %s for shared prompts",
            size_in_words(num_bytes),
            size_in_words(room.sessions),
            size_in_words(room.pages),
        )
        return room

    async def can_load(self, span: Span) -> bool:
        """True if the files of other blocks are there (on the hub: downloaded now) and hold them."""
        try:
            await in_background(self._check_files)
            for stack_span in parts_of(self._checkpoint.config, span):
                look = partial(span_tensor_names, self._checkpoint, stack_span)
                names = await self.device_thread.run_call(look, Priority.SESSIONLESS)
                await in_background(partial(self._checkpoint.tensors, names.value))
        except LOADING_FAILURES as error:
            logger.warning("blocks %s can't be loaded: %s", span, str(error) or repr(error))
            return False
        return True


def describe_changed(name: str, filenames: Sequence[str]) -> str:
    """Tell the owner what to do about files that have changed."""
    more = f" and {len(filenames) - 1} more files" if len(filenames) > 1 else ""
    return (
        f"{filenames[0]}{more} of {name} changed on disk, or went, after this server had opened it: start the server "
        "again to serve what is there now, or put back what was there"
    )
