"""Models in GGUF, the files of llama.cpp: their settings as transformers' config, their tensors as its weights.

In this order: the header, whose bytes transformers takes apart, and whose values are checked here before anybody
relies on them; the architectures that can be read, with llama.cpp's names of weights and settings; the config; the
rotation of positions; the weights. An entry of an architecture is only right if nothing is left out: a file with other
tensors or settings is refused, not ignored.

llama.cpp stores some weights in another way than transformers: rows of queries and keys in another order, norms with 1
added, experts of a block in one tensor. All of that is undone here, also for packed weights: blocks of weights never
span two rows. Weights in blocks stay packed if that is wanted; `models/quantization/decoded` multiplies by them.
Used by `checkpoint/stored_files`.
"""

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.integrations.gguf import reader
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swarmllm.errors import CorruptWeightsError, UnsupportedModelError
from swarmllm.models.published_formats.stored_format import PackedTensor
from swarmllm.models.quantization.decoded import FORMS, KINDS, WHOLE

MOST_ENTRIES = 1 << 20
"""Tensors or settings of a file; the largest models have some 2000 and 100."""
MOST_DIMENSIONS = 4
"""As ggml has it."""
DEFAULT_ALIGNMENT = 32

_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_MLP = frozenset(_DENSE)
_EXPERT_SETTINGS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_MOE_SETTINGS = {**_EXPERT_SETTINGS, "expert_feed_forward_length": "moe_intermediate_size"}

_REQUIRED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_USUAL = {"feed_forward_length": "intermediate_size", "attention.head_count_kv": "num_key_value_heads"}
_OF_NO_EFFECT = frozenset({"vocab_size", "tensor_data_layout"})
"""The first is known from the embeddings; `Architecture.interleaved` does the work of the second."""
_GEMMA_OF_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}
"""Models with 27B parameters scale attention by hidden_size / heads instead of head_dim. llama.cpp, too, knows them by
their number of blocks, because files don't say it."""
_LOCAL_THETA = 10000.0
"""Gemma 3's base for blocks with a window (its transformers config)."""
_LARGEST = 1 << 31
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")

DEFAULT_THETA = 10000.0
"""llama.cpp's, of files that name none."""
LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0, 2.0)
"""The factors of Llama 3.1 and 3.2, and further ones to be tried."""

ROPE_FACTORS = "rope_freqs.weight"
"""No weight of transformers: its config says it (`rope_parameters`)."""
_VECTOR_AS_MATRIX = ".ffn_gate_inp_shexp."


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor, and its form."""

    path: Path
    name: str
    shape: tuple[int, ...]
    """As torch counts dimensions: the last one is that of neighbours."""
    kind: int
    start: int
    """Its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        if self.kind in WHOLE:
            return math.prod(self.shape) * WHOLE[self.kind].itemsize
        _, weights, size = KINDS[self.kind]
        return math.prod(self.shape) // weights * size


