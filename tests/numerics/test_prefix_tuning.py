"""peft's prefix tuning on remote blocks: the local model's logits, gradients and texts, wherever it works locally."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.sessions_together import Sessions, load, packs_counted, some_inputs
from tests.numerics.tiny_models import NUM_BLOCKS, save_tiny
from torch import Tensor
from transformers import DynamicCache

from swarmllm.data_structures import Patch
from swarmllm.errors import ConfigurationError, RemoteProtocolError
from swarmllm.models.adapters.block_adapter import BlockAdapter, checked
from swarmllm.models.architecture import Task
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packing import Packing

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft has some to say about blocks it leaves out

NUM_PREFIX = 4
NO_HEADS = frozenset({"dbrx", "falcon_mamba", "mamba", "mamba2", "mpt", "trocr", "xglm"})
"""peft doesn't find their heads, or they have none."""
OTHER_SHAPES = frozenset(
    {"axk1", "deepseek_v2", "deepseek_v3", "falcon_alibi", "glm4_moe_lite", "mimo_v2_flash", "minicpm3", "youtu"}
)
"""peft makes keys and values of another shape than the blocks do."""
OTHER_CACHES = frozenset(
    {
        *("axk2", "bailing_hybrid", "bamba", "deepseek_v32", "deepseek_v4", "dots3_note_text", "falcon_h1"),
        *("glm_moe_dsa", "granitemoehybrid", "hy_v4", "inkling_text", "jamba", "kimi_linear", "lfm2", "lfm2_moe"),
        *(
            "lfm3",
            "nemotron_h",
            "nemotron_h_experts",
            "olmo_hybrid",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "qwen4_exp_text",
        ),
        *("zamba", "zamba2"),
    }
)
"""peft's caches lack what some of their blocks keep."""

