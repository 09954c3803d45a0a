"""What servers claim of their blocks in greetings, compared with the traits that this client has found out itself.

    trait                      whose word counts
    batch_axis, block_output   the client's: a server that claims another value is left out
    takes_source, encoder      the same
    extra_inputs               the client's: a server that asks for more is left out, one that asks for less is used
    forbidden_cuts             the client's where the client cuts; each server's for its own blocks, in routes
    skips_padding, length_borders, own_length_beyond
                               the client's: servers have no say
    chunked_prefill, rollback  the client's; a server that claims less is used only if nobody else serves its blocks,
                               and then its word counts from the beginning. Other code, as some accelerators run it,
                               may be able to do less than what the client has tried

Of a model that can't be tried here (`models/span/small_copy`), servers are believed if the user has named them in
`allowed_servers`, and nobody otherwise. So nobody is sent what the model doesn't need. A trait that is added to
`BlockTraits` belongs into one of the tuples below, or into a function of its own here. Called by `view/swarm_view` for
every greeting.
"""

from collections.abc import Iterable, Sequence

from swarmllm.data_structures import BlockTraits, ServedBlocks, Span, StackTraits
from swarmllm.errors import RemoteProtocolError
from swarmllm.swarm.stacks import describe_span

SAME = ("batch_axis", "block_output")
"""Traits that are the same in all blocks of a stack."""
ABILITIES = ("chunked_prefill", "rollback")
"""Traits that are true of blocks which can do something."""


def check_claims(peer_id: str, served: ServedBlocks, own: BlockTraits, encoder: Span | None) -> None:
    """Compare a greeting with the traits of the model; `encoder` are the blocks of its encoder, if it has one.

    Raises:
        RemoteProtocolError: the server says something else.
    """
    if served.traits is None:
        return
    _check_stacks(peer_id, served, encoder)
    for own_stack, claimed, name in _stacks(served, own, encoder):
        for trait in SAME:
            if getattr(claimed, trait) != getattr(own_stack, trait):
                raise _contradiction(peer_id, f"the {trait} of its {name} is {getattr(claimed, trait)}")
        if bool(claimed.takes_source) != bool(own_stack.takes_source):
            raise _contradiction(peer_id, f"takes_source of its {name} is {claimed.takes_source}")
        if more := sorted({*claimed.extra_inputs} - {*own_stack.extra_inputs}):
            raise _contradiction(peer_id, f"its {name} need {' and '.join(more)}")


def lacking_abilities(served: ServedBlocks, own: BlockTraits, encoder: Span | None) -> tuple[str, ...]:
    """What the model's blocks can do and this server's can't, as it says."""
    return tuple(
        trait
        for own_stack, claimed, _ in _stacks(served, own, encoder)
        for trait in ABILITIES
        if getattr(own_stack, trait) and not getattr(claimed, trait)
    )


def check_abilities(peer_id: str, served: ServedBlocks, agreed: BlockTraits, encoder: Span | None) -> None:
    """Raises RemoteProtocolError if the server says that its blocks can do less than what this client builds on."""
    for trait in lacking_abilities(served, agreed, encoder):
        raise _contradiction(peer_id, f"its blocks lack {trait}")


def with_abilities_of(own: BlockTraits, greetings: Iterable[ServedBlocks], encoder: Span | None) -> BlockTraits:
    """The traits that hold for all these servers, of which some may be able to do less."""
    lacking = {trait for served in greetings for trait in lacking_abilities(served, own, encoder)}
    return own.model_copy(update=dict.fromkeys(lacking, False))


def trusted_traits(greetings: Sequence[ServedBlocks], encoder: Span | None) -> BlockTraits:
    """The traits that all these servers together claim, which the user trusts."""
    parts = [served.traits for served in greetings if served.traits and (not encoder or served.end > encoder.end)]
    found = _together(parts)
    if encoder is None:
        return found
    parts = [served.traits.of_encoder for served in greetings if served.traits and served.start < encoder.end]
    of_encoder = StackTraits(**_together(parts).model_dump(exclude={"encoder"}))
    return found.model_copy(update={"encoder": of_encoder})


def _together(claims: Sequence[BlockTraits]) -> BlockTraits:
    first = claims[0] if claims else BlockTraits()
    return first.model_copy(
        update={
            "extra_inputs": tuple(sorted({name for claimed in claims for name in claimed.extra_inputs})),
            "forbidden_cuts": tuple(sorted({cut for claimed in claims for cut in claimed.forbidden_cuts})),
            "length_borders": tuple(sorted({border for claimed in claims for border in claimed.length_borders})),
            "own_length_beyond": min(filter(None, (claimed.own_length_beyond for claimed in claims)), default=None),
            "skips_padding": tuple(
                side for side in first.skips_padding if all(side in one.skips_padding for one in claims)
            ),
            **{trait: all(getattr(claimed, trait) for claimed in claims) for trait in ABILITIES},
        }
    )


def _stacks(served: ServedBlocks, own: BlockTraits, encoder: Span | None) -> list[tuple[BlockTraits, BlockTraits, str]]:
    """(own traits, claimed ones, what they are of) for each stack that the server has blocks of."""
    claimed = served.traits or own
    if encoder is None:
        return [(own, claimed, "blocks")]
    found = [(own, claimed, "decoder's blocks")] if served.end > encoder.end else []
    if served.start < encoder.end:
        found.append((own.of_encoder, claimed.of_encoder, "encoder's blocks"))
    return found


def _check_stacks(peer_id: str, served: ServedBlocks, encoder: Span | None) -> None:
    """A server of an older version doesn't know of the two stacks that its blocks are of."""
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


def _contradiction(peer_id: str, claim: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the server {peer_id} says that {claim}, which is not so for this model: it lies, or runs another version of "
        "swarmllm or transformers",
        peer_id,
    )
