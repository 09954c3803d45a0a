"""The models that are read from GGUF: how llama.cpp calls their weights and settings, and what it does to weights.

An entry is only right if nothing is left out: files with other tensors or settings are refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Architecture:
    """How one architecture of transformers is stored."""

    model_type: str
    model_class: str
    parts: Mapping[str, str]
    """Name within a block → transformers' name within a block; `{}` is the expert."""
    biases: frozenset[str] = frozenset()
    """Those parts that may have a bias."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Beyond those of all: name after the architecture's → field of the config."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that llama.cpp takes for granted."""
    interleaved: bool = False
    """Whether rows of queries and keys are in the order of Meta's rotation, of neighbours instead of halves."""
    raised_norms: bool = False
    """Whether 1 has been added to the weights of norms."""

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