IDS = torch.randint(3, 100, (3, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, :3] = 0  # padded on the left, as for generating


def tuned(model: Any, task: str = "CAUSAL_LM", **options: Any) -> Any:
    """With a prefix of random values, the same for equal options."""
    options = {"num_virtual_tokens": NUM_PREFIX, "encoder_hidden_size": 12, **options}
    config = peft.PrefixTuningConfig(task_type=task, **options)
    adapted = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(7)
    for _, parameter in sorted(adapted.named_parameters()):
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return adapted


def gradients(adapted: Any, **inputs: Tensor) -> dict[str, Tensor]:
    adapted.zero_grad()
    adapted(**inputs).loss.backward()
    return {f"gradient of {name}": p.grad.clone() for name, p in adapted.named_parameters() if p.grad is not None}


def results(adapted: Any) -> dict[str, Tensor]:
    """Logits in sessions and without, gradients, and texts."""
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    found = gradients(adapted, **inputs, labels=IDS)
    with torch.no_grad():
        found["logits"] = adapted(**inputs, use_cache=False).logits
        found["logits in a session"] = adapted(**inputs).logits
        found["logits without a mask"] = adapted(input_ids=IDS).logits
    options = {"do_sample": False, "max_new_tokens": 6}
    found["text"] = adapted.generate(**inputs, **options)
    found["beams"] = adapted.generate(input_ids=IDS[:1], num_beams=3, **options)
    found["two texts of each"] = adapted.generate(input_ids=IDS[:2], num_beams=2, num_return_sequences=2, **options)
    return found


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            assert bool(value.isfinite().all()), name
            assert float((got[name] - value).abs().max()) <= 1e-5 * float(value.abs().max()), name
        else:
            assert got[name].tolist() == value.tolist(), name


def check_prefix(local: Any, client: Any, **options: Any) -> None:
    plain = local(input_ids=IDS).logits
    expected = results(tuned(local, **options))
    assert any(name.startswith("gradient") for name in expected)
    assert not torch.allclose(expected["logits without a mask"], plain, atol=1e-3), "the prefix does something"
    assert_same(results(tuned(client, **options)), expected)
    with torch.no_grad():
        assert float((client(input_ids=IDS).logits - plain).abs().max()) <= 1e-5, "and nothing of it stays"


def check_refused_prefix(local: Any, client: Any, reason: str) -> None:
    """Where it fails locally, too."""
    with pytest.raises((RuntimeError, ValueError, AttributeError)):
        tuned(local)(input_ids=IDS)
    with pytest.raises((ConfigurationError, RemoteProtocolError), match=reason):
        tuned(client)(input_ids=IDS)


@pytest.mark.parametrize("model_type", ["gemma2", "mistral", "gemma3_text"])
@pytest.mark.rotates(3)
def test_longer_than_a_sliding_window(model_type: str, tmp_path: Path) -> None:
    local = save_tiny(model_type, tmp_path).requires_grad_(False)
    window = local.config.sliding_window
    expected = results(tuned(local, num_virtual_tokens=window + 3))
    assert_same(results(tuned(InProcessSwarm(tmp_path).client, num_virtual_tokens=window + 3)), expected)


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gpt2", marks=pytest.mark.slow), "qwen2"])
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.rotates(3)
def test_a_classifier(model_type: str, projected: bool, tmp_path: Path) -> None:
    from tests.numerics.test_task_classes import save_tiny as save_classifier

    local = save_classifier(model_type, Task.SEQUENCE_CLASSIFICATION, tmp_path).requires_grad_(False)
    client = InProcessSwarm(tmp_path, task=Task.SEQUENCE_CLASSIFICATION).client
    inputs = {"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([0, 2, 1])}
    found = []
    for model in (client, local):
        adapted = tuned(model, "SEQ_CLS", prefix_projection=projected)
        found.append(gradients(adapted, **inputs) | {"logits": adapted(**inputs).logits.detach()})
    assert_same(*found)
    assert any("score" in name for name in found[0]), "the head is trained as well"


def test_adapters_are_interchangeable(tmp_path: Path) -> None:
    local = save_tiny("llama", tmp_path / "base").requires_grad_(False)
    client = InProcessSwarm(tmp_path / "base").client
    for projected in (False, True):
        trained = tuned(client, prefix_projection=projected)
        trained.save_pretrained(tmp_path / "adapter")
        expected = trained(input_ids=IDS, use_cache=False).logits
        for base in (local, InProcessSwarm(tmp_path / "base").client):
            loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
            torch.testing.assert_close(loaded(input_ids=IDS, use_cache=False).logits, expected)


# What is no prefix


def filled(num_blocks: int = NUM_BLOCKS, rows: int = 3, length: int = NUM_PREFIX, heads: int = 2) -> DynamicCache:
    return DynamicCache([(torch.ones(rows, heads, length, 16), torch.ones(rows, heads, length, 16))] * num_blocks)


def rows_that_differ() -> DynamicCache:
    cache = filled()
    cache.layers[1].values = torch.randn(3, 2, NUM_PREFIX, 16)
    return cache


def of_unlike_lengths() -> DynamicCache:
    cache = filled()
    cache.update(torch.ones(3, 2, 1, 16), torch.ones(3, 2, 1, 16), 2)
    return cache


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (DynamicCache(), "a DynamicCache can't be used as past_key_values"),
        ([(torch.ones(3, 2, 4, 16),) * 2] * NUM_BLOCKS, "a list can't be used as past_key_values"),
        (filled(num_blocks=3), "for each of the 4 blocks"),
        (filled(rows=2), "of 3 rows"),
        (filled(length=1025), "may have 1 to 1024 positions, not 1025"),
        (filled(length=0), "may have 1 to 1024 positions, not 0"),
        (filled(heads=3), "must be keys and values"),
        (rows_that_differ(), "the same for all rows"),
        (of_unlike_lengths(), "5 positions in each block"),
    ],
)
def test_other_caches_are_refused(client: Any, cache: Any, reason: str) -> None:
    for use_cache in (False, True):
        with pytest.raises((ConfigurationError, RemoteProtocolError), match=reason), torch.no_grad():
            client(input_ids=IDS, past_key_values=cache, use_cache=use_cache)
        assert client(input_ids=IDS).logits.isfinite().all()


def test_masks_behind_a_prefix(client: Any) -> None:
    for mask in (torch.ones(3, 1, 9, 13), torch.zeros(3, 13)):
        with pytest.raises(ConfigurationError, match=r"attention_mask must be \[batch, prefix \+ seq\]"):
            client(input_ids=IDS, attention_mask=mask, past_key_values=filled(), use_cache=False)


# On a server


@pytest.fixture(scope="module", params=["llama", "bloom", "gemma2"])
def blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    return load(request.param, tmp_path_factory.mktemp(request.param))


