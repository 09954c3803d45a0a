"""Where `generate()` begins to speculate, and the checkpoint's own head for guesses.

`generation` asks `Speculator` for each greedy or sampled text; `ClientConfig.speculation` turns it on and off. There
are no guesses for several rows, for blocks whose caches can't be rolled back, for texts given as embeddings, and for
models whose forwards draw random numbers or have hooks of the user.

`MtpHead` is a checkpoint's own head for multi-token prediction. It is loaded and run on this machine;
`speculation/drafters` asks it. Its block runs as on servers, by the architecture's own forward.

Checkpoints have such a head as an ordinary block after the last one. DeepSeek-AI 2024 (DeepSeek-V3, section 2.2): the
hidden state of a position and the embedding of the token after it, each after a norm of its own, are joined and
projected to one hidden state. A block of the model's own architecture and a norm follow. Then the model's head predicts
the token after the next. Checkpoints differ only in names (`LAYOUTS`), and in the order in which the two are joined.
Embeddings and head are the model's own, even if the checkpoint repeats them.
"""

import copy
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import output_capturing

from swarmllm.client.local_blocks import LocalSpan
from swarmllm.client.local_fallback import open_local_model
from swarmllm.client.session.inference_session import InferenceSession
from swarmllm.config import ClientConfig
from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, UnsupportedModelError, WeightsError, WeightsMismatchError
from swarmllm.models.architecture import Task, blocks_class, cache_argument, decoder_stack, find_blocks, text_config
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.skeleton import block_bytes, on_meta
from swarmllm.models.checkpoint.stored_files import MTP_FILE
from swarmllm.models.shell.hollow_modules import is_row_hook
from swarmllm.models.shell.remote_cache import RemoteCache
from swarmllm.models.shell.stack_forward import INNER_OUTPUTS
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.span_cache import SpanCache
from swarmllm.speculation.drafters import (
    BestDrafter,
    Drafter,
    ModelDrafter,
    MtpDrafter,
    NGramDrafter,
    SilentDrafter,
    note_states,
)
from swarmllm.speculation.planner import Planner
from swarmllm.speculation.sampling_loop import Speculation

logger = logging.getLogger(__name__)

AUTO_LATENCY_S = 0.02
"""Assumed: with "auto", a round trip that waits for the network less than this is no reason to speculate. Loopback and
local networks stay below it (0.5 to 5 ms measured), other continents and most other towns above."""
LOOK_TEXTS = 16
"""One text of this many is written by our own loop although the servers are near, to measure again. Assumed."""
UNGUESSED = (Task.SEQ_TO_SEQ_LM, Task.SPEECH_SEQ_TO_SEQ, Task.IMAGE_TEXT_TO_TEXT)
"""Tasks whose texts are written without guesses."""

AUTO_BYTES = 1 << 30
"""A head of at most this size is read unasked. Assumed; MiMo-7B's has 0.4 GiB, DeepSeek-V3's 11 in 8 bits."""
FULL_ATTENTION = "full_attention"


def require_no_drafts(config: ClientConfig, task: Task) -> None:
    """Refuse guesses for a task whose texts are written without: guesses know text alone.

    Raises:
        ConfigurationError: the config asks for guesses.
    """
    if task in UNGUESSED and config.speculation not in ("auto", "off"):
        raise ConfigurationError(
            f"speculation is for language models of text alone, and this is a {task.value}: leave out "
            f"speculation={config.speculation!r}"
        )


