"""What a session knows of its text: each call of `generate()` in it writes what the local model writes.

Calls of all kinds follow each other in one session, in any order, because each may leave a cache behind that the next
one can't use.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import OPTIONS, connected, load_local, prompt
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from swarmllm import AutoDistributedModelForCausalLM, LocalSwarm
from swarmllm.errors import ConfigurationError, SessionClosedError

LENGTH = 9
HOLE = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])


def mask_of(length: int, begin: Tensor) -> Tensor:
    return torch.cat([begin, begin.new_ones(1, length - begin.shape[1])], 1)


KINDS: dict[str, Callable[[PreTrainedModel, Tensor], dict[str, Any]]] = {
    "greedy": lambda model, ids: {},
    "a mask of ones": lambda model, ids: {"attention_mask": torch.ones_like(ids)},
    "a mask with a hole": lambda model, ids: {"attention_mask": mask_of(ids.shape[1], HOLE)},
    "padding": lambda model, ids: {"attention_mask": mask_of(ids.shape[1], PADDED)},
    "positions": lambda model, ids: {"position_ids": torch.arange(ids.shape[1])[None] * 3},
    "embeddings": lambda model, ids: {"inputs_embeds": model.get_input_embeddings()(ids.flip(1)).detach()},
    "beams": lambda model, ids: {"num_beams": 3},
    "prompt lookup": lambda model, ids: {"prompt_lookup_num_tokens": 3},
    "an assistant": lambda model, ids: {"assistant_model": model},
    "no cache": lambda model, ids: {"use_cache": False},
    "guidance": lambda model, ids: {"guidance_scale": 1.5},
    "guidance by another text": lambda model, ids: {
        "guidance_scale": 1.5,
        "negative_prompt_ids": torch.cat([ids, ids], 1),
    },
}


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 30))])
def test_calls_of_all_kinds_in_any_order(seed: int, model: Any, local: PreTrainedModel) -> None:
    chosen = random.Random(seed)
    with model.inference_session(max_length=400) as session:
        ids = prompt(length=LENGTH)
        for _ in range(6):
            kind = chosen.choice(list(KINDS))
            texts = [
                one.generate(ids, max_new_tokens=4, do_sample=False, **KINDS[kind](local, ids))
                for one in (model, local)
            ]
            assert torch.equal(*texts), kind
            assert session.num_repairs == 0
            growing = torch.cat([ids[:, : chosen.randint(LENGTH, ids.shape[1])], prompt(length=2, seed=seed)], 1)
            ids = chosen.choice([ids, growing, torch.cat([ids, texts[0][:, -4:]], 1)])


def test_changes_in_front_of_the_blocks_and_inside(llama: Path, swarm: LocalSwarm) -> None:
    """Hooks that come or go, and changed embeddings."""
    ids, local = prompt(length=LENGTH), load_local(llama)

    def steer(block: Any, args: Any, output: Any) -> Any:
        return output + 0.5

    with connected(llama, swarm.initial_peers) as model, model.inference_session(max_length=100):

        def check() -> None:
            texts = [one.generate(ids, max_new_tokens=4, do_sample=False) for one in (model, local)]
            assert torch.equal(*texts)

        check()
        hooks = [one.model.layers[1].register_forward_hook(steer) for one in (model, local)]
        check()
        for hook in hooks:
            hook.remove()
        check()
        with torch.no_grad():
            for one in (model, local):
                one.get_input_embeddings().weight.mul_(-1)
        check()


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning")
def test_soft_prompts_of_peft(llama: Path, swarm: LocalSwarm) -> None:
    """A session counts their positions, the ids of a text don't."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ids, local = prompt(length=LENGTH), load_local(llama)
    with connected(llama, swarm.initial_peers) as remote:
        tuned = []
        for model in (remote, local):
            tuned.append(peft.get_peft_model(model, config).eval())
            torch.nn.init.normal_(
                next(tuned[-1].prompt_encoder.parameters()), std=0.3, generator=torch.Generator().manual_seed(1)
            )
        with remote.inference_session(max_length=100):
            for _ in range(3):
                texts = [one.generate(input_ids=ids, max_new_tokens=5, do_sample=False) for one in tuned]
                assert torch.equal(*texts)
                ids = torch.cat([texts[0], prompt(length=2, seed=5)], 1)


def test_a_cache_knows_its_adapter(llama: Path, swarm: LocalSwarm) -> None:
    ids = prompt(length=LENGTH)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    with connected(llama, swarm.initial_peers) as remote, torch.no_grad():
        tuned = peft.get_peft_model(remote, config).eval()
        with tuned.disable_adapter():
            past = tuned(input_ids=ids, use_cache=True).past_key_values
            tuned(input_ids=ids[:, :2], past_key_values=past)
        with pytest.raises(ConfigurationError, match="adapter has changed"):
            tuned(input_ids=ids[:, :2], past_key_values=past)
        with pytest.raises(ConfigurationError, match="adapter has changed"):
            tuned.generate(input_ids=prompt(length=20), past_key_values=past, max_new_tokens=3)
        past = tuned(input_ids=ids, use_cache=True).past_key_values
        tuned(input_ids=ids[:, :2], past_key_values=past)
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.mul_(2)
        with pytest.raises(ConfigurationError, match="adapter has changed"):
            tuned(input_ids=ids[:, :2], past_key_values=past)


