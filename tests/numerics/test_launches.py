"""Kernels that a decode step on pages launches: no more than now, and nothing read on the host.

The step runs on torch's device without data, "meta", where every read by the host fails. Triton's kernels are counted
where they would be launched, so neither a GPU nor Triton is needed.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.numerics.test_paged import paged as paged_blocks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import swarmllm.models.quantization
import swarmllm.models.span
from swarmllm.models.quantization import cuda, kernels
from swarmllm.models.span import page_pool
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.decode_graphs import StaticInputs
from swarmllm.models.span.page_pool import PAGE_TOKENS, PageTable
from swarmllm.models.span.paged_attention import PagedAttention

SESSIONS = (1, 8, 32)
UNCOUNTED = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::lift_fresh")
"""Operators that launch nothing, besides views."""
OWN_CODE, AROUND_BLOCKS = 40, 10
"""Launches of the model's own code, for a block and for the rest of a step."""
FUSED = {1: 7, 8: 10, 32: 10}
"""Launches of a fused block, by number of sessions."""

RunBlock = Callable[[int, Callable[[], Any]], Any]


class Launches(TorchDispatchMode):
    """Notes the operators and kernels that work on the device "meta"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # operators made of others, such as `linear`
            output = func.decompose(*args, **kwargs)
        if output is not NotImplemented:
            return output
        output = func(*args, **kwargs)
        first = output[0] if isinstance(output, list | tuple) and output else output
        if isinstance(first, Tensor) and first.is_meta and not _is_view(func) and not func.name().startswith(UNCOUNTED):
            self.names.append(func.name())
        return output

    @contextmanager
    def noted(self, names: list[str]) -> Iterator[None]:
        """Within: what is launched comes into `names`, too."""
        before = len(self.names)
        yield
        names += self.names[before:]


def _is_view(func: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


class Kernel:
    """In place of a Triton kernel."""

    def __init__(self, launches: Launches, name: str) -> None:
        self.launches, self.name = launches, name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: self.launches.names.append(self.name)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Counts what is launched; `fused_step` and the kernels are imported anew, with something in place of Triton."""
    launches = Launches()
    triton: Any = ModuleType("triton")
    triton.jit = lambda function=None, **_: triton.jit if function is None else Kernel(launches, function.__name__)
    triton.cdiv = lambda one, other: -(-one // other)
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    triton.language = SimpleNamespace(constexpr=int)
    with pytest.MonkeyPatch.context() as imports:
        imports.setitem(sys.modules, "triton", triton)
        imports.setitem(sys.modules, "triton.language", triton.language)
        for package, name in (
            (swarmllm.models.quantization, "cuda_products"),
            (swarmllm.models.span, "paged_kernels"),
            (swarmllm.models.span, "fused_kernels"),
            (swarmllm.models.span, "fused_step"),
        ):
            spec = find_spec(f"{package.__name__}.{name}")
            assert spec is not None
            assert spec.loader is not None
            module = module_from_spec(spec)
            monkeypatch.setitem(sys.modules, spec.name, module)
            monkeypatch.setattr(package, name, module, raising=False)
            spec.loader.exec_module(module)
    monkeypatch.setattr(page_pool, "_interprets", True)
    return launches


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    return without_data(paged_blocks("llama", tmp_path_factory.mktemp("llama"), torch.bfloat16))


def without_data(blocks: BlockSpan) -> BlockSpan:
    blocks.stack.to("meta")
    blocks.device = torch.device("meta")
    blocks.pool = blocks.new_pool(64)
    return blocks


def own_code(paged: PagedAttention) -> RunBlock:
    return lambda _, call: call()


def fused(paged: PagedAttention) -> RunBlock:
    from swarmllm.models.span import fused_step

    blocks = {idx: fused_step._fused(paged.blocks, idx) for idx in paged.blocks.span}
    for one in blocks.values():
        one.join()
        assert one.is_joined
    run_block: RunBlock = fused_step.FusedStep(paged, blocks).run_block
    return run_block


def run_step(paged: PagedAttention, run_block: RunBlock, launches: Launches, num_sessions: int) -> list[list[str]]:
    """Launches of each block, and last of the rest of the step, for sessions of unlike lengths."""
    blocks = paged.blocks
    assert blocks.pool is not None
    inputs = StaticInputs(64, blocks.dtype, blocks.device, num_sessions)
    tables = [PageTable(blocks.pool) for _ in range(num_sessions)]
    lengths = [1 + 7 * idx % (2 * PAGE_TOKENS) for idx in range(num_sessions)]
    for table, length in zip(tables, lengths, strict=True):
        table.prepare(1, length + 1)
    hidden = [torch.zeros(1, 1, 64, dtype=blocks.dtype, device=blocks.device)] * num_sessions
    inputs.fill(num_sessions, hidden, [(table.rows[0], at) for table, at in zip(tables, lengths, strict=True)])
    of_blocks: list[list[str]] = []

    def noted(block_idx: int, call: Callable[[], Any]) -> Any:
        of_blocks.append([])
        with launches.noted(of_blocks[-1]):
            return run_block(block_idx, call)

    rest: list[str] = []
    with launches, launches.noted(rest):
        paged.step(*inputs.of(num_sessions), recorder=noted)
    for name in itertools.chain(*of_blocks):
        rest.remove(name)
    return [*of_blocks, rest]


@pytest.mark.parametrize("num_sessions", SESSIONS)
def test_of_the_model_s_own_code(num_sessions: int, llama: BlockSpan, launches: Launches) -> None:
    paged = PagedAttention(llama)
    *of_blocks, rest = run_step(paged, own_code(paged), launches, num_sessions)
    assert len(of_blocks) == len(llama.span)
    for names in of_blocks:
        assert len(names) <= OWN_CODE, names
        assert {"_write", "_attend", "_join"} <= set(names)
    assert len(rest) <= AROUND_BLOCKS, rest


@pytest.mark.parametrize("num_sessions", SESSIONS)
def test_of_fused_blocks(num_sessions: int, llama: BlockSpan, launches: Launches) -> None:
    paged = PagedAttention(llama)
    *of_blocks, rest = run_step(paged, fused(paged), launches, num_sessions)
    assert len(of_blocks) == len(llama.span)
    for names in of_blocks:
        assert len(names) <= FUSED[num_sessions], names
        assert {"_rotate", "_attend", "_join"} <= set(names)
    assert len(rest) <= AROUND_BLOCKS, rest


def test_of_a_fused_block_of_packed_weights(
    tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their codes and scales are joined, and multiplied by the kernel that norms, gates and adds, too."""
    monkeypatch.setattr(cuda, "_compiles_for", lambda *_: True)
    monkeypatch.setattr(kernels, "has_strips", lambda *_: False)  # they are arranged for the device of a server
    paged = PagedAttention(without_data(paged_blocks("llama", tmp_path, torch.bfloat16, "int8")))
    for names in run_step(paged, fused(paged), launches, 1)[:-1]:
        assert len(names) <= FUSED[1], names
        assert names.count("_multiply") == 4


def test_one_more_is_found(llama: BlockSpan, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarmllm.models.span import fused_kernels

    gate = fused_kernels.gate
    monkeypatch.setattr(fused_kernels, "gate", lambda *given: gate(*given).contiguous() + 0)
    paged = PagedAttention(llama)
    for names in run_step(paged, fused(paged), launches, 8)[:-1]:
        assert len(names) == FUSED[8] + 1


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, Tensor.nonzero, Tensor.cpu, bool])
def test_reads_on_the_host_fail(read: Callable[[Tensor], Any], llama: BlockSpan, launches: Launches) -> None:
    paged = PagedAttention(llama)

    def reading(block_idx: int, call: Any) -> Any:
        read(call.args[0].sum())
        return call()

    with pytest.raises(RuntimeError):
        run_step(paged, reading, launches, 1)