@dataclass(frozen=True)
class Header:
    """All that a file says before its tensors."""

    settings: Mapping[str, Any]
    """Lists of strings by their length only."""
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path) -> Header:
    """The header of one file.

    Raises:
        CorruptWeightsError: it is damaged, incomplete, or no GGUF.
        UnsupportedModelError: it holds numbers in a form that swarmllm can't read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if mapped[:4] == b"GGUF" and max(struct.unpack_from("<QQ", mapped, 8)) > MOST_ENTRIES:
                raise ValueError(f"more than {MOST_ENTRIES} tensors or settings")
            settings, count, position = reader._read_metadata(mapped, str(path))
            entries, position = reader._read_tensor_table(mapped, count, position)
            alignment = settings.get("general.alignment", DEFAULT_ALIGNMENT)
            if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
                raise ValueError(f"an alignment of {alignment}")
            begin = -(-position // alignment) * alignment
            tensors = {entry[0]: _checked(path, entry, begin, alignment, len(mapped)) for entry in entries}
            if len(tensors) < len(entries):
                raise ValueError("two tensors of one name")
    except UnsupportedModelError:
        raise
    except (ValueError, struct.error, OverflowError, MemoryError, OSError) as error:
        raise CorruptWeightsError(
            f"{path} is no GGUF file, or damaged or incomplete ({error}); delete it and download it again"
        ) from error
    return Header(settings, tensors)


def head_ranges(data: bytes) -> list[tuple[int, int]] | None:
    """The ranges of a file that `config_of` needs, from its first bytes; None if these are too few.

    Raises:
        CorruptWeightsError: it is no GGUF.
    """
    if data[:4] != b"GGUF":
        raise CorruptWeightsError("a file with the name of a GGUF file is none")
    try:
        settings, count, position = reader._read_metadata(data, "")
        entries, position = reader._read_tensor_table(data, count, position)
        alignment = int(settings.get("general.alignment", DEFAULT_ALIGNMENT))
    except (ValueError, struct.error, OverflowError, MemoryError, IndexError):
        return None
    if position > len(data):
        return None
    begin = -(-position // alignment) * alignment
    factors = [(begin + offset, math.prod(shape) * 4) for name, shape, _, offset in entries if name == ROPE_FACTORS]
    return [(0, begin), *((start, start + num_bytes) for start, num_bytes in factors)]


def _checked(path: Path, entry: tuple[Any, ...], begin: int, alignment: int, file_size: int) -> StoredTensor:
    name, shape, kind, offset = entry
    if kind not in WHOLE and kind not in KINDS:
        raise UnsupportedModelError(
            f"{path} holds tensors of GGUF's type {kind}, which swarmllm can't read: use a file of the model in one of "
            f"F32, F16, BF16, {', '.join(sorted(known for known, *_ in KINDS.values()))}"
        )
    if not 0 < len(shape) <= MOST_DIMENSIONS or 0 in shape:
        raise ValueError(f"{name[:100]!r} has the shape {shape[:9]}")
    if kind in KINDS and (len(shape) == 1 or shape[-1] % KINDS[kind][1]):  # llama.cpp keeps vectors whole
        raise ValueError(f"rows of {name[:100]!r} are no whole blocks")
    found = StoredTensor(path, name, tuple(shape), kind, begin + offset)
    if offset % alignment or found.start + found.num_bytes > file_size:
        raise ValueError(f"{name[:100]!r} is outside the file, or between its places")
    return found


@dataclass(frozen=True)
class Architecture:
    """The way in which one architecture of transformers is stored."""

    model_type: str
    model_class: str
    parts: Mapping[str, str]
    """Name within a block → transformers' name within a block; `{}` is the expert."""
    biases: frozenset[str] = frozenset()
    """Modules that may have a bias."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings besides those of all architectures: name after the architecture's → field of the config."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that llama.cpp takes for granted."""
    interleaved: bool = False
    """True if rows of queries and keys are in the order of Meta's rotation, of neighbours instead of halves."""
    raised_norms: bool = False
    """True if 1 has been added to the weights of norms."""

    def weight_names(self, stored: str, num_experts: int) -> Iterator[tuple[str, int | None]]:
        """A stored tensor's name → (transformers' name, expert) of each weight in it; nothing of an unknown one."""
        if stored in _ENDS:
            yield _ENDS[stored], None
        block = stored.split(".")
        if len(block) != 4 or block[0] != "blk" or not block[1].isdecimal() or block[2] not in self.parts:
            return
        _, block_idx, part, leaf = block
        if leaf != "weight" and (leaf != "bias" or part not in self.biases):
            return
        name = f"model.layers.{int(block_idx)}.{self.parts[part]}.{leaf}"
        for expert in range(num_experts) if "{}" in name else (None,):
            yield name.format(expert), expert


