"""Hooks on blocks through real servers: forwards, texts and gradients are those of the local model with them."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, connected, load_local, prompt
from tests.numerics.block_hooks import CHECKS, blocks_of, compared
from torch import Tensor, nn

from swarmllm import LocalSwarm

pytestmark = pytest.mark.rotates(6, whole_file=True)


@pytest.fixture(scope="module")
def local(llama: Path) -> Any:
    """One of its own: its embeddings are trained."""
    return load_local(llama)


@pytest.mark.parametrize("seed", range(3))
def test_any_hooks(seed: int, local: Any, model: Any) -> None:
    """Also where servers take over, and at the ends."""
    for check in CHECKS:
        assert not compared(local, model, check, seed), check


class Counted:
    """A hook that depends on how often it was called before, as tools for steering by schedules do."""

    def __init__(self, block: nn.Module) -> None:
        self.lengths: list[int] = []
        self.handle = block.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.lengths.append(output.shape[1])
        return output * (1 + 0.1 * len(self.lengths))


def counted(model: Any, block_idxs: tuple[int, ...] = (2, 5)) -> list[Counted]:
    return [Counted(blocks_of(model)[block_idx]) for block_idx in block_idxs]


def remove(hooks: list[Counted]) -> list[list[int]]:
    for hook in hooks:
        hook.handle.remove()
    return [hook.lengths for hook in hooks]


def test_a_server_dies_in_a_text(llama: Path, local: Any) -> None:
    """Steps that are computed again call no hook again."""
    ids = prompt()
    options = {"max_new_tokens": 12, "do_sample": False}
    hooks = counted(local)
    expected, lengths = local.generate(ids, **options), remove(hooks)
    assert expected.tolist() != local.generate(ids, **options).tolist()
    with (
        LocalSwarm(llama, spans=[(0, 4), (4, NUM_BLOCKS), (0, NUM_BLOCKS)], **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as model,
    ):
        by_peer = {server.peer_id: server for server in swarm.servers}
        with model.inference_session(max_length=64) as session:
            hooks = counted(model)

            def kill(module: nn.Module, args: Any, output: Tensor) -> None:
                if len(hooks[0].lengths) == 5:
                    by_peer[session.route[-1].server.peer_id].kill()

            handle = blocks_of(model)[1].register_forward_hook(kill)
            assert model.generate(ids, **options).tolist() == expected.tolist()
            assert session.num_repairs > 0
            assert remove(hooks) == lengths
            handle.remove()


def test_hooks_that_come_and_go_within_a_text(local: Any, model: Any) -> None:
    """A text goes on from where it is; where it is cut anew, its past is computed as one, which rounds."""
    ids = prompt(2, 20)

    def logits_of(one: Any) -> Tensor:
        found = []
        output = one(ids[:, :6], use_cache=True)
        for number, place in enumerate(((), (2, 5), (3,), ()), start=2):
            hooks = counted(one, place)
            output = one(ids[:, 3 * number : 3 * number + 3], use_cache=True, past_key_values=output.past_key_values)
            remove(hooks)
            found.append(output.logits)
        return torch.stack(found)

    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), logits_of(local), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["no_grad", "grad"])
def test_what_a_forward_has_left_is_copied_and_goes_on(how: str, local: Any, model: Any) -> None:
    """Without use_cache=True the cache is only remembered; with gradients, too."""
    ids = prompt(2, 12)

    def logits_of(one: Any) -> Tensor:
        hooks = counted(one)
        with torch.set_grad_enabled(how == "grad" and one is model):  # no local cache with gradients can be copied
            cache = one(ids[:, :8]).past_key_values
        with torch.no_grad():
            twin = copy.deepcopy(cache)
            first = one(ids[:, 8:], past_key_values=cache).logits
            second = one(ids[:, 8:], past_key_values=twin).logits
        assert remove(hooks) == [[8, 4, 4], [8, 4, 4]]
        return torch.stack([first, second])

    torch.testing.assert_close(logits_of(model), logits_of(local), rtol=1e-5, atol=1e-5)


def test_guesses_are_not_sent_ahead(llama: Path, local: Any, swarm: LocalSwarm) -> None:
    ids = prompt(1, 6).repeat(1, 4)
    hooks = counted(local)
    expected, lengths = local.generate(ids, max_new_tokens=8, do_sample=False), remove(hooks)
    with connected(llama, swarm.initial_peers, speculation="ngram") as model:
        hooks = counted(model)
        assert model.generate(ids, max_new_tokens=8, do_sample=False).tolist() == expected.tolist()
        assert remove(hooks) == lengths


def test_blocks_of_ones_own_have_hooks_as_well(llama: Path, local: Any, swarm: LocalSwarm) -> None:
    ids = prompt(2)
    with connected(llama, swarm.initial_peers, local_blocks="0:2,5:6") as model:
        places = (1, 2, 5, 6)
        for run in (lambda one: one(ids).logits, lambda one: one.generate(ids, max_new_tokens=5, do_sample=False)):
            found = []
            for one in (local, model):
                hooks = counted(one, places)
                with torch.no_grad():
                    found.append((run(one), remove(hooks)))
            assert torch.equal(found[0][0], found[1][0])
            assert found[0][1] == found[1][1]


def steered(model: Any, ids: Tensor, labels: Tensor, mask: Tensor) -> tuple[list[float], Tensor]:
    """A vector behind a block and a LoRA, trained together."""
    torch.manual_seed(5)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"])
    adapted = peft.get_peft_model(model, config)
    vector = nn.Parameter(torch.zeros(64))
    handle = blocks_of(model)[3].register_forward_hook(lambda module, args, output: output + vector)
    optimizer = torch.optim.SGD([vector, *(p for p in adapted.parameters() if p.requires_grad)], lr=0.5)
    losses = []
    for _ in range(3):
        loss = adapted(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    handle.remove()
    adapted.unload()
    return losses, vector.detach()


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_a_vector_is_trained(llama: Path, swarm: LocalSwarm) -> None:
    ids, mask = prompt(4, 11), torch.ones(4, 11, dtype=torch.int64)
    mask[1, :4] = 0
    mask[2, :1] = 0
    labels = ids.masked_fill(mask == 0, -100)
    expected, vector = steered(load_local(llama), ids, labels, mask)
    with connected(llama, swarm.initial_peers) as model:
        losses, found = steered(model, ids, labels, mask)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    torch.testing.assert_close(found, vector, rtol=1e-4, atol=1e-6)


@pytest.fixture
def hooks_left(model: Any) -> Iterator[None]:
    yield
    assert not model.swarm_adapters.blocks.hooked()


def test_a_hook_that_raises(local: Any, model: Any, hooks_left: None) -> None:
    """As tools do that need no more than the first blocks; the text goes on as if it hadn't begun."""
    ids = prompt()

    def stop(*_: Any) -> None:
        raise KeyError("seen enough")

    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
        handle = blocks_of(model)[4].register_forward_hook(stop)
        for options in ({"past_key_values": cache}, {"use_cache": False}):
            with pytest.raises(KeyError, match="seen enough"):
                model(ids[:, 5:], **options)
        handle.remove()
        found = model(ids[:, 5:], past_key_values=cache).logits
        expected = local(ids[:, 5:], past_key_values=local(ids[:, :5]).past_key_values).logits
    assert torch.equal(found, expected)


def test_while_hooked_padding_is_computed(local: Any, model: Any) -> None:
    """Hooks read the hidden states of padding, too."""
    ids, mask = prompt(3, 10), torch.ones(3, 10, dtype=torch.int64)
    mask[0, 4:] = 0
    mask[1, :2] = 0
    seen: list[Tensor] = []
    for one in (local, model):
        handle = blocks_of(one)[2].register_forward_hook(lambda module, args, output: seen.append(output.clone()))
        with torch.no_grad():
            one(ids, attention_mask=mask)
        handle.remove()
    assert torch.equal(*seen)
