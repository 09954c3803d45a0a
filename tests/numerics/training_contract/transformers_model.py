"""Public names of PreTrainedModel that nn.Module hasn't got, or has otherwise."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tests.numerics.test_training_surface import IDS, load_local, lora, results
from tests.numerics.training_contract import Apart, Check, Contract, Equal, logits
from torch import nn
from transformers import CompileConfig

PLANS = Apart("the swarm is what the model is spread over")
CLASS = Apart("a fact about the class, which is the same one")
LOADING = Apart("a step of loading, which is over")


def same(name: str) -> Equal:
    """A property, or what a method without arguments answers."""

    def check(model: Any) -> object:
        found = getattr(model, name)
        return found() if callable(found) and not isinstance(found, type | nn.Module) else found

    return Equal(check)


def then(change: Callable[[Any], object], note: str = "") -> Equal:
    """The model's outputs and gradients after a change."""

    def check(model: Any) -> object:
        change(model)
        return results(model)

    return Equal(check, note)


def with_adapter(use: Callable[[Any], object]) -> Check:
    """With a LoRA that transformers has put in, its values random."""

    def check(model: Any) -> object:
        torch.manual_seed(5)
        model.add_adapter(lora(init_lora_weights=False))
        return use(model), logits(model)

    return check


def two(use: Callable[[Any], object]) -> Check:
    def both(model: Any) -> object:
        model.add_adapter(lora(r=2, init_lora_weights=False), "other")
        return use(model)

    return with_adapter(both)


def saved(model: Any) -> object:
    """Trained, saved, and opened again: by `load_trained` where the blocks aren't here."""
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
        expected = logits(model)
        with TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            if hasattr(model, "load_trained"):
                model.model.norm.weight.zero_()
                model.load_trained(directory)
                again = model
            else:
                again = load_local(Path(directory))
        assert torch.equal(logits(again), expected)
    return expected


def loaded_adapter(model: Any) -> object:
    torch.manual_seed(5)
    model.add_adapter(lora(init_lora_weights=False))
    with TemporaryDirectory() as directory:
        torch.save(model.get_adapter_state_dict(), f"{directory}/adapter_model.bin")
        state = model.get_adapter_state_dict()
        model.load_adapter(peft_config=lora(), adapter_state_dict=state, adapter_name="again")
    model.set_adapter("again")
    return logits(model)


def inputs_want_gradients(model: Any) -> object:
    model.requires_grad_(False)
    model.enable_input_require_grads()
    with_them = model(IDS, use_cache=False).logits.requires_grad
    model.disable_input_require_grads()
    return with_them, model(IDS, use_cache=False).logits.requires_grad


def reduced(dtype: torch.dtype, change: Callable[[Any], object]) -> Check:
    """Converted here, and its blocks computed as the servers have them."""

    def check(model: Any) -> object:
        change(model)
        assert logits(model).dtype == dtype
        return model.dtype, model.get_input_embeddings().weight

    return check


def head_of(model: Any) -> Any:
    return model.get_output_embeddings()


def other_embeddings(model: Any) -> None:
    torch.manual_seed(2)
    model.set_input_embeddings(nn.Embedding(*model.get_input_embeddings().weight.shape))


def other_head(model: Any) -> None:
    torch.manual_seed(2)
    model.set_output_embeddings(nn.Linear(*reversed(head_of(model).weight.shape), bias=False))


def compiled(model: Any) -> object:
    config = CompileConfig(backend="eager", fullgraph=False)
    with torch.no_grad():
        return model.get_compiled_call(config)(input_ids=IDS, use_cache=False).logits