_QWEN_DENSE = {**_ATTENTION, **_FFN_NORM, **_DENSE}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", _QWEN_DENSE, biases=_QKV | _MLP | {"attn_output"}, interleaved=True
    ),
    "mixtral": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        {**_ATTENTION, **_FFN_NORM, **_MIXTRAL_EXPERTS},
        settings={**_EXPERT_SETTINGS, "expert_count": "num_local_experts"},
        interleaved=True,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _QWEN_DENSE, biases=_QKV),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**_QWEN_DENSE, **_QK_NORMS}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**_ATTENTION, **_FFN_NORM, **_EXPERTS, **_SHARED_EXPERT},
        biases=_QKV,
        settings={**_MOE_SETTINGS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        constants={"norm_topk_prob": False},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_ATTENTION, **_QK_NORMS, **_FFN_NORM, **_EXPERTS},
        settings=_MOE_SETTINGS,
        constants={"norm_topk_prob": True},
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _QWEN_DENSE, raised_norms=True),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        {**_ATTENTION, **_DENSE, **_GEMMA_NORMS},
        settings={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        raised_norms=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_ATTENTION, **_QK_NORMS, **_DENSE, **_GEMMA_NORMS},
        settings={"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"},
        raised_norms=True,
    ),
}
"""`general.architecture` → how it is stored. Mixtral calls itself llama."""


def architecture_of(header: Header) -> Architecture:
    """The way in which the model of this file is stored.

    Raises:
        UnsupportedModelError: swarmllm doesn't know its architecture.
    """
    name = header.settings.get("general.architecture")
    if name == "llama" and header.settings.get("llama.expert_count"):
        name = "mixtral"
    found = ARCHITECTURES.get(str(name))
    if found is None:
        raise UnsupportedModelError(
            f"swarmllm doesn't read the architecture {str(name)[:50]!r} from GGUF (but {', '.join(ARCHITECTURES)}): "
            "use the model's safetensors, from which servers make 8 or 4 bits"
        )
    return found


