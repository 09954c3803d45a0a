"""Makes gguf_blocks.safetensors and gguf/: blocks of each kind and tiny models, written by the package gguf.

    PYTHONPATH=src python tests/numerics/data/make_gguf.py     # needs gguf

`gguf_blocks.safetensors` has bytes of each kind, and in its metadata the SHA-256 of what gguf makes of them (float32).
`gguf/` has one file for each architecture, with matrices of several kinds, and expected.json: config of the model that
it was made from, and the SHA-256 of each of its weights after gguf has quantized and dequantized it, before anything
was put into llama.cpp's order. Frozen, so that tests don't need gguf. Compared with transformers' own reader when made.
"""

import hashlib
import itertools
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarmllm.models.quantization.decoded import KINDS

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from gguf_writer import interleaved, stored_name  # noqa: E402

LARGEST = 0.3
"""Largest value of a block's weights, as models have it."""
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
HEAD_DIM = {"head_dim": 16}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False}
THETA = {"rope_type": "default", "rope_theta": 5e5}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", HEAD_DIM | {"rope_parameters": LLAMA3, "vocab_size": 288, "tie_word_embeddings": True,
               "max_position_embeddings": 16384}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": THETA}),
    "qwen2": ("Qwen2", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}}),
    "qwen3": ("Qwen3", HEAD_DIM | {"rope_parameters": THETA, "tie_word_embeddings": True}),
    "qwen2moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 64}),
    "qwen3moe": ("Qwen3Moe", HEAD_DIM | MOE | {"norm_topk_prob": True, "rope_parameters": THETA}),
    "gemma": ("Gemma", HEAD_DIM),
    "gemma2": ("Gemma2", HEAD_DIM | {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 40.0}),
    "gemma3": ("Gemma3", HEAD_DIM | {"sliding_window": 8, "query_pre_attn_scalar": 16, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}}),
}  # fmt: skip
"""File → (transformers' class, config)."""
ARCHITECTURES = {"mixtral": "llama", "llama-biases": "llama"}
Kind = gguf.GGMLQuantizationType


def digest(weight: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(weight, dtype=np.float32).tobytes()).hexdigest()


def blocks(kind: int) -> tuple[torch.Tensor, str]:
    """Random bytes that are weights of the usual size: `[8, bytes]` of rows of 512 or 1024."""
    _, weights, size = KINDS[kind]
    random, found = np.random.default_rng(kind), []
    while len(found) < 8 * (16 if weights == 32 else 4):
        for raw in random.integers(0, 256, (4096, size), dtype=np.uint8):
            with np.errstate(all="ignore"):
                largest = np.abs(gguf.quants.dequantize(raw[None], Kind(kind))).max()
            if LARGEST / 4 < largest < LARGEST:
                found.append(raw)
    rows = np.stack(found[: 8 * (16 if weights == 32 else 4)]).reshape(8, -1)
    return torch.from_numpy(rows), digest(gguf.quants.dequantize(rows, Kind(kind)))


def save_blocks() -> None:
    made = {str(kind): blocks(kind) for kind in sorted(KINDS)}
    save_file({kind: rows for kind, (rows, _) in made.items()}, HERE / "gguf_blocks.safetensors",
              {kind: sha for kind, (_, sha) in made.items()})  # fmt: skip


