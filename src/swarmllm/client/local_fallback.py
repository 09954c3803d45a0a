"""A model on this machine that finishes a text when the swarm fails.

Set by `ClientConfig`'s `fallback_to_local` and `fallback_after`; `generation` runs its loop under it. A text of one row
continues after its last token; HearthNet's design starts the call again. The gateway has a fallback of its own, because
it tells its readers.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from swarmllm.client.session.inference_session import InferenceSession
from swarmllm.config import ClientConfig, default_cache_dir, hub_token, require_directory_or_hub_id
from swarmllm.errors import ConfigurationError, PeerError, RoutingError, SwarmError
from swarmllm.files import existing_path, user_path
from swarmllm.models.architecture import cache_argument, decoder_stack, has_vision, table_positions, text_config
from swarmllm.models.checkpoint.checkpoint import Checkpoint, load_tokenizer
from swarmllm.models.checkpoint.manifest import partial_files
from swarmllm.models.checkpoint.sources import first_line, require_room
from swarmllm.speculation.sampling_loop import kwargs_behind

logger = logging.getLogger(__name__)

_INPUTS = ("attention_mask", "position_ids", "token_type_ids")
"""Inputs besides tokens that `generate()` gives a model, and that models with the same tokens understand alike."""


def open_local_model(name: str, purpose: str, device: torch.device) -> PreTrainedModel:
    """A causal language model that runs here.

    Raises:
        ConfigurationError: it can't be loaded; `purpose` is what the message says that it was wanted as.
    """
    try:
        if not name.endswith(".gguf"):
            require_directory_or_hub_id(name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{purpose}, and {error}") from None
    if partial_files(user_path(name)) is not None:  # transformers would read zeros
        raise ConfigurationError(f"{purpose}, and {name!r} holds only parts of one: name a whole model")
    here = existing_path(name)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(here or name), dtype="auto", trust_remote_code=False, token=hub_token(), cache_dir=default_cache_dir()
        )
    except (OSError, ValueError) as error:
        if here is None:
            require_room(name, error, default_cache_dir())
        raise ConfigurationError(f"{purpose}, and {name!r} can't be loaded as one: {first_line(error)}") from None
    return model.to(device).requires_grad_(False).eval()


class LocalFallback:
    """The local model, and when it takes over."""

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

    def finish_if_swarm_fails(
        self,
        in_swarm: Callable[[StoppingCriteriaList], Any],
        model: Any,
        method: str,
        input_ids: Tensor,
        stopping_criteria: StoppingCriteriaList,
        given: dict[str, Any],
        model_kwargs: dict[str, Any],
    ) -> Any:
        """Call `in_swarm`; if the swarm fails, call that method of the local model on what there is of the text.

        Args:
            in_swarm: writes the text on the swarm's model, until these criteria end it.
            given: logits processors, generation config and streamer, for both models.
        """
        config = given["generation_config"]
        if not _can_take_over(model, input_ids, config, given.get("streamer"), model_kwargs):
            return in_swarm(stopping_criteria)
        session = getattr(model_kwargs.get(cache_argument(decoder_stack(model))), "session", None)
        so_far = SoFar(input_ids, session if isinstance(session, InferenceSession) else None, self.after)
        try:
            return in_swarm(StoppingCriteriaList([*stopping_criteria, so_far]))
        except (PeerError, RoutingError) as error:
            logger.warning("the local model goes on: %s", error)
            failure = error
        # Of several rows it isn't known which have ended, and details are those of one model: these begin anew.
        goes_on = len(input_ids) == 1 and method == "_sample" and not config.return_dict_in_generate
        ids = so_far.ids if goes_on else input_ids
        stopping_criteria = self._within_positions(ids, stopping_criteria, failure)
        inputs = self._inputs_behind(model, model_kwargs, input_ids, ids.shape[1] - input_ids.shape[1])
        rows = len(ids) // max(config.num_beams or 1, config.num_return_sequences or 1)
        self.model._prepare_cache_for_generation(config, inputs, None, rows, config.max_length - 1)
        return getattr(self.model, method)(ids, stopping_criteria=stopping_criteria, **inputs, **given)

    def _within_positions(self, ids: Tensor, criteria: StoppingCriteriaList, failure: SwarmError) -> Any:
        """These criteria, and an error where the text needs more positions than the local model has embeddings for.

        Raises:
            RoutingError: it already does.
        """
        table = table_positions(decoder_stack(self.model))
        if table is None:
            return criteria
        end = _EndOfTable(table.stop, criteria, failure)
        end.require_room(ids.shape[1] - 1)
        return StoppingCriteriaList([*criteria, end])

    def _inputs_behind(self, model: Any, kwargs: dict[str, Any], ids: Tensor, num_tokens: int) -> dict[str, Any]:
        """The inputs of the local model, `num_tokens` behind the `ids` for which the swarm's model has these."""
        mask = kwargs.get("attention_mask")
        known = {**kwargs, "attention_mask": torch.ones_like(ids) if mask is None else mask}
        taken = inspect.signature(self.model.forward).parameters
        known = {name: known[name] for name in _INPUTS if name in taken and known.get(name) is not None}
        if (wanted := kwargs.get("output_hidden_states")) is not None:
            known["output_hidden_states"] = wanted
        return kwargs_behind(model, known, num_tokens) | {"use_cache": True}


