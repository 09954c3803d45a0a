"""Promises of a span besides exactness: cuts, traits, memory of its own, gradients, refusals."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.numerics.tiny_models import save_tiny

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, UnsupportedModelError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.skeleton import block_bytes
from swarmllm.models.quantization import kernels
from swarmllm.models.span import loading
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing_probe import PackingProbe, right_ways
from swarmllm.models.span.trials import kind_of, worthwhile_threads
from swarmllm.server.device.device_thread import DeviceThread
from swarmllm.server.peers.peer_limits import PeerLimits
from swarmllm.server.settings import ServerConfig
from swarmllm.server.span_loader import SpanLoader


def _span(model_type: str, directory: Path, span: Span, dtype: torch.dtype | None = None) -> BlockSpan:
    if not (directory / "config.json").exists():
        save_tiny(model_type, directory)
    return load_block_span(open_checkpoint(str(directory)), span, dtype=dtype, progress=False)


def _inputs(blocks: BlockSpan, batch: int = 2, seq: int = 5) -> BlockInputs:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, seq, blocks.embedding_dim, generator=generator).to(blocks.dtype)
    return BlockInputs(hidden_states=hidden, batch_size=batch, seq_len=seq)


@pytest.mark.parametrize("model_type", ["llama", "bloom", "gemma2", "qwen3_next"])
def test_any_part_of_the_hosted_blocks_can_be_run(model_type: str, tmp_path: Path) -> None:
    blocks = _span(model_type, tmp_path, Span(0, 4))
    inputs = _inputs(blocks)
    with torch.no_grad():
        whole = blocks.forward(inputs)
        for cuts in ([1], [2], [3], [1, 2, 3]):
            step = inputs
            for start, end in zip([0, *cuts], [*cuts, 4], strict=True):
                step = step.with_hidden(blocks.forward(step, Span(start, end)))
            assert torch.equal(step.hidden_states, whole), cuts


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", {}),
        ("bloom", {"block_output": 2}),
        ("gemma3n_text", {"batch_axis": 1, "extra_inputs": ("input_ids", "inputs_embeds")}),
        ("deepseek_v4", {"extra_inputs": ("input_ids",), "rollback": False}),
        ("zamba2", {"extra_inputs": ("inputs_embeds",), "rollback": False}),
        ("qwen3_next", {"rollback": False}),
        ("mamba", {"chunked_prefill": False, "rollback": False}),
        ("bamba", {"block_output": 2, "chunked_prefill": False, "rollback": False}),
        ("lfm2", {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.rotates(3)
def test_traits(model_type: str, expected: dict[str, object], dtype: torch.dtype, tmp_path: Path) -> None:
    blocks = _span(model_type, tmp_path, Span(1, 4), dtype)
    assert blocks.dtype == dtype
    # Where it can't be looked at in float32, padding is computed: Bloom's bias for distances has a dtype of its own.
    is_skipped = model_type != "deepseek_v4" and (model_type, dtype) != ("bloom", torch.bfloat16)
    sides = {"skips_padding": ("left", "right")} if is_skipped else {}
    assert blocks.traits.model_dump(exclude_defaults=True) == {**sides, **expected}


def test_blocks_of_one_kind_have_the_same_settings(tmp_path: Path) -> None:
    llama, gemma = (_span(name, tmp_path / name, Span(0, 4)) for name in ("llama", "gemma2"))
    assert len({kind_of(llama, block_idx) for block_idx in range(4)}) == 1
    sliding = [kind_of(gemma, block_idx) for block_idx in range(4)]
    assert sliding[0] == sliding[2] != sliding[1] == sliding[3]


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (1024, 1), (2048, 2), (16384, 4)])
@pytest.mark.usefixtures("four_threads")
def test_threads_that_a_matrix_keeps_busy(rows: int, threads: int) -> None:
    blocks = torch.nn.ModuleList([torch.nn.Linear(kernels.WORTH_A_THREAD // 1024, rows, device="meta")])
    with worthwhile_threads(blocks):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_small_blocks_are_loaded_and_tried_by_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other programs would be waited for after each operation."""
    seen: dict[str, int] = {}

    def noting(owner: object, name: str) -> None:
        usual = getattr(owner, name)

        def note(*args: Any, **options: Any) -> Any:
            seen[name] = torch.get_num_threads()
            return usual(*args, **options)

        monkeypatch.setattr(owner, name, note)

    for name in ("load_pruned", "check_quantized", "probe"):
        noting(loading, name)
    noting(PackingProbe, "agrees")
    save_tiny("llama", tmp_path / "model")
    model, thread = str(tmp_path / "model"), SimpleNamespace()
    config = ServerConfig(model=model, new_swarm=True, cache_dir=str(tmp_path / "cache"))
    loader = SpanLoader(config, open_checkpoint(model), cast(DeviceThread, thread), PeerLimits())

    def load(num_blocks: int) -> None:
        (blocks,) = loader._load_blocks(Span(0, num_blocks), 0, None)
        right_ways(blocks)

    load(2)
    assert seen == {"load_pruned": 1, "check_quantized": 1, "probe": 1, "agrees": 1}
    assert torch.get_num_threads() == 4
    monkeypatch.setattr(kernels, "WORTH_A_THREAD", 1)
    load(3)
    assert set(seen.values()) == {4}


