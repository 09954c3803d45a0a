"""A server of a checkpoint that is published in 4 bits takes about a third of the memory of one in bfloat16."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from swarm_models import prompt, save_llama
from torch import Tensor
from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig, PreTrainedConfig

from swarmllm import AutoDistributedModel, LocalSwarm
from swarmllm.models.architecture import blocks_class
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.skeleton import on_meta

MOST = 0.35
LEAST = 400_000_000
"""Bytes of blocks in bfloat16: what else differs between servers, such as workspaces, is little beside them."""
SCALE = 0.01
_SIZES: dict[str, Any] = {"vocab_size": 128, "max_position_embeddings": 512, "eos_token_id": None}
Parts = dict[str, Tensor]


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def awq(shape: torch.Size) -> Parts:
    rows, columns = shape
    zeros = torch.full((columns // 128, rows // 8), 0x77777777, dtype=torch.int32)
    scales = torch.full((columns // 128, rows), SCALE, dtype=torch.float16)
    return {".qweight": _bytes(columns, rows // 2).view(torch.int32), ".qzeros": zeros, ".scales": scales}


def int4(shape: torch.Size) -> Parts:
    rows, columns = shape
    packed, scale = _bytes(rows, columns // 2).view(torch.int32), torch.full((rows, columns // 32), SCALE)
    return {".weight_packed": packed, ".weight_scale": scale.bfloat16(), ".weight_shape": torch.tensor(shape)}


def mxfp4(shape: torch.Size) -> Parts:
    experts, columns, rows = shape
    scales = torch.full((experts, rows, columns // 32), 120, dtype=torch.uint8)
    return {"_blocks": _bytes(experts, rows, columns // 32, 16), "_scales": scales}


Kind = tuple[PreTrainedConfig, Callable[[torch.Size], Parts], Callable[[str], bool], dict[str, Any]]
KINDS: dict[str, Kind] = {
    "awq": (
        LlamaConfig(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=12, num_attention_heads=32,
            num_key_value_heads=8, **_SIZES,
        ), awq, lambda name: name.endswith("proj.weight"),
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    ),
    "mxfp4": (
        GptOssConfig(
            hidden_size=1024, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=16,
            num_key_value_heads=4, head_dim=64, num_local_experts=16, num_experts_per_tok=2, sliding_window=128,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **_SIZES,
        ), mxfp4, lambda name: name.endswith(("gate_up_proj", "down_proj")), {"quant_method": "mxfp4"},
    ),
    "int4": (
        DeepseekV3Config(
            hidden_size=1024, intermediate_size=1024, moe_intermediate_size=512, num_hidden_layers=12,
            num_attention_heads=8, num_key_value_heads=8, n_routed_experts=32, num_experts_per_tok=2, n_group=1,
            topk_group=1, n_shared_experts=1, first_k_dense_replace=0, q_lora_rank=256, kv_lora_rank=128,
            qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64, **_SIZES,
        ), int4, lambda name: ".experts." in name,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}},
    ),
}  # fmt: skip


def save(kind: str, directory: Path) -> tuple[Path, Path]:
    """A checkpoint with random codes, and one of the same shapes in bfloat16."""
    config, store, is_stored, settings = KINDS[kind]
    config.dtype = torch.bfloat16
    shapes = {name: tensor.shape for name, tensor in on_meta(blocks_class(config), config).state_dict().items()}
    if kind == "int4":
        shapes = dict(_one_by_one(shapes))
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    plain, stored = ({}, {})
    for name, shape in shapes.items():
        plain[name] = noise.repeat(-(-shape.numel() // len(noise)))[: shape.numel()].view(shape)
        parts = store(shape) if is_stored(name) else {".weight" if name.endswith(".weight") else "": plain[name]}
        stored |= {name.removesuffix(".weight") + part: tensor for part, tensor in parts.items()}
    for path, tensors, more in ((directory / "plain", plain, {}), (directory / "published", stored, settings)):
        config.save_pretrained(path)
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "model.safetensors")
        if more:
            about = json.loads((path / "config.json").read_text()) | {"quantization_config": more}
            (path / "config.json").write_text(json.dumps(about))
    return directory / "published", directory / "plain"


def _one_by_one(shapes: dict[str, torch.Size]) -> Iterator[tuple[str, torch.Size]]:
    """Experts as such checkpoints have them: each matrix by itself."""
    for name, shape in shapes.items():
        place, _, which = name.rpartition(".")
        if not place.endswith(".experts"):
            yield name, shape
            continue
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else (which,)
        for expert in range(shape[0]):
            for part in parts:
                yield f"{place}.{expert}.{part}.weight", torch.Size((shape[1] // len(parts), shape[2]))


def memory_of_a_server(path: Path, quant_type: str) -> int:
    """Bytes that it and its daemon share with nobody, when it has computed something."""
    blocks = (0, open_checkpoint(str(path)).num_blocks)
    options = {"dtype": "bfloat16", "quant_type": quant_type, "num_threads": 1, "attn_cache_tokens": 256}
    with (
        LocalSwarm(path, spans=[blocks], **options) as swarm,
        AutoDistributedModel.from_pretrained(str(path), initial_peers=swarm.initial_peers) as model,
    ):
        assert model.generate(prompt(1, 20), max_new_tokens=2, do_sample=False).shape == (1, 22)
        process = psutil.Process(swarm.servers[0].pid)
        family = [process, *process.children(recursive=True)]
        return sum(member.memory_full_info().uss for member in family)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_third(kind: str, tmp_path: Path) -> None:
    """Beyond a server with next to no weights, which is as much code, as many threads and a daemon."""
    published, plain = save(kind, tmp_path)
    nothing = memory_of_a_server(save_llama(tmp_path / "thin", num_blocks=2), "none")
    few_bits, whole = memory_of_a_server(published, "auto") - nothing, memory_of_a_server(plain, "none") - nothing
    assert whole > LEAST
    assert few_bits <= MOST * whole, f"{few_bits / whole:.3f}"
