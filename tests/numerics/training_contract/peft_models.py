"""Public names of PeftModel and PeftMixedModel, on a model with a LoRA."""

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
from tests.numerics.test_training_surface import IDS, lora, results, tuned
from tests.numerics.training_contract import Apart, Check, Contract, Equal, Refused, logits
from torch import Tensor

LOHA = peft.LoHaConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"])


def adapted(use: Callable[[Any], object]) -> Check:
    """With a LoRA whose values are random."""
    return lambda model: use(tuned(model, lora()))


def two(use: Callable[[Any], object]) -> Check:
    """With a second one that is not in use."""

    def check(model: Any) -> object:
        one = tuned(model, lora())
        tuned(one, lora(r=2), "other", seed=9)
        return use(one)

    return check


def mixed(use: Callable[[Any], object]) -> Check:
    """With a LoRA and a LoHa, on other modules."""

    def check(model: Any) -> object:
        torch.manual_seed(5)
        both = peft.get_peft_model(model, lora(init_lora_weights=False), mixed=True)
        both.add_adapter("other", LOHA)
        return use(both)

    return check


def after(change: Callable[[Any], object]) -> Callable[[Any], object]:
    """The model's outputs then, and its trained parameters."""

    def use(model: Any) -> object:
        change(model)
        return logits(model), sorted(name for name, p in model.named_parameters() if p.requires_grad)

    return use


def without(model: Any) -> object:
    with model.disable_adapter():
        inside = logits(model)
    return inside, logits(model)


def said(model: Any) -> str:
    with redirect_stdout(StringIO()) as output:
        model.print_trainable_parameters()
    return output.getvalue()


def saved_and_loaded(model: Any) -> object:
    """By this model and again into it."""
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        model.load_adapter(f"{directory}/other" if "other" in model.peft_config else directory, "again")
        model.set_adapter("again")
        return logits(model)


def opened(model: Any) -> object:
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        base = model.unload()
        return logits(peft.PeftModel.from_pretrained(base, directory))


def opened_mixed(model: Any) -> object:
    with TemporaryDirectory() as directory:
        tuned(model, lora()).save_pretrained(directory)
        return logits(
            peft.PeftMixedModel.from_pretrained(model.unload() if hasattr(model, "unload") else model, directory)
        )


def prompt(use: Callable[[Any], object]) -> Check:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return lambda model: use(tuned(model, config))


def generated(model: Any) -> Tensor:
    found: Tensor = model.generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, do_sample=False
    )
    return found


def trains(model: Any) -> object:
    model.set_requires_grad("default", requires_grad=False)
    return sorted(name for name, p in model.named_parameters() if p.requires_grad)


HUB = Apart("it uploads what save_pretrained writes")
CARD = Apart("it writes a text")

PEFT_MODEL: Contract = {
    "active_adapters": Equal(two(lambda m: m.active_adapters)),
    "active_peft_config": Equal(two(lambda m: m.active_peft_config.r)),
    "add_adapter": Equal(two(after(lambda m: m.set_adapter("other")))),
    "base_model_torch_dtype": Equal(adapted(lambda m: m.base_model_torch_dtype)),
    "create_or_update_model_card": CARD,
    "delete_adapter": Equal(two(after(lambda m: (m.delete_adapter("default"), m.set_adapter("other"))))),
    "disable_adapter": Equal(adapted(without)),
    "forward": Equal(adapted(results), "also with `adapter_names`, a name for each row"),
    "from_pretrained": Equal(adapted(opened)),
    "generate": Equal(adapted(generated)),
    "get_base_model": Equal(adapted(lambda m: type(m.get_base_model()).__name__)),
    "get_layer_status": Equal(
        two(lambda m: [(s.name, s.active_adapters, s.merged_adapters) for s in m.get_layer_status()])
    ),
    "get_model_status": Equal(two(lambda m: {k: v for k, v in vars(m.get_model_status()).items() if k != "devices"})),
    "get_nb_trainable_parameters": Equal(adapted(lambda m: m.get_nb_trainable_parameters())),
    "get_prompt": Equal(prompt(lambda m: m.get_prompt(batch_size=2))),
    "get_prompt_embedding_to_save": Equal(prompt(lambda m: m.get_prompt_embedding_to_save("default"))),
    "has_active_enabled_adapter": Equal(adapted(lambda m: m.has_active_enabled_adapter)),
    "load_adapter": Equal(adapted(saved_and_loaded)),
    "modules_to_save": Equal(lambda model: sorted(tuned(model, lora(modules_to_save=["lm_head"])).modules_to_save)),
    "peft_config": Equal(adapted(lambda m: sorted(m.peft_config))),
    "prepare_model_for_gradient_checkpointing": Equal(
        adapted(lambda m: (m._prepare_model_for_gradient_checkpointing(m.get_base_model()), results(m)))
    ),
    "print_trainable_parameters": Equal(adapted(said), "the whole model is counted"),
    "push_to_hub": HUB,
    "save_pretrained": Equal(two(saved_and_loaded)),
    "set_adapter": Equal(two(after(lambda m: m.set_adapter("other")))),
    "set_requires_grad": Equal(adapted(trains)),
    "supports_lora_conversion": Equal(adapted(lambda m: m.supports_lora_conversion())),
}


def merged(model: Any) -> object:
    return model.merge_and_unload()


PEFT_MIXED_MODEL: Contract = {
    "active_adapter": Equal(mixed(lambda m: m.active_adapter)),
    "active_adapters": Equal(mixed(lambda m: list(m.active_adapters))),
    "add_adapter": Equal(
        mixed(after(lambda m: m.set_adapter(["default", "other"]))), "two methods on one module: refused"
    ),
    "create_or_update_model_card": CARD,
    "delete_adapter": Equal(mixed(after(lambda m: m.delete_adapter("other")))),
    "disable_adapter": Equal(mixed(without)),
    "forward": Equal(mixed(results)),
    "from_pretrained": Equal(opened_mixed),
    "generate": Equal(mixed(generated)),
    "get_layer_status": Equal(mixed(lambda m: [(s.name, s.active_adapters) for s in m.get_layer_status()])),
    "get_model_status": Equal(mixed(lambda m: m.get_model_status().num_adapter_layers)),
    "get_nb_trainable_parameters": Equal(mixed(lambda m: m.get_nb_trainable_parameters())),
    "load_adapter": Equal(mixed(lambda m: m.load_adapter("nowhere", "again"))),
    "merge_and_unload": Refused(mixed(merged), "swarmllm adapters merge", "the weights are the servers'"),
    "peft_config": Equal(mixed(lambda m: sorted(m.peft_config))),
    "print_trainable_parameters": Equal(mixed(said)),
    "push_to_hub": HUB,
    "save_pretrained": Equal(mixed(lambda m: m.save_pretrained("nowhere"))),
    "set_adapter": Equal(mixed(after(lambda m: m.set_adapter("other")))),
    "set_modules_to_save": Equal(mixed(after(lambda m: m.set_modules_to_save(m.peft_config["default"], "default")))),
    "unload": Equal(mixed(lambda m: logits(m.unload()))),
}
