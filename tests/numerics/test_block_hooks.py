"""Hooks on blocks: what they can't change is refused. `test_architectures` has what they can, of every architecture."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.numerics.block_hooks import blocks_of, forward
from torch import nn

from swarmllm.errors import ConfigurationError
from swarmllm.models.shell.hollow_modules import ModulePlace
from swarmllm.models.shell.playback import open_to_hooks


def test_a_mask(client: Any) -> None:
    """And whatever else servers compute for themselves."""
    block = blocks_of(client)[1]
    changes: list[Callable[..., Any]] = [
        lambda module, args, kwargs: (args, kwargs | {"position_ids": kwargs["position_ids"] + 1}),
        lambda module, args, kwargs: (args, {**kwargs, "more": 1}),
        lambda module, args, kwargs: ((args[0][:, 1:], *args[1:]), kwargs),
    ]
    for change in changes:
        handle = block.register_forward_pre_hook(change, with_kwargs=True)
        with pytest.raises(ConfigurationError, match="a hook on block 1 has changed more than hidden states"):
            forward(client)
        handle.remove()
    for returned in (lambda *_: "nothing", lambda m, a, output: output[:, 1:], lambda m, a, output: (output,)):
        handle = block.register_forward_hook(returned)
        with pytest.raises(ConfigurationError, match="a hook on block 1 has changed more than hidden states"):
            forward(client)
        handle.remove()


def test_a_mask_in_place(client: Any) -> None:
    def change(module: nn.Module, args: Any, kwargs: Any) -> None:
        kwargs["position_embeddings"][0].mul_(2)
        kwargs["position_ids"].add_(1)

    handle = blocks_of(client)[2].register_forward_pre_hook(change, with_kwargs=True)
    with pytest.raises(ConfigurationError, match="a hook on block 2 has changed more than hidden states"):
        forward(client)
    handle.remove()


def test_where_a_model_cannot_be_cut() -> None:
    blocks, num_used = [nn.Linear(2, 2) for _ in range(3)], Counter[int]()
    for block_idx, block in enumerate(blocks):
        open_to_hooks(block, ModulePlace(f"block {block_idx}"), block_idx, 3, {1, 3}, num_used)
    for block_idx, register in ((0, "register_forward_hook"), (1, "register_forward_pre_hook")):
        with pytest.raises(ConfigurationError, match=f"block {block_idx}, because this model can't be cut there"):
            getattr(blocks[block_idx], register)(print)
    handles = [blocks[2].register_forward_hook(print), blocks[2].register_forward_pre_hook(print)]
    assert num_used == {2: 1, 3: 1}
    for handle in handles:
        handle.remove()
    assert not num_used.total()
