"""Where `generate()` begins to speculate: a mixin of the distributed model, asked for every greedy or sampled text.

`ClientConfig.speculation` says whether. What can't be speculated on takes transformers' own loop: batches, blocks whose
caches can't be rolled back, texts given as embeddings, models whose forwards draw random numbers or are watched by
hooks; beams and transformers' own assistants never come here.
"""

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from swarmllm.client.local_fallback import open_local_model
from swarmllm.client.mtp_head import MtpHead, load_mtp_head, small_mtp_weights, wanted_mtp_weights
from swarmllm.client.session.inference_session import InferenceSession
from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError, UnsupportedModelError, WeightsError
from swarmllm.models.architecture import Task, cache_argument, decoder_stack, text_config
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.shell.hollow_modules import is_row_hook
from swarmllm.models.shell.remote_cache import RemoteCache
from swarmllm.models.shell.stack_forward import INNER_OUTPUTS
from swarmllm.speculation.best_drafter import BestDrafter
from swarmllm.speculation.drafters import Drafter, ModelDrafter, NGramDrafter, SilentDrafter
from swarmllm.speculation.mtp_drafter import MtpDrafter, note_states
from swarmllm.speculation.planner import Planner
from swarmllm.speculation.sampling_loop import Speculation

logger = logging.getLogger(__name__)
AUTO_LATENCY_S = 0.02
"""Assumed: with "auto", a round trip that waits for the network less than this is no reason to speculate. Loopback and
local networks stay below it (0.5 to 5 ms measured), other continents and most other towns above."""
LOOK_TEXTS = 16
"""One text of this many is written by our own loop although latency doesn't pay: to see whether it does. Assumed."""
UNGUESSED = (Task.SEQ_TO_SEQ_LM, Task.SPEECH_SEQ_TO_SEQ, Task.IMAGE_TEXT_TO_TEXT)
"""Tasks whose models write text on which nothing is speculated."""


def require_no_drafts(config: ClientConfig, task: Task) -> None:
    """For models on whose texts nothing is speculated, because guesses know text alone.

    Raises:
        ConfigurationError: drafts are asked for all the same.
    """
    if task in UNGUESSED and config.speculation not in ("auto", "off"):
        raise ConfigurationError(
            f"speculation is for language models of text alone, and this is a {task.value}: leave out "
            f"speculation={config.speculation!r}"
        )


class Speculator:
    """The means of one client to speculate: drafters, and a planner that learns how fast its swarm is."""

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

    def leaves_to_transformers(self) -> bool:
        """Whether transformers' own loop is to write the next text, because latency is known not to pay for ours."""
        near = self.planner.costs is not None and not self.planner.latency_pays
        self._num_plain = (self._num_plain + 1) % LOOK_TEXTS if near else 0
        return self._num_plain > 0

    def drafter_for(self, cache: RemoteCache) -> Drafter:
        """A drafter for a text on this cache, whose session `generate()` has just opened or goes on with."""
        session = cache.session
        if not cache.forgets_early or (isinstance(session, InferenceSession) and session.records_past):
            return self.new_drafter()
        # Keeping everything costs servers time and memory: not before it is known that it will be of use.
        if not self.planner.latency_pays or (isinstance(session, InferenceSession) and session.route):
            return SilentDrafter()
        session.record_past()
        return self.new_drafter()


def _head_finder(checkpoint: Checkpoint, model: PreTrainedModel) -> Callable[[], MtpHead | None]:
    """What loads the model's own head when it is first asked for, which is when the swarm is known to be far."""
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
        except (UnsupportedModelError, WeightsError) as error:  # nobody has asked for it
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
    return model


def runs_each_position_once(model: nn.Module) -> bool:
    """Whether the model's forward must see the tokens of the text alone, and each of them once.

    With guesses it sees wrong tokens too, and every token twice. In train mode that would draw other random numbers.
    Hooks and forwards of the user may draw some as well, or note what passes.
    """
    return any(
        module.training
        or "forward" in vars(module)
        or any(_is_of_user(hook) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()))
        for module in model.modules()
    )


def _is_of_user(hook: Any) -> bool:
    """Not one of transformers, of ours, or of peft, which notes the adapter of each row."""
    ours = hook is note_states or is_row_hook(hook)
    return not ours and getattr(hook, "__module__", None) != output_capturing.__name__


class SpeculativeGeneration(PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixed into the distributed model."""

    swarm_traits: BlockTraits
    speculator: Speculator | None = None
    """Set when the model has been loaded."""

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """transformers' own loop, or the same with guesses under way."""
        name = cache_argument(decoder_stack(self))
        cache = model_kwargs.get(name)
        speculator = self.speculator
        # peft's soft prompts come in here as positions that the text doesn't have.
        foreign = getattr(self.prepare_inputs_for_generation, "__self__", self) is not self
        embeds = model_kwargs.get("inputs_embeds") is not None
        # What each forward shows of its inside is one entry per token, which guesses are not.
        shows = any(
            getattr(settings, name, None) for settings in (generation_config, self.config) for name in INNER_OUTPUTS
        )
        plain = shows or synced_gpus or generation_config.is_assistant or embeds or foreign
        plain = plain or not model_kwargs.get("use_cache")
        if plain or speculator is None or not self._can_speculate(cache) or speculator.leaves_to_transformers():
            return super()._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        session: Any = cache.session
        drafter = speculator.drafter_for(cache)
        speculation = Speculation(self, name, session, drafter, speculator.planner, self.swarm_traits)
        return speculation.run(
            input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
        )

    def _can_speculate(self, cache: Any) -> TypeGuard[RemoteCache]:
        return (
            self.speculator is not None
            and self.speculator.enabled
            and self.swarm_traits.rollback
            and isinstance(cache, RemoteCache)
            and isinstance(cache.session, InferenceSession)
            and cache.batch_size == 1
            and not runs_each_position_once(self)
        )
