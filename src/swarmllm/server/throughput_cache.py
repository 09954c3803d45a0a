"""Measurements of earlier starts, so that a server that starts again need not measure: one small file for each kind.

Used by `server/throughput`. A file that is damaged, old, or was made by other versions counts as none.
"""

import hashlib
import json
import logging
import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarmllm import __version__
from swarmllm.models.block_span import BlockSpan

logger = logging.getLogger(__name__)

MAX_AGE_S = 30 * 24 * 3600.0
"""Assumed: drivers, kernels and cooling change."""

Measured = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Throughput(BaseModel):
    """Speed through the whole span."""

    model_config = ConfigDict(frozen=True, strict=True)

    forward_tokens_per_s: Measured
    decode_ms_per_block: Measured
    decode_ms_per_block_batch8: Measured = 0.0
    """0 = not measured, here and below."""
    context_ms_per_block_per_1k: Measured = 0.0
    num_threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """The number of threads that was best; 0 = not chosen by measurement."""
    packing: Literal["ragged", "padded", "one by one"]
    """How steps of several sessions run fastest: the values of `models.packing.Packing`."""
    ragged_alone_from: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Context from which a session alone runs ragged; 0 = never."""
    measured_at: Measured = 0.0
    """Unix time divided by 1000, seconds: within the bounds of a measurement."""


@dataclass(frozen=True)
class ThroughputCache:
    """The files of one checkpoint as it is served here."""

    directory: Path
    fingerprint: str
    quant_type: str
    num_threads: int | None
    """As told; None = to be chosen."""

    def load(self, blocks: BlockSpan) -> Throughput | None:
        """What was measured for such blocks before."""
        try:
            known = Throughput.model_validate_json(self._path(blocks).read_bytes())
        except (OSError, ValidationError):
            return None
        age_s = time.time() - known.measured_at * 1e3
        return known if 0 <= age_s < MAX_AGE_S else None

    def save(self, blocks: BlockSpan, throughput: Throughput) -> None:
        """Keep it for the next start; where that can't be, the next start measures again."""
        path = self._path(blocks)
        dated = throughput.model_copy(update={"measured_at": time.time() / 1e3})
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(dated.model_dump_json())
            unfinished.replace(path)
        except OSError as error:
            logger.debug("could not keep the measurement: %s", error)

    def _path(self, blocks: BlockSpan) -> Path:
        device = blocks.device
        kind = {
            "fingerprint": self.fingerprint,
            # which blocks, only as far as their kind goes: a server that moves need not measure again
            "blocks": [len(blocks.span), blocks.cache_bytes_per_token],
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
            "cpus": os.cpu_count(),
            "dtype": str(blocks.dtype),
            "quant_type": self.quant_type,
            "num_threads": self.num_threads,
            "versions": [__version__, torch.__version__, version("transformers")],
        }
        name = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:32]
        return self.directory / "swarmllm" / "throughput" / f"{name}.json"
