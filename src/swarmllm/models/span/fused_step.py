"""A step, or a prompt, through blocks of Llama's kind in few kernels: 7 a block for one position, 10 for several.

`find_fused` checks that blocks are built that way: RMS norms before attention and before an MLP with silu(gate) * up,
queries and keys rotated, perhaps normalized by head. A comparison with the model's own code decides if they also
compute that. Around the blocks, the model's own code runs: it makes positions, rotations and masks. Then queries, keys
and values become one product, and gate and up another; the modules keep views of the joined weights.

So do packed weights, whose codes and scales are joined. A weight that no kernel takes is multiplied by its own module;
everything else stays the same. Used by `packing`; needs Triton.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmllm.data_structures import Span
from swarmllm.models.block_slots import Recorder
from swarmllm.models.quantization import QuantizedWeight, cuda
from swarmllm.models.quantization.cuda import Matrix
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.span import fused_kernels
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packed_caches import PackingUnsupportedError
from swarmllm.models.span.page_pool import PageTable, Placed, attend_pages
from swarmllm.models.span.paged_attention import SHORT_TOKENS, PagedAttention, PagedBatch, Window
from swarmllm.models.span.trials import in_float32, kind_of, rms

logger = logging.getLogger(__name__)

BLOCK_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
CLOSE = 1e-4
"""Largest difference in float32, relative to the block's own contribution. Assumed: right code is near 1e-6."""
TRIAL = (3, 3, SHORT_TOKENS + 3, 1)
"""Positions of the steps of the comparison: the third attends in tiles."""


@dataclass(eq=False)
class Product:
    """Matrices with the same inputs; one matrix after `join`."""

    modules: tuple[nn.Linear, ...]
    weight: Tensor | Packed | None = None
    bias: Tensor | None = None
    matrix: Tensor | Matrix | None = None
    """The joined weight as `fused_kernels.multiply` takes it; None if it doesn't."""

    @property
    def sizes(self) -> list[int]:
        return [int(module.weight.shape[0]) for module in self.modules]

    def join(self) -> None:
        """Join the weights, if they are plain tensors or packed in one form; the modules keep views."""
        biases: list[Tensor | None] = [one.bias for one in self.modules]
        given = [one for one in biases if one is not None]
        if given and len(given) < len(biases):
            return
        weights: list[Any] = [one.weight for one in self.modules]
        if all(isinstance(one, QuantizedWeight) for one in weights):
            self.weight = _joined_packed([one.packed for one in weights])
        elif all(type(one) is nn.Parameter and one.is_contiguous() for one in weights):
            self.weight = _joined(weights)
        if self.weight is None:
            return
        self.bias = _joined(given) if given else None
        self.matrix = _for_kernel(self.weight) if isinstance(self.weight, Packed) else self.weight

    def __call__(self, inputs: Tensor) -> list[Tensor]:
        """`[total, in]` → `[total, out]` of each."""
        if self.weight is None:
            return [module(inputs) for module in self.modules]
        if isinstance(self.weight, Packed):
            outputs = self.weight.linear(inputs, self.bias)
        else:
            outputs = functional.linear(inputs, self.weight, self.bias)
        return list(torch.split(outputs, self.sizes, dim=-1))

    def added_to(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """The residual, changed in place where that saves a kernel."""
        (module,) = self.modules
        matrix = None if self.bias is not None else self.matrix
        if isinstance(matrix, Matrix) and cuda.takes(inputs, matrix):
            return cuda.multiply(inputs, matrix, residual=residual)
        if isinstance(matrix, Tensor):
            return residual.addmm_(inputs, matrix.t())
        residual += module(inputs)
        return residual


def _for_kernel(packed: Packed) -> Matrix | None:
    single = torch.empty(1, packed.shape[1], dtype=packed.dtype, device=packed.device)
    matrix = None if packed.changes_inputs else packed.cuda_matrix()
    return matrix if matrix is not None and cuda.takes(single, matrix) else None


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0].data
    joined = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(tensors, torch.split(joined, [len(tensor) for tensor in tensors]), strict=True):
        tensor.data = part
    return joined


def _joined_packed(weights: Sequence[Packed]) -> Packed | None:
    """Packed weights as one; None if they have unlike forms, or their parts aren't row by row."""
    first, tensors = weights[0], [one.tensors() for one in weights]
    names = list(tensors[0])
    for one, parts in zip(weights, tensors, strict=True):
        likeness = [(type(weight), weight.dtype, weight.rounds_inputs) for weight in (one, first)]
        if likeness[0] != likeness[1] or list(parts) != names or len(one.shape) != 2:
            return None
        for name, part in parts.items():
            like = tensors[0][name]
            if len(part) != one.shape[0] or part.shape[1:] != like.shape[1:] or part.dtype != like.dtype:
                return None
    joined = {name: _joined([parts[name] for parts in tensors]) for name in names}
    return type(first)(**joined, dtype=first.dtype)