def prefix_of(blocks: BlockSpan, seed: int, length: int = NUM_PREFIX) -> BlockAdapter:
    generator = torch.Generator().manual_seed(seed)
    patches = [
        Patch(block=block_idx, path="", kind="prefix", shapes=tuple((heads, length, size) for heads, size in shapes))
        for block_idx, shapes in blocks.cache_sizes.key_value_shapes.items()
    ]
    count = sum(
        heads * length * size for shapes in blocks.cache_sizes.key_value_shapes.values() for heads, size in shapes
    )
    flat = torch.randn(count, generator=generator)
    return checked(patches, flat, blocks.slots, None, blocks.cache_sizes.key_value_shapes)


class PrefixSessions(Sessions):
    """Two sessions behind one prefix, one behind another, and one behind none."""

    def __init__(self, blocks: BlockSpan) -> None:
        super().__init__(blocks)
        for cache in (*self.packed, *self.alone):
            cache.record_past()
        same = prefix_of(blocks, 1)
        self.adapters = [same, same, prefix_of(blocks, 2, length=7), None]

    def inputs(self, idx: int, length: int) -> BlockInputs:
        mask = torch.ones(self.rows[idx], self.alone[idx].position + length, dtype=torch.int64)
        return replace(super().inputs(idx, length), adapter=self.adapters[idx], attention_mask=mask)


def test_sessions_behind_one_prefix_run_together(blocks: BlockSpan) -> None:
    sessions = PrefixSessions(blocks)
    way = sessions.packer.way
    assert way is (Packing.PADDED if "Bloom" in type(blocks.slots.block(0)).__name__ else Packing.RAGGED)
    with packs_counted(sessions.packer) as sizes:
        errors = [sessions.step(lengths) for lengths in ((4, 3, 5, 6), (1, 1, 1, 1), (1, 1, 1, 1))]
        assert sizes == [2, 2], "each begins alone"
        for caches in (sessions.packed, sessions.alone):
            for cache, position in zip(caches, (2, 0, 6, 1), strict=True):
                cache.rollback(position)
        errors += [sessions.step(lengths) for lengths in ((2, 3, 1, 2), (1, 1, 1, 1))]
    assert max(errors) <= 1e-5
    assert [cache.position for cache in sessions.packed] == [5, 4, 8, 4]
    assert [cache.length - cache.position for cache in sessions.packed] == [4, 4, 7, 0]


def test_a_session_is_what_a_batch_is(blocks: BlockSpan) -> None:
    inputs = some_inputs(blocks, 2, 6, torch.Generator().manual_seed(3))
    inputs.adapter = prefix_of(blocks, 1)
    whole = blocks.forward(inputs)
    cache = blocks.new_cache()
    axis = blocks.traits.batch_axis
    for start, end in ((0, 4), (4, 5), (5, 6)):
        part = blocks.forward(inputs.columns(start, end, start, blocks.traits), cache=cache)
        torch.testing.assert_close(part, whole.narrow(axis + 1, start, end - start))
    assert cache.position == 6
    inputs.adapter = inputs.adapter.part(type(blocks.span)(0, 2))
    with pytest.raises(ConfigurationError, match="need a prefix for each, or for none"):
        blocks.forward(inputs)


def bad_patches(blocks: BlockSpan) -> Iterator[tuple[list[Patch], str]]:
    good = prefix_of(blocks, 1).patches
    (heads, length, size), _ = good[0].shapes

    def changed(**fields: Any) -> list[Patch]:
        return [good[0].model_copy(update=fields), *good[1:]]

    for shape in ((heads + 1, length, size), (heads, length, size + 1), (heads, length + 1, size), (heads, size)):
        yield changed(shapes=(shape, shape)), "must be keys and values"
    yield changed(shapes=((heads, length, size),)), "must be keys and values"
    yield changed(shapes=((heads, 1025, size),) * 2), "may have 1024 positions"
    yield changed(path="self_attn"), "must be keys and values"
    yield changed(block=77), "block 77 keeps no keys and values"
    yield [*good, good[0]], "one prefix only"


def test_what_does_not_fit_is_refused(blocks: BlockSpan) -> None:
    for patches, reason in bad_patches(blocks):
        with pytest.raises(RemoteProtocolError, match=reason):
            checked(patches, torch.zeros(1), blocks.slots, None, blocks.cache_sizes.key_value_shapes)
    with pytest.raises(RemoteProtocolError, match="block 0 keeps no keys and values"):
        checked(prefix_of(blocks, 1).patches, torch.zeros(1), blocks.slots)
