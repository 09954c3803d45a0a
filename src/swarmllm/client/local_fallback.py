"""A model on this machine that goes on with a text when the swarm can't: a mixin of the distributed model.

HearthNet's design starts the call again; here a text of one row goes on from its last token. Set by `ClientConfig`'s
`fallback_to_local` and `fallback_after`. The gateway, which tells its readers, does the same by its own means.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from swarmllm.client.session.inference_session import InferenceSession
from swarmllm.config import ClientConfig, default_cache_dir, hub_token
from swarmllm.errors import ConfigurationError, PeerError, RoutingError
from swarmllm.models.architecture import cache_argument, decoder_stack, sees, text_config
from swarmllm.models.checkpoint.checkpoint import Checkpoint, load_tokenizer
from swarmllm.models.checkpoint.sources import first_line

logger = logging.getLogger(__name__)


def open_local_model(name: str, purpose: str, device: torch.device) -> PreTrainedModel:
    """A causal language model that runs here.

    Raises:
        ConfigurationError: it can't be loaded; `purpose` is what the message says that it was wanted as.
    """
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{purpose}, and {name!r} can't be loaded as one: {first_line(error)}") from None
    return model.to(device).requires_grad_(False).eval()


class LocalFallback:
    """The model, and when it is asked."""

    def __init__(self, name: str, after: int | None, checkpoint: Checkpoint, device: torch.device) -> None:
        """`after`: how many repairs of one text are enough; None = as many as can be had.

        Raises:
            ConfigurationError: it can't be loaded, or has another tokenizer than the swarm's model.
        """
        self.model: Any = open_local_model(name, "fallback_to_local must be a model for text generation", device)
        if _tokens(name, None, self.model.config) != _tokens(checkpoint.name, checkpoint.revision, checkpoint.config):
            raise ConfigurationError(f"fallback_to_local {name} has another tokenizer than the swarm's model")
        self.after = after
        logger.info("loaded %s, which goes on when the swarm can't", name)


def open_fallback(config: ClientConfig, checkpoint: Checkpoint, model: Any) -> LocalFallback | None:
    """The one that the config names, for a distributed model.

    Raises:
        ConfigurationError: it can't be loaded, or this model has no use for one.
    """
    name = config.fallback_to_local
    if name is None:
        return None
    if not isinstance(model, FallbackGeneration) or getattr(model, "tuned_prompts", None) is not None:
        raise ConfigurationError("fallback_to_local goes with text generation, and without tuning_mode")
    if sees(checkpoint.config):
        raise ConfigurationError(
            "fallback_to_local goes with models that don't see: it would go on without the pictures"
        )
    return LocalFallback(name, config.fallback_after, checkpoint, model.device)


def _tokens(name: str, revision: str | None, config: PreTrainedConfig) -> Any:
    """Something that is the same for models that mean the same by their tokens."""
    try:
        options = {"revision": revision, "token": hub_token(), "cache_dir": default_cache_dir()}
        return load_tokenizer(name, **options).get_vocab()
    except ConfigurationError:  # who has none tells by their number alone
        return text_config(config).vocab_size


class SoFar(StoppingCriteria):
    """What of a text there is, and whether its session was repaired too often."""

    def __init__(self, ids: Tensor, session: InferenceSession | None, fallback_after: int | None) -> None:
        self.ids = ids
        self._session = None if fallback_after is None else session
        self._most_repairs = (fallback_after or 0) + (session.num_repairs if session is not None else 0)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.ids = input_ids
        if self._session is not None and self._session.num_repairs >= self._most_repairs:
            raise RoutingError("servers were replaced as often as fallback_after allows")
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class FallbackGeneration(PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixed into the distributed model."""

    local_fallback: LocalFallback | None = None
    """Set when the model has been loaded."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return self._or_locally("_sample", super()._sample, *args, **kwargs)

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        return self._or_locally("_beam_search", super()._beam_search, *args, **kwargs)

    def _or_locally(
        self,
        method: str,
        in_swarm: Callable[..., Any],
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> Any:
        """That loop of transformers with the swarm's blocks, and with the local model when they can't be had."""
        details, streamer = generation_config.return_dict_in_generate, kwargs.get("streamer")
        given = {"logits_processor": logits_processor, "generation_config": generation_config}
        # What the local model can't be given (soft prompts) or doesn't tell (attention weights), and what can't be
        # taken back: half of the details.
        foreign = getattr(self.prepare_inputs_for_generation, "__self__", self) is not self
        embeds = kwargs.get("inputs_embeds") is not None or kwargs.get("output_attentions")
        if self.local_fallback is None or foreign or embeds or (details and streamer is not None):
            return in_swarm(input_ids, stopping_criteria=stopping_criteria, **given, **kwargs)
        session = getattr(kwargs.get(cache_argument(decoder_stack(self))), "session", None)
        session = session if isinstance(session, InferenceSession) else None
        so_far = SoFar(input_ids, session, self.local_fallback.after)
        try:
            return in_swarm(
                input_ids, stopping_criteria=StoppingCriteriaList([*stopping_criteria, so_far]), **given, **kwargs
            )
        except (PeerError, RoutingError) as error:
            logger.warning("the local model goes on: %s", error)
        # In a batch it isn't known which rows have ended, and details are those of one model: these begin anew.
        ids = so_far.ids if len(input_ids) == 1 and method == "_sample" and not details else input_ids
        mask = kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
        if streamer is not None:
            given["streamer"] = streamer
        if (wanted := kwargs.get("output_hidden_states")) is not None:
            given["output_hidden_states"] = wanted
        loop = getattr(self.local_fallback.model, method)
        return loop(ids, stopping_criteria=stopping_criteria, attention_mask=mask, use_cache=True, **given)
