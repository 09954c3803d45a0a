"""A refused call leaves nothing behind: the same call is refused again, and a good one works as before."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import assert_same_tokens, connected, load_local, prompt
from tests.swarm.test_adapter_names import with_three
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import output_capturing

from swarmllm import LocalSwarm
from swarmllm.errors import SwarmError

pytestmark = pytest.mark.rotates(3)

IDS, TWO = prompt(), prompt(2)
Call = Callable[[Any], object]


def text(**options: Any) -> Call:
    return lambda model: model.generate(**{"inputs": IDS, "max_new_tokens": 4, **options})


def forward(**options: Any) -> Call:
    return lambda model: model(**{"input_ids": IDS, **options})


def in_session(call: Call) -> Call:
    def within(model: Any) -> object:
        with model.inference_session(max_length=16):
            return call(model)

    return within


def with_config(name: str, value: Any, call: Call) -> Call:
    """The config is changed around the call, as transformers does for a moment."""

    def changed(model: Any) -> object:
        was = getattr(model.config, name)
        setattr(model.config, name, value)
        try:
            return call(model)
        finally:
            setattr(model.config, name, was)

    return changed


def with_a_hook_on_all(model: Any) -> object:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        return model(IDS)
    finally:
        handle.remove()


def with_a_hook_that_changes_too_much(model: Any) -> object:
    hook = lambda _, args, kwargs: (args, kwargs | {"attention_mask": None, "more": 1})  # noqa: E731
    handle = model.model.layers[2].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        return model.generate(IDS, max_new_tokens=4)
    finally:
        handle.remove()


def by_torch_func(model: Any) -> object:
    embeds = model.get_input_embeddings()(IDS).detach()
    return torch.func.grad(lambda values: model(inputs_embeds=values, use_cache=False).logits.sum())(embeds)


def backward_through_a_cache(model: Any) -> object:
    past = model(IDS, use_cache=True).past_key_values
    return model(IDS, past_key_values=past).logits.sum().backward()


def gradients_of_gradients(model: Any) -> object:
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    return torch.autograd.grad(model(inputs_embeds=embeds).logits.sum(), embeds, create_graph=True)


def backward_of_nan(model: Any) -> object:
    return (model(IDS, labels=IDS).loss * torch.nan).backward()


def other_rows_in_a_session(model: Any) -> object:
    with model.inference_session(max_length=32, batch_size=2) as session, torch.no_grad():
        session.step(model.embed(TWO))
        return session.step(model.embed(IDS))


def a_row_that_is_not_there(model: Any) -> object:
    past = model(IDS, use_cache=True).past_key_values
    return past.reorder_cache(torch.tensor([3]))


def continued(ids: Tensor, **options: Any) -> Call:
    """With a cache of one row."""

    def call(model: Any) -> object:
        past = model.generate(IDS, max_new_tokens=2, return_dict_in_generate=True).past_key_values
        return model.generate(ids, past_key_values=past, max_new_tokens=2, **options)

    return call


LONGER = prompt(2, 14)
WRONG = torch.ones(1, 5, dtype=torch.long)
REFUSED: dict[str, Call] = {
    "early exit": text(assistant_early_exit=2),
    "early exit, sampled": text(assistant_early_exit=2, do_sample=True),
    "a cache of keys and values": text(past_key_values=DynamicCache()),
    "a quantized cache": text(cache_implementation="quantized"),
    "a cache of fewer rows": continued(LONGER),
    "a cache of fewer rows than beams": continued(LONGER[:1], num_beams=2),
    "a cache of fewer rows than sequences": continued(LONGER[:1], num_return_sequences=2, do_sample=True),
    "breakers without a tokenizer": text(dry_multiplier=1.0, dry_sequence_breakers=["a"]),
    "options that don't fit": text(mirostat_tau=2.0, do_sample=False),
    "attention weights of a text": text(output_attentions=True, return_dict_in_generate=True),
    "a mask of another length for a text": text(attention_mask=WRONG),
    "hidden words in a mask": text(attention_mask=torch.ones_like(IDS) * 0.5),
    "no rows": text(inputs=IDS[:0]),
    "no text": text(inputs=IDS[:, :0]),
    "no text at all": lambda model: model.generate(
        max_new_tokens=4, input_ids=None, inputs_embeds=None, attention_mask=WRONG
    ),
    "no ids in a session": in_session(lambda model: model.generate(inputs_embeds=model.embed(IDS), max_new_tokens=4)),
    "too long a text in a session": in_session(text(max_new_tokens=40)),
    "too long a text in a session, beams": in_session(text(max_new_tokens=40, num_beams=2)),
    "early exit in a session": in_session(text(assistant_early_exit=2)),
    "a forward in a session": in_session(forward()),
    "other rows in a session": other_rows_in_a_session,
    "a row that is not there": a_row_that_is_not_there,
    "attention weights": forward(output_attentions=True),
    "router logits": forward(output_router_logits=True),
    "a cache of others": forward(
        past_key_values=DynamicCache([(torch.ones(1, 3, 4, 16), torch.ones(1, 3, 4, 16))] * 8)
    ),
    "is_causal": forward(is_causal=False),
    "a state to look at": forward(encoder_hidden_states=torch.zeros(1, 2, 64)),
    "a mask of another length": forward(attention_mask=WRONG),
    "a mask that is no tensor": forward(attention_mask=[[1] * 9]),
    "a trained mask": forward(attention_mask=torch.ones(1, 9, requires_grad=True)),
    "positions of the past, too": forward(position_ids=torch.arange(12)[None]),
    "positions of other rows": forward(position_ids=torch.arange(9).expand(3, 9)),
    "one position for all": forward(position_ids=torch.tensor([[3]])),
    "positions of another length in a session": in_session(
        lambda model: model.active_cache_session().step(model.embed(IDS), position_ids=torch.arange(12)[None])
    ),
    "embeddings without values": forward(input_ids=None, inputs_embeds=torch.empty(1, 3, 64, device="meta")),
    "embeddings of another width": forward(input_ids=None, inputs_embeds=torch.zeros(1, 3, 5)),
    "ids with too many dimensions": forward(input_ids=IDS[None]),
    "no rows of ids": forward(input_ids=IDS[:0]),
    "neither ids nor embeddings": forward(input_ids=None),
    "too many tokens": lambda model: model(prompt(1, 9000), use_cache=False),
    "fewer blocks": with_config("num_hidden_layers", 2, forward()),
    "fewer blocks of a text": with_config("num_hidden_layers", 2, text()),
    "a hook on all modules": with_a_hook_on_all,
    "a hook that changes too much": with_a_hook_that_changes_too_much,
    "torch.func": by_torch_func,
    "backward through a cache": backward_through_a_cache,
    "gradients of gradients": gradients_of_gradients,
    "backward of NaN": backward_of_nan,
}


def hooks_of(part: nn.Module) -> Iterator[Any]:
    """Hooks that transformers hasn't put there for itself."""
    for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
        if getattr(hook, "__module__", "") != output_capturing.__name__:
            yield hook


