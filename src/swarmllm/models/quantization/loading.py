"""Loading: quantizes each weight as soon as transformers has read it, and tests the kernels on the result.

It uses transformers' own extension point for quantizers. At most one weight is in memory in full precision, also where
several tensors of a checkpoint become one parameter (fused experts). Used by `skeleton.load_pruned`.

`hold_whole` is for weights that stay in bfloat16. On a processor without instructions for it (AVX2: most desktops),
PyTorch multiplies bfloat16 at a tenth of the speed of float32, however many tokens there are. `whole` knows its order
there and has its bits. Where it doesn't, and for gradients, some rows at a time are converted, which is exact, and
multiplied in float32; the result is rounded once. That is at least as close to float32's result as PyTorch's own
product. On other processors nothing changes, and weights in float32 are never touched.

`check_quantized` is a self-test when quantized blocks are loaded: kernels differ between processors, and some have
been wrong without an error. It multiplies by some rows of one weight of each kind and shape, with a few tokens and
with many, and compares outputs and gradients with those of the dequantized weight. `load_block_span` calls both.

`observe` is for calibration: from then on, each matrix notes the squares of its inputs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from swarmllm.errors import ConfigurationError
from swarmllm.machine_memory import trim_heap
from swarmllm.models.architecture import find_blocks
from swarmllm.models.quantization import kernels, whole
from swarmllm.models.quantization.block_search import quantize
from swarmllm.models.quantization.decoded import FORMS, KBit, Nf4Pairs
from swarmllm.models.quantization.nf4 import Nf4
from swarmllm.models.quantization.packed import Int8, LlmInt8, Packed
from swarmllm.models.quantization.rules import (
    BITS,
    BLOCKS,
    OF_WHOLE_ROWS,
    SMALLEST,
    Quantization,
    StoredType,
    is_linear,
    is_transposed,
    may_be_packed,
)
from swarmllm.models.quantization.weight import PackedView, QuantizedWeight

METHOD = "swarmllm"

WORTH = 2.5
"""Times as fast. Measured on one machine: 4 to 8 with AVX2; 1.3 to 1.7 with AVX-512 and its bfloat16, where it isn't
worth giving up the very bits of the local model."""
NATIVE_TOKENS = 3
"""Most tokens for PyTorch's own product. Measured (5632×2048, AVX2): 2 tokens take 5.9 ms, 6.7 converted; 4 tokens 8.9
and 8.0."""
RECORDED_TOKENS = 8
"""Measured (AVX2, steps of 4 blocks): recorded ones of 4 and 8 sessions take as long as others, of 16 1.08 times."""

TOKENS = (1, 5, 40)
"""Numbers of tokens that take the kernels for few tokens, and the way for many."""
ROWS = 256
"""Rows of a weight that are compared, if it has a multiple of these: kernels work on rows in parts, and a whole large
weight takes 25 times as long, at each start (measured: 9 s with AVX2, hidden 2048)."""
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative errors that rounding explains: about three times the measured ones."""
LLM_INT8_TOLERANCE = 5e-2
"""The same of outputs where inputs are rounded to 8 bits as well."""
ROUNDED_TOLERANCE = 3e-2
"""The same of `--activations int8`. Measured: 0.0055."""


@register_quantization_config(METHOD)
class LoadingConfig(QuantizationConfigMixin):
    """The `quantization_config` for `from_pretrained`."""

    def __init__(self, quantization: Quantization, device: torch.device, comes_packed: bool = False) -> None:
        self.quant_method = METHOD
        self.quantization = quantization
        self.device = device
        """The device of the loaded weights; their layout depends on it."""
        self.comes_packed = comes_packed
        """True if the checkpoint has weights in few bits, which stay as they are."""

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD, "quant_type": self.quantization.quant_type}