def config_of(header: Header, rope_factors: Tensor | None) -> dict[str, Any]:
    """Fields of transformers' config, its `model_type` and `dtype` among them.

    Raises:
        CorruptWeightsError: settings are missing, or can't be true.
        UnsupportedModelError: the model is of an unknown kind.
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
    """Raise CorruptWeightsError if there are others than the file has tensors of."""
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
    """The dtype of the matrices; bfloat16 for matrices in few bits."""
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


def rope_parameters(settings: MutableMapping[str, Any], factors: Tensor | None, head_dim: int) -> dict[str, Any]:
    """Take the known settings of a rotation out of `settings`; `factors` `[head_dim / 2]` divide the frequencies.

    Raises:
        UnsupportedModelError: the rotation is of an unknown kind.
    """
    theta = float(settings.pop("rope.freq_base", DEFAULT_THETA))
    kind = settings.pop("rope.scaling.type", "none")
    factor, context = settings.pop("rope.scaling.factor", None), settings.pop("rope.scaling.original_context_length", 0)
    settings.pop("rope.scaling.finetuned", None)
    if factors is not None:
        if kind != "none":
            raise _refused_rope(f"{kind} together with factors of frequencies")
        return _llama3(theta, factors, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn") or not factor or (kind == "yarn" and not context):
        raise _refused_rope(f"the scaling {kind!r}")
    found = {"rope_type": kind, "rope_theta": theta, "factor": float(factor)}
    return found if kind == "linear" else {**found, "original_max_position_embeddings": context}


def _llama3(theta: float, factors: Tensor, head_dim: int) -> dict[str, Any]:
    """Find the settings of Llama 3 that give these factors: files hold the factors only."""
    for factor in LLAMA3_FACTORS:
        found = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=found)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        usual = 1 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        if factors.shape == scaled.shape and torch.allclose(usual / scaled, factors.float(), rtol=1e-4):
            return found
    raise _refused_rope("factors of frequencies that aren't those of Llama 3.1 to 3.3")


def _refused_rope(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this GGUF file turns positions by {what}, which swarmllm doesn't read from GGUF: use the model's safetensors"
    )


class GgufView:
    """Names of weights, and which stored tensor each is, or is a part of."""

    def __init__(self, architecture: Architecture, tensors: Mapping[str, StoredTensor], config: Any) -> None:
        self._architecture = architecture
        self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        self.stored: dict[str, tuple[StoredTensor, int | None]] = {}
        """Name of a weight → (its tensor, which expert of it)."""
        for name, tensor in tensors.items():
            found = dict.fromkeys(architecture.weight_names(name, tensor.shape[0]), tensor)
            if not found and name != ROPE_FACTORS:
                raise UnsupportedModelError(
                    f"this GGUF file holds {name[:100]!r}, which swarmllm doesn't know in a model of the type "
                    f"{architecture.model_type!r}: use the model's safetensors"
                )
            self.stored |= {weight: (tensor, expert) for weight, expert in found}

    def kept_bits(self, weight: str) -> float | None:
        """Bits of a weight that may stay packed; None of another."""
        tensor, _ = self.stored[weight]
        if tensor.kind in WHOLE:
            return None
        _, weights, size = KINDS[tensor.kind]
        return size * 8 / weights

    def tensors(
        self,
        weights: Iterable[str],
        packed_for: torch.dtype | None,
        on_read: Callable[[str, str, Tensor], None] | None = None,
    ) -> dict[str, Any]:
        """Lazy weights of these names (`lazy[...]` reads), packed if possible, unless `packed_for` is None."""
        return {name: self._weight(name, packed_for, on_read) for name in weights}

    def _weight(self, name: str, packed_for: torch.dtype | None, on_read: Callable[..., None] | None) -> "GgufWeight":
        tensor, expert = self.stored[name]
        told = None if on_read is None else partial(on_read, name, tensor.name)
        return GgufWeight(tensor, expert, *self._order(name), packed_for, told)

    def _order(self, weight: str) -> tuple[int | None, float]:
        """(heads with interleaved rows, the number that has been added)."""
        tensor, _ = self.stored[weight]
        heads = self._heads.get(tensor.name.split(".")[-2]) if self._architecture.interleaved else None
        return heads, 1.0 if self._architecture.raised_norms and weight.endswith("norm.weight") else 0.0


class GgufWeight:
    """A weight that is read when it is indexed; for transformers' loader."""

    def __init__(
        self,
        tensor: StoredTensor,
        expert: int | None,
        heads: int | None,
        added: float,
        packed_for: torch.dtype | None,
        on_read: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._tensor, self._expert, self._heads, self._added = tensor, expert, heads, added
        self._packed_for = packed_for
        self._on_read = on_read

    def __getitem__(self, index: Any) -> Any:
        kind, part = self._tensor.kind, self._stored()[index].clone()
        if self._on_read is not None and index is Ellipsis:
            self._on_read(part)
        if kind in WHOLE:
            return part.float() - self._added if self._added else part
        if self._packed_for is not None and index is Ellipsis and part.ndim == 2:
            return PackedTensor(FORMS[kind](part, self._packed_for))
        weights = FORMS[kind](part.reshape(-1, part.shape[-1]), torch.float32).dequantize() - self._added
        return weights.view(*part.shape[:-1], -1)

    def get_shape(self) -> list[int]:
        shape = list(self._tensor.shape if self._expert is None else self._tensor.shape[1:])
        return [1, *shape] if self._is_vector(shape) else shape

    def get_dtype(self) -> str:
        return {torch.float16: "F16", torch.bfloat16: "BF16"}.get(WHOLE.get(self._tensor.kind, torch.float32), "F32")

    def _is_vector(self, shape: Sequence[int]) -> bool:
        """True if the tensor is a vector, and transformers' model has a matrix."""
        return _VECTOR_AS_MATRIX in self._tensor.name and len(shape) == 1

    def _stored(self) -> Tensor:
        """The stored tensor with rows in transformers' order: numbers, or bytes of blocks in the last dimension.

        The file is mapped while the tensor lives, so unused bytes of it are never read.
        """
        one = self._tensor
        mapped = np.memmap(one.path, np.uint8, "c", one.start, (one.num_bytes,))
        found = torch.from_numpy(mapped)
        if one.kind in WHOLE:
            found = found.view(WHOLE[one.kind]).view(one.shape)
        else:
            found = found.view(*one.shape[:-1], -1)
        if self._expert is not None:
            found = found[self._expert]
        if self._heads is not None:
            found = found.view(self._heads, -1, 2, *found.shape[1:]).transpose(1, 2).flatten(0, 2)
        return found[None] if self._is_vector(found.shape) else found
