"""What is special about models with an encoder and a decoder, whose blocks are both on servers.

The encoder's blocks run as batches, the decoder's in sessions, which are given the encoder's outputs once. Used by
`distributed_model`.
"""

from collections.abc import Sequence
from typing import Any, Never

from swarmllm.client.batches.batch_runner import BatchRunner
from swarmllm.client.remote_blocks import RemoteBlocks
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits, Span
from swarmllm.errors import ConfigurationError


class EncoderDecoder:
    """Mixed into the distributed model; `remote_blocks` are those of the decoder."""

    remote_encoder_blocks: RemoteBlocks | None
    """The blocks of the encoder, as a differentiable module."""

    def inference_session(self, *_: Any, **__: Any) -> Never:
        raise ConfigurationError(
            "generate() of an encoder-decoder opens a session for each text: call it without inference_session()"
        )

    def embed(self, *_: Any, **__: Any) -> Never:
        raise ConfigurationError("embed() is for models without an encoder: call this model as transformers does")

    def head(self, *_: Any, **__: Any) -> Never:
        raise ConfigurationError("head() is for models without an encoder: call this model as transformers does")


def tell_stacks(view: SwarmView, spans: Sequence[Span], config: ClientConfig) -> None:
    """Tell the view which blocks are the encoder's, if there are any.

    Raises:
        ConfigurationError: a setting doesn't go with an encoder-decoder.
    """
    if len(spans) == 1:
        return
    view.look_ups.encoder_blocks = spans[0].end
    for name in ("local_blocks", "fallback_to_local", "active_adapter"):
        if getattr(config, name) is not None:
            raise ConfigurationError(f"{name} is for models without an encoder: leave it out for this encoder-decoder")


def encoder_blocks(view: SwarmView, traits: BlockTraits, spans: Sequence[Span]) -> RemoteBlocks | None:
    """The encoder's blocks, of a model that has one: `spans` are those of its stacks."""
    if len(spans) == 1:
        return None
    of_encoder = traits.of_encoder
    return RemoteBlocks(view, BatchRunner(view, of_encoder), of_encoder, spans[0])
