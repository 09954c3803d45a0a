"""Fields of TrainingArguments: two steps of transformers' Trainer with each that reaches the model."""

import math
from tempfile import TemporaryDirectory
from typing import Any

from tests.numerics.test_training_surface import IDS, lora, tuned
from tests.numerics.training_contract import Apart, Check, Contract, Equal
from transformers import Trainer, TrainingArguments

BASIC: dict[str, Any] = {
    "max_steps": 2,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 3,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 1,
    "save_strategy": "no",
    "logging_steps": 1,
}


def trained(**options: Any) -> Check:
    """Losses, what was evaluated, and the weights of a LoRA after some steps."""

    def check(model: Any) -> object:
        adapted = tuned(model, lora())
        rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(2, 1)]
        with TemporaryDirectory() as directory:
            arguments = TrainingArguments(output_dir=directory, **{**BASIC, **options})
            trainer = Trainer(model=adapted, args=arguments, train_dataset=rows, eval_dataset=rows[:3])
            trainer.train()
            kept = ("loss", "eval_loss", "grad_norm")
            said = [{key: one[key] for key in kept if key in one} for one in trainer.state.log_history]
            said.append({"eval_loss": trainer.evaluate()["eval_loss"]})
        assert all(math.isfinite(value) for one in said for value in one.values())
        return said, {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}

    return check


def equal(note: str = "", **options: Any) -> Equal:
    return Equal(trained(**options), note)


LOGS, DATA = Apart("of logs and progress"), Apart("of data, which the model isn't asked about")
FILES, HUB, SEVERAL = (
    Apart("of files"),
    Apart("of the hub"),
    Apart("of several processes; each has a client of its own"),
)
NOTE = Apart("for scripts that read it; Trainer doesn't")
SPREAD = "the blocks are with servers already, and what is here is small"