def test_an_adapter_that_was_taken_off(llama: Path, swarm: LocalSwarm) -> None:
    ids = prompt(length=LENGTH)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    with connected(llama, swarm.initial_peers) as remote, torch.no_grad():
        tuned = peft.get_peft_model(remote, config).eval()
        past = tuned(input_ids=ids, use_cache=True).past_key_values
        bare = tuned.unload()
        with pytest.raises(ConfigurationError, match="adapter has changed"):
            bare(input_ids=ids[:, :2], past_key_values=past)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_adapters_of_embeddings_and_hooks_on_the_stack(llama: Path, swarm: LocalSwarm) -> None:
    ids, local = prompt(length=LENGTH), load_local(llama)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["embed_tokens"], init_lora_weights=False)

    def shift(stack: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % 64}

    with connected(llama, swarm.initial_peers) as remote, remote.inference_session(max_length=100):
        tuned = []
        for model in (remote, local):
            torch.manual_seed(0)
            tuned.append(peft.get_peft_model(model, config).eval())

        def check() -> None:
            options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            assert torch.equal(*(one.generate(input_ids=ids, **options) for one in tuned))

        check()
        with tuned[0].disable_adapter(), tuned[1].disable_adapter():
            check()
        check()
        for model in (remote, local):
            model.model.register_forward_pre_hook(shift, with_kwargs=True)
        check()


def test_a_text_that_is_changed_in_place(model: Any, local: PreTrainedModel) -> None:
    with model.inference_session(max_length=100):
        ids = model.generate(prompt(length=LENGTH), max_new_tokens=4, do_sample=False)
        ids[0, 4] = (ids[0, 4] + 1) % 64
        for place in (4, 2):
            texts = [one.generate(ids, max_new_tokens=4, do_sample=False) for one in (model, local)]
            assert torch.equal(*texts)
            ids[0, place] = (ids[0, place] + 1) % 64


def test_padding_with_the_token_that_ends_a_text(model: Any, local: PreTrainedModel) -> None:
    """No mask is inferred from it."""
    ids, mask = prompt(length=LENGTH), PADDED.clone()
    ids[:, :3] = 5
    with model.inference_session(max_length=100):
        for given in ({"attention_mask": mask}, {}, {"attention_mask": mask}):
            options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 5, "eos_token_id": 5, **given}
            assert torch.equal(model.generate(ids, **options), local.generate(ids, **options))


def test_a_mask_after_steps_without_one(model: Any, local: PreTrainedModel) -> None:
    ids = prompt(length=LENGTH)
    with model.inference_session(max_length=100) as session, torch.no_grad():
        session.step(model.embed(ids))
        options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": PADDED}
        assert torch.equal(model.generate(ids, **options), local.generate(ids, **options))


def test_options_that_need_the_tokenizer(model: Any) -> None:
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {chr(60 + idx): idx for idx in range(64)}

        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(chr(60 + int(idx)) for idx in torch.as_tensor(ids).flatten())

        def batch_decode(self, rows: Any, **_: Any) -> list[str]:
            return [self.decode(row) for row in rows]

        def __len__(self) -> int:
            return 64

    options = {"tokenizer": Tokenizer(), "dry_multiplier": 0.8, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(prompt(length=LENGTH), **options)
    with model.inference_session(max_length=100):
        for _ in range(2):
            assert torch.equal(model.generate(prompt(length=LENGTH), **options), expected)


def test_a_closed_session_cannot_be_entered(model: Any) -> None:
    session = model.inference_session(max_length=20)
    session.close()
    with pytest.raises(SessionClosedError), session:
        pass


def test_a_prompt_is_copied_when_it_is_submitted(model: Any, local: PreTrainedModel) -> None:
    wanted = [local.generate(prompt(seed=seed), max_new_tokens=4, do_sample=False) for seed in range(3)]
    buffer = torch.empty_like(prompt())
    submitted = [model.submit(buffer.copy_(prompt(seed=seed)), max_new_tokens=4, do_sample=False) for seed in range(3)]
    assert [one.result().tolist() for one in submitted] == [one.tolist() for one in wanted]
    refilled = (buffer.copy_(prompt(seed=seed)) for seed in range(3))
    for index, text in model.generate_many(refilled, max_new_tokens=4, do_sample=False):
        assert torch.equal(text, wanted[index])


def test_types_of_tokens_and_positions_of_one_axis(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=128, n_positions=64, bos_token_id=1, eos_token_id=1)
    local, ids = GPT2LMHeadModel(config).eval(), prompt(length=LENGTH)
    local.save_pretrained(tmp_path)
    with (
        LocalSwarm(str(tmp_path), num_servers=1, **OPTIONS) as swarm,
        AutoDistributedModelForCausalLM.from_pretrained(str(tmp_path), initial_peers=swarm.initial_peers) as model,
        torch.no_grad(),
    ):
        model.eval()
        for given in ({"token_type_ids": torch.full_like(ids, 7)}, {"position_ids": torch.arange(LENGTH).flip(0)}):
            assert torch.equal(model(ids, **given).logits, local(ids, **given).logits)
        with pytest.raises(ConfigurationError, match="position_ids must be integers"):
            model(ids, position_ids=torch.arange(float(LENGTH))[None])
        with model.inference_session(max_length=20) as session, pytest.raises(ConfigurationError, match="integers"):
            session.step(model.embed(ids), position_ids=torch.arange(float(LENGTH))[None])