@dataclass(eq=False)
class FusedBlock:
    """One block in a step on pages."""

    block: Any
    block_idx: int
    qkv: Product = field(init=False)
    output: Product = field(init=False)
    gate_up: Product = field(init=False)
    down: Product = field(init=False)

    def __post_init__(self) -> None:
        attention, mlp = self.block.self_attn, self.block.mlp
        self.qkv = Product((attention.q_proj, attention.k_proj, attention.v_proj))
        self.output = Product((attention.o_proj,))
        self.gate_up = Product((mlp.gate_proj, mlp.up_proj))
        self.down = Product((mlp.down_proj,))

    @torch.inference_mode(False)
    def join(self) -> None:
        """Join weights with the same inputs. Outside of inference mode, because training's forwards read them, too."""
        for product in (self.qkv, self.output, self.gate_up, self.down):
            product.join()

    @property
    def is_joined(self) -> bool:
        """True if kernels multiply all weights, after `join`."""
        return all(one.matrix is not None for one in (self.qkv, self.output, self.gate_up, self.down))

    def __call__(self, hidden: Tensor, batch: PagedBatch, cos_sin: tuple[Tensor, Tensor], window: int) -> Tensor:
        """`[total, hidden]` → the same, which may be changed in place."""
        run = self._run_single if len(hidden) == 1 and self.is_joined else self._run_several
        return run(hidden, partial(self._attend, batch, cos_sin, window))

    def _run_several(self, hidden: Tensor, attend: Callable[[list[Tensor]], Tensor]) -> Tensor:
        normal = fused_kernels.normalize(hidden, *_norm(self.block.input_layernorm))
        hidden = self.output.added_to(hidden, attend(self.qkv(normal)))
        normal = fused_kernels.normalize(hidden, *_norm(self.block.post_attention_layernorm))
        return self.down.added_to(hidden, fused_kernels.gate(*self.gate_up(normal)))

    def _run_single(self, hidden: Tensor, attend: Callable[[list[Tensor]], Tensor]) -> Tensor:
        multiply, before, between = (
            fused_kernels.multiply,
            _norm(self.block.input_layernorm),
            _norm(self.block.post_attention_layernorm),
        )
        qkv, output, gate_up, down = (
            (one.matrix, one.bias) for one in (self.qkv, self.output, self.gate_up, self.down)
        )
        states = torch.split(multiply(hidden, *qkv, norm=before), self.qkv.sizes, dim=-1)  # type: ignore[arg-type]
        hidden = multiply(attend(list(states)), *output, residual=hidden)  # type: ignore[arg-type]
        inner = multiply(hidden, *gate_up, norm=between, gated=True)  # type: ignore[arg-type]
        return multiply(inner, *down, residual=hidden)  # type: ignore[arg-type]

    def _attend(self, batch: PagedBatch, cos_sin: tuple[Tensor, Tensor], window: int, states: list[Tensor]) -> Tensor:
        attention = self.block.self_attn
        assert batch.pool is not None
        assert batch.placed is not None
        keys, values, tables = batch.pool.keys[self.block_idx], batch.pool.values[self.block_idx], batch.pool.tables
        places = batch.placed.rows, batch.placed.positions
        norms = None
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm.weight, *_norm(attention.k_norm))
        query = fused_kernels.rotate(tuple(states), cos_sin, norms, (keys, values, tables), places)  # type: ignore[arg-type]
        scale = float(attention.scaling)
        given = query.transpose(0, 1)[None]
        return attend_pages(given, keys, values, tables, batch.placed, scale, window).flatten(2)[0]


def _norm(module: Any) -> tuple[Tensor, float]:
    if not hasattr(module, "variance_epsilon"):
        raise PackingUnsupportedError(f"a block has other norms: {type(module).__name__}")
    return module.weight, float(module.variance_epsilon)


class FusedStep:
    """A `DecodeStep` of all hosted blocks."""

    def __init__(self, paged: PagedAttention, fused: dict[int, FusedBlock]) -> None:
        self.paged, self.fused = paged, fused

    def __call__(self, hidden: Tensor, placed: Placed, position_ids: Tensor) -> Tensor:
        # A copy, as blocks may change it in place.
        return self.paged.step(hidden.clone(), placed, position_ids, recorder=self.run_block)

    def run_block(self, block_idx: int, call: Callable[[], Any]) -> Any:
        """Run the block; returns what its module would return."""
        assert isinstance(call, partial)
        output = run_fused(self.fused[block_idx], call, self.paged.cache)
        arity = self.paged.blocks.slots.block_output
        return output if not arity else (output, *(None,) * (arity - 1))


