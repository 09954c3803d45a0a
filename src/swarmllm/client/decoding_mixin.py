"""`generate()`'s further ways to choose tokens: a mixin of the distributed model, which adds `decoding/` to its own.

Their fields are given like transformers' own, to `generate()` or in a GenerationConfig.
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitNormalization

from swarmllm.decoding.options import ADDED, DECODING_TOKENIZER, DecodingOptions
from swarmllm.decoding.processors import processors_before, processors_behind
from swarmllm.decoding.text_so_far import padding_lengths, tokens_with
from swarmllm.errors import ConfigurationError


class MoreDecoding(PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixed into the distributed model."""

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate()`, which also takes the fields of `DecodingOptions`."""
        if kwargs.get("tokenizer") is not None:
            kwargs[DECODING_TOKENIZER] = kwargs["tokenizer"]
        return super().generate(inputs, *args, **kwargs)

    def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """transformers': the config of this call and what is for the model. Refuses values that won't do."""
        added = {name: kwargs.pop(name) for name in ADDED if name in kwargs}
        tokenizer = kwargs.pop(DECODING_TOKENIZER, None)
        config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        for name, value in added.items():
            setattr(config, name, value)
        options = _added_options(config)
        options.require_fitting(do_sample=bool(config.do_sample), num_beams=config.num_beams or 1)
        config._dry_breakers = frozenset()
        if options.is_on("dry_multiplier") and (strings := options.resolved()["dry_sequence_breakers"]):
            if tokenizer is None:
                raise ConfigurationError(
                    "dry_sequence_breakers are strings: give generate() the tokenizer=…, or dry_sequence_breakers=[]"
                )
            config._dry_breakers = tokens_with(strings, tokenizer)
        return config, model_kwargs

    def _get_logits_processor(
        self,
        generation_config: Any,
        input_ids_seq_length: int | None = None,
        encoder_input_ids: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        logits_processor: Any = None,
        device: Any = None,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' processors and those that it lacks: behind the caller's own, and behind all but the last."""
        options, start = _added_options(generation_config), input_ids_seq_length or 0
        mask = (model_kwargs or {}).get(
            "decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask"
        )
        before = processors_before(
            options,
            start=start,
            breakers=getattr(generation_config, "_dry_breakers", frozenset()),
            padding=padding_lengths(mask),
        )
        found = super()._get_logits_processor(
            generation_config,
            input_ids_seq_length,
            encoder_input_ids,
            prefix_allowed_tokens_fn,
            [*(logits_processor or ()), *before],
            device,
            model_kwargs,
            **kwargs,
        )
        last = len(found) - 1 if found and isinstance(found[-1], LogitNormalization) else len(found)
        found[last:last] = processors_behind(options, start=start)
        return found


def _added_options(config: Any) -> DecodingOptions:
    """What a GenerationConfig says about ways that transformers lacks."""
    names = (one.name for one in fields(DecodingOptions) if one.name in ADDED)
    return DecodingOptions(**{name: getattr(config, name, None) for name in names})
