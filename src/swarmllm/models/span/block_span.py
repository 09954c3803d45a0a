"""Blocks `[a, b)` of a model, run through the model's own forward.

`span/loading` reads them from a checkpoint, and `probes` finds their `BlockTraits`. Then `BlockSpan.forward` runs any
`[c, d)` of them, with a KV cache or with gradients. One thread (the server's device thread) alone calls it; it is not
re-entrant.

`InnerRecording` keeps the outputs of blocks and attention weights of one call, for a client that asks for them
(`boundary/inner_states`). Outputs are what a block returns, before anything that the model does between two blocks.
Attention weights come from transformers' own code: newer models collect them by hooks in their blocks, older ones
return them from each block. Only eager attention has them, so such a call uses it.

`KeptState` is state that modules keep after a call. A server has one rotary module for all sessions. With dynamic NTK
it keeps the frequencies of the longest call so far, and another session's call must not find them. `probes` compares
all attributes before and after it has tried the blocks. `BlockSpan` puts the changed ones back before each call, so a
call depends on its own inputs alone.
"""

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.utils.output_capturing import _active_collector

from swarmllm.data_structures import BlockTraits, Span
from swarmllm.errors import ConfigurationError, LocalProtocolError, UnsupportedModelError
from swarmllm.models.adapters.block_adapter import applied
from swarmllm.models.architecture import (
    cache_argument,
    find_blocks,
    hosted_stack,
    is_encoder,
    max_positions,
    stack_module,
    table_positions,
    text_config,
)
from swarmllm.models.block_slots import BlockSlots, ForwardStopped, Observer, Recorder, give
from swarmllm.models.boundary.block_inputs import SOURCE, BlockInputs, DeepstackArguments, unpack_masks
from swarmllm.models.boundary.inner_states import MAX_PLACE, InnerStates, Map, fits_attention
from swarmllm.models.checkpoint.skeleton import GivenEmbeddings
from swarmllm.models.parallel.shared import Group, SharedMatrix, SharedWeight, is_rounded
from swarmllm.models.quantization import QuantizedWeight
from swarmllm.models.quantization.loading import Whole
from swarmllm.models.quantization.packed import exact_inputs
from swarmllm.models.span.attention import attending, attention_configs, faster_attention
from swarmllm.models.span.offload import OffloadedBlocks
from swarmllm.models.span.page_pool import PagePool, page_bytes
from swarmllm.models.span.span_cache import CacheSizes, Elsewhere, SpanCache, can_be_paged


