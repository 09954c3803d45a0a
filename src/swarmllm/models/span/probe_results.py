"""Results of probes, kept on disk for the next start of a server, which would find the same.

Called by `loading`. A result is for the same blocks of the same config, in the same format, computed by the same code
on the same kind of processor. Weights make no difference to what blocks need and can do.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import BaseModel, ConfigDict

from swarmllm.data_structures import BlockTraits, Span
from swarmllm.files import replace_file
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.quantization import Quantization, kernels
from swarmllm.models.span.block_span import BlockSpan, KeptState
from swarmllm.models.span.span_cache import CacheSizes

PROBES = "swarmllm_probes"
"""The folder of results, within the cache directory."""


class _Result(BaseModel):
    """Everything that `probes` writes into a span."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    traits: BlockTraits
    cache_sizes: CacheSizes
    kept_state: tuple[str, ...]


class ProbeResults:
    """The result for one way of loading some blocks, if it is known."""

    def __init__(
        self, directory: Path, checkpoint: Checkpoint, quantization: Quantization, left_out: Collection[str]
    ) -> None:
        """`left_out` names parts of the model that probes would miss if they were needed."""
        self._directory, self._config, self._quantization = directory, checkpoint.raw_config(), quantization
        self._left_out = sorted(left_out)

    def restore(self, blocks: BlockSpan) -> bool:
        """Put a known result into the blocks; False if there is none."""
        if (found := self._read(self._path_of(blocks))) is None:
            return False
        blocks.traits, blocks.slots.block_output = found.traits, found.traits.block_output
        blocks.cache_sizes = found.cache_sizes
        blocks.kept_state = KeptState(blocks.stack, found.kept_state)
        return True

    def traits_of(self, span: Span, dtype: torch.dtype) -> BlockTraits | None:
        """Known traits of the blocks of `span` on this processor, before the blocks are loaded."""
        found = self._read(self._path(span, dtype, torch.device("cpu")))
        return None if found is None else found.traits

    def _read(self, path: Path) -> _Result | None:
        try:
            written = path.read_text()
            found = _Result.model_validate_json(written)
        except (OSError, ValueError):
            return None
        # Traits have defaults, and so would be complete without some of them.
        return found if found.model_dump_json() == written else None

    def keep(self, blocks: BlockSpan) -> None:
        """Write the result. If that fails, the next start probes again."""
        found = _Result(traits=blocks.traits, cache_sizes=blocks.cache_sizes, kept_state=tuple(blocks.kept_state.names))
        path = self._path_of(blocks)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, found.model_dump_json(), durable=False)

    def _path_of(self, blocks: BlockSpan) -> Path:
        return self._path(blocks.span, blocks.dtype, blocks.device, offloaded=blocks.offloaded is not None)

    def _path(self, span: Span, dtype: torch.dtype, device: torch.device, *, offloaded: bool = False) -> Path:
        about = {
            "config": self._config,
            "span": [span.start, span.end],
            "dtype": str(dtype),
            "quantization": [self._quantization.quant_type, self._quantization.smallest],
            "left out": self._left_out,
            "offloaded": offloaded,
            "device": _device(device),
            "code": _code(),
        }
        return self._directory / f"{hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()}.json"


def _device(device: torch.device) -> list[Any]:
    """The kind of processor, because kernels differ."""
    if device.type == "cuda":
        return [device.type, torch.cuda.get_device_name(device)]
    names: set[str] = set()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = {line for line in lines if line.startswith(("model name", "CPU part"))}
    capability = torch.backends.cpu.get_cpu_capability()
    return [device.type, platform.machine(), sorted(names), capability, kernels.library() is not None]


@cache
def _code() -> list[str]:
    """Versions, and a digest of the source, which changes without a version during development."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return [sys.version, torch.__version__, transformers.__version__, digest.hexdigest()]
