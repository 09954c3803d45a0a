"""Where `generate()` begins to speculate: a mixin of the distributed model, asked for every greedy or sampled text.

`ClientConfig.speculation` says whether. What can't be speculated on takes transformers' own loop: batches, blocks whose
caches can't be rolled back, texts given as embeddings; beams and transformers' own assistants never come here.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarmllm.client.inference_session import InferenceSession
from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits
from swarmllm.decoding.drafts import Drafter, ModelDrafter, NGramDrafter, SilentDrafter
from swarmllm.decoding.pace import Pace
from swarmllm.decoding.speculation import Speculation
from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import cache_argument, decoder_stack, text_config
from swarmllm.models.remote_cache import RemoteCache

AUTO_LATENCY_S = 0.02
"""Assumed: with "auto", a round trip that waits for the network less than this is no reason to speculate. Loopback and
local networks stay below it (0.5 to 5 ms measured), other continents and most other towns above."""


class Speculator:
    """What one client needs to speculate: how to guess, and what it has learnt of its swarm's pace."""

    def __init__(self, config: ClientConfig, vocabulary_size: int, device: torch.device) -> None:
        """Raises: ConfigurationError: the draft model can't be loaded, or has another vocabulary."""
        mode = config.speculation
        self.enabled = mode != "off"
        self.pace = Pace(min_latency_s=AUTO_LATENCY_S if mode == "auto" else 0.0)
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
        if not self.pace.latency_pays or (isinstance(session, InferenceSession) and session.route):
            return SilentDrafter()
        session.record_past()
        return self.new_drafter()


def _load_draft_model(path: str, vocabulary_size: int, device: torch.device) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=False).to(
            device
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(
            f"speculation must be auto, off, ngram or a draft model, and {path!r} can't be loaded as one: {reason}"
        ) from None
    known = text_config(model.config).vocab_size
    if not vocabulary_size <= known <= 1.05 * vocabulary_size and not known <= vocabulary_size <= 1.05 * known:
        raise ConfigurationError(
            f"the draft model {path} knows {known} tokens, this model {vocabulary_size}: use one of the same family"
        )
    return model.requires_grad_(False).eval()


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
        plain = synced_gpus or generation_config.is_assistant or embeds or foreign
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
        speculation = Speculation(self, name, session, speculator.drafter_for(cache), speculator.pace)
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
