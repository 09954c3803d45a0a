"""Every error that a user of swarmllm can meet.

Each class says two things that the retry policy (`swarm/retry`) needs: whether trying again can help, and whether the
peer is to blame. Foreign errors (hivemind, OS, transformers) are translated where they enter: `p2p/peer` and
`wire/protocol` for peers, `checkpoint/checkpoint` for weights.

The right column says how to try again (with another peer, after looking up servers again, or by replaying the inputs)
and whether the peer is blamed.

    SwarmError
      ConfigurationError(ValueError)                 the caller's settings; never retried
        UnsupportedModelError                        this architecture, or this cut of it, can't be served
      RoutingError
        MissingBlocksError(block_idxs)               nobody serves some blocks; retry after a refresh
      PeerError(peer_id)
        PeerUnreachableError                         another peer, blame
        PeerTimeoutError(TimeoutError)               another peer, blame
        ServerOverloadedError                        another peer, no blame
          ServerOutOfMemoryError                     another peer, no blame
        CacheFullError                               another peer, no blame
          SessionTooLargeError                       another peer, no blame
        BlocksNotServedError                         refresh, no blame
          GroupLostError                             refresh, no blame
        SessionLostError                             replay, no blame
        RemoteProtocolError                          another peer, blame
        CorruptActivationsError                      another peer, blame
      LocalProtocolError                             our bug: never retried, blames nobody
      SessionClosedError(RuntimeError)
      SessionLengthExceededError(ValueError)
      WeightsError
        BlockWeightsNotFoundError
        WeightsMismatchError
        CorruptWeightsError
"""

from collections.abc import Sequence
from typing import ClassVar


class SwarmError(Exception):
    """Base of all errors of swarmllm."""

    code: ClassVar[str] = "error"
    """Name of this error on the wire."""
    retriable: ClassVar[bool] = False
    """True if the same call can succeed after a refresh or with another peer."""
    blames_peer: ClassVar[bool] = False
    """True: avoid the peer for a while."""
    said_by: str | None = None
    """The server that answered a request with this error; None: this side found it. A `PeerError` has `accused_by`."""


class ConfigurationError(SwarmError, ValueError):
    """The caller's settings or arguments can't work. The message names the mend."""

    code = "configuration"


class UnsupportedModelError(ConfigurationError):
    """This architecture, or this way of cutting it into spans, can't be served exactly."""

    code = "unsupported_model"


class RoutingError(SwarmError):
    """No usable route through the swarm."""

    code = "routing"
    retriable = True


class MissingBlocksError(RoutingError):
    """Nobody serves some of the blocks."""

    code = "missing_blocks"

    def __init__(self, message: str, block_idxs: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.block_idxs = tuple(block_idxs)


class PeerError(SwarmError):
    """Something went wrong with one peer."""

    code = "peer"
    retriable = True
    accused_by: str | None = None
    """The peer that reported this about `peer_id`. None: this side saw it, or `peer_id` reported it itself."""
    through_relay: bool = False
    """True if the failed stream went through a relay: then the relay may be what failed."""

    def __init__(self, message: str, peer_id: str | None = None) -> None:
        super().__init__(message)
        self.peer_id = peer_id

    @property
    def is_hearsay(self) -> bool:
        """True if one peer reports this about another. It proves nothing, so nobody is avoided for it."""
        return self.accused_by is not None and self.accused_by != self.peer_id


class PeerUnreachableError(PeerError):
    """The peer can't be dialled, or its stream broke."""

    code = "unreachable"
    blames_peer = True


class PeerTimeoutError(PeerError, TimeoutError):
    """The peer stopped answering."""

    code = "timeout"
    blames_peer = True


class ServerOverloadedError(PeerError):
    """The server has no room for this request now, or can't do it for another reason of its own."""

    code = "overloaded"


class ServerOutOfMemoryError(ServerOverloadedError):
    """The server's memory ran out while it computed."""

    code = "out_of_memory"


class CacheFullError(PeerError):
    """The server's KV cache budget can't hold this session."""

    code = "cache_full"


class SessionTooLargeError(CacheFullError):
    """The session needs more KV cache than the server has in all. Waiting doesn't help, only a larger server."""

    code = "session_too_large"


class BlocksNotServedError(PeerError):
    """The server doesn't hold the blocks, or not any more."""

    code = "blocks_not_served"


class GroupLostError(BlocksNotServedError):
    """A process that held some of the server's weights is gone. The server can't compute until it is restarted."""

    code = "group_lost"


class SessionLostError(PeerError):
    """The server doesn't know the session, or can't roll its cache back; replaying the inputs restores it."""

    code = "session_lost"


class RemoteProtocolError(PeerError):
    """The peer sent something that breaks the protocol."""

    code = "remote_protocol"
    blames_peer = True


class CorruptActivationsError(PeerError):
    """The peer returned hidden states that can't be right (NaN, infinite, wrong shape or type)."""

    code = "corrupt_activations"
    blames_peer = True


class LocalProtocolError(SwarmError):
    """This side broke the protocol: a bug of swarmllm, please report it."""

    code = "local_protocol"


class SessionClosedError(SwarmError, RuntimeError):
    """The session or model was used after it had been closed."""

    code = "session_closed"


class SessionLengthExceededError(SwarmError, ValueError):
    """More tokens than the session was opened for."""

    code = "length_exceeded"


class WeightsError(SwarmError):
    """The checkpoint can't be used."""

    code = "weights"


class BlockWeightsNotFoundError(WeightsError):
    """The checkpoint lacks tensors or files that are needed."""

    code = "weights_not_found"


class WeightsMismatchError(WeightsError):
    """The swarm serves another checkpoint, or the checkpoint's tensors don't fit its config."""

    code = "weights_mismatch"


class CorruptWeightsError(WeightsError):
    """A file of the checkpoint is truncated or damaged."""

    code = "weights_corrupt"


def _subclasses(cls: type[SwarmError]) -> list[type[SwarmError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _subclasses(child))]


ERRORS_BY_CODE: dict[str, type[SwarmError]] = {cls.code: cls for cls in _subclasses(SwarmError)}


def error_from_code(code: str, message: str, peer_id: str | None = None) -> SwarmError:
    """Make the error that a peer reported with `code`. Unknown codes, of newer peers, become a plain PeerError."""
    cls = ERRORS_BY_CODE.get(code, PeerError)
    return cls(message, peer_id) if issubclass(cls, PeerError) else cls(message)