class Speculator:
    """The drafters of one client, and a planner that learns how fast its swarm is."""

    def __init__(self, config: ClientConfig, checkpoint: Checkpoint, model: PreTrainedModel) -> None:
        """Raises: SwarmError: the head or draft model can't be loaded, or has another vocabulary."""
        mode = config.speculation
        self.enabled = mode != "off"
        self.planner = Planner(min_latency_s=AUTO_LATENCY_S if mode == "auto" else 0.0)
        self.new_drafter: Callable[[], Drafter] = NGramDrafter
        self._num_plain = 0
        """Texts in a row that transformers' own loop has written."""
        if mode == "mtp":
            head = load_mtp_head(model, wanted_mtp_weights(checkpoint), model.dtype)
            self.new_drafter = lambda: MtpDrafter(lambda: head)
        elif mode == "auto":
            find_head = _head_finder(checkpoint, model)
            self.new_drafter = lambda: BestDrafter([NGramDrafter(), MtpDrafter(find_head)], self.planner)
        elif mode not in ("off", "ngram"):
            vocabulary_size = text_config(model.config).vocab_size
            draft_model = _load_draft_model(mode, vocabulary_size, model.device)
            self.new_drafter = lambda: ModelDrafter(draft_model, vocabulary_size)

    def speculation_for(self, model: Any, config: Any, model_kwargs: dict[str, Any]) -> Speculation | None:
        """The loop with guesses, for a text that `generate()` has prepared; None: use transformers' own loop.

        Args:
            config: the GenerationConfig of the call; its mode is greedy or sampling.
            model_kwargs: inputs of the model's forward, the cache among them.
        """
        name = cache_argument(decoder_stack(model))
        # peft's soft prompts come in by this method, as positions that the text doesn't have.
        foreign = getattr(model.prepare_inputs_for_generation, "__self__", model) is not model
        embeds = model_kwargs.get("inputs_embeds") is not None
        # Hidden states and attentions are shown once per token, and a step with guesses has several.
        shows = any(getattr(settings, name, None) for settings in (config, model.config) for name in INNER_OUTPUTS)
        plain = shows or config.is_assistant or embeds or foreign or not model_kwargs.get("use_cache")
        cache: Any = model_kwargs.get(name)
        if plain or not self._can_guess(model, cache) or self._leaves_to_transformers():
            return None
        return Speculation(model, name, cache.session, self.drafter_for(cache), self.planner, model.swarm_traits)

    def _can_guess(self, model: Any, cache: Any) -> TypeGuard[RemoteCache]:
        return (
            self.enabled
            and model.swarm_traits.rollback
            and isinstance(cache, RemoteCache)
            and isinstance(cache.session, InferenceSession)
            and cache.batch_size == 1
            and not runs_each_position_once(model)
        )

    def _leaves_to_transformers(self) -> bool:
        """True if transformers' own loop writes the next text, because the servers are near."""
        near = self.planner.costs is not None and not self.planner.latency_pays
        self._num_plain = (self._num_plain + 1) % LOOK_TEXTS if near else 0
        return self._num_plain > 0

    def drafter_for(self, cache: RemoteCache) -> Drafter:
        """A drafter for a text on this cache. `generate()` has just opened its session, or continues it."""
        session = cache.session
        if not cache.forgets_early or (isinstance(session, InferenceSession) and session.records_past):
            return self.new_drafter()
        # Keeping everything costs servers time and memory: not before it is known that it will be of use.
        if not self.planner.latency_pays or (isinstance(session, InferenceSession) and session.route):
            return SilentDrafter()
        session.record_past()
        return self.new_drafter()


def _head_finder(checkpoint: Checkpoint, model: PreTrainedModel) -> "Callable[[], MtpHead | None]":
    """A function that loads the model's own head on its first call, which is when the swarm is known to be far."""
    forgettable = weakref.ref(model)  # which has the speculator
    looking = threading.Lock()
    found: list[MtpHead | None] = []

    def look() -> MtpHead | None:
        model = forgettable()
        if model is None:
            return None
        try:
            weights = small_mtp_weights(checkpoint, model.dtype)
            return None if weights is None else load_mtp_head(model, weights, model.dtype)
        except (UnsupportedModelError, WeightsError) as error:  # it was not asked for
            logger.warning("guesses are n-grams alone: %s", error)
            return None

    def find() -> MtpHead | None:
        with looking:
            if not found:
                found.append(look())
            return found[0]

    return find


def _load_draft_model(path: str, vocabulary_size: int, device: torch.device) -> PreTrainedModel:
    model = open_local_model(path, "speculation must be auto, off, ngram, mtp or a draft model", device)
    known = text_config(model.config).vocab_size
    if not vocabulary_size <= known <= 1.05 * vocabulary_size and not known <= vocabulary_size <= 1.05 * known:
        raise ConfigurationError(
            f"the draft model {path} knows {known} tokens, this model {vocabulary_size}: use one of the same family"
        )
    if not _can_guess_again(model):
        raise ConfigurationError(
            f"the draft model {path} can't go on from before a wrong guess, because its cache can't be cut: use "
            'another one, or speculation="ngram"'
        )
    return model


def _can_guess_again(model: PreTrainedModel) -> bool:
    """True if this draft model can be told that its guess was wrong. Found out by doing so."""
    if not model._supports_default_dynamic_cache():
        return False
    guessing = ModelDrafter(model, text_config(model.config).vocab_size)
    text = [0, 0]
    try:
        for _ in range(2):
            guessing.extend(text)
            guessing.begin()
            text = [0 if token else 1 for token in guessing.more(2)]
    except (AttributeError, TypeError, ValueError, RuntimeError):  # as the caches of transformers happen to fail
        return False
    return True


def runs_each_position_once(model: nn.Module) -> bool:
    """True if the model's forward must see each token of the text once, and no others.

    With guesses it sees wrong tokens too, and every token twice. In train mode that would draw other random numbers.
    Hooks and forwards of the user may draw some as well, or note their inputs.
    """
    return any(
        module.training
        or "forward" in vars(module)
        or any(_is_of_user(hook) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()))
        for module in model.modules()
    )


