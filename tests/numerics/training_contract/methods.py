"""Methods of peft: what each computes inside the blocks, by its PeftType; variants of LoRA are in `lora_config`."""

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import peft
import torch
from tests.numerics.test_training_surface import IDS, lora
from tests.numerics.training_contract import Contract, Equal, Refused
from torch import Tensor
from transformers import AutoModelForCausalLM

SQUARE = ["q_proj", "v_proj"]
OTHER_LAYER = "can't run on servers"


def trained(method: str, inputs: dict[str, Any], **options: Any) -> Callable[[Any], dict[str, Tensor]]:
    """Logits and gradients of a model with such an adapter, its values random, those of the same seed the same."""

    def check(model: Any) -> dict[str, Tensor]:
        torch.manual_seed(7)
        cls = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(method)]
        adapted = peft.get_peft_model(model, cls(task_type="CAUSAL_LM", **options)).train()
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and parameter.numel():
                generator = torch.Generator().manual_seed(crc32(name.encode()))
                parameter.data += torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.03
        output = adapted(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS, **inputs)
        output.loss.backward()
        found = {name: p.grad.clone() for name, p in adapted.named_parameters() if p.grad is not None}
        assert found
        return {"logits": output.logits.detach(), **found}

    return check


def equal(method: str, note: str = "", inputs: Any = None, **options: Any) -> Equal:
    return Equal(trained(method, inputs or {}, **({"target_modules": SQUARE} | options)), note)


def prompts(method: str, note: str = "", inputs: Any = None, **options: Any) -> Equal:
    return Equal(trained(method, inputs or {}, **options), note)


def refused(method: str, because: str, sentence: str = OTHER_LAYER, **options: Any) -> Refused:
    return Refused(trained(method, {}, **({"target_modules": SQUARE} | options)), sentence, because)


def mixture(model: Any) -> object:
    """X-LoRA over one saved LoRA."""
    with TemporaryDirectory() as directory:
        peft.get_peft_model(AutoModelForCausalLM.from_config(model.config), lora()).save_pretrained(directory)
        model.config.use_cache = False
        config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=64, adapters={"0": directory})
        return peft.get_peft_model(model, config)(input_ids=IDS).logits


TRAVELS = "travels as a LoRA"
WHOLE = "each module's whole change travels after each step, at most 16 million numbers; without dropout"
UNKNOWN = "servers don't know it"
READS = "it computes with base weights in each forward"
RANDOM = "it draws random numbers in each forward"

METHODS: Contract = {
    "LORA": equal("LORA", "its options are below"),
    "ADALORA": equal("ADALORA", TRAVELS, total_step=10),
    "ADAMSS": refused("ADAMSS", UNKNOWN, "scikit-learn is required|can't run on servers"),
    "ADAPTION_PROMPT": Refused(
        trained("ADAPTION_PROMPT", {}, adapter_layers=2, adapter_len=3),
        "self_attn of block 2 can't be changed here",
        "it puts another attention into blocks",
    ),
    "BEFT": equal("BEFT", TRAVELS),
    "BOFT": refused("BOFT", "servers don't know it; OFT they do"),
    "C3A": refused("C3A", UNKNOWN, block_size=8),
    "CARTRIDGE": prompts("CARTRIDGE", num_virtual_tokens=3),
    "CPT": prompts(
        "CPT",
        inputs={"input_type_mask": torch.ones_like(IDS)},
        cpt_token_ids=[3, 4, 5],
        cpt_mask=[1, 1, 1],
        cpt_tokens_type_mask=[1, 2, 4],
    ),
    "DEFT": refused("DEFT", UNKNOWN),
    "DELORA": equal("DELORA", TRAVELS),
    "FOURIERFT": equal("FOURIERFT", WHOLE),
    "FROD": refused("FROD", READS),
    "GLORA": refused("GLORA", "it takes plain linear modules alone", "GLoRA does not support this layer type"),
    "GRALORA": equal("GRALORA", WHOLE),
    "HIRA": refused("HIRA", READS),
    "HRA": refused("HRA", "servers don't know it; OFT they do"),
    "IA3": equal("IA3", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LILY": refused("LILY", "what it adds depends on its inputs"),
    "LN_TUNING": prompts("LN_TUNING", target_modules=["input_layernorm", "norm"]),
    "LOHA": equal("LOHA", "without `rank_dropout` and `module_dropout`"),
    "LOKR": equal("LOKR", "without `rank_dropout` and `module_dropout`", r=2),
    "MISS": equal("MISS", TRAVELS + "; without `init_weights='bat'`"),
    "MULTITASK_PROMPT_TUNING": prompts(
        "MULTITASK_PROMPT_TUNING", inputs={"task_ids": torch.tensor([0, 1, 0])}, num_virtual_tokens=3, num_tasks=2
    ),
    "OFT": equal("OFT", "without `module_dropout`", oft_block_size=8),
    "OSF": refused("OSF", UNKNOWN),
    "PEANUT": refused("PEANUT", UNKNOWN),
    "POLY": refused("POLY", "each row of a batch has its own mixture"),
    "PREFIX_TUNING": prompts("PREFIX_TUNING", num_virtual_tokens=3),
    "PROMPT_TUNING": prompts("PROMPT_TUNING", num_virtual_tokens=3),
    "PSOFT": refused("PSOFT", UNKNOWN),
    "PVERA": refused("PVERA", RANDOM),
    "P_TUNING": prompts("P_TUNING", num_virtual_tokens=3),
    "RANDLORA": equal("RANDLORA", WHOLE),
    "ROAD": refused("ROAD", UNKNOWN, group_size=8),
    "SHADOW": refused("SHADOW", "it runs hooks inside blocks", "no hook can run in"),
    "SHIRA": equal("SHIRA", WHOLE, r=4),
    "SUPERTUNING": refused("SUPERTUNING", READS),
    "TINYLORA": equal("TINYLORA", TRAVELS),
    "TRAINABLE_TOKENS": prompts("TRAINABLE_TOKENS", token_indices=[3, 7]),
    "UNILORA": equal("UNILORA", TRAVELS),
    "VBLORA": equal("VBLORA", TRAVELS, vector_length=8, num_vectors=16, r=2),
    "VERA": equal("VERA", TRAVELS, r=4),
    "WAVEFT": equal("WAVEFT", WHOLE, n_frequency=50),
    "XLORA": Refused(mixture, "no hook can run in|can't run on servers", "what it adds depends on its inputs"),
}
