"""Adapters on a server's blocks: its weights stay what they were, and what doesn't fit them is refused."""

import hashlib
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from tests.numerics.tiny_models import save_tiny
from torch import Tensor

from swarmllm.data_structures import Patch, Span
from swarmllm.errors import BlocksNotServedError, RemoteProtocolError, ServerOverloadedError
from swarmllm.models.adapters.block_adapter import BlockAdapter, checked
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.server.adapters import AdapterStore
from swarmllm.server.device import forward_backward
from swarmllm.server.device.forward_backward import Graph, KeptForward, Turns, forward, gradients, record

T = TypeVar("T")

LORA: dict[str, Any] = {"block": 1, "path": "self_attn.q_proj", "kind": "lora", "shapes": ((4, 64), (64, 4))}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    directory: Path = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return load_block_span(open_checkpoint(str(directory)), Span(0, 2), progress=False)


def values(patch: Patch, seed: int = 0) -> Tensor:
    count = sum(int(torch.tensor(shape).prod()) for shape in patch.shapes)
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def run(turns: Turns[T]) -> T:
    while True:
        try:
            next(turns)
        except StopIteration as end:
            value: T = end.value
            return value


def fingerprint(blocks: BlockSpan) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(blocks.slots.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def test_weights_are_the_same_before_and_after(blocks: BlockSpan) -> None:
    patch = Patch(**LORA)
    adapter = checked((patch,), values(patch), blocks.slots)
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))

    def inputs(adapter: BlockAdapter | None) -> BlockInputs:
        return BlockInputs(hidden_states=hidden.clone(), batch_size=2, seq_len=5, adapter=adapter)

    before, plain = fingerprint(blocks), blocks.forward(inputs(None))
    for _ in range(2):
        adapted = run(forward(blocks, inputs(adapter), blocks.span))["hidden_states"]
        assert not torch.allclose(adapted, plain)
        grads = run(gradients(blocks, inputs(adapter), blocks.span, torch.ones_like(hidden)))
        assert grads["adapter"].shape == values(patch).shape
        assert grads["adapter"].abs().sum() > 0
    cache = blocks.new_cache()
    torch.testing.assert_close(blocks.forward(inputs(adapter), blocks.span, cache), adapted)
    assert torch.equal(blocks.forward(inputs(None)), plain)
    assert fingerprint(blocks) == before
    with torch.no_grad():
        next(blocks.slots.parameters())[0] += 1e-3
    assert fingerprint(blocks) != before, "the control"
    with torch.no_grad():
        next(blocks.slots.parameters())[0] -= 1e-3


@pytest.mark.parametrize("rows_at_a_time", [1, 2, 8])
def test_in_turns_is_the_same_as_at_once(
    blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch, rows_at_a_time: int
) -> None:
    monkeypatch.setattr(forward_backward, "TURN_TOKENS", 5 * rows_at_a_time)
    patches = [Patch(**LORA), Patch(**{**LORA, "block": 0})]  # not in the order of blocks
    adapter = checked(patches, torch.cat([values(patch, seed) for seed, patch in enumerate(patches)]), blocks.slots)
    hidden, grad = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(1))

    def inputs() -> BlockInputs:
        return BlockInputs(hidden_states=hidden.clone(), batch_size=3, seq_len=5, adapter=adapter)

    whole = KeptForward([[Graph.record(blocks, inputs(), blocks.span)]])
    kept = run(record(blocks, inputs(), blocks.span, short_turns=True))
    torch.testing.assert_close(kept.outputs, whole.outputs)
    outputs = run(forward(blocks, inputs(), blocks.span, short_turns=True))["hidden_states"]
    assert torch.equal(outputs, kept.outputs)
    expected = run(whole.gradients(grad))
    for turns in (kept.gradients(grad), gradients(blocks, inputs(), blocks.span, grad, short_turns=True)):
        found = run(turns)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            check = torch.equal if rows_at_a_time == 8 else torch.allclose
            assert check(found[name], gradient), name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block": 3}, "holds blocks"),
        ({"path": "self_attn.nothing"}, "no such module"),
        ({"path": "self_attn"}, "not a linear module"),
        ({"path": "input_layernorm"}, "not a linear module"),
        ({"shapes": ((4, 32), (64, 4))}, "don't fit"),
        ({"shapes": ((4, 64), (64, 5))}, "don't fit"),
        ({"shapes": ((4, 64),)}, "don't fit"),
        ({"shapes": ((2000, 64), (64, 2000))}, "don't fit"),
        ({"kind": "ia3_in"}, "don't fit"),
        ({"kind": "prompt"}, "prompts must be"),
        ({"kind": "prompt", "path": "", "shapes": ((4, 32),)}, "prompts must be"),
        ({"kind": "prompt", "path": "", "shapes": ((2000, 64),)}, "prompts must be"),
        ({"kind": "loha"}, "don't fit"),
    ],
)
def test_what_does_not_fit_is_refused(blocks: BlockSpan, change: dict[str, Any], reason: str) -> None:
    patch = Patch(**{**LORA, **change})
    with pytest.raises(RemoteProtocolError, match=reason):
        checked((patch,), values(patch), blocks.slots, 64)


def test_values_must_be_as_many_finite_floats(blocks: BlockSpan) -> None:
    patch = Patch(**LORA)
    good = values(patch)
    for bad in (good[:-1], good.view(2, -1), good.to(torch.int64), good / 0):
        with pytest.raises(RemoteProtocolError, match=r"values must be"):
            checked((patch,), bad, blocks.slots)


def test_the_store_is_bounded_and_knows_whose_is_whose(blocks: BlockSpan) -> None:
    patch = Patch(**LORA)
    adapter = checked((patch,), values(patch), blocks.slots)
    size = adapter.flat().nbytes
    store = AdapterStore(4 * size)
    for handle in (1, 2):
        store.put("a", handle, adapter)
    assert store.get("a", 1) is adapter
    assert store.get("a", None) is None
    store.put("a", 3, adapter)
    with pytest.raises(BlocksNotServedError, match="send it again"):
        store.get("a", 2)  # the longest unused
    with pytest.raises(BlocksNotServedError):
        store.get("b", 1)
    store.put("b", 1, adapter)
    store.put("b", 2, adapter)
    store.put("c", 1, adapter)  # over the sum: the longest unused of all goes
    with pytest.raises(BlocksNotServedError):
        store.get("a", 1)
    with pytest.raises(ServerOverloadedError):
        AdapterStore(2 * size - 1).put("a", 4, adapter)
