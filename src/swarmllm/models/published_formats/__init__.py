"""Formats in which models are published in few bits: the stored tensors of one weight → the weight.

    stored_format       the interface, and a checkpoint as if every weight were stored as one tensor
    few_bits            AWQ, GPTQ, HQQ, bitsandbytes
    few_bit_floats      FP8 (DeepSeek's blocks of 128×128, rows, whole tensors), ModelOpt (NVIDIA), MXFP4 (gpt-oss)
    compressed_tensors  4 and 8 bits, FP8, NVFP4 (llm-compressor, Kimi)
    torchao             int4, int8 and float8
    gguf                a file of llama.cpp: its header, config and weights

A new format is a subclass of `StoredFormat` in a file that fits or a new one, and a line in `FORMATS`. Used by
`checkpoint`; knows no models. `models/quantization` multiplies by packed weights.
"""

from collections.abc import Mapping
from typing import Any

from swarmllm.errors import UnsupportedModelError
from swarmllm.models.published_formats.compressed_tensors import CompressedTensors
from swarmllm.models.published_formats.few_bit_floats import Fp8, ModelOpt, Mxfp4
from swarmllm.models.published_formats.few_bits import Awq, BitsAndBytes, Gptq, Hqq
from swarmllm.models.published_formats.stored_format import StoredFormat
from swarmllm.models.published_formats.torchao import TorchAo

FORMATS: dict[str, type[StoredFormat]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "hqq": Hqq,
    "modelopt": ModelOpt,
    "mxfp4": Mxfp4,
    "torchao": TorchAo,
}
"""`quant_method` of the config → format."""


def format_of(config: Mapping[str, Any]) -> StoredFormat | None:
    """The format of a checkpoint with this config.json; None if its weights are plain numbers.

    Raises:
        UnsupportedModelError: swarmllm can't read this format, or this form of it.
    """
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings is None and isinstance(text := config.get("text_config"), Mapping):
        settings = text.get("quantization_config")
    if not settings:
        return None
    method = _method(settings)
    if method not in FORMATS:
        raise _refused(f"the format {method!r}")
    form = FORMATS[method](settings)
    if what := form.unread():
        raise _refused(what)
    return form


def _method(settings: Mapping[str, Any]) -> str:
    """The name in `FORMATS`: auto-round packs as others do, and old checkpoints of bitsandbytes have no name."""
    method = str(settings.get("quant_method", "")).lower()
    if method in ("auto-round", "auto_round"):
        packing = str(settings.get("packing_format", "auto_round:auto_gptq"))
        return "awq" if "awq" in packing else "gptq" if "gptq" in packing else packing
    if not method and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"
    return method


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the weights of this checkpoint are in {what}, which swarmllm can't read: use another one of the model, in "
        f"bfloat16 (servers make 8 or 4 bits of it) or in one of {', '.join(sorted(FORMATS))}"
    )
