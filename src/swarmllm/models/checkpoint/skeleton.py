"""A model without weights, cut down to some blocks or to none, and the checkpoint tensors that it needs.

transformers' own renaming rules choose these tensors, so renamed, fused and quantized checkpoints work without a table
of names. Used by `span/loading`, `shell/loading` and `fingerprint`.

The encoder of a model with audio is cut down to its blocks alone, one after the other (`keep_blocks_alone`). The client
makes the input of the first block from audio, and the mask that hides padding from blocks. Between the blocks of such
an encoder nothing happens (`architecture.WITH_AUDIO`), so its own forward isn't needed for them.

`BlockDigests` computes a digest of each block, of every byte that is stored for it, while the block is read. Servers
that read the same files have the same digests, in every format, dtype and device that they keep blocks in. A digest
shows differences by accident (another fine-tune, a damaged file). A server that wants to lie about it can.
"""

import base64
import copy
import hashlib
import inspect
import logging
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from operator import itemgetter
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.masking_utils import create_bidirectional_mask
from transformers.utils import logging as hf_logging

from swarmllm.data_structures import DIGEST_CHARS, Span
from swarmllm.errors import (
    BlockWeightsNotFoundError,
    ConfigurationError,
    CorruptWeightsError,
    LocalProtocolError,
    UnsupportedModelError,
    WeightsMismatchError,
)
from swarmllm.machine_memory import memory_ran_out
from swarmllm.models.architecture import (
    Stack,
    as_config_says,
    blocks_class,
    find_blocks,
    has_audio,
    hosted_stack,
    stack_module,
    stack_of,
    stacks,
    stored_prefix,
    text_config,
)
from swarmllm.models.block_slots import BlockSlots, ForwardStopped, holder_of, only_in_first
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.sources import first_line
from swarmllm.models.quantization import FULL_PRECISION, Quantization, stored_bytes
from swarmllm.models.quantization.rules import may_be_packed

Prune = Callable[[PreTrainedModel], None]
"""Replaces the parts of a freshly built model that are not wanted."""

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that configs have for the number of experts of a block."""
ROTATION = "rotary_emb"
"""transformers' name of the module that makes `position_embeddings`."""


class BlockDigests:
    """Checksums of everything read so far. Use it with `with`: a thread computes them during loading."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], Future[int]] = {}
        self._latest: list[Future[int]] = []
        self._block_of: dict[str, int] = {}
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="swarmllm-digests")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._beside.shutdown(cancel_futures=True)

    def expect(self, model: PreTrainedModel, parameters: Mapping[str, str]) -> None:
        """Note the weights that are going to be read, and their parameters in the model; once for each model.

        Buffers don't count: some versions of transformers read a buffer that others compute.
        """
        blocks, first = find_blocks(model).blocks, hosted_stack(model).span.start
        prefix = next(f"{name}." for name, module in model.named_modules() if module is blocks)
        inside = {name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(prefix)}
        self._block_of |= {
            weight: first + int(name.removeprefix(prefix).partition(".")[0])
            for weight, name in parameters.items()
            if name in inside
        }

    def on_read(self, weight: str, stored: str, tensor: torch.Tensor) -> None:
        """Take note of one of the tensors that a weight is stored as."""
        if weight in self._block_of and (weight, stored) not in self._sums:
            wait(self._latest)  # or a faster loader fills the memory with tensors to be summed
            self._sums[weight, stored] = self._beside.submit(_checksum, tensor)
            self._latest = [self._sums[weight, stored]]

    def of(self, span: Span) -> str:
        """The digests of these blocks, `DIGEST_CHARS` characters each."""
        texts = dict.fromkeys(span, "")
        for (weight, stored), checksum in sorted(self._sums.items(), key=itemgetter(0)):
            if (block := self._block_of[weight]) in span:
                texts[block] += f"{weight}\0{stored}\0{checksum.result():08x}\n"
        return "".join(_digest(text) for text in texts.values())


def _checksum(tensor: torch.Tensor) -> int:
    """Measured: 3 GB/s on one core, where SHA-256 has 1.4 and quantizing 0.5."""
    # A last axis of 1 can be viewed as bytes in every layout, also those of pickled checkpoints.
    return zlib.crc32(np.ascontiguousarray(tensor.unsqueeze(-1).view(torch.uint8).numpy()).data)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())[:DIGEST_CHARS].decode()


class GivenEmbeddings(nn.Module):
    """A stand-in for the input embeddings of a server, which has none: returns the prepared embeddings of the call."""

    def __init__(self, embedding_dim: int, *, pads: bool = False) -> None:
        """`pads`: the stack may embed padding that it appends to a text; nothing of it reaches the blocks."""
        super().__init__()
        self.embedding_dim, self.pads = embedding_dim, pads
        self.weight = torch.empty(0, embedding_dim)  # no parameter: only for code that initializes or measures it
        self.prepared: Tensor | None = None

    def forward(self, ids: Any = None, *_: Any, **__: Any) -> Tensor | None:
        if self.prepared is None and self.pads and isinstance(ids, Tensor):
            return torch.zeros(*ids.shape, self.embedding_dim, device=ids.device)
        return self.prepared


class _LeftOut(nn.Module):
    """A stand-in for a part that is never called; transformers' initialization still looks for weights there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.empty(0, 1)
        self.bias = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> None:
        raise LocalProtocolError("a part of the model was called that had been left out")