class InnerRecording:
    """The recording of one call."""

    def __init__(self, inner: InnerStates, stack: PreTrainedModel, slots: BlockSlots) -> None:
        self._inner, self._stack, self._slots = inner, stack, slots
        self.arguments: dict[str, Any] = {"output_attentions": True} if inner.attentions else {}
        """More arguments for the stack's forward."""
        if inner.attentions:
            parameters = inspect.signature(stack.forward).parameters
            takes_more = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
            if "output_attentions" not in parameters and not takes_more:
                raise ConfigurationError(
                    f"{type(stack).__name__} has no attention weights: leave output_attentions out"
                )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within: the blocks use eager attention if its weights are asked for."""
        if self._inner.attentions and self._slots.block_output == 1:  # the model then takes weights from more results
            self._slots.extras = (None,) * MAX_PLACE
        try:
            with attending(attention_configs(self._stack) if self._inner.attentions else (), "eager"):
                yield
        finally:
            self._slots.extras = None

    def record(self, block_idx: int, block: Callable[[], Any]) -> Any:
        """Run the block, and keep its outputs and attention weights if they are asked for."""
        inner, collected = self._inner, _collected()
        num_before = len(collected)
        result = block()
        hidden, *others = result if isinstance(result, tuple) else (result,)
        if block_idx in inner.outputs:
            inner.found[block_idx] = hidden.detach().to("cpu", copy=True)  # some models go on in place
        if inner.attentions:
            maps: list[Map] = [(block_idx, 0, weights) for weights in collected[num_before:]]
            returned = enumerate(others[:MAX_PLACE], start=1)
            if not maps:
                maps = [(block_idx, place, one) for place, one in returned if isinstance(one, Tensor)]
            inner.maps[block_idx] = [
                (idx, place, weights.detach().to("cpu", copy=True)) for idx, place, weights in maps
            ]
        return result

    def check(self, inputs: BlockInputs, past: int) -> None:
        """Check the shapes of the recorded attention weights.

        Raises:
            ConfigurationError: these blocks attend in another way.
        """
        end = past + inputs.seq_len + inputs.num_prefix
        for weights in (one[2] for maps in self._inner.maps.values() for one in maps):
            if not fits_attention(weights, inputs.batch_size, inputs.seq_len, end):
                raise ConfigurationError(
                    f"the attention weights of {type(self._stack).__name__} are {list(weights.shape)}, not "
                    "[batch, heads, seq, past + seq]: leave output_attentions out"
                )


def _collected() -> list[Tensor]:
    """Attention weights that transformers has collected in this forward."""
    collector = _active_collector.get()
    found: list[Tensor] = [] if collector is None else collector.get("attentions", [])
    return found


class BlockSpan:
    """The hosted blocks `[span.start, span.end)` of one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        span: Span,
        digests: str,
        offloaded: OffloadedBlocks | None = None,
        group: Group | None = None,
    ) -> None:
        """`model` has been pruned by `prune_to_span(span)`; `probes.probe` sets traits, cache sizes and kept state."""
        self.span = span
        self.offloaded = offloaded
        """The blocks whose weights are in memory only while they compute; None: all blocks are in memory."""
        self.group = group
        """The processes that share the matrices, this one included; None: this process has them alone."""
        self.is_together = False
        """True if all of them run these blocks (`span/together`); otherwise they only multiply."""
        self.heads: dict[int, tuple[int, ...]] = {}
        """Key heads of each process, by block, if they are spread."""
        self.hosted = hosted_stack(model)
        self.stack = stack_module(model, self.hosted)
        slots = find_blocks(model).blocks
        assert isinstance(slots, BlockSlots)
        self.slots = slots
        for block_idx in span if slots.given else ():
            give(slots.block(slots.first), slots.block(block_idx), slots.given)
        self.keeps_cache = not is_encoder(model.config) and not self.is_of_encoder
        """True if these blocks can have sessions; the blocks of an encoder run whole batches only."""
        self._require_arguments(type(model).__name__)
        self.largest_weight = max(self._weights(), key=lambda weight: weight.numel())
        """The weight whose dtype is that of the blocks: some small ones stay in float32."""
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.eval()
        self.traits = BlockTraits()
        self.digests = digests
        """Digests of the blocks in the checkpoint (`checkpoint/skeleton`)."""
        self.cache_sizes = CacheSizes()
        self.pool: PagePool | None = None
        """Pages for the keys and values of all sessions; None: each session has tensors of its own."""
        self.kept_state = KeptState(self.stack, ())
        """State that modules keep after a call, as it was before the first call; put back before each call."""

    def for_followers(self) -> dict[str, Any]:
        """The state of a copy for another process of the group; see `following`."""
        cached = {name for name, value in vars(type(self)).items() if isinstance(value, cached_property)}
        left_out = {*cached, "group", "is_together", "largest_weight", "kept_state", "pool"}
        return {name: value for name, value in vars(self).items() if name not in left_out} | {
            "kept_names": self.kept_state.names
        }

    @classmethod
    def following(cls, state: dict[str, Any]) -> Self:
        """A copy of another process's blocks, with this process's parts of the matrices."""
        blocks = cls.__new__(cls)
        kept_names = state.pop("kept_names")
        vars(blocks).update(state, group=None, is_together=False, pool=None)
        blocks.largest_weight = max(blocks._weights(), key=lambda weight: weight.numel())
        blocks.kept_state = KeptState(blocks.stack, kept_names)
        return blocks

    def _require_arguments(self, model_name: str) -> None:
        """Check that the model's forward takes a cache, and an encoder's outputs, if the blocks need them."""
        parameters = self._parameters
        if self.source_dim and SOURCE[0] not in parameters:
            raise UnsupportedModelError(f"the decoder {type(self.stack).__name__} doesn't take {SOURCE[0]}")
        if self.keeps_cache and self._cache_argument not in parameters:
            raise UnsupportedModelError(f"{model_name} keeps no KV cache, so it can't continue a session")

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the model's forward."""
        return inspect.signature(self.stack.forward).parameters

    @cached_property
    def deepstack(self) -> DeepstackArguments | None:
        """Arguments of the stack that it adds between blocks; None: it takes none."""
        return DeepstackArguments.of(self.stack)

    @cached_property
    def _cache_argument(self) -> str:
        return cache_argument(self.stack)

    @property
    def source_dim(self) -> int:
        """Width of the encoder's outputs that these blocks attend to; 0: there are none."""
        return self.slots.source_dim

    @cached_property
    def masks_source(self) -> bool:
        """True if a mask can hide some of the encoder's outputs from these blocks; models with audio may have no such
        mask."""
        return self.source_dim > 0 and SOURCE[1] in self._parameters

    @property
    def is_of_encoder(self) -> bool:
        return self.hosted.role == "encoder"

    @cached_property
    def device(self) -> torch.device:
        device: torch.device = self.largest_weight.device
        return device

    @cached_property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.largest_weight.dtype
        return dtype

    def _weights(self) -> list[Any]:
        packed = (part for part in self.slots.modules() if isinstance(part, QuantizedWeight))
        return [*self.slots.parameters(), *packed]

    @cached_property
    def is_quantized(self) -> bool:
        """True if weights were rounded to fewer bits when they were loaded."""
        return any(isinstance(one, QuantizedWeight) and is_rounded(one.packed) for one in self._weights())

    @cached_property
    def has_pairs(self) -> bool:
        """True if half a block is cut so that processes can compute it with their own features."""
        matrices = [one.packed for one in self._weights() if isinstance(one, SharedWeight)]
        return any(isinstance(one, SharedMatrix) and one.is_paired for one in matrices)

    @cached_property
    def rounds_inputs(self) -> bool:
        """True if products with quantized weights round their inputs in sessions (`--activations`)."""
        return self.activations != "none"

    @cached_property
    def activations(self) -> str:
        """Which weights round their inputs in sessions: "int8" = all that can, "auto" = some of them, or "none"."""
        packed = [one.packed for one in self._weights() if isinstance(one, QuantizedWeight)]
        if not any(one.rounds_inputs for one in packed):
            return "none"
        return "int8" if all(one.rounds_inputs or not one.can_round_inputs() for one in packed) else "auto"

    @cached_property
    def is_exact(self) -> bool:
        """True if no weight is in few bits: steps must have the very bits of the model's own code then."""
        packed = (weight.packed for weight in self._weights() if isinstance(weight, QuantizedWeight))
        return all(isinstance(one, Whole) for one in packed)

    @cached_property
    def shares_keys(self) -> bool:
        """True if sessions attend by `attention.attend_few`.

        In float32, and with weights that are multiplied as they are stored, blocks compute exactly what the local
        model computes: in half precision, another order of adding up could change a token.
        """
        return not self.is_exact and self.dtype != torch.float32 and self.device.type == "cpu"

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of the whole model, up to the end of this stack."""
        return self.slots.first + len(self.slots)

    @cached_property
    def _embeddings(self) -> GivenEmbeddings:
        found: GivenEmbeddings = self.stack.get_input_embeddings()
        return found

    @property
    def embedding_dim(self) -> int:
        return self._embeddings.embedding_dim

    @cached_property
    def vocab_size(self) -> int:
        return int(text_config(self.stack.config).vocab_size)

    @cached_property
    def max_positions(self) -> int | None:
        """Positions that the model was made for; some models have a learned embedding for each, and none for more."""
        return max_positions(self.stack)

    @cached_property
    def table_positions(self) -> range | None:
        """The `position_ids` for which this model's tables have an entry; None: it has no such tables."""
        return table_positions(self.stack)

    @property
    def longest_text(self) -> int | None:
        """Most positions of a text, prefix included; None: no table limits them."""
        table = self.table_positions  # the first entries of some are for padding, so texts may have `max_positions`
        return None if table is None else min(table.stop, self.max_positions or table.stop)

    @cached_property
    def num_token_types(self) -> int:
        """Number of token types that have an embedding; some models use those of their vocabulary instead."""
        config = text_config(self.stack.config)
        return int(getattr(config, "type_vocab_size", None) or self.vocab_size)

    @property
    def num_bytes(self) -> int:
        """Memory that the weights take."""
        tensors = (*self.stack.parameters(), *self.stack.buffers())
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        if self.offloaded is not None:
            storages |= self.offloaded.slots()
        num_bytes: int = sum(storages.values()) + self._shared_bytes
        return num_bytes

    @property
    def _shared_bytes(self) -> int:
        """Memory of shared matrices on this device: for a processor, the memory of all processes."""
        if self.group is None:
            return 0
        return sum(self.group.num_bytes) if self.device.type == "cpu" else self.group.num_bytes[0]

    def new_cache(self, span: Span | None = None, *, record_past: bool = False) -> SpanCache:
        """An empty cache for `span` (default: all hosted blocks); `record_past` for sessions that will roll back.

        Raises:
            UnsupportedModelError: these are blocks of an encoder.
        """
        if not self.keeps_cache:
            raise UnsupportedModelError("the blocks of an encoder keep no KV cache, so they have no sessions")
        cache = SpanCache(
            self.stack.config,
            self._inside(span),
            record_past=record_past,
            first=self.slots.first,
            has_source=self.source_dim > 0,
            pool=self.pool,
        )
        if self.is_together and self.group is not None:
            cache.elsewhere = Elsewhere(self.group, self, self.heads)
        return cache

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within: this process runs the blocks, and followers only multiply; for new caches."""
        before, self.is_together = self.is_together, False
        try:
            yield
        finally:
            self.is_together = before

    def step(
        self, inputs: BlockInputs, caches: Sequence[SpanCache], run: tuple[Any, ...]
    ) -> AbstractContextManager[None]:
        """Within: followers run the same (object, method, arguments), if they take part in such calls.

        Caches that they have parts of become whole if they don't.
        """
        needs_whole = inputs.adapter is not None or inputs.inner is not None
        if needs_whole:
            for cache in caches:
                cache.make_whole()
        alone = needs_whole or any(cache.elsewhere is None for cache in caches)
        if self.group is None or not self.is_together or alone or (not caches and torch.is_grad_enabled()):
            return nullcontext()
        for cache in caches:
            if cache.elsewhere is not None:
                cache.elsewhere.hold(cache)
        return self.group.step(*run)

    @property
    def why_not_paged(self) -> str:
        """The reason why sessions can't be kept in pages; "" if they keep only keys and values, of all blocks."""
        if not self.keeps_cache:
            return "the blocks keep nothing of a session"
        if self.source_dim:
            return "the blocks attend to another text, too"
        if self.offloaded is not None:
            return "some blocks come when they compute"
        if self.group is not None:
            return "several processes share the blocks"
        layers = self.new_cache().layers
        if self.cache_sizes.key_value_shapes.keys() != set(self.span) or not all(
            can_be_paged(layers[block_idx - self.slots.first]) for block_idx in self.span
        ):
            return "some blocks keep something else than keys and values of all positions"
        return ""

    def new_pool(self, num_pages: int, span: Span | None = None, dtype: torch.dtype | None = None) -> PagePool:
        """A pool of pages for the keys and values of sessions on these blocks (default: all hosted)."""
        shapes = {idx: self.cache_sizes.key_value_shapes[idx] for idx in self._inside(span)}
        return PagePool(shapes, num_pages, dtype or self.dtype, self.device)

    @property
    def page_bytes(self) -> int:
        """Memory of one page in all hosted blocks."""
        return page_bytes(self.cache_sizes.key_value_shapes, self.dtype)

    def forward(self, inputs: BlockInputs, span: Span | None = None, cache: SpanCache | None = None) -> Tensor:
        """Run the blocks of `span` (default: all hosted) on `inputs`; returns hidden states of the same shape.

        With a cache: no gradients, and the cache has `inputs.seq_len` positions more afterwards (if this raises, it is
        in an undefined state and must be dropped). Without: gradients flow to `hidden_states`, `inputs_embeds` and the
        adapter's values.

        Raises:
            UnsupportedModelError: the span cuts the model where it can't be cut.
            ConfigurationError: the span is not hosted, or an input that these blocks need is missing.
        """
        span = self._inside(span)
        for cut in self.traits.forbidden_cuts:
            if cut in (span.start, span.end):
                raise UnsupportedModelError(f"blocks {span} can't run alone: the model can't be cut before block {cut}")
        for name in self.traits.extra_inputs:
            if getattr(inputs, name) is None and not (name == "input_ids" and inputs.per_layer_inputs is not None):
                raise ConfigurationError(f"these blocks need {name} with every call, which was not given")
        if self.source_dim and inputs.encoder_hidden_states is None and (cache is None or not cache.source):
            raise ConfigurationError("these blocks attend to encoder_hidden_states, which were not given")
        step = self.step(inputs, () if cache is None else (cache,), (self, "forward", inputs, span, cache))
        if cache is None:
            with step, self.adapted(inputs, span), self._saved_for_backward(), exact_inputs():
                return self.run_blocks(inputs, span, self._with_prefix(None, inputs, span))
        with step, torch.inference_mode(), self.adapted(inputs, span, cache.position):
            output = self.run_blocks(inputs, span, self._with_prefix(cache, inputs, span))
            cache.advance(inputs.seq_len)
            return output

    def adapted(self, inputs: BlockInputs, span: Span, past: int | None = None) -> AbstractContextManager[None]:
        """Within: the blocks compute with the adapter of `inputs`, if it has one, on positions from `past` on."""
        if inputs.adapter is None:
            return nullcontext()
        beside = inputs.dropout_seeds, inputs.adapter_numbers
        return applied(inputs.adapter, self.slots, span, past, *beside, self.device.type, inputs.source_len)

    def _saved_for_backward(self) -> AbstractContextManager[None]:
        if self.offloaded is None or not torch.is_grad_enabled():
            return nullcontext()
        return self.offloaded.saved_for_backward()

    def _with_prefix(self, cache: SpanCache | None, inputs: BlockInputs, span: Span) -> SpanCache | None:
        """The cache, or a new one for this call alone. A text that begins gets the adapter's prefix first."""
        if inputs.adapter is None or not inputs.num_prefix or (cache is not None and cache.length):
            return cache
        prefix = inputs.adapter.prefix(span)
        if prefix.keys() != self.cache_sizes.key_value_shapes.keys() & set(span):
            raise ConfigurationError(f"blocks {span} need a prefix for each, or for none")
        cache = self.new_cache(span) if cache is None else cache
        of_blocks = {idx: (keys.to(self.dtype), values.to(self.dtype)) for idx, (keys, values) in prefix.items()}
        cache.begin_with(of_blocks, inputs.batch_size)
        return cache

    def run_blocks(
        self,
        inputs: BlockInputs,
        span: Span,
        cache: SpanCache | None = None,
        observer: Observer | None = None,
        recorder: Recorder | None = None,
    ) -> Tensor:
        """Run `forward` without its checks; the probes call it before the traits are known."""
        # contiguous, as the previous block would have made them: some models use view()
        hidden = inputs.hidden_states.contiguous()
        if inputs.inner is None:
            self.slots.begin(span, hidden, observer, recorder)
            return self._call_stack(inputs, cache)
        recording = InnerRecording(inputs.inner, self.stack, self.slots)
        with recording.running():
            self.slots.begin(span, hidden, observer, recording.record)
            output = self._call_stack(inputs, cache, **recording.arguments)
        recording.check(inputs, 0 if cache is None else cache.length)
        return output

    def preamble(self, inputs: BlockInputs) -> Tensor:
        """The hidden states that the model's own forward passes to the first hosted block, for the given embeddings."""
        self.slots.begin_preamble()
        return self._call_stack(inputs, None)

    def first_block(self, inputs: BlockInputs) -> Any:
        """The whole result of the first hosted block: a tensor, or a tuple that begins with one."""
        self.slots.begin_first_block(inputs.hidden_states)
        self._call_stack(inputs, None)
        result, self.slots.result = self.slots.result, None
        return result

    def _call_stack(self, inputs: BlockInputs, cache: SpanCache | None, **more: Any) -> Tensor:
        kwargs: dict[str, Any] = {} if inputs.position_ids is None else {"position_ids": inputs.position_ids}
        if (mask := unpack_masks(inputs, self.stack.config, cache)) is not None:
            kwargs["attention_mask"] = mask
        if self.deepstack is not None:
            kwargs |= self.deepstack.unpack(inputs)
        kwargs |= more
        if "use_cache" in self._parameters:
            kwargs["use_cache"] = cache is not None
        if self.source_dim:
            kwargs |= inputs.source() if cache is None else cache.source_of(inputs.source())
        if cache is not None:
            kwargs[self._cache_argument] = cache if cache.cross is None else EncoderDecoderCache(cache, cache.cross)
            if cache.num_prefix and inputs.attention_mask is not None:
                if inputs.attention_mask.ndim != 2:
                    raise ConfigurationError("behind a prefix, attention_mask must be [batch, past + seq]")
                kwargs["attention_mask"] = functional.pad(inputs.attention_mask, (cache.num_prefix, 0), value=1)
        embeds = inputs.inputs_embeds
        if embeds is None:  # the preamble computes with them, but nothing of it reaches the blocks
            shape = (inputs.batch_size, inputs.seq_len, self.embedding_dim)
            embeds = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if inputs.per_layer_inputs is not None:
            kwargs |= {"inputs_embeds": embeds, "per_layer_inputs": inputs.per_layer_inputs}
        elif inputs.input_ids is not None and "input_ids" in self.traits.extra_inputs:
            self._embeddings.prepared = embeds
            kwargs["input_ids"] = inputs.input_ids
        else:
            kwargs["inputs_embeds"] = embeds
        self.kept_state.put_back()
        try:
            may_be_faster = cache is not None and self.device.type == "cpu" and self.dtype != torch.float32
            with faster_attention(few=self.shares_keys) if may_be_faster else nullcontext():
                self.stack(**kwargs)
        except ForwardStopped:
            pass
        finally:
            self._embeddings.prepared = None
            output = self.slots.end()
        if output is None:
            raise LocalProtocolError(f"the forward of {type(self.stack).__name__} never reached its blocks")
        return output

    def _inside(self, span: Span | None) -> Span:
        if span is None or span == self.span:
            return self.span
        if span not in self.span:
            raise ConfigurationError(f"blocks {span} are not among the hosted {self.span}")
        return span


