"""What a GGUF file says about its model → transformers' config. A setting that isn't known is refused, not ignored."""

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor

from swarmllm.errors import CorruptWeightsError, UnsupportedModelError
from swarmllm.models.published_formats.gguf.architectures import ARCHITECTURES, Architecture
from swarmllm.models.published_formats.gguf.header import Header
from swarmllm.models.published_formats.gguf.rope import rope_parameters
from swarmllm.models.quantization.gguf_blocks import WHOLE

_REQUIRED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_USUAL = {"feed_forward_length": "intermediate_size", "attention.head_count_kv": "num_key_value_heads"}
_OF_NO_EFFECT = frozenset({"vocab_size", "tensor_data_layout"})
"""The first is known from the embeddings; the second says what `Architecture.interleaved` does."""
_GEMMA_OF_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}
"""Those with 27B parameters scale attention by hidden_size / heads instead of head_dim; llama.cpp knows them by their
number of blocks as well, because files don't say it."""
_LOCAL_THETA = 10000.0
"""Gemma 3's base for blocks with a window (its transformers config)."""
_LARGEST = 1 << 31
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")


def architecture_of(header: Header) -> Architecture:
    """How the model of this file is stored.

    Raises:
        UnsupportedModelError: nobody here knows.
    """
    name = header.settings.get("general.architecture")
    if name == "llama" and header.settings.get("llama.expert_count"):
        name = "mixtral"
    found = ARCHITECTURES.get(str(name))
    if found is None:
        raise UnsupportedModelError(
            f"swarmllm doesn't read the architecture {str(name)[:50]!r} from GGUF (but {', '.join(ARCHITECTURES)}): "
            "use the model's safetensors, of which servers make 8 or 4 bits"
        )
    return found


def config_of(header: Header, rope_factors: Tensor | None) -> dict[str, Any]:
    """Fields of transformers' config, its `model_type` and `dtype` among them.

    Raises:
        CorruptWeightsError: settings are missing, or can't be true.
        UnsupportedModelError: the model differs from those that are known here.
    """
    architecture = architecture_of(header)
    name = str(header.settings["general.architecture"])
    settings = {
        key.removeprefix(f"{name}."): value for key, value in header.settings.items() if key.startswith(f"{name}.")
    }
    fields = {**_REQUIRED, **_USUAL, **architecture.settings}
    config = {fields[key]: _number(key, settings.pop(key)) for key in list(settings) if key in fields}
    if missing := [key for key, field in _REQUIRED.items() if field not in config]:
        raise CorruptWeightsError(
            f"this GGUF file lacks the setting {name}.{missing[0]}: take another file of the model"
        )
    _check_blocks(config["num_hidden_layers"], header)
    config |= architecture.constants
    head_dim = _number("attention.key_length", settings.pop("attention.key_length", 0) or _head_dim(config))
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.pop(key, head_dim) != head_dim:
            raise UnsupportedModelError(f"this GGUF file has another {name}.{key} than {head_dim}: use the safetensors")
    config["head_dim"] = head_dim
    config["rope_parameters"] = rope_parameters(settings, rope_factors, head_dim)
    if name.startswith("gemma"):
        _gemma(name, config, settings)
    if unknown := sorted(settings.keys() - _OF_NO_EFFECT):
        raise UnsupportedModelError(
            f"this GGUF file has the setting {name}.{unknown[0][:50]}, whose effect swarmllm doesn't know: use the "
            "model's safetensors, or a file that was made without it"
        )
    return {**config, **_of_tensors(header, architecture), **_special_tokens(header.settings)}


def _number(key: str, value: Any) -> Any:
    """A setting that is a number; a list of one number for each block counts as that number."""
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        if isinstance(value, list):
            raise UnsupportedModelError(f"this GGUF file has several values of {key}: use the model's safetensors")
        raise CorruptWeightsError(
            f"this GGUF file says that {key} is {str(value)[:50]}: take another file of the model"
        )
    return value


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


def _check_blocks(num_blocks: int, header: Header) -> None:
    """Raises CorruptWeightsError if there are others than the file has tensors of."""
    found = {int(match[1]) for match in map(_BLOCK.match, header.tensors) if match}
    if len(found) != num_blocks or max(found) >= num_blocks or "token_embd.weight" not in header.tensors:
        raise CorruptWeightsError(
            f"this GGUF file should have embeddings and {num_blocks} blocks, but has tensors of {len(found)} blocks: "
            "name the first part of a file in parts, or take another file of the model"
        )


def _gemma(name: str, config: dict[str, Any], settings: MutableMapping[str, Any]) -> None:
    if name == "gemma":
        return
    by_hidden_size = config["num_hidden_layers"] == _GEMMA_OF_HIDDEN_SIZE[name]
    config["query_pre_attn_scalar"] = _head_dim(config) if by_hidden_size else config["head_dim"]
    if name == "gemma3":
        local = settings.pop("rope.freq_base_swa", _LOCAL_THETA)
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": float(local)},
        }


def _of_tensors(header: Header, architecture: Architecture) -> dict[str, Any]:
    names = header.tensors.keys()
    found = {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in names,
        "dtype": _dtype(header),
    }
    if architecture.model_type == "llama":
        found |= {"attention_bias": "blk.0.attn_q.bias" in names, "mlp_bias": "blk.0.ffn_up.bias" in names}
    return found


def _dtype(header: Header) -> str:
    """What the matrices are stored in, and bfloat16 for those in few bits."""
    kinds = {one.kind for one in header.tensors.values() if len(one.shape) > 1}
    only = str(WHOLE.get(kinds.pop(), "bfloat16")) if len(kinds) == 1 else "bfloat16"
    return only.removeprefix("torch.")


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Texts end at the end of a turn as well, where the file names one."""
    ids = {name: settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = [one for one in dict.fromkeys((ids["eos"], ids["eot"])) if one is not None]
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends if len(ends) > 1 else ids["eos"],
        "pad_token_id": ids["padding"],
    }
