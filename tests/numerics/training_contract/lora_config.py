"""Fields of LoraConfig: each is set to something that makes a difference."""

from tempfile import TemporaryDirectory
from typing import Any

import peft
from peft.tuners.lora import config
from tests.numerics.test_training_surface import IDS, lora, results, tuned
from tests.numerics.training_contract import Apart, Check, Contract, Equal, Refused
from transformers import AutoModelForCausalLM


def with_options(**options: Any) -> Check:
    """Logits and gradients in train mode with such a LoRA, its values random."""
    return lambda model: results(tuned(model, lora(**options)).train())


def equal(note: str = "", **options: Any) -> Equal:
    return Equal(with_options(**options), note)


def refused(sentence: str, because: str, **options: Any) -> Refused:
    return Refused(lambda model: peft.get_peft_model(model, lora(**options)), sentence, because)


def arrow(model: Any) -> object:
    """A choice among two saved adapters."""
    with TemporaryDirectory() as directory:
        for name in ("one", "two"):
            local = AutoModelForCausalLM.from_config(model.config)
            peft.get_peft_model(local, lora()).save_pretrained(f"{directory}/{name}")
        names = [f"{directory}/{name}" for name in ("one", "two")]
        return peft.create_arrow_model(model, names, peft.ArrowConfig(top_k=1))(input_ids=IDS)


def half_of_the_inputs(model: Any) -> object:
    """Dropout is drawn from seeds of its own, so it is compared where it does nothing; `test_adapters` has more."""
    adapted = tuned(model, lora(lora_dropout=0.5))
    assert not results(adapted.train())["logits"].equal(results(adapted.eval())["logits"])
    return results(adapted.eval())


def results_of_frozen(model: Any) -> object:
    """An adapter that is only used."""
    adapted = tuned(model, lora(inference_mode=True))
    return [name for name, p in adapted.named_parameters() if p.requires_grad], adapted(input_ids=IDS).logits


VARIANT = "a variant of LoRA, isn't known to servers"
UNKNOWN = "a variant of LoRA that servers don't know"
CHANGES = "reads base weights"
WEIGHTS = "PiSSA, OLoRA, EVA, CorDA, LoftQ, LoRA-GA and the like change base weights"
BLOCK_DIAGONAL = config.BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"], nblocks=2)
GPTQ = "of GPTQ layers, which no block shows here; without effect on others"
MEGATRON = "of Megatron's own parallel layers, which no model here has"

LORA_CONFIG: Contract = {
    "task_type": equal(task_type=peft.TaskType.CAUSAL_LM),
    "peft_type": Apart("the method's name"),
    "auto_mapping": Apart("a note of which class it was made for"),
    "peft_version": Apart("a note of the version"),
    "base_model_name_or_path": Apart("a note of the base"),
    "revision": Apart("a note of the base"),
    "inference_mode": Equal(results_of_frozen),
    "r": equal(r=3),
    "target_modules": equal(target_modules="all-linear"),
    "exclude_modules": equal(target_modules="all-linear", exclude_modules=["o_proj", "lm_head"]),
    "lora_alpha": equal(lora_alpha=3),
    "lora_dropout": Equal(half_of_the_inputs, "in train mode from seeds of its own"),
    "fan_in_fan_out": equal("peft sets it right", fan_in_fan_out=True),
    "bias": equal(bias="all"),
    "use_rslora": equal(use_rslora=True, lora_alpha=16),
    "modules_to_save": equal("inside blocks up to 16 million numbers a module", modules_to_save=["lm_head", "mlp"]),
    "init_lora_weights": equal("True, False, 'gaussian' and 'orthogonal'; " + WEIGHTS, init_lora_weights="gaussian"),
    "layers_to_transform": equal(layers_to_transform=[0, 2]),
    "layers_pattern": equal(layers_to_transform=[1], layers_pattern="layers"),
    "rank_pattern": equal(rank_pattern={"down_proj": 2}),
    "alpha_pattern": equal(alpha_pattern={r"1\.self_attn\.q_proj": 32}),
    "megatron_config": Apart(MEGATRON),
    "megatron_core": Apart(MEGATRON),
    "trainable_token_indices": equal(trainable_token_indices=[3, 7]),
    "loftq_config": refused(
        "CUDA|is not here but on servers",  # peft asks for a GPU before it looks at a weight
        "it changes base weights",
        init_lora_weights="loftq",
        loftq_config=peft.LoftQConfig(loftq_bits=4),
    ),
    "eva_config": refused(
        CHANGES, "it runs the model over data first", init_lora_weights="eva", eva_config=peft.EvaConfig()
    ),
    "corda_config": refused(
        "run `preprocess_corda` first",
        "it runs the model over data first, and changes base weights",
        init_lora_weights="corda",
        corda_config=config.CordaConfig(),
    ),
    "lora_ga_config": refused(
        CHANGES, "it changes base weights", init_lora_weights="lora_ga", lora_ga_config=config.LoraGAConfig()
    ),
    "use_dora": equal("up to the order of adding up", use_dora=True),
    "velora_config": refused(VARIANT, UNKNOWN, velora_config=config.VeloraConfig(num_groups=8)),
    "alora_invocation_tokens": refused(VARIANT, UNKNOWN, alora_invocation_tokens=[3]),
    "use_qalora": equal(GPTQ, use_qalora=True),
    "qalora_group_size": equal(GPTQ, use_qalora=True, qalora_group_size=8),
    "monteclora_config": refused(VARIANT, UNKNOWN, monteclora_config=config.MontecloraConfig()),
    "layer_replication": refused("layer_replication", "there are no other blocks", layer_replication=[(0, 4), (2, 4)]),
    "runtime_config": equal(runtime_config=peft.LoraRuntimeConfig(ephemeral_gpu_offload=True)),
    "lora_bias": equal(lora_bias=True),
    "target_parameters": refused(
        "target_parameters=", "adapters are for linear modules", target_parameters=["mlp.up_proj.weight"]
    ),
    "use_bdlora": refused(VARIANT, UNKNOWN, use_bdlora=BLOCK_DIAGONAL),
    "arrow_config": Refused(arrow, "a variant of LoRA, isn't known|can't run on servers", UNKNOWN),
    "kasa_config": refused("is not here but on servers", "it changes base weights", kasa_config=config.KasaConfig()),
    "ensure_weight_tying": equal(modules_to_save=["lm_head"], ensure_weight_tying=True),
}