def state(model: Any) -> list[Any]:
    """State of the model that a call may change for a moment."""
    parts = dict(model.named_modules())
    return [
        copy.deepcopy(model.config.to_dict()),
        copy.deepcopy(model.generation_config.to_dict()),
        {name: part.training for name, part in parts.items()},
        {(name, key) for name, part in parts.items() for key in vars(part) if callable(getattr(type(part), key, None))},
        {name: [*hooks_of(part)] for name, part in parts.items()},
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        model.active_cache_session(),
        torch.is_grad_enabled(),
    ]


def refused_twice(call: Call, model: Any, kinds: tuple[type[Exception], ...]) -> None:
    said, before = [], state(model)
    for _ in range(2):
        with pytest.raises(kinds) as caught:
            call(model)
        said.append(str(caught.value))
        assert "\n" not in said[0]
    assert said[0] == said[1]
    assert state(model) == before


@pytest.fixture(scope="module")
@torch.no_grad()
def held(model: Any) -> Any:
    """A text that was begun before anything was refused."""
    return model(IDS, use_cache=True).past_key_values


@pytest.mark.parametrize("name", REFUSED)
def test_refused_twice_and_then_a_good_call(name: str, model: Any, local: PreTrainedModel, held: Any) -> None:
    refused_twice(REFUSED[name], model, (SwarmError,))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, local(IDS).logits)
        further = model(TWO[:1], past_key_values=copy.deepcopy(held)).logits
        torch.testing.assert_close(further, local(torch.cat([IDS, TWO[:1]], dim=1)).logits[:, -TWO.shape[1] :])
    with model.inference_session(max_length=32):
        assert_same_tokens(model, local, IDS, max_new_tokens=4)


def rows(names: list[str], call: str = "forward", **options: Any) -> Call:
    return lambda adapted: getattr(adapted, call)(input_ids=TWO, adapter_names=names, **options)


@pytest.fixture(scope="module")
def adapted(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    with connected(llama, swarm.initial_peers) as model:
        yield with_three(model)


@pytest.mark.parametrize(
    "call",
    {
        "a name too few": rows(["first"]),
        "a name too few for a text": rows(["first"], "generate", max_new_tokens=4),
        "attention weights": rows(["first", "third"], output_attentions=True),
        "early exit": rows(["first", "third"], "generate", assistant_early_exit=2),
        "a mask of another length": rows(["first", "third"], attention_mask=WRONG),
        "labels that don't fit": rows(["first", "third"], labels=IDS),
    }.items(),
    ids=lambda call: call[0],
)
def test_rows_with_adapters(call: tuple[str, Call], adapted: Any, llama: Path) -> None:
    """peft says by hooks which row has which adapter, and leaves them there if the call fails."""
    refused_twice(call[1], adapted, (SwarmError, ValueError))
    local = with_three(load_local(llama))
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=TWO).logits, local(input_ids=TWO).logits)
        names = {"input_ids": TWO, "adapter_names": ["third", "__base__"]}
        torch.testing.assert_close(adapted(**names).logits, local(**names).logits)