TRAINING_ARGUMENTS: Contract = {
    "output_dir": FILES,
    "per_device_train_batch_size": equal(per_device_train_batch_size=2),
    "num_train_epochs": equal(max_steps=-1, num_train_epochs=1),
    "max_steps": equal(max_steps=3),
    "learning_rate": equal(learning_rate=0.3),
    "lr_scheduler_type": equal(lr_scheduler_type="cosine"),
    "lr_scheduler_kwargs": equal(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 2}),
    "warmup_steps": equal(lr_scheduler_type="linear", warmup_steps=1),
    "optim": equal(optim="adamw_torch", learning_rate=1e-3),
    "optim_args": equal(optim="adafactor", learning_rate=1e-3),
    "weight_decay": equal(weight_decay=0.1),
    "adam_beta1": equal(optim="adamw_torch", learning_rate=1e-3, adam_beta1=0.5),
    "adam_beta2": equal(optim="adamw_torch", learning_rate=1e-3, adam_beta2=0.9),
    "adam_epsilon": equal(optim="adamw_torch", learning_rate=1e-3, adam_epsilon=1e-4),
    "optim_target_modules": Apart("of optimizers (GaLore, APOLLO) for whole matrices, which are with servers"),
    "gradient_accumulation_steps": equal(per_device_train_batch_size=1, gradient_accumulation_steps=3),
    "average_tokens_across_devices": equal(average_tokens_across_devices=False),
    "max_grad_norm": equal(max_grad_norm=0.01),
    "label_smoothing_factor": equal(label_smoothing_factor=0.1),
    "bf16": equal("servers compute under autocast, too; exact where a batch isn't cut", bf16=True),
    "fp16": Apart("it needs a GPU here; float16 stays there, and the log says so"),
    "bf16_full_eval": Equal(trained(), "of what is here: servers keep their dtype"),
    "fp16_full_eval": Apart("of what is here: servers keep their dtype"),
    "tf32": Apart("of this machine's GPU"),
    "activation_checkpointing": equal(activation_checkpointing=True),
    "activation_checkpointing_kwargs": equal(
        activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False}
    ),
    "gradient_checkpointing": equal(gradient_checkpointing=True),
    "gradient_checkpointing_kwargs": equal(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
    ),
    "torch_compile": equal(torch_compile=True, torch_compile_backend="eager"),
    "torch_compile_backend": equal(torch_compile_backend="eager"),
    "torch_compile_mode": Apart("of the compiler"),
    "use_liger_kernel": Equal(trained(use_liger_kernel=True)),
    "liger_kernel_config": Apart("of a package that swaps modules of models when they are made"),
    "use_cache": equal(use_cache=True),
    "neftune_noise_alpha": equal(neftune_noise_alpha=5.0),
    "torch_empty_cache_steps": Apart("of this machine's GPU"),
    "auto_find_batch_size": equal(auto_find_batch_size=True),
    "logging_strategy": LOGS,
    "logging_steps": LOGS,
    "logging_first_step": LOGS,
    "log_on_each_node": LOGS,
    "logging_nan_inf_filter": LOGS,
    "include_num_input_tokens_seen": LOGS,
    "log_level": LOGS,
    "log_level_replica": LOGS,
    "disable_tqdm": LOGS,
    "report_to": LOGS,
    "run_name": LOGS,
    "project": LOGS,
    "trackio_space_id": LOGS,
    "trackio_bucket_id": LOGS,
    "trackio_static_space_id": LOGS,
    "eval_strategy": equal(eval_strategy="epoch"),
    "eval_steps": equal(eval_strategy="steps", eval_steps=1),
    "eval_delay": equal(eval_strategy="steps", eval_steps=1, eval_delay=2),
    "per_device_eval_batch_size": equal(per_device_eval_batch_size=2),
    "prediction_loss_only": equal(prediction_loss_only=True),
    "eval_on_start": equal(eval_on_start=True),
    "eval_do_concat_batches": equal(eval_do_concat_batches=False),
    "eval_use_gather_object": SEVERAL,
    "eval_accumulation_steps": equal(eval_accumulation_steps=1),
    "include_for_metrics": DATA,
    "batch_eval_metrics": DATA,
    "save_only_model": FILES,
    "save_strategy": equal(save_strategy="steps", save_steps=1),
    "save_steps": equal(save_strategy="steps", save_steps=2),
    "save_on_each_node": FILES,
    "save_total_limit": FILES,
    "enable_jit_checkpoint": FILES,
    "push_to_hub": HUB,
    "hub_token": HUB,
    "hub_private_repo": HUB,
    "hub_model_id": HUB,
    "hub_strategy": HUB,
    "hub_always_push": HUB,
    "hub_revision": HUB,
    "load_best_model_at_end": equal(
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model="loss",
    ),
    "metric_for_best_model": Apart("a name, for load_best_model_at_end"),
    "greater_is_better": Apart("for load_best_model_at_end"),
    "ignore_data_skip": DATA,
    "restore_callback_states_from_checkpoint": FILES,
    "full_determinism": Apart("of torch on this machine"),
    "seed": equal(seed=5),
    "data_seed": DATA,
    "use_cpu": Apart("of what is here"),
    "accelerator_config": equal(accelerator_config={"split_batches": True}),
    "parallelism_config": SEVERAL,
    "dataloader_drop_last": DATA,
    "dataloader_num_workers": DATA,
    "dataloader_pin_memory": DATA,
    "dataloader_persistent_workers": DATA,
    "dataloader_prefetch_factor": DATA,
    "dataloader_multiprocessing_context": DATA,
    "dataloader_in_order": DATA,
    "remove_unused_columns": equal(remove_unused_columns=False),
    "label_names": DATA,
    "train_sampling_strategy": equal(train_sampling_strategy="sequential"),
    "length_column_name": DATA,
    "ddp_find_unused_parameters": SEVERAL,
    "ddp_bucket_cap_mb": SEVERAL,
    "ddp_broadcast_buffers": SEVERAL,
    "ddp_static_graph": SEVERAL,
    "ddp_backend": SEVERAL,
    "ddp_timeout": SEVERAL,
    "fsdp": Apart(f"of several processes: {SPREAD}"),
    "fsdp_config": Apart(f"of several processes: {SPREAD}"),
    "deepspeed": Apart(f"of several processes: {SPREAD}"),
    "debug": LOGS,
    "skip_memory_metrics": LOGS,
    "do_train": NOTE,
    "do_eval": NOTE,
    "do_predict": NOTE,
    "resume_from_checkpoint": NOTE,
    "local_rank": SEVERAL,
}