PRE_TRAINED_MODEL: Contract = {
    "activation_checkpointing_disable": then(
        lambda m: (m.activation_checkpointing_enable(), m.activation_checkpointing_disable())
    ),
    "activation_checkpointing_enable": then(
        lambda m: m.train().activation_checkpointing_enable(), "servers decide for themselves what they keep"
    ),
    "active_adapters": Equal(two(lambda m: m.active_adapters())),
    "add_adapter": Equal(with_adapter(results)),
    "add_model_tags": Apart("a text for the card"),
    "barrier_after_gathered_checkpoint_save": PLANS,
    "base_model": same("base_model"),
    "base_model_prefix": same("base_model_prefix"),
    "can_generate": same("can_generate"),
    "can_record_outputs": CLASS,
    "cuda": Apart("it moves what is here"),
    "delete_adapter": Equal(two(lambda m: (m.delete_adapter("other"), m.set_adapter("default")))),
    "dequantize": same("dequantize"),
    "device": same("device"),
    "disable_adapters": Equal(with_adapter(lambda m: m.disable_adapters())),
    "disable_input_require_grads": Equal(inputs_want_gradients),
    "dtype": same("dtype"),
    "dummy_inputs": same("dummy_inputs"),
    "enable_adapters": Equal(with_adapter(lambda m: (m.disable_adapters(), m.enable_adapters()))),
    "enable_input_require_grads": Equal(inputs_want_gradients),
    "enable_peft_hotswap": then(lambda m: m.enable_peft_hotswap(8)),
    "ep_plan": PLANS,
    "eval": then(lambda m: m.train().eval()),
    "float": Equal(reduced(torch.float32, lambda m: m.float())),
    "from_pretrained": Apart("the Auto classes open a model, and say which arguments they can't honour"),
    "fsdp_plan": PLANS,
    "fsdp_size": PLANS,
    "gather_sharded_state_dict_for_save": PLANS,
    "generation_config_class": CLASS,
    "get_adapter_state_dict": Equal(with_adapter(lambda m: m.get_adapter_state_dict())),
    "get_compiled_call": Equal(compiled),
    "get_correct_attn_implementation": Equal(lambda m: m.get_correct_attn_implementation("sdpa")),
    "get_correct_experts_implementation": Equal(lambda m: m.get_correct_experts_implementation(None)),
    "get_decoder": same("get_decoder"),
    "get_encoder": same("get_encoder"),
    "get_expanded_tied_weights_keys": same("get_expanded_tied_weights_keys"),
    "get_experts_implementation": same("get_experts_implementation"),
    "get_init_context": LOADING,
    "get_input_embeddings": Equal(lambda m: m.get_input_embeddings().weight),
    "get_memory_footprint": Apart("it says what is in this process's memory"),
    "get_output_embeddings": Equal(lambda m: m.get_output_embeddings().weight),
    "get_parameter_or_buffer": Equal(lambda m: m.get_parameter_or_buffer("model.norm.weight")),
    "get_position_embeddings": same("get_position_embeddings"),
    "gradient_checkpointing_disable": then(
        lambda m: (m.gradient_checkpointing_enable(), m.gradient_checkpointing_disable())
    ),
    "gradient_checkpointing_enable": then(lambda m: m.train().gradient_checkpointing_enable()),
    "half": Equal(reduced(torch.float16, lambda m: m.half()), "of what is here; servers have a dtype of their own"),
    "init_parallel_plans": PLANS,
    "init_weights": LOADING,
    "initialize_weights": LOADING,
    "input_modalities": CLASS,
    "is_activation_checkpointing": Equal(
        lambda m: (m.activation_checkpointing_enable(), bool(m.is_activation_checkpointing))[1]
    ),
    "is_backend_compatible": CLASS,
    "is_custom_code": CLASS,
    "is_distributed_loading_by_transformers": PLANS,
    "is_gradient_checkpointing": Equal(
        lambda m: (m.gradient_checkpointing_enable(), bool(m.is_gradient_checkpointing))[1]
    ),
    "is_remote_code": CLASS,
    "load_adapter": Equal(loaded_adapter),
    "loss_function": Equal(lambda m: m.loss_function(logits(m), IDS, vocab_size=m.config.vocab_size)),
    "main_input_name": same("main_input_name"),
    "mark_tied_weights_as_initialized": LOADING,
    "maybe_distribute_model": PLANS,
    "named_non_persistent_buffers": Equal(lambda m: [n for n, _ in m.model.rotary_emb.named_buffers()]),
    "num_parameters": same("num_parameters"),
    "post_init": LOADING,
    "pp_plan": PLANS,
    "prepare_distribute_model": PLANS,
    "push_to_hub": Apart("it uploads what save_pretrained writes"),
    "register_for_auto_class": CLASS,
    "resize_position_embeddings": Equal(lambda m: m.resize_position_embeddings(16)),
    "resize_token_embeddings": then(lambda m: m.resize_token_embeddings(160, mean_resizing=False)),
    "retrieve_modules_from_names": Equal(lambda m: len(m.retrieve_modules_from_names(["model.norm.weight"]))),
    "save_distributed_checkpoint": PLANS,
    "save_pretrained": Equal(saved, "what is here; `load_trained` opens it"),
    "set_adapter": Equal(two(lambda m: m.set_adapter("default"))),
    "set_attn_implementation": then(lambda m: m.set_attn_implementation("eager")),
    "set_decoder": then(lambda m: m.set_decoder(m.get_decoder())),
    "set_encoder": then(lambda m: m.set_encoder(m.get_encoder())),
    "set_experts_implementation": then(lambda m: m.set_experts_implementation("eager")),
    "set_input_embeddings": then(other_embeddings),
    "set_output_embeddings": then(other_head),
    "set_use_kernels": Equal(lambda m: m.set_use_kernels(False)),
    "should_save_on_this_rank": PLANS,
    "supports_context_parallel": PLANS,
    "supports_gradient_checkpointing": same("supports_gradient_checkpointing"),
    "supports_pp_plan": PLANS,
    "supports_tp_plan": PLANS,
    "tie_weights": then(lambda m: m.tie_weights()),
    "to": Equal(reduced(torch.float64, lambda m: m.to(torch.float64)), "of what is here"),
    "tp_plan": PLANS,
    "tp_size": PLANS,
    "train": then(lambda m: m.train()),
    "use_kernels": same("use_kernels"),
    "warn_if_padding_and_no_attention_mask": Apart("it only warns"),
}