def _is_of_user(hook: Any) -> bool:
    """True if the hook is neither transformers', nor ours, nor peft's for the adapter of each row."""
    ours = hook is note_states or is_row_hook(hook)
    return not ours and getattr(hook, "__module__", None) != output_capturing.__name__


# ---------------------------------------------------------------------- heads for multi-token prediction


@dataclass(frozen=True)
class MtpLayout:
    """The names of a head's tensors; `{}` stands for the number of the model's blocks."""

    block: str
    """Prefix of the block's tensors; the rest of their names is as in other blocks."""
    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    hidden_first: bool = False
    """True if the hidden state comes before the embedding where they are joined."""


LAYOUTS = (
    MtpLayout(  # DeepSeek-V3, GLM-4.5 and others of transformers' `num_nextn_predict_layers`
        block="model.layers.{}.",
        token_norm="model.layers.{}.enorm.weight",
        hidden_norm="model.layers.{}.hnorm.weight",
        projection="model.layers.{}.eh_proj.weight",
        final_norm="model.layers.{}.shared_head.norm.weight",
    ),
    MtpLayout(  # Qwen3-Next, Qwen3.5
        block="mtp.layers.0.",
        token_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        projection="mtp.fc.weight",
        final_norm="mtp.norm.weight",
    ),
    MtpLayout(  # MiMo
        block="model.mtp_layers.0.",
        token_norm="model.mtp_layers.0.token_layernorm.weight",
        hidden_norm="model.mtp_layers.0.hidden_layernorm.weight",
        projection="model.mtp_layers.0.input_proj.weight",
        final_norm="model.mtp_layers.0.final_layernorm.weight",
        hidden_first=True,
    ),
)
"""A head with several blocks predicts several tokens; only its first block is used, again and again."""


@dataclass(frozen=True)
class MtpWeights:
    """A head of a checkpoint, not yet loaded."""

    checkpoint: Checkpoint
    """The checkpoint of the model with the head's block after its last one."""
    block_idx: int
    layout: MtpLayout
    """With the names as they are."""


def find_mtp_weights(checkpoint: Checkpoint) -> MtpWeights | None:
    """The head of a checkpoint, also if it is in a file of its own; None if there is none."""
    found = _layout_of(checkpoint)
    if found is None:
        more = checkpoint.with_file(MTP_FILE)
        found = None if more is None else _layout_of(more)
        if more is None or found is None:
            return None
        checkpoint = more
    config, block_idx = _with_one_more(checkpoint.config), checkpoint.num_blocks
    model = on_meta(blocks_class(config), config)
    blocks = find_blocks(model).blocks
    prefix = f"{next(name for name, part in model.named_modules() if part is blocks)}.{block_idx}."
    names = {
        prefix + name.removeprefix(found.block): name
        for name in checkpoint.weight_map()
        if name.startswith(found.block) and found.block != prefix
    }
    return MtpWeights(checkpoint.with_names(config, names), block_idx, found)


def _layout_of(checkpoint: Checkpoint) -> MtpLayout | None:
    if checkpoint.config.is_encoder_decoder:
        return None
    names = checkpoint.weight_map()
    for layout in LAYOUTS:
        filled: dict[str, Any] = {
            field: value.format(checkpoint.num_blocks) if isinstance(value, str) else value
            for field, value in vars(layout).items()
        }
        found = MtpLayout(**filled)
        if {found.token_norm, found.hidden_norm, found.projection, found.final_norm} <= names.keys():
            return found
    return None


