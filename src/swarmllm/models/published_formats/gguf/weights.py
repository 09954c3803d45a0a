"""The tensors of GGUF files as weights of transformers' names: those in blocks stay packed where that is wanted.

llama.cpp stores some weights otherwise than transformers: rows of queries and keys in another order, norms with 1
added, experts of a block in one tensor. All of that is undone here, for packed weights too: blocks never span two rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmllm.errors import UnsupportedModelError
from swarmllm.models.published_formats.gguf.architectures import Architecture
from swarmllm.models.published_formats.gguf.header import StoredTensor
from swarmllm.models.published_formats.logical_view import PackedTensor
from swarmllm.models.quantization.gguf_blocks import FORMS, KINDS, WHOLE

ROPE_FACTORS = "rope_freqs.weight"
"""No weight of transformers: its config says it (`rope`)."""
_VECTOR_AS_MATRIX = ".ffn_gate_inp_shexp."


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
        """Lazy weights of those names (`lazy[...]` reads), packed where that can be, unless None."""
        return {name: self._weight(name, packed_for, on_read) for name in weights}

    def _weight(self, name: str, packed_for: torch.dtype | None, on_read: Callable[..., None] | None) -> "GgufWeight":
        tensor, expert = self.stored[name]
        told = None if on_read is None else partial(on_read, name, tensor.name)
        return GgufWeight(tensor, expert, *self._order(name), packed_for, told)

    def _order(self, weight: str) -> tuple[int | None, float]:
        """(heads whose rows are interleaved, what has been added)."""
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
        """Whether it is one, of which transformers' model has a matrix."""
        return _VECTOR_AS_MATRIX in self._tensor.name and len(shape) == 1

    def _stored(self) -> Tensor:
        """As it is in the file, with rows in transformers' order: numbers, or bytes of blocks in the last dimension.

        The file is mapped while the tensor lives, so what isn't wanted of it is never read.
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