def _can_take_over(model: Any, input_ids: Tensor, config: Any, streamer: Any, kwargs: dict[str, Any]) -> bool:
    """True if the local model can be given all of this text, and can finish it or write it anew.

    It can't be given soft prompts, or tokens that only a cache has seen, and tells no attention weights. What a
    streamer has seen of several rows, or of a text with details, can't be taken back.
    """
    foreign = getattr(model.prepare_inputs_for_generation, "__self__", model) is not model
    embeds = kwargs.get("inputs_embeds") is not None or kwargs.get("output_attentions")
    streamed = streamer is not None and (config.return_dict_in_generate or len(input_ids) > 1)
    mask = kwargs.get("attention_mask")  # `generate()` leaves out one of ones, and keeps its length
    length = getattr(config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
    return not (foreign or embeds or streamed) and bool(length == input_ids.shape[1])


def open_fallback(config: ClientConfig, checkpoint: Checkpoint, model: Any) -> LocalFallback | None:
    """Load the one that the config names, for a distributed model.

    Raises:
        ConfigurationError: it can't be loaded, or this model has no use for one.
    """
    name = config.fallback_to_local
    if name is None:
        return None
    if not hasattr(model, "local_fallback") or model.tuned_prompts is not None:
        raise ConfigurationError("fallback_to_local is for text generation without tuning_mode: leave one of them out")
    if has_vision(checkpoint.config):
        raise ConfigurationError(
            "fallback_to_local is for models without vision: it would continue without the pictures"
        )
    return LocalFallback(name, config.fallback_after, checkpoint, model.device)


def _tokens(name: str, revision: str | None, config: PreTrainedConfig) -> Any:
    """The vocabulary: equal for models with the same tokens."""
    try:
        options = {"revision": revision, "token": hub_token(), "cache_dir": default_cache_dir()}
        return load_tokenizer(name, **options).get_vocab()
    except ConfigurationError:  # without a tokenizer, the number of tokens has to do
        return text_config(config).vocab_size


class SoFar(StoppingCriteria):
    """The text so far. Raises RoutingError when its session has been repaired too often."""

    def __init__(self, ids: Tensor, session: InferenceSession | None, fallback_after: int | None) -> None:
        self.ids = ids
        self._session = None if fallback_after is None else session
        self._most_repairs = (fallback_after or 0) + (session.num_repairs if session is not None else 0)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.ids = input_ids
        if self._session is not None and self._session.num_repairs >= self._most_repairs:
            raise RoutingError("servers were replaced as often as fallback_after allows")
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class _EndOfTable(StoppingCriteria):
    """Raises RoutingError when a text needs more positions than the local model has embeddings for."""

    def __init__(self, most: int, others: StoppingCriteriaList, failure: SwarmError) -> None:
        self._most, self._others, self._failure = most, others, failure

    def require_room(self, num_tokens: int) -> None:
        """Raise if the model can't be fed one token behind so many."""
        if num_tokens >= self._most:
            raise RoutingError(
                f"the local model has embeddings for {self._most} positions, too few for this text: name a model with "
                f"more as fallback_to_local. It went on because: {self._failure}"
            ) from self._failure

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if input_ids.shape[1] > self._most and not bool(self._others(input_ids, scores).all()):
            self.require_room(input_ids.shape[1] - 1)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