def run_fused(fused: FusedBlock, call: "partial[Any]", batch: PagedBatch) -> Tensor:
    """Run one block on the arguments that its module would get.

    Raises:
        PackingUnsupportedError: these aren't those of a block of this kind.
    """
    given = call.keywords
    hidden: Tensor = call.args[0] if call.args else given["hidden_states"]
    rule, cos_sin = given.get("attention_mask"), given.get("position_embeddings")
    if len(call.args) > 1 or not isinstance(rule, Window) or not isinstance(cos_sin, tuple) or len(hidden) != 1:
        raise PackingUnsupportedError("the block takes other arguments")
    # `_compare` runs blocks in float32, whose stack still rotates in their own type.
    if cos_sin[0].shape[:2] != hidden.shape[:2] or torch.promote_types(cos_sin[0].dtype, hidden.dtype) != hidden.dtype:
        raise PackingUnsupportedError("the block rotates in another way")
    cos, sin = (one[0].to(hidden.dtype).contiguous() for one in cos_sin)
    return fused(hidden[0], batch, (cos, sin), rule.length)[None]


def find_fused(paged: PagedAttention) -> FusedStep | None:
    """A step of these blocks in few kernels; None if they are of another kind."""
    blocks = paged.blocks
    try:
        fused = {idx: _fused(blocks, idx) for idx in blocks.span}
        for block_idx in {(kind_of(blocks, idx), _forms(blocks, idx)): idx for idx in blocks.span}.values():
            _compare(paged, block_idx)
    except PackingUnsupportedError as error:
        logger.info("decode steps are run by the model's own kernels: %s", error)
        return None
    except Exception as error:  # noqa: BLE001 - a kernel that this GPU or Triton refuses
        said = f"{type(error).__name__}: {error}"
        logger.warning("decode steps are run by the model's own kernels, as fused ones fail: %s", said)
        return None
    logger.info("decode steps are run by fused kernels")
    for one in fused.values():
        one.join()
    return FusedStep(paged, fused)


def _forms(blocks: BlockSpan, block_idx: int) -> tuple[object, ...]:
    """Forms and shapes of the block's packed weights, each of which is multiplied in its own way."""
    packed = (one.packed for one in blocks.slots.block(block_idx).modules() if isinstance(one, QuantizedWeight))
    return tuple(
        (type(one), *((name, tensor.shape, tensor.dtype) for name, tensor in one.tensors().items())) for one in packed
    )


def _fused(blocks: BlockSpan, block_idx: int) -> FusedBlock:
    block: Any = blocks.slots.block(block_idx)
    found = {name for name, _ in block.named_children()}
    if found != BLOCK_PARTS:
        raise PackingUnsupportedError(f"a block has other parts: {sorted(found)}")
    of_attention = {name for name, _ in block.self_attn.named_children()}
    of_mlp = {name for name, _ in block.mlp.named_children()}
    if of_attention not in (ATTENTION_PARTS, ATTENTION_PARTS | HEAD_NORMS) or of_mlp != MLP_PARTS:
        raise PackingUnsupportedError(f"a block has other parts: {sorted(of_attention | of_mlp)}")
    (key_heads, key_dim), (_, value_dim) = blocks.cache_sizes.key_value_shapes[block_idx]
    if key_dim != value_dim or block.self_attn.k_proj.weight.shape[0] != key_heads * key_dim:
        raise PackingUnsupportedError("keys and values are of unlike sizes")
    return FusedBlock(block, block_idx)


@torch.inference_mode()
def _compare(paged: PagedAttention, block_idx: int) -> None:
    """Compare a block with the model's own code in float32: with several positions and with one, joined and not.

    Raises:
        PackingUnsupportedError: it computes something else.
    """
    blocks, part = paged.blocks, Span(block_idx, block_idx + 1)
    usual = blocks.pool
    blocks.pool = blocks.new_pool(4, part, torch.float32)
    table = PageTable(blocks.pool)
    table.prepare(1, sum(TRIAL))
    try:
        with in_float32(blocks, part):
            expected = _trial(paged, part, table, None)
            fused = _fused(blocks, block_idx)
            step = FusedStep(paged, {block_idx: fused})
            for join in (False, True):
                if join:
                    fused.join()
                for got, want in zip(_trial(paged, part, table, step.run_block), expected, strict=True):
                    error = rms(got - want)
                    if not error <= CLOSE * rms(want):
                        raise PackingUnsupportedError(
                            f"block {block_idx} computes something else: {error / rms(want):.1e}"
                        )
    finally:
        blocks.pool = usual


def _trial(paged: PagedAttention, part: Span, table: PageTable, recorder: Recorder | None) -> list[Tensor]:
    """The block's own contribution to random hidden states, in steps of several positions and one of one."""
    device = paged.blocks.device
    block: Any = paged.blocks.slots.block(part.start)
    random = torch.Generator().manual_seed(0)
    outputs, start = [], 0
    for number in TRIAL:
        hidden = torch.randn(1, number, block.input_layernorm.weight.shape[0], generator=random).to(device)
        pairs = [(table.rows[0], position) for position in range(start, start + number)]
        placed = Placed.of(pairs, device)
        if number > SHORT_TOKENS:
            placed = Placed.of(pairs, device, 0, ((0, number),))
        outputs.append(paged.step(hidden.clone(), placed, placed.positions[None], part, recorder) - hidden)
        start += number
    return outputs