def _with_one_more(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the model with one block more. Lists with an entry for each block repeat the last one. But a head's
    block attends to the whole text if some block does (Qwen3-Next mixes in blocks that don't)."""
    longer = copy.deepcopy(config)
    text = text_config(longer)
    count = int(text.num_hidden_layers)
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == count}
    text.num_hidden_layers = count + 1
    for name, value in lists.items():
        setattr(text, name, [*value, FULL_ATTENTION if FULL_ATTENTION in value else value[-1]])
    return longer


class MtpHead:
    """Guesses the token after the next one from a hidden state and the next token; any thread may call it."""

    def __init__(self, model: PreTrainedModel, block: LocalSpan, weights: MtpWeights) -> None:
        """Raises: WeightsMismatchError: the head doesn't fit the model."""
        self._embed, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self._block = block
        self._hidden_first = weights.layout.hidden_first
        layout = weights.layout
        names = (layout.token_norm, layout.hidden_norm, layout.projection, layout.final_norm)
        read = {name: lazy[...] for name, lazy in weights.checkpoint.tensors(names).items()}
        size = read[layout.final_norm].shape[-1]
        norm = _norm_of(block.modules()[weights.block_idx], size)
        projection = nn.Linear(2 * size, size, bias=False, device="meta")
        parts = zip(names, (norm, copy.deepcopy(norm), projection, copy.deepcopy(norm)), strict=True)
        self._parts = nn.ModuleList(_with_weight(part, read[name], name) for name, part in parts)
        self._parts.requires_grad_(False)
        self._moving = threading.Lock()

    def new_cache(self) -> SpanCache:
        """An empty cache of pairs, which `states` fills and which can be rolled back."""
        return self._block.new_cache(record_past=True)

    @torch.no_grad()
    def states(self, tokens: list[int], hidden: Tensor, cache: SpanCache) -> Tensor:
        """Feed pairs: hidden states `[seq, hidden]` behind the final norm, of the model or of this head, each with the
        token after it. Returns the head's outputs `[seq, hidden]`, for `best` or for its next pair.
        """
        token_norm, hidden_norm, projection, final_norm = self._parts_for(hidden)
        ids = torch.tensor([tokens], device=hidden.device)
        pair = token_norm(self._embed(ids).to(hidden.dtype)), hidden_norm(hidden[None])
        joined = torch.cat(pair[::-1] if self._hidden_first else pair, dim=-1)
        inputs = BlockInputs(hidden_states=projection(joined), batch_size=1, seq_len=len(tokens))
        found: Tensor = final_norm(self._block.forward(inputs, cache=cache))
        return found[0]

    def _parts_for(self, hidden: Tensor) -> nn.ModuleList:
        """Norms and projection in its dtype, on its device. Not moved in place: other threads may be using them."""
        with self._moving:
            weight = next(self._parts.parameters())
            if (weight.device, weight.dtype) != (hidden.device, hidden.dtype):
                self._parts = copy.deepcopy(self._parts).to(hidden.device, hidden.dtype)
            return self._parts

    @torch.no_grad()
    def best(self, state: Tensor) -> int:
        """The token that the model's head finds likeliest after this state `[hidden]`."""
        return int(self._head(state).argmax())


def load_mtp_head(model: PreTrainedModel, weights: MtpWeights, dtype: torch.dtype) -> MtpHead:
    """Read a head that the checkpoint has.

    Raises:
        UnsupportedModelError: its block can't guess: it has no cache that can be rolled back, or needs more inputs.
        WeightsError: its tensors are missing, damaged, or don't fit the model.
    """
    span = Span(weights.block_idx, weights.block_idx + 1)
    blocks = load_block_span(weights.checkpoint, span, dtype=dtype, device=model.device, progress=False)
    traits = blocks.traits
    if not (blocks.keeps_cache and traits.rollback) or traits.extra_inputs or traits.batch_axis:
        raise UnsupportedModelError(
            f"the head for multi-token prediction of {weights.checkpoint.name} can't guess ahead here: "
            'use speculation="ngram" or a small model'
        )
    logger.info("loaded the head for multi-token prediction of %s", weights.checkpoint.name)
    return MtpHead(model, LocalSpan(blocks), weights)


def wanted_mtp_weights(checkpoint: Checkpoint) -> MtpWeights:
    """The head of a checkpoint, which the config asks for.

    Raises:
        ConfigurationError: it has none.
    """
    found = find_mtp_weights(checkpoint)
    if found is None:
        raise ConfigurationError(
            f"{checkpoint.name} has no head for multi-token prediction: "
            'use speculation="auto", "ngram" or a small model'
        )
    return found


def small_mtp_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> MtpWeights | None:
    """The head of a checkpoint, if it has one that is small enough to be read without being asked for."""
    found = find_mtp_weights(checkpoint)
    if found is None:
        return None
    num_bytes = block_bytes(found.checkpoint, dtype)[found.block_idx]
    if num_bytes <= AUTO_BYTES:
        return found
    logger.info(
        'the head for multi-token prediction of %s takes %.1f GB here: speculation="mtp" has it guess all the same',
        checkpoint.name,
        num_bytes / 1e9,
    )
    return None


def _norm_of(block: nn.Module, size: int) -> nn.Module:
    """A copy of the block's first norm of this size, for the architecture's own kind of norm."""
    for part in block.children():
        weight: Any = getattr(part, "weight", None)
        if weight is not None and weight.shape == (size,):
            return copy.deepcopy(part)
    raise WeightsMismatchError(f"the head for multi-token prediction has size {size}, and no norm of the block has")


def _with_weight(part: nn.Module, weight: Tensor, name: str) -> nn.Module:
    expected: Tensor = part.weight  # type: ignore[assignment]
    if weight.shape != expected.shape:
        raise WeightsMismatchError(f"{name} should be {list(expected.shape)}, not {list(weight.shape)}")
    part.weight = nn.Parameter(weight, requires_grad=False)
    return part
