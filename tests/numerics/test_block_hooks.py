"""Hooks on blocks: what users read and change there is what it is in the local model, of every architecture."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.numerics.block_hooks import blocks_of, compared, forward, generate, gradients
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.tiny_models import save_tiny
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarmllm.errors import ConfigurationError
from swarmllm.models.shell.hollow_modules import ModulePlace
from swarmllm.models.shell.playback import hooked_bounds, open_to_hooks


@pytest.mark.parametrize("seed", range(8))
def test_any_hooks(seed: int, llama: tuple[PreTrainedModel, InProcessSwarm]) -> None:
    local, swarm = llama
    for check in (forward, generate, gradients):
        assert not compared(local, swarm.client, check, seed)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, InProcessSwarm]:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto"), InProcessSwarm(directory)


# ---------------------------------------------------------------------- what a hook can't change


def test_a_mask(llama: tuple[PreTrainedModel, InProcessSwarm]) -> None:
    """And whatever else servers compute for themselves."""
    _, swarm = llama
    block = blocks_of(swarm.client)[1]
    changes: list[Callable[..., Any]] = [
        lambda module, args, kwargs: (args, kwargs | {"position_ids": kwargs["position_ids"] + 1}),
        lambda module, args, kwargs: (args, {**kwargs, "more": 1}),
        lambda module, args, kwargs: ((args[0][:, 1:], *args[1:]), kwargs),
    ]
    for change in changes:
        handle = block.register_forward_pre_hook(change, with_kwargs=True)
        with pytest.raises(ConfigurationError, match="a hook on block 1 has changed more than hidden states"):
            forward(swarm.client)
        handle.remove()
    for returned in (lambda *_: "nothing", lambda m, a, output: output[:, 1:], lambda m, a, output: (output,)):
        handle = block.register_forward_hook(returned)
        with pytest.raises(ConfigurationError, match="a hook on block 1 has changed more than hidden states"):
            forward(swarm.client)
        handle.remove()


def test_a_mask_in_place(llama: tuple[PreTrainedModel, InProcessSwarm]) -> None:
    _, swarm = llama

    def change(module: nn.Module, args: Any, kwargs: Any) -> None:
        kwargs["position_embeddings"][0].mul_(2)
        kwargs["position_ids"].add_(1)

    handle = blocks_of(swarm.client)[2].register_forward_pre_hook(change, with_kwargs=True)
    with pytest.raises(ConfigurationError, match="a hook on block 2 has changed more than hidden states"):
        forward(swarm.client)
    handle.remove()


def test_where_a_model_cannot_be_cut() -> None:
    blocks = [nn.Linear(2, 2) for _ in range(3)]
    for block_idx, block in enumerate(blocks):
        open_to_hooks(block, ModulePlace(f"block {block_idx}"), block_idx, 3, forbidden={1, 3})
    for block_idx, register in ((0, "register_forward_hook"), (1, "register_forward_pre_hook")):
        with pytest.raises(ConfigurationError, match=f"block {block_idx}, because this model can't be cut there"):
            getattr(blocks[block_idx], register)(print)
    handles = [blocks[2].register_forward_hook(print), blocks[2].register_forward_pre_hook(print)]
    assert hooked_bounds(dict(enumerate(blocks))) == {2, 3}
    for handle in handles:
        handle.remove()
    assert not hooked_bounds(dict(enumerate(blocks)))
