"""What one session's messages take while they wait: counted before they are decoded, and until they have been run.

A session's lease covers its cache, and as much again as its inputs take; so that is free to wait. A step that takes
more (a mask of four axes, say) may still come alone, if the cache's budget has so much left for as long as it waits.
All of it counts as bytes of the session's client, whoever sends it: what is passed on here was asked for by the client.
Used by `server/sessions` and `server/handler`.
"""

from swarmllm.errors import ServerOverloadedError
from swarmllm.network.messages import ReplayHeader, StepHeader
from swarmllm.network.protocol import Message
from swarmllm.network.tensor_codec import unpacked_bytes
from swarmllm.server.kv_cache import CacheBudget
from swarmllm.server.peer_limits import PeerLimits

MAX_WAITING = 1024
"""Messages of one session that may wait; a client that sends more without reading answers is refused."""
INPUTS_FACTOR = 2
"""Inputs may take so many times the hidden states of the session's whole length: clients may send wider types."""
BESIDE_BYTES = 32
"""Of one position beside its hidden states: mask, position, token type and input id."""
MESSAGE_BYTES = 2048
"""Of any message: its header as Python objects."""
NUMBER_BYTES = 40
"""Of a Python integer in a tuple."""


def bytes_of(header: StepHeader | ReplayHeader, message: Message) -> int:
    """Memory that a message takes until it has been run."""
    num_numbers = len(header.batch_index or ())
    if isinstance(header, StepHeader):
        num_numbers += 4 * len(header.timings)
    unpacked = unpacked_bytes(message.header.get("tensors"), len(message.payload))
    return MESSAGE_BYTES + NUMBER_BYTES * num_numbers + len(message.payload) + unpacked


class WaitingRoom:
    """Of one session, whose client is known by its peer id."""

    def __init__(self, budget: CacheBudget, limits: PeerLimits, peer_id: str) -> None:
        self._extra = budget.lease(0)
        self._limits, self._peer_id = limits, peer_id
        self._waiting_bytes = self._running_bytes = self._num_waiting = 0
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Of all that wait, and of the one that runs."""
        return self._waiting_bytes + self._running_bytes

    def enter(self, num_bytes: int, num_free_bytes: int) -> None:
        """Count a message that takes so much, where `num_free_bytes` are free to wait.

        The one that runs takes no place from those that wait: its answer may have gone out before it has ended.

        Raises:
            ServerOverloadedError: too much of this session or of this client waits already.
            CacheFullError: it takes more than is free, and than the budget has left.
        """
        num_free_bytes += MESSAGE_BYTES * (self._num_waiting + 1)
        waiting = self._waiting_bytes + num_bytes
        if self._num_waiting >= MAX_WAITING or (self._num_waiting and waiting > num_free_bytes):
            raise ServerOverloadedError("too many steps of this session are waiting")
        if not self._limits.take_now(self._peer_id, num_bytes):
            raise ServerOverloadedError("too many bytes of this client's steps and batches are waiting")
        try:
            extra = max(0, waiting - num_free_bytes) + max(0, self._running_bytes - num_free_bytes)
            self._extra.resize(max(self._extra.num_bytes, extra))
        except BaseException:
            self._limits.give_back(self._peer_id, num_bytes)
            raise
        self._waiting_bytes = waiting
        self._num_waiting += 1

    def leave(self, num_bytes: int) -> None:
        """It was refused after all."""
        if not self._closed:
            self._waiting_bytes -= num_bytes
            self._num_waiting -= 1
            self._give_back(num_bytes)

    def begin(self, num_bytes: int) -> None:
        """It is its turn to run."""
        self._waiting_bytes -= num_bytes
        self._num_waiting -= 1
        self._running_bytes = num_bytes

    def end(self) -> None:
        """What has begun to run has been run."""
        if not self._closed:
            num_bytes, self._running_bytes = self._running_bytes, 0
            self._give_back(num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self._limits.give_back(self._peer_id, num_bytes)
        if not self.num_bytes:
            self._extra.resize(0)

    def close(self) -> None:
        """Nothing will be run any more; harmless when done twice."""
        if not self._closed:
            self._limits.give_back(self._peer_id, self.num_bytes)
            self._extra.release()
            self._closed = True