def random_model(name: str) -> PreTrainedModel:
    family, settings = MODELS[name]
    suffix = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + suffix)(**SIZES | settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def write(name: str, expected: dict) -> None:
    family, settings = MODELS[name]
    architecture = ARCHITECTURES.get(name, name)
    model = random_model(name)
    config = model.config
    writer = gguf.GGUFWriter(HERE / f"gguf/{name}.gguf", architecture)
    describe(writer, config, family)
    directory = Path("/tmp/make_gguf") / name
    model.save_pretrained(directory)
    weights = {key: value.numpy() for key, value in safetensors_of(directory).items()}
    kinds = itertools.cycle((Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.F16, Kind.Q4_1, Kind.BF16, Kind.Q5_0))
    read, merged = {}, {}
    for key, of_model in weights.items():
        stored = stored_name(key, family)
        raised = np.float32(family.startswith("Gemma") and key.endswith("norm.weight"))
        experts = merged.setdefault(stored, [])
        kind = experts[0][1] if experts else next(kinds)
        if of_model.ndim == 1 or stored.endswith("ffn_gate_inp_shexp.weight"):
            kind = Kind.F32
        weight = of_model + raised
        read[key] = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind) - raised
        if "attn_q." in stored or "attn_k." in stored:
            heads = config.num_attention_heads if "attn_q." in stored else config.num_key_value_heads
            weight = interleaved(weight, heads) if architecture == "llama" else weight
        experts.append((weight[0] if "ffn_gate_inp_shexp" in stored else weight, kind))
    for stored, parts in merged.items():
        weight, kind = parts[0]
        if "_exps" in stored:
            weight = np.stack([one for one, _ in parts])
        packed = gguf.quants.quantize(weight, kind)
        writer.add_tensor(stored, packed, raw_dtype=kind)
    if "llama3" in str(settings):
        writer.add_tensor("rope_freqs.weight", rope_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    digests = {key: digest(weight) for key, weight in read.items()}
    expected[name] = {"config": json.loads((directory / "config.json").read_text()), "weights": digests}
    if family not in ("Mixtral", "Gemma"):  # which transformers doesn't read
        save_file({key: torch.from_numpy(np.ascontiguousarray(weight, np.float32)) for key, weight in read.items()},
                  directory / "model.safetensors", {"format": "pt"})  # fmt: skip
        compare(name, directory)


def safetensors_of(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def rope_factors(config) -> np.ndarray:
    """As llama.cpp's converter computes them from a config."""
    rope, found = config.rope_parameters, []
    for frequency in 1 / rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim):
        length, before = 2 * np.pi / frequency, rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = (before / length - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        found.append(1 if length < before / high else rope["factor"] if length > before / low else between)
    return np.array(found, dtype=np.float32)


def describe(writer: gguf.GGUFWriter, config, family: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if rope["rope_theta"] != 1e4:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family == "Llama":
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(config.vocab_size)
    if family in ("Gemma2", "Gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if family == "Gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    describe_tokenizer(writer, config)


def describe_tokenizer(writer: gguf.GGUFWriter, config) -> None:
    """Bytes, and what they are joined to where there is room."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelled = list(bytes_to_unicode().values())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    tokens = ["<pad>", "<s>", "</s>", "<turn>", *spelled, *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"unused{index}" for index in range(config.vocab_size)]
    kinds = [3, 3, 3, 3, *[1] * (len(tokens) - 4)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens[: config.vocab_size])
    writer.add_token_types(kinds[: config.vocab_size])
    writer.add_token_merges(merges if config.vocab_size > 256 else [])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)


def compare(name: str, directory: Path) -> None:
    """The model that transformers reads from the same weights without packing."""
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    try:
        model = AutoModelForCausalLM.from_pretrained(HERE / "gguf", gguf_file=f"{name}.gguf", dtype=torch.float32)
    except RuntimeError as error:
        print(f"{name}: transformers can't read it ({error})")
        return
    for key, weight in model.state_dict().items():
        if not torch.equal(weight, plain[key]):
            print(f"{name}: transformers reads another {key}")
    wanted, config = (one.to_diff_dict() for one in (AutoConfig.from_pretrained(directory), model.config))
    for key in sorted(wanted.keys() | config.keys()):
        if wanted.get(key) != config.get(key):
            print(f"{name}: transformers reads {key} = {config.get(key)} instead of {wanted.get(key)}")


if __name__ == "__main__":
    save_blocks()
    (HERE / "gguf").mkdir(exist_ok=True)
    everything: dict = {}
    for each in MODELS:
        write(each, everything)
    (HERE / "gguf/expected.json").write_text(json.dumps(everything, indent=0))