# ---------------------------------------------------------------------- state that modules keep

MAX_COPIED_BYTES = 1 << 20
"""The content of larger tensors is not copied: frequencies and counters are small. Assumed."""
_ABSENT = object()
_OF_TORCH = frozenset(vars(nn.Module()))
_KINDS = (bool, int, float, str, tuple, Tensor, type(None))


@dataclass(slots=True)
class _Attribute:
    """One attribute or buffer, with its value at some time."""

    module: nn.Module
    name: str
    value: Any
    content: Tensor | None = None
    version: int = 0
    """The number of writes to a tensor."""

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Self:
        value = module._buffers.get(name, vars(module).get(name, _ABSENT))
        found = cls(module, name, value)
        if isinstance(value, Tensor) and not value.is_meta:
            found.version = _version(value)
            found.content = value.detach().clone() if value.nbytes <= MAX_COPIED_BYTES else None
        return found

    def has_changed(self) -> bool:
        now = _Attribute.of(self.module, self.name)
        if not isinstance(self.value, Tensor) or not isinstance(now.value, Tensor):
            is_equal = isinstance(self.value, bool | int | float | str) and now.value == self.value
            return now.value is not self.value and not is_equal
        if self.content is None or now.content is None:
            return now.value is not self.value or now.version != self.version
        return now.content.shape != self.content.shape or not torch.equal(now.content.to(self.content), self.content)

    def put_back(self) -> None:
        """Give the module its earlier value; a tensor keeps its address."""
        if self.content is not None and _version(self.value) != self.version:
            self.value.copy_(self.content)
            self.version = _version(self.value)
        place = self.module._buffers if self.name in self.module._buffers else vars(self.module)
        if self.value is not _ABSENT:
            place[self.name] = self.value
        else:
            place.pop(self.name, None)