def test_a_forbidden_cut_is_announced_and_refused(tmp_path: Path) -> None:
    blocks = _span("hy_v4", tmp_path, Span(0, 4))
    assert blocks.traits.forbidden_cuts == (2, 3)
    for part in (Span(0, 2), Span(2, 4)):
        with pytest.raises(UnsupportedModelError, match="before block 2"):
            blocks.forward(_inputs(blocks), part)
    with pytest.raises(UnsupportedModelError, match="before block 2"):
        _span("hy_v4", tmp_path, Span(2, 4))


@pytest.mark.parametrize("model_type", ["gemma3n_shared_kv", "gemma4_shared_kv"])
def test_shared_keys_and_values_stay_together(model_type: str, tmp_path: Path) -> None:
    """Block 3 uses the keys and values of block 1."""
    assert _span(model_type, tmp_path, Span(0, 4)).traits.forbidden_cuts == (2, 3)
    assert _span(model_type, tmp_path, Span(1, 4)).traits.forbidden_cuts == (2, 3)
    with pytest.raises(UnsupportedModelError, match="without the ones before"):
        _span(model_type, tmp_path, Span(2, 4))


def test_blocks_that_are_not_hosted(tmp_path: Path) -> None:
    blocks = _span("llama", tmp_path, Span(1, 3))
    with pytest.raises(ConfigurationError, match="1:3"):
        blocks.forward(_inputs(blocks), Span(0, 2))


def test_a_missing_extra_input(tmp_path: Path) -> None:
    blocks = _span("zamba2", tmp_path, Span(0, 2))
    with pytest.raises(ConfigurationError, match="inputs_embeds"):
        blocks.forward(_inputs(blocks))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_cache_works_in_every_mode_and_between_modes(mode: type, tmp_path: Path) -> None:
    blocks = _span("llama", tmp_path, Span(0, 4))
    inputs = _inputs(blocks, seq=6)
    with torch.no_grad():
        want = blocks.forward(inputs)
    cache = blocks.new_cache()
    first = blocks.forward(inputs.columns(0, 3, 0, blocks.traits), cache=cache)
    with mode():
        second = blocks.forward(inputs.columns(3, 6, 3, blocks.traits), cache=cache)
        cache.rollback(4)
        cache.select_batch([1])
    third = blocks.forward(inputs.rows(1, 2, blocks.traits).columns(4, 6, 4, blocks.traits), cache=cache)
    assert torch.allclose(torch.cat([first, second], 1), want, atol=1e-5)
    assert torch.allclose(third, want[1:, 4:], atol=1e-5)
    assert not third.requires_grad


def test_gradients_reach_the_inputs_and_nothing_else(tmp_path: Path) -> None:
    blocks = _span("zamba2", tmp_path, Span(0, 4))
    inputs = _inputs(blocks)
    hidden = inputs.hidden_states.requires_grad_()
    embeds = torch.randn_like(hidden).requires_grad_()
    inputs = BlockInputs(hidden_states=hidden, inputs_embeds=embeds, batch_size=2, seq_len=5)
    blocks.forward(inputs).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0
    assert embeds.grad is not None
    assert embeds.grad.abs().sum() > 0
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in blocks.slots.parameters())


def test_memory_is_that_of_the_hosted_blocks(tmp_path: Path) -> None:
    checkpoint_bytes = None
    sizes = {}
    for span in (Span(0, 1), Span(1, 3), Span(0, 4)):
        sizes[span] = _span("llama", tmp_path, span).num_bytes
        checkpoint_bytes = block_bytes(open_checkpoint(str(tmp_path)))
    assert checkpoint_bytes is not None
    for span, size in sizes.items():
        blocks_only = sum(checkpoint_bytes[span.start : span.end])
        assert blocks_only <= size <= blocks_only + 200, "rotary tables are all that may come on top"


def test_cache_memory_is_known_beforehand(tmp_path: Path) -> None:
    blocks = _span("llama", tmp_path, Span(1, 4))
    cache = blocks.new_cache()
    blocks.forward(_inputs(blocks, batch=2, seq=5), cache=cache)
    assert cache.used_bytes() == (2 * 5 * blocks.cache_sizes.bytes_per_token, 0)
    assert blocks.cache_sizes.bytes_per_session == 0


def test_recurrent_states_cost_per_session(tmp_path: Path) -> None:
    blocks = _span("mamba2", tmp_path, Span(0, 4))
    assert blocks.cache_sizes.bytes_per_session > 0