def on_meta(cls: type[PreTrainedModel], config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """The model's modules without storage; `options` are arguments of the class's own.

    Raises:
        UnsupportedModelError: the config describes no model.
    """
    with as_config_says(config.name_or_path), torch.device("meta"), torch.random.fork_rng(devices=[]):
        return cls(copy.deepcopy(config), **options)


def pruned(cls: type[PreTrainedModel], prune: Prune, *mixins: type) -> type[PreTrainedModel]:
    """A subclass of the same name whose instances lose parts before any weight is read."""

    def build(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        prune(self)

    return type(cls.__name__, (*mixins, cls), {"__init__": build, "__module__": cls.__module__})


def prune_to_span(span: Span, unused: Iterable[str] = ()) -> Prune:
    """Keeps the blocks of `span` and the rest of the stack, without its embeddings and its parts named in `unused`."""

    def prune(model: PreTrainedModel) -> None:
        hosted = stack_of(model.config, span)
        model.__dict__["swarm_stack"] = hosted
        stack = stack_module(model, hosted)
        source_dim = model.get_encoder().config.get_text_config().hidden_size if hosted.role == "decoder" else 0
        _drop_all_but(model, stack)
        for name in unused:
            setattr(stack, name, _LeftOut())
        if has_audio(model.config) and hosted.role == "encoder":
            keep_blocks_alone(stack, find_blocks(model).attribute)
            width = stack.config.get_text_config().hidden_size
        else:
            width = stack.get_input_embeddings().weight.shape[1]
        stack.set_input_embeddings(GivenEmbeddings(width, pads=hosted.role == "encoder"))
        found = find_blocks(model)
        blocks = list(found.blocks)
        prefix = next(name for name, module in model.named_modules() if module is found.blocks)
        slots = BlockSlots(blocks, span, hosted.span.start)
        slots.source_dim = int(source_dim)
        setattr(found.owner, found.attribute, slots)
        for place, names in borrowed(model, prefix, {block_idx - slots.first for block_idx in span}).items():
            slots.add_module(str(place), parameters_alone(blocks[place], names))
        slots.given = only_in_first(blocks) if hosted.role else ()
        if slots.given and slots.first not in span:
            slots.add_module("0", holder_of(blocks[0], slots.given))
        _forget_ties(model)

    return prune


def unused_before_blocks(config: PreTrainedConfig, stack: Stack | None = None) -> set[str]:
    """Parts of the stack (its final norm, mostly) that are not called before the first block.

    A server that needs none of them doesn't have to download the shard that holds them. Found by a forward with zeros
    for weights that stops at the first block; empty if the model can't be run that way.
    """
    start = (stack or stacks(config)[-1]).span.start
    model = on_meta(pruned(blocks_class(config), prune_to_span(Span(start, start + 1))), config).eval()
    module = stack_module(model, hosted_stack(model))
    slots = find_blocks(model).blocks
    assert isinstance(slots, BlockSlots)  # prune_to_span has put them there
    parts = {
        name: part
        for name, part in module.named_children()
        if not isinstance(part, GivenEmbeddings) and all(one is not slots for one in part.modules())
    }
    called: set[str] = set()
    with as_config_says(config.name_or_path):  # its sizes may be anything: no weights have been compared with them yet
        for name, part in parts.items():
            for tensor in (*part.to_empty(device="cpu").parameters(), *part.buffers()):
                tensor.data.zero_()
            part.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    embeds = torch.zeros(1, 2, module.get_input_embeddings().weight.shape[1])
    slots.begin_preamble()
    try:
        with torch.no_grad():
            module(inputs_embeds=embeds, use_cache=False)
    except ForwardStopped:
        return {name for name, part in parts.items() if name not in called and any(True for _ in part.parameters())}
    except Exception:  # noqa: BLE001 - model code that needs more than embeddings: keep all that may come before
        return parts.keys() & {"pooler"}
    finally:
        slots.end()
    return set()


def _drop_all_but(model: nn.Module, kept: nn.Module) -> None:
    """Replace everything that is neither `kept` nor around it."""
    if model is kept:
        return
    for name in (*model._parameters, *model._buffers):  # transformers' initialization still fills them
        model._parameters.pop(name, None)
        model.register_buffer(name, torch.empty(0), persistent=False)
    for name, child in list(model.named_children()):
        if any(module is kept for module in child.modules()):
            _drop_all_but(child, kept)
        else:
            setattr(model, name, _LeftOut())


def _forget_ties(model: PreTrainedModel) -> None:
    present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if target in present and source in present
    }


def drop_blocks(model: PreTrainedModel) -> None:
    """Keeps everything but the blocks."""
    for stack in stacks(model.config):
        found = find_blocks(model, stack)
        setattr(found.owner, found.attribute, nn.ModuleList())
    _forget_ties(model)


def client_tensor_names(checkpoint: Checkpoint) -> list[str]:
    """The checkpoint's tensors outside the blocks: embeddings, norms, head."""
    cls = pruned(blocks_class(checkpoint.config), drop_blocks)
    return needed_tensors(on_meta(cls, checkpoint.config), checkpoint.weight_map())


def tensors_of_span(checkpoint: Checkpoint, span: Span, unused: Collection[str] = ()) -> list[str]:
    """The checkpoint's tensors of these blocks of one stack, and of the rest of the stack without parts in `unused`."""
    cls = pruned(blocks_class(checkpoint.config), prune_to_span(span, unused))
    return needed_tensors(on_meta(cls, checkpoint.config), checkpoint.weight_map())


def block_bytes(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None, quantization: Quantization = FULL_PRECISION
) -> list[int]:
    """Bytes that each block takes in memory (dtype None = as stored), computed without reading any weight."""
    model, dtype = on_meta(blocks_class(checkpoint.config), checkpoint.config), dtype or checkpoint.stored_dtype()
    bits: dict[str, set[float | None]] = {}
    for name, parameter in parameters_of(model, checkpoint.weight_map() if checkpoint.comes_packed else ()).items():
        bits.setdefault(parameter, set()).add(checkpoint.kept_bits(name))

    def stored(name: str, parameter: nn.Parameter) -> int:
        kept = [*bits.get(name, ())]  # several if it is merged of weights that are stored differently: not kept then
        if len(kept) == 1 and kept[0] is not None and may_be_packed(model, name):
            return int(parameter.numel() * kept[0] / 8)
        return stored_bytes(model, name, dtype, quantization)

    return [
        sum(stored(f"{prefix}.{name}", parameter) for name, parameter in block.named_parameters())
        for prefix, block in named_blocks(model)
    ]


def read_share(checkpoint: Checkpoint) -> float:
    """Share of the blocks' weights that one token reads, from the config: less than 1 for a mixture of experts."""
    config = text_config(checkpoint.config)
    num_experts = next((count for name in NUM_EXPERTS if (count := getattr(config, name, None))), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if not isinstance(num_experts, int) or not isinstance(chosen, int):
        return 1.0
    model = on_meta(blocks_class(checkpoint.config), checkpoint.config)
    read = total = 0.0
    for _, block in named_blocks(model):
        for name, parameter in block.named_parameters():
            is_of_experts = "experts" in name.split(".")
            read += parameter.numel() * (min(1.0, chosen / num_experts) if is_of_experts else 1.0)
            total += parameter.numel()
    return read / total


def _tensors(
    cls: type[PreTrainedModel], checkpoint: Checkpoint, packed_for: torch.dtype | None, digests: BlockDigests | None
) -> dict[str, Any]:
    """The checkpoint's tensors that an instance of the class needs."""
    model = on_meta(cls, checkpoint.config)
    found = parameters_of(model, checkpoint.weight_map())
    if checkpoint.comes_packed:
        _check_biases(checkpoint, found)
    if digests is None:
        tensors = checkpoint.tensors(found, packed_for=packed_for)
    else:
        digests.expect(model, found)
        tensors = checkpoint.tensors(found, packed_for=packed_for, on_read=digests.on_read)
    return {as_of_this_class(model, name): tensor for name, tensor in tensors.items()}


def named_blocks(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """All blocks and their names in the model, in the order of their numbers."""
    found: list[tuple[str, nn.Module]] = []
    for stack in stacks(model.config):
        blocks = find_blocks(model, stack).blocks
        prefix = next(name for name, module in model.named_modules() if module is blocks)
        found += [(f"{prefix}.{place}", block) for place, block in enumerate(blocks)]
    return found


_loading = threading.Lock()
"""transformers switches process-wide settings while it builds and loads a model: two at once spoil each other."""


def load_pruned(
    cls: type[PreTrainedModel],
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    progress: bool = True,
    may_lack: Collection[str] = (),
    digests: BlockDigests | None = None,
    **hf_kwargs: Any,
) -> PreTrainedModel:
    """An instance of a `pruned` class with its weights, through transformers' own `from_pretrained`.

    Tensors of `may_lack` (a new head) are initialized as transformers does it if the checkpoint lacks them. `digests`
    notes everything that is read.

    Raises:
        BlockWeightsNotFoundError: the checkpoint lacks a tensor or file.
        CorruptWeightsError: a file is damaged.
        UnsupportedModelError: it has biases that its architecture lacks.
        WeightsMismatchError: a tensor has another shape than the config says.
    """
    with _loading:
        return _load_pruned(
            cls, checkpoint, dtype=dtype, progress=progress, may_lack=may_lack, digests=digests, **hf_kwargs
        )


def _load_pruned(
    cls: type[PreTrainedModel],
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    progress: bool,
    may_lack: Collection[str],
    digests: BlockDigests | None,
    **hf_kwargs: Any,
) -> PreTrainedModel:
    tensors = _tensors(cls, checkpoint, dtype if "quantization_config" in hf_kwargs else None, digests)
    bar_was_on = hf_logging.is_progress_bar_enabled()
    report = hf_logging.get_logger(modeling_utils.__name__)
    report.addFilter(named := partial(_with_name, checkpoint.name))
    (hf_logging.enable_progress_bar if progress else hf_logging.disable_progress_bar)()
    try:
        # transformers initializes missing tensors; only a new head may take from the user's random state
        with torch.random.fork_rng(devices=[], enabled=not may_lack):
            model, info = cls.from_pretrained(
                None,
                config=checkpoint.config,
                state_dict=tensors,
                dtype=dtype,
                output_loading_info=True,
                **hf_kwargs,
            )
    except SafetensorError as error:
        raise CorruptWeightsError(f"{checkpoint.name}: a weights file is damaged ({error})") from error
    except (MemoryError, RuntimeError) as error:
        if memory_ran_out(error):
            raise ConfigurationError(
                f"memory ran out while {checkpoint.name} was loaded ({first_line(error)}): load fewer blocks, or end "
                "other programs"
            ) from error
        raise WeightsMismatchError(f"the tensors of {checkpoint.name} don't fit its config: {error}") from error
    finally:
        report.removeFilter(named)
        (hf_logging.enable_progress_bar if bar_was_on else hf_logging.disable_progress_bar)()
    if missing := sorted({*info["missing_keys"]} - {*may_lack}):
        raise BlockWeightsNotFoundError(
            f"{checkpoint.name} lacks {missing[0]}" + (f" and {len(missing) - 1} more tensors" * (len(missing) > 1))
        )
    model.config.name_or_path = checkpoint.name
    return model


def with_random_weights(
    cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, *, noise: float
) -> PreTrainedModel:
    """An instance of a `pruned` class that transformers has initialized, the same each time, and `noise` added.

    The user's random state stays untouched.
    """
    report = hf_logging.get_logger(modeling_utils.__name__)
    bar_was_on = hf_logging.is_progress_bar_enabled()
    with _loading, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        report.addFilter(_nothing)  # it would tell that all weights are missing
        hf_logging.disable_progress_bar()
        try:
            model = cls.from_pretrained(None, config=copy.deepcopy(config), state_dict={}, dtype=dtype)
        finally:
            report.removeFilter(_nothing)
            if bar_was_on:
                hf_logging.enable_progress_bar()
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model.eval().requires_grad_(False)


def _nothing(_: logging.LogRecord) -> bool:
    return False


def _with_name(name: str, record: logging.LogRecord) -> bool:
    """Put the checkpoint's name into transformers' report of a new head: transformers doesn't know it."""
    record.msg = str(record.msg).replace("from: None", f"from: {name}")
    return True


def _check_biases(checkpoint: Checkpoint, names: Collection[str]) -> None:
    """Rounding to few bits may have given linear maps a bias, to make up for errors. It may be 0 (AutoGPTQ's is).

    Raises:
        UnsupportedModelError: there is one, which the model has no place for.
    """
    biases = {name.removesuffix("weight") + "bias" for name in names if name.endswith(".weight")}
    homeless = biases.intersection(checkpoint.weight_map()).difference(names)
    for name, bias in checkpoint.tensors(sorted(homeless)).items():
        if bias[...].any():
            raise UnsupportedModelError(
                f"{checkpoint.name} has {name}, which its architecture lacks in transformers, so blocks would compute "
                "something else: use another checkpoint of the model"
            )


def borrowed(model: PreTrainedModel, prefix: str, hosted: Collection[int]) -> dict[int, set[str]]:
    """Parameters of other blocks that hosted blocks share: {block: names within it}."""
    borrowed: dict[int, set[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        user, owner = (_inside_block(name, prefix) for name in (target, source))
        if user is not None and owner is not None and user[0] in hosted and owner[0] not in hosted:
            borrowed.setdefault(owner[0], set()).add(owner[1])
    return borrowed


def parameters_alone(block: nn.Module, names: Iterable[str]) -> nn.Module:
    """A module that does nothing but hold some parameters of `block` under their names."""
    root = nn.Module()
    for name in names:
        path, _, leaf = name.rpartition(".")
        holder = root
        for part in path.split("."):
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.register_parameter(leaf, block.get_parameter(name))
    return root


def _inside_block(name: str, prefix: str) -> tuple[int, str] | None:
    """`model.layers.3.mlp.weight` → (3, "mlp.weight")."""
    if not name.startswith(f"{prefix}."):
        return None
    index, _, rest = name.removeprefix(f"{prefix}.").partition(".")
    return int(index), rest


def needed_tensors(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """The checkpoint's tensors that end up in `model`."""
    return list(parameters_of(model, names))


def parameters_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Each of the checkpoint's tensors that ends up in `model` → the parameter that it is, or is merged into."""
    wanted = model.state_dict()
    with as_config_says(model.config.name_or_path):
        mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found = {}
    for name in sorted(names):
        given = as_of_this_class(model, name)
        renamed, _ = rename_source_key(given, renamings, converters, model.base_model_prefix, wanted)
        if renamed not in wanted and given in wanted:
            renamed = given
        if renamed in wanted:
            found[name] = renamed
    return found


def as_of_this_class(model: PreTrainedModel, name: str) -> str:
    """The name of a tensor, had the checkpoint been saved by the model's class.

    Classes of one architecture may call their stack differently: `transformer` where Qwen3 answers, else `model`.
    """
    stored, own = stored_prefix(model.config), model.base_model_prefix
    if not stored or not own or stored == own or not name.startswith(f"{stored}."):
        return name
    return f"{own}.{name.removeprefix(f'{stored}.')}"


def keep_blocks_alone(stack: PreTrainedModel, blocks: str) -> None:
    """Let the encoder's forward take embeddings and run the blocks, which it has under that name, on them."""
    for name, _ in list(stack.named_children()):
        if name not in (blocks, ROTATION):
            delattr(stack, name)
    cls = type(stack)
    taken = inspect.signature(getattr(stack, blocks)[0].forward).parameters

    def forward(self: PreTrainedModel, inputs_embeds: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
        hidden = inputs_embeds
        given: dict[str, Any] = {
            "attention_mask": create_bidirectional_mask(
                config=self.config, inputs_embeds=hidden, attention_mask=attention_mask
            )
        }
        if "position_embeddings" in taken:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
            given |= {"position_ids": positions, "position_embeddings": getattr(self, ROTATION)(hidden, positions)}
        for block in getattr(self, blocks):
            hidden = block(hidden, **given)
        return hidden

    def get_input_embeddings(self: PreTrainedModel) -> nn.Module:
        found: nn.Module = self.embeddings
        return found

    def set_input_embeddings(self: PreTrainedModel, value: nn.Module) -> None:
        self.embeddings = value

    members = {"forward": forward, "__module__": cls.__module__}
    members |= {"get_input_embeddings": get_input_embeddings, "set_input_embeddings": set_input_embeddings}
    stack.__class__ = type(cls.__name__, cls.__bases__, members)  # a class without the deleted members