class KeptState:
    """Attributes of a model's modules by name, with their values when this object is made."""

    def __init__(self, root: nn.Module, names: Iterable[str]) -> None:
        self._attributes = {name: _Attribute.of(*_place(root, name)) for name in names}
        self._left_out: set[int] = set()

    @classmethod
    def everything(cls, root: nn.Module, without: Iterable[Tensor] = ()) -> "KeptState":
        """All state that a call might change, `without` these buffers, which another object manages."""
        left_out = {id(tensor) for tensor in without}
        found = cls(root, sorted(_names(root, left_out)))
        found._left_out = left_out
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._attributes)

    def changed(self, root: nn.Module) -> "KeptState":
        """The attributes that have changed, with their earlier values; new ones had been absent."""
        found = KeptState(root, ())
        found._attributes = {name: one for name, one in self._attributes.items() if one.has_changed()}
        for name in sorted(_names(root, self._left_out) - self._attributes.keys()):
            module, attribute = _place(root, name)
            found._attributes[name] = _Attribute(module, attribute, _ABSENT)
        return found

    def add(self, others: "KeptState") -> None:
        """Put these attributes back as well, now and later."""
        self._attributes |= others._attributes
        self.put_back()

    def put_back(self) -> None:
        """Give the modules their earlier values."""
        for one in self._attributes.values():
            one.put_back()


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return root.get_submodule(path), attribute


def _names(root: nn.Module, left_out: Container[int]) -> set[str]:
    named = ((path, name) for path, module in root.named_modules() for name in _state(module, left_out))
    return {f"{path}.{name}" if path else name for path, name in named}


def _state(module: nn.Module, left_out: Container[int]) -> Iterator[str]:
    """Names of the state that an architecture's own module may keep: numbers, texts, tensors, but no weights."""
    if type(module).__module__.startswith("swarmllm."):
        return
    yield from (name for name, buffer in module._buffers.items() if id(buffer) not in left_out)
    for name, value in vars(module).items():
        if name not in _OF_TORCH and isinstance(value, _KINDS):
            yield name


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
