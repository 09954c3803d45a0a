"""Hooks on blocks: what users read and change there is what it is in the local model, of every architecture."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics.exactness import PROMPT
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.test_encoder_decoders import EXACT, client_of, inputs_of
from tests.numerics.test_inner_states import differences, outcome
from tests.numerics.test_sweep import ARCHITECTURES, ROUNDS_DIFFERENTLY
from tests.numerics.tiny_encoder_decoders import save_tiny_model, tiny_model
from tests.numerics.tiny_models import VARIANTS, save_tiny
from tests.selection import sampled
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import find_blocks, stacks
from swarmllm.models.shell.hollow_modules import ModulePlace
from swarmllm.models.shell.playback import hooked_bounds, open_to_hooks


def hidden_of(given: Any) -> Tensor:
    return given[0] if isinstance(given, tuple) else given


def with_hidden(given: Any, hidden: Tensor) -> Any:
    return (hidden, *given[1:]) if isinstance(given, tuple) else hidden


def blocks_of(model: PreTrainedModel, stack: int = -1) -> list[nn.Module]:
    """The blocks that can be hooked, of the local model as of the client."""
    found = find_blocks(model, stacks(model.config)[stack]).blocks
    return list(found.blocks() if hasattr(found, "blocks") else found)


class Watched:
    """Reads, changes and replaces, in ways that a seed decides; the same in both models."""

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
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    with torch.no_grad():
        return model(input_ids=PROMPT, attention_mask=mask, use_cache=False).logits


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
    """What differs, with the same hooks in both."""
    relative = max(ROUNDS_DIFFERENTLY.get(local.config.model_type, relative), 1e-6 if check is gradients else 0.0)
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


@pytest.mark.parametrize("model_type", sampled([*ARCHITECTURES, *VARIANTS], 12))
def test_they_do_what_they_do_locally(model_type: str, tmp_path: Path) -> None:
    local = save_tiny(model_type, tmp_path)
    swarm = InProcessSwarm(tmp_path)
    before = forward(swarm.client)
    failures = {
        f"{check.__name__} {seed}": problems
        for seed, check in enumerate(CHECKS, start=len(model_type))
        if (problems := compared(local, swarm.client, check, seed))
    }
    assert not failures
    assert torch.equal(forward(swarm.client), before), "they are removed"


@pytest.mark.parametrize("seed", range(30))
def test_any_hooks(seed: int, llama: tuple[PreTrainedModel, InProcessSwarm]) -> None:
    local, swarm = llama
    for check in (forward, generate, gradients):
        assert not compared(local, swarm.client, check, seed)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, InProcessSwarm]:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto"), InProcessSwarm(directory)


@pytest.mark.parametrize("name", sampled(EXACT, 4))
def test_in_an_encoder_decoder(name: str, tmp_path: Path) -> None:
    local, client = tiny_model(name), client_of(save_tiny_model(name, tmp_path))
    given = inputs_of(local)

    def translate(model: PreTrainedModel) -> Any:
        return model.generate(**given, max_new_tokens=5, do_sample=False)

    def logits(model: PreTrainedModel) -> Any:
        with torch.no_grad():
            return model(**given, decoder_input_ids=given["input_ids"][:, :4], use_cache=False).logits

    for stack in (0, 1):
        for seed, check in enumerate((translate, logits)):
            assert not compared(local, client, check, seed + len(name), stack, relative=1e-4), (stack, check)


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
