"""The traits of a model's blocks, as the servers of one route say when they are greeted.

Called by `view/swarm_view` when a model is loaded, and for each server that joins a route later.
"""

from collections.abc import Sequence

from swarmllm.data_structures import BlockTraits, ServedBlocks, Span
from swarmllm.errors import ConfigurationError, RemoteProtocolError
from swarmllm.swarm.stacks import describe_span

SHARED = ("batch_axis", "block_output")
"""Traits that must be the same in all blocks of a model; which inputs they need, and where to cut them, may differ."""


def agreed_traits(said: Sequence[tuple[str, BlockTraits]]) -> BlockTraits:
    """The traits of all blocks, from (peer id, traits of its blocks).

    Raises:
        ConfigurationError: the servers contradict each other; who is wrong can't be known.
    """
    first_id, first = said[0]
    for peer_id, traits in said[1:]:
        name = contradiction(first, traits)
        if name is not None:
            raise ConfigurationError(
                f"servers disagree about the model's blocks: {first_id} says that their {name} is "
                f"{getattr(first, name)}, {peer_id} says {getattr(traits, name)}; "
                "name the one that you don't trust in blocked_servers"
            )
    all_traits = [traits for _, traits in said]
    return first.model_copy(
        update={
            "extra_inputs": tuple(sorted({name for traits in all_traits for name in traits.extra_inputs})),
            "forbidden_cuts": tuple(sorted({cut for traits in all_traits for cut in traits.forbidden_cuts})),
            "chunked_prefill": all(traits.chunked_prefill for traits in all_traits),
            "length_borders": tuple(sorted({border for traits in all_traits for border in traits.length_borders})),
            "own_length_beyond": min(filter(None, (traits.own_length_beyond for traits in all_traits)), default=None),
            "rollback": all(traits.rollback for traits in all_traits),
            "skips_padding": tuple(
                side for side in first.skips_padding if all(side in traits.skips_padding for traits in all_traits)
            ),
        }
    )


def check_stacks(peer_id: str, served: ServedBlocks, encoder: Span | None) -> None:
    """Whether a server knows of the two stacks that its blocks are of; one of an older version doesn't.

    Raises:
        RemoteProtocolError: it doesn't.
    """
    if encoder is None or served.traits is None:
        return
    lacks_encoder = served.start < encoder.end and served.traits.encoder is None
    lacks_decoder = served.end > encoder.end and not served.traits.takes_source
    if lacks_encoder or lacks_decoder:
        blocks = describe_span(served.start, served.end, encoder.end)
        raise RemoteProtocolError(
            f"the server {peer_id} offers {blocks}, but is of a version that serves no models with an encoder and a "
            "decoder: update swarmllm there",
            peer_id,
        )


def check_agrees(peer_id: str, served: ServedBlocks, agreed: BlockTraits, encoder: Span | None) -> None:
    """Raises RemoteProtocolError if a server's blocks are not those of a model with the `agreed` traits and stacks."""
    check_stacks(peer_id, served, encoder)
    said = served.traits or agreed
    pairs = [] if encoder is not None and served.end <= encoder.end else [(agreed, said)]
    if encoder is not None and served.start < encoder.end:
        pairs.append((agreed.of_encoder, said.of_encoder))
    for agreed, traits in pairs:
        name = contradiction(agreed, traits)
        if name is None:
            continue
        raise RemoteProtocolError(
            f"the server {peer_id} says that the {name} of its blocks is {getattr(traits, name)}, other servers "
            f"say {getattr(agreed, name)}",
            peer_id,
        )


def contradiction(one: BlockTraits, other: BlockTraits) -> str | None:
    """The name of a trait in which they can't both be right."""
    return next((name for name in SHARED if getattr(one, name) != getattr(other, name)), None)