@register_quantizer(METHOD)
class _Quantizer(HfQuantizer):
    quantization_config: LoadingConfig

    def __init__(self, quantization_config: LoadingConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.misshapen: set[str] = set()
        self._blocks = ""
        """The path of the blocks in the model; everything outside of them stays as it is."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        blocks = find_blocks(model).blocks
        self._blocks = next(f"{name}." for name, module in model.named_modules() if module is blocks)
        # Not when a weight is converted: transformers would log the error and go on.
        self.quantization_config.quantization.require_calibration(model, self._blocks)
        return model

    def form_of(self, model: PreTrainedModel, name: str) -> StoredType:
        """`Quantization.format_of` a parameter of the blocks."""
        if name in self.misshapen or not name.startswith(self._blocks):
            return "none"
        return self.quantization_config.quantization.format_of(model, name)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """True for every matrix of the blocks: it may come packed."""
        if param_name in self.misshapen or not param_name.startswith(self._blocks):
            return False
        return self.quantization_config.comes_packed or self.form_of(model, param_name) != "none"

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        self.remove_quantization_config(model)  # the config describes the checkpoint, as without quantization
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Quantize(ConversionOps):
    """Puts a `QuantizedWeight` in place of a parameter; returns the parameters that transformers has to put in place
    itself."""

    def __init__(self, quantizer: _Quantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        model: PreTrainedModel,
        missing_keys: set[str] | None = None,
        **_context: Any,
    ) -> dict[str, Tensor]:
        device = self._quantizer.quantization_config.device
        rest: dict[str, Tensor] = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            weight = value[0] if isinstance(value, list) else value
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            fits = weight.shape == (module._parameters.get(leaf, module._buffers.get(leaf))).shape
            if not fits:
                self._quantizer.misshapen.add(name)
            form = self._quantizer.form_of(model, name)
            if isinstance(weight, PackedView) and not (
                fits and may_be_packed(model, name) and weight.transposed == is_transposed(module)
            ):
                weight = weight.dequantize()  # one that doesn't fit goes on, and transformers reports it
            if form == "none" and not isinstance(weight, PackedView):
                rest[name] = weight
                continue
            importance = self._quantizer.quantization_config.quantization.importance_of(name)
            install(module, leaf, weight, form, device, importance)
            if missing_keys is not None:
                missing_keys.discard(name)
        return rest


def install(
    module: nn.Module,
    leaf: str,
    weight: Tensor | PackedView,
    form: StoredType,
    device: torch.device,
    importance: Tensor | None = None,
) -> None:
    """Replace the parameter `leaf` of a module by the quantized `weight`, which may be so already."""
    transposed = is_transposed(module)
    if isinstance(weight, PackedView):
        packed = weight.packed
    else:
        packed = pack(weight.mT if transposed else weight, form, device, importance)
    packed = packed.for_device(device)  # the name of the first form goes, and with it its memory
    quantized = QuantizedWeight(packed, transposed=transposed)
    del module._parameters[leaf]
    module.add_module(leaf, quantized)
    trim_heap()
    for loaded in (module, quantized):
        loaded._is_hf_initialized = True  # type: ignore[assignment]  # or transformers would initialize it


@torch.no_grad()
def pack(weight: Tensor, form: StoredType, device: torch.device, importance: Tensor | None = None) -> Packed:
    """Quantize `[…, out, in]` for use on `device`: there, if it is a GPU, or else where the weight is. `importance`
    `[…, in]` of the columns is for forms that are found by search.

    Measured (16 blocks of 7B, 16 cores): CPUs take 5 s to int8 and 18 s to nf4.
    """
    if device.type == "cuda":
        weight = weight.to(device)
    if form in OF_WHOLE_ROWS:
        return (Int8 if form == "int8" else LlmInt8).quantize(weight)
    if form in BITS:
        return KBit.quantize(weight, BITS[form])
    if form in BLOCKS:
        kind, *_ = BLOCKS[form]
        return FORMS[kind](quantize(weight, kind, importance), weight.dtype)
    packed = Nf4.quantize(weight, tiled=None if device.type == "cpu" else False)
    if device.type == "cpu" and type(packed) is Nf4:  # bitsandbytes has no kernel for this processor, or this shape
        codes = (packed.codes >> 4) | (packed.codes << 4)
        return Nf4Pairs(codes, packed.scale, packed.dtype)
    return packed


@dataclass(frozen=True, eq=False)
class Whole(Packed):
    """Weights `[…, out, in]` themselves."""

    scale: None = field(init=False, default=None)  # type: ignore[assignment]

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes}

    def dequantize(self) -> Tensor:
        return self.codes.to(self.dtype)

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.codes[start:end].to(dtype)

    def _output_scale(self) -> None:
        return None

    def _kernel_takes(self, inputs: Tensor, bias: Tensor | None = None) -> bool:
        if inputs.dtype != self.codes.dtype or (bias is not None and bias.dtype != inputs.dtype):
            return False
        return len(inputs) <= NATIVE_TOKENS or whole.takes(whole.at_line(inputs), self.codes, bias)

    def _multiply_by_kernel(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        return whole.linear(whole.at_line(inputs), self.codes, bias)

    def multiply_and_add(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Rounded once where that is torch's product."""
        if bias is not None and len(inputs) and self._kernel_takes(inputs, bias):
            return self._multiply_by_kernel(inputs, bias)
        return super().multiply_and_add(inputs, bias)

    def most_inputs(self) -> int:
        """The number of inputs up to which recorded steps multiply as fast as `multiply`, in the same way."""
        if self.codes.ndim > 2 or not self.codes.is_contiguous():  # these are torch's in recorded steps
            return NATIVE_TOKENS
        for most in (kernels.NO_LIMIT, RECORDED_TOKENS):
            several = (*range(NATIVE_TOKENS + 1, RECORDED_TOKENS + 1), most)
            if all(whole.knows(self.codes, num) for num in several):
                return most
        return NATIVE_TOKENS


def hold_whole(model: PreTrainedModel) -> None:
    """Put a `Whole` in the place of each large matrix in bfloat16 of the blocks, if this processor gains by it."""
    blocks = find_blocks(model).blocks
    prefix = next(f"{name}." for name, module in model.named_modules() if module is blocks)
    large = [
        name
        for name, weight in model.named_parameters()
        if name.startswith(prefix) and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        if weight.shape[-2:].numel() >= SMALLEST and may_be_packed(model, name)
    ]
    if not large or kernels.float32_speedup() < WORTH:
        return
    for name in large:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        _install_whole(module, leaf, Whole)
        held: QuantizedWeight = module.get_submodule(leaf)
        codes = held.packed.codes
        one = codes if codes.ndim == 2 else codes[0]  # experts have the same shape
        has_bias = leaf == "weight" and module._parameters.get("bias") is not None
        whole.find_orders(one, has_bias=has_bias, threads=whole.likely_threads())


def _install_whole(module: nn.Module, leaf: str, form: Callable[[Tensor, torch.dtype], Packed]) -> None:
    """Put `form(weight, its dtype)` in the place of a parameter."""
    weight = module._parameters[leaf]
    assert weight is not None
    transposed = is_transposed(module)
    packed = form(weight.data.mT if transposed else weight.data, weight.dtype)
    install(module, leaf, PackedView(packed, transposed=transposed), "none", weight.device)


@dataclass(frozen=True, eq=False)
class Observed(Whole):
    """Weights that note their inputs."""

    squares: Tensor
    """Sums of the squares of the inputs, `[…, in]`."""
    num_inputs: Tensor
    """`[…]`."""

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype) -> "Observed":
        squares = torch.zeros(*weight.shape[:-2], weight.shape[-1], dtype=torch.float64, device=weight.device)
        return cls(weight, dtype, squares, squares[..., 0].clone())

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "squares": self.squares, "num_inputs": self.num_inputs}

    def split(self, rows: int) -> "Observed":
        """All parts note their inputs in the same place."""
        codes = self.codes.view(-1, rows, self.codes.shape[-1])
        return type(self)(codes, self.dtype, self.squares.expand(len(codes), -1), self.num_inputs.expand(len(codes)))

    def multiply(self, inputs: Tensor) -> Tensor:
        return self.multiply_and_add(inputs, None)

    def multiply_and_add(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        self.squares.add_(inputs.double().square().sum(0))
        self.num_inputs.add_(len(inputs))
        return F.linear(inputs, self.codes, bias)


def observe(block: nn.Module) -> None:
    """Let all large matrices of a block note their inputs from now on."""
    for path, module in list(block.named_modules()):
        for leaf, weight in list(module.named_parameters(recurse=False)):
            if weight.shape[-2:].numel() >= SMALLEST and is_linear(f"{path}.{leaf}".lstrip("."), module, weight):
                _install_whole(module, leaf, Observed.of)


def observed_squares(block: nn.Module) -> dict[str, Tensor]:
    """Mean squares of the inputs of each matrix, `[…, in]`, by its name; zeros where there were none."""
    packed = {name: part.packed for name, part in block.named_modules() if isinstance(part, QuantizedWeight)}
    return {
        name: (one.squares / one.num_inputs.clamp_min(1)[..., None]).float()
        for name, one in packed.items()
        if isinstance(one, Observed)
    }


def round_inputs(modules: Iterable[nn.Module], *, if_faster: bool = False) -> None:
    """Let all quantized weights that can do so round their inputs to 8 bits, for products without gradients.

    `if_faster`: only weights that gain by it. That follows from their shapes, so it is the same on all such machines.

    All products of such a weight round, whatever number of inputs they have: so a text that is computed again, in other
    pieces or beside other texts, has the same tokens. Call `check_rounding` before.
    """
    for module in modules:
        if isinstance(module, QuantizedWeight):
            module.round_inputs(if_faster=if_faster)


def check_rounding(modules: Iterable[nn.Module], known: set[object], *, if_faster: bool = False) -> None:
    """Test products with rounded inputs of each kind of weight that `round_inputs` will change and that isn't `known`
    yet. All kinds are known then.

    Raises:
        ConfigurationError: this machine computes something else than it should.
    """
    for module in modules:
        if isinstance(module, QuantizedWeight) and module.packed.can_round_inputs(faster=if_faster):
            matrix = module.packed[0] if len(module.shape) > 2 else module.packed
            kind = type(matrix), matrix.shape, matrix.dtype
            if kind not in known:
                check_rounded(_some_rows(matrix.as_rounding()))
                known.add(kind)


FEW_BITS = ("q4_k", "q5_k")
"""Types of `--quant_type` whose strips are multiplied as bytes with AVX2 alone, too."""
EXACT_TYPES = ("none", "llm_int8")
"""Types of `--quant_type` whose inputs are never rounded here. In others of them some matrices are stored in int8."""


@torch.no_grad()
def check_rounded(matrix: Packed) -> None:
    """Compare products of one matrix that rounds its inputs with exact ones.

    Raises:
        ConfigurationError: they differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(max(TOKENS), matrix.shape[1], generator=generator).to(matrix.dtype)
    rounded, expected = matrix.linear(inputs), matrix.multiply(inputs)
    if not _relative_error(rounded, expected) <= ROUNDED_TOLERANCE:
        raise ConfigurationError(
            f"this machine multiplies {type(matrix).__name__} weights by rounded inputs wrongly "
            f"({matrix.shape[0]}×{matrix.shape[1]} in {matrix.dtype}): serve without --activations"
        )


def resolve_activations(wanted: str, device: torch.device, quantization: Quantization, *, comes_packed: bool) -> str:
    """The user's choice for this device and these weights. `comes_packed`: the checkpoint's own types are kept.

    auto is none where rounded inputs are no faster. With AVX2 alone only those of 4 and 5 bits in strips are (q4_k,
    128 inputs, Zen 2: 2.5 times).

    Raises:
        ConfigurationError: inputs can't be rounded here.
    """
    if wanted == "int8" and (device.type != "cpu" or kernels.library() is None):
        here = "kernels that were compiled when swarmllm was installed" if device.type == "cpu" else "a CPU"
        raise ConfigurationError(f"--activations int8 needs {here}: leave it out")
    if wanted == "int8" and not comes_packed and quantization.quant_type in EXACT_TYPES:
        raise ConfigurationError(
            f"weights of --quant_type {quantization.quant_type} can't be multiplied by rounded inputs: leave "
            "--activations out, or serve with --quant_type int8, q8_0, q6_k, q5_k or q4_k"
        )
    if wanted == "auto":
        gains = kernels.multiplies_bytes() or (
            not comes_packed and quantization.quant_type in FEW_BITS and kernels.has_strips(kernels.Q4_0)
        )
        return "auto" if device.type == "cpu" and gains else "none"
    return wanted


def check_quantized(modules: Iterable[nn.Module]) -> int:
    """Test each kind of quantized weight among the modules; how many kinds there are.

    Raises:
        ConfigurationError: this machine computes something else than it should.
    """
    kinds: dict[object, Packed] = {}
    for module in modules:
        if isinstance(module, QuantizedWeight):
            packed = module.packed
            matrix = packed[0] if len(packed.shape) > 2 else packed
            kinds.setdefault((type(matrix), matrix.shape, matrix.dtype), matrix)
    for one in kinds.values():
        matrix = _some_rows(one)
        for tokens in TOKENS:
            check_matrix(matrix, tokens)
    return len(kinds)


def _some_rows(matrix: Packed) -> Packed:
    return matrix if matrix.shape[0] % ROWS else matrix.split(ROWS)[0]


def check_matrix(matrix: Packed, tokens: int) -> None:
    """Compare outputs and gradients of one matrix with those of its dequantized self.

    Raises:
        ConfigurationError: they differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(tokens)
    rows, columns = matrix.shape
    inputs, grads = (
        torch.randn(tokens, size, generator=generator).to(matrix.dtype).to(matrix.device) for size in (columns, rows)
    )
    weight = matrix.dequantize()
    with torch.no_grad():
        without_gradients = matrix.linear(inputs)
    leaf = inputs.requires_grad_()
    with torch.enable_grad():
        outputs = matrix.linear(leaf)
    (grad,) = torch.autograd.grad(outputs, leaf, grads)
    wide = torch.promote_types(matrix.dtype, torch.float32)  # as precise, and fast on every processor
    weight = weight.to(wide)
    expected = F.linear(inputs.detach().to(wide), weight)
    tolerance = TOLERANCES[matrix.dtype]
    for what, got, wanted in (
        ("outputs", without_gradients, expected),
        ("outputs", outputs.detach(), expected),
        ("gradients", grad, grads.to(wide) @ weight),
    ):
        limit = LLM_INT8_TOLERANCE if isinstance(matrix, LlmInt8) and what == "outputs" else tolerance
        if not _relative_error(got, wanted) <= limit:
            raise ConfigurationError(
                f"this machine multiplies {type(matrix).__name__} weights wrongly ({what} of {tokens} tokens, "
                f"{rows}×{columns} in {matrix.dtype}): serve with --quant_type none"
            )


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).float().norm() / wanted.float().norm().clamp_min(1e-30))
