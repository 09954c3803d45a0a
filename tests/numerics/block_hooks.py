"""Hooks on blocks that read, change and replace hidden states, and checks that a model gives the same with them."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.numerics.exactness import MASK, PROMPT, differences, outcome
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarmllm.models.architecture import find_blocks, stacks


def hidden_of(given: Any) -> Tensor:
    return given[0] if isinstance(given, tuple) else given


def with_hidden(given: Any, hidden: Tensor) -> Any:
    return (hidden, *given[1:]) if isinstance(given, tuple) else hidden


def blocks_of(model: PreTrainedModel, stack: int = -1) -> list[nn.Module]:
    """The blocks that can be hooked, of a local model or of a client."""
    found = find_blocks(model, stacks(model.config)[stack]).blocks
    return list(found.blocks() if hasattr(found, "blocks") else found)


class Watched:
    """Hooks that read, change and replace hidden states. A seed decides which: the same in both models."""

    def __init__(self, blocks: list[nn.Module], seed: int, forbidden: frozenset[int] = frozenset()) -> None:
        choose = random.Random(seed)
        self.seen: list[Tensor] = []
        self.modules: list[bool] = []
        self.vectors: list[nn.Parameter] = []
        self.handles = []
        kinds = [self.read, self.add, self.scale_in_place, self.before, self.before_by_name]
        for place in sorted(choose.sample(range(2 * len(blocks)), choose.randint(1, 4))):
            block_idx, behind = divmod(place, 2)
            kind = choose.choice(kinds[:3] if behind else kinds[3:])
            if 0 < block_idx + behind < len(blocks) and block_idx + behind in forbidden:
                continue
            self.handles += kind(blocks[block_idx])

    def read(self, block: nn.Module) -> list[Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.modules.append(module is block)
            self.seen.append(hidden_of(output).detach().clone())

        return [block.register_forward_hook(hook)]

    def add(self, block: nn.Module) -> list[Any]:
        vector = nn.Parameter(torch.empty(0))
        self.vectors.append(vector)

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            hidden = hidden_of(output)
            if not vector.numel():
                vector.data = torch.linspace(-0.5, 0.5, hidden.shape[-1], dtype=hidden.dtype)
            return with_hidden(output, hidden + vector)

        return [block.register_forward_hook(hook, with_kwargs=True)]

    def scale_in_place(self, block: nn.Module) -> list[Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden_of(output)[..., ::2] *= 0.75

        def another(module: nn.Module, args: Any, output: Any) -> Any:
            return with_hidden(output, hidden_of(output) * 1.25)

        return [block.register_forward_hook(hook), block.register_forward_hook(another, prepend=True)]

    def before(self, block: nn.Module) -> list[Any]:
        def hook(module: nn.Module, args: Any) -> Any:
            return (args[0] * 1.1, *args[1:]) if args else None

        return [block.register_forward_pre_hook(hook)]

    def before_by_name(self, block: nn.Module) -> list[Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self.seen.append((args[0] if args else next(iter(kwargs.values()))).detach().clone())
            return ((args[0] * 0.9, *args[1:]), kwargs) if args else None

        return [block.register_forward_pre_hook(hook, with_kwargs=True)]


@contextmanager
def watched(model: PreTrainedModel, seed: int, forbidden: frozenset[int], stack: int = -1) -> Iterator[Watched]:
    hooks = Watched(blocks_of(model, stack), seed, forbidden)
    try:
        yield hooks
    finally:
        for handle in hooks.handles:
            handle.remove()


def forward(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(input_ids=PROMPT, attention_mask=MASK, use_cache=False).logits


def generate(model: PreTrainedModel, **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(PROMPT, **{"max_new_tokens": 4, "do_sample": False, **options})


def beams(model: PreTrainedModel) -> Any:
    return generate(model, num_beams=3)


def hidden_states(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(input_ids=PROMPT, use_cache=False, output_hidden_states=True).hidden_states


def gradients(model: PreTrainedModel) -> Any:
    embeddings = model.get_input_embeddings()
    embeddings.requires_grad_(True)
    model.zero_grad()
    model(input_ids=PROMPT, use_cache=False).logits.pow(2).mean().backward()
    return embeddings.weight.grad.clone()


CHECKS: tuple[Callable[[PreTrainedModel], Any], ...] = (forward, generate, beams, hidden_states, gradients)


def compared(
    local: PreTrainedModel,
    client: PreTrainedModel,
    check: Callable[[PreTrainedModel], Any],
    seed: int,
    stack: int = -1,
    relative: float = 0.0,
) -> list[str]:
    """The differences between two models that have the same hooks."""
    relative = max(relative, 1e-6 if check is gradients else 0.0)
    forbidden = frozenset(client.swarm_stacks[stack].traits.forbidden_cuts)
    found = []
    for model in (local, client):
        with watched(model, seed, forbidden, stack) as hooks:
            result = outcome(model, check)
            found.append((result, hooks, [vector.grad for vector in hooks.vectors]))
    (wanted, of_local, vectors), (got, of_client, grads) = found
    if isinstance(wanted, str) or isinstance(got, str):
        return [] if wanted == got else [f"local: {wanted!s:.300} remote: {got!s:.300}"]
    assert all(of_client.modules), "hooks are given the block itself"
    return [
        *differences(wanted, got, relative),
        *(f"seen: {one}" for one in differences(of_local.seen, of_client.seen, relative)),
        *(f"vectors: {one}" for one in differences(vectors, grads, 1e-5)),
    ]
