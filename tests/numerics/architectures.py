"""The architectures of transformers that run on a swarm, and a tiny model of each, made once for all its properties."""

import copy
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tests.numerics import tiny_encoder_decoders, tiny_models, tiny_speech_models, tiny_vision_models
from tests.numerics.in_process_swarm import InProcessSwarm, encoder_decoder_client
from transformers import AutoModelForSpeechSeq2Seq, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from swarmllm.data_structures import Span
from swarmllm.models.architecture import ENCODERS, REFUSED_ARCHITECTURES, WITH_AUDIO, Task, stacks
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.parallel.shared import Group
from swarmllm.models.quantization import FULL_PRECISION, Quantization
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span

ENCODER_DECODERS_WITH_A_CAUSAL_HEAD = frozenset(
    {
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
        *("prophetnet", "whisper"),
    }
)
"""Their default configs are encoder-decoders; only parts of them have a causal head."""
VISION_ENCODER_DECODERS = frozenset(
    ("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder")
)
"""T5Gemma 2 runs as an encoder-decoder for text, and the others are refused."""
NO_TINY_MODEL = frozenset(("fast_vlm", "gemma3n", "perception_lm"))
"""Their vision towers come from another package. Servers try them, and refuse them if their blocks differ."""

TEXT = sorted(
    {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    - {*REFUSED_ARCHITECTURES}
    - ENCODERS
    - ENCODER_DECODERS_WITH_A_CAUSAL_HEAD
    - {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
)
REFUSED_VISION = [name for name in tiny_vision_models.names() if name in REFUSED_ARCHITECTURES]
VISION = [
    name
    for name in tiny_vision_models.names()
    if name not in {*REFUSED_VISION, *NO_TINY_MODEL, *VISION_ENCODER_DECODERS}
]
REFUSED_ENCODER_DECODERS = [name for name in tiny_encoder_decoders.names() if name in REFUSED_ARCHITECTURES]
ENCODER_DECODERS = [name for name in tiny_encoder_decoders.names() if name not in REFUSED_ARCHITECTURES]
SPEECH = sorted(WITH_AUDIO)
ALL = {
    "text": [*TEXT, *tiny_models.VARIANTS],
    "vision": VISION,
    "encoder-decoder": ENCODER_DECODERS,
    "speech": SPEECH,
}
"""By kind of model."""

ROUNDS_DIFFERENTLY = {
    # transformers leaves out positions that need no logits, before blocks with shared keys and values.
    "gemma4_shared_kv": 1e-6,
    # Products of towers and experts depend on the memory address of weights: a second local model differs as much.
    **dict.fromkeys(("granite_docling", "qwen3_vl_moe", "step3p7"), 1e-6),
}
"""Relative tolerance. All other architectures are equal bit by bit."""


class Subject:
    """One architecture: a tiny checkpoint, a local model, a client with two servers; each is made when first used.

    A property leaves them as it found them. What it changes, it makes for itself: `fresh_local`, `fresh_swarm`, `load`.
    """

    def __init__(self, kind: str, name: str, root: Path, group: Callable[[], Group]) -> None:
        """`group` gives two processes for the matrices of blocks."""
        self.kind, self.name, self.group = kind, name, group
        self.tolerance = ROUNDS_DIFFERENTLY.get(name, 0.0)
        self._root = root / f"{kind} {name}"
        self._saved: set[Path] = set()

    def directory(self, dtype: torch.dtype = torch.float32) -> Path:
        """The directory of the checkpoint with weights of this dtype; text models have several."""
        path = self._root / str(dtype)
        if path not in self._saved:
            path.mkdir(parents=True)
            if self.kind == "text":
                tiny_models.save_tiny(self.name, path, dtype=dtype)
            else:
                saved_by = {"vision": tiny_vision_models, "speech": tiny_speech_models}
                saved_by.get(self.kind, tiny_encoder_decoders).save_tiny_model(self.name, path)
            self._saved.add(path)
        return path

    def new_directory(self) -> Path:
        """An empty one."""
        path = self._root / f"other {len(self._saved)}"
        path.mkdir(parents=True)
        self._saved.add(path)
        return path

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(str(self.directory()))

    def fresh_local(self) -> PreTrainedModel:
        if self.kind == "text":
            return tiny_models.load_tiny(self.directory())
        if self.kind == "speech":
            model: PreTrainedModel = AutoModelForSpeechSeq2Seq.from_pretrained(self.directory())
            return model
        made_by = tiny_vision_models if self.kind == "vision" else tiny_encoder_decoders
        return made_by.tiny_model(self.name)

    def fresh_swarm(self, **options: Any) -> InProcessSwarm:
        """A client and two servers, of a model without an encoder."""
        task = Task.IMAGE_TEXT_TO_TEXT if self.kind == "vision" else Task.CAUSAL_LM
        return InProcessSwarm(self.directory(), **{"tolerance": self.tolerance, "task": task, **options})

    @cached_property
    def local(self) -> PreTrainedModel:
        return self.fresh_local()

    @cached_property
    def swarm(self) -> InProcessSwarm:
        return self.fresh_swarm()

    @cached_property
    def client(self) -> PreTrainedModel:
        """The client of `swarm`, or of a swarm with two servers for each stack."""
        two_stacks = self.kind in ("encoder-decoder", "speech")
        client = encoder_decoder_client(self.directory()) if two_stacks else self.swarm.client
        if self.kind != "text":
            client.eval()
            client.generation_config = copy.deepcopy(self.local.generation_config)
        return client

    def load(self, dtype: torch.dtype | None = None, quantization: Quantization = FULL_PRECISION) -> BlockSpan:
        """All blocks; of an encoder-decoder those of the decoder."""
        span: Span = stacks(self.checkpoint.config)[-1].span
        return load_block_span(self.checkpoint, span, dtype=dtype, quantization=quantization, progress=False)
