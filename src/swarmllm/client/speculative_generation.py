"""Where `generate()` begins to speculate: a mixin of the distributed model, asked for every greedy or sampled text.

`ClientConfig.speculation` says whether. What can't be speculated on takes transformers' own loop: batches, blocks whose
caches can't be rolled back, texts given as embeddings; beams and transformers' own assistants never come here.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm.client.local_fallback import open_local_model
from swarmllm.client.session.inference_session import InferenceSession
from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import cache_argument, decoder_stack, text_config
from swarmllm.models.shell.remote_cache import RemoteCache
from swarmllm.models.shell.stack_forward import INNER_OUTPUTS
from swarmllm.speculation.drafters import Drafter, ModelDrafter, NGramDrafter, SilentDrafter
from swarmllm.speculation.planner import Planner
from swarmllm.speculation.sampling_loop import Speculation

AUTO_LATENCY_S = 0.02
"""Assumed: with "auto", a round trip that waits for the network less than this is no reason to speculate. Loopback and
local networks stay below it (0.5 to 5 ms measured), other continents and most other towns above."""


class Speculator:
    """The means of one client to speculate: drafters, and a planner that learns how fast its swarm is."""

    def __init__(self, config: ClientConfig, vocabulary_size: int, device: torch.device) -> None:
        """Raises: ConfigurationError: the draft model can't be loaded, or has another vocabulary."""
        mode = config.speculation
        self.enabled = mode != "off"
        self.planner = Planner(min_latency_s=AUTO_LATENCY_S if mode == "auto" else 0.0)
        self.new_drafter: Callable[[], Drafter] = NGramDrafter
        if mode not in ("off", "auto", "ngram"):
            draft_model = _load_draft_model(mode, vocabulary_size, device)
            self.new_drafter = lambda: ModelDrafter(draft_model, vocabulary_size)

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


def _load_draft_model(path: str, vocabulary_size: int, device: torch.device) -> PreTrainedModel:
    model = open_local_model(path, "speculation must be auto, off, ngram or a draft model", device)
    known = text_config(model.config).vocab_size
    if not vocabulary_size <= known <= 1.05 * vocabulary_size and not known <= vocabulary_size <= 1.05 * known:
        raise ConfigurationError(
            f"the draft model {path} knows {known} tokens, this model {vocabulary_size}: use one of the same family"
        )
    return model


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
        if plain or speculator is None or not self._can_speculate(cache) or not model_kwargs.get("use_cache"):
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
        speculation = Speculation(self, name, session, speculator.drafter_for(cache), speculator.planner)
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
        )
