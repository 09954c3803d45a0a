"""What one session's messages take while they wait: counted before they are decoded, and until they have been run.

A session's lease covers its cache, and as much again as its inputs take; so that is free to wait. A step that takes
more (a mask of four axes, say) may still come alone, if the cache's budget has as much left for as long as it waits.
All of it counts as bytes of the session's client, whoever sends it: what is passed on here was asked for by the client.
Used by `session` and `streams/session_messages`.
"""

from swarmllm.errors import ServerOverloadedError
from swarmllm.network.wire.messages import ReplayHeader, StepHeader
from swarmllm.network.wire.protocol import Message
from swarmllm.network.wire.tensor_codec import decompressed_bytes
from swarmllm.server.peers.peer_limits import PeerLimits
from swarmllm.server.sessions.kv_cache import CacheBudget

MAX_WAITING = 1024
"""Messages of one session that may wait; a client that sends more without reading answers is refused."""
MESSAGE_BYTES = 2048
"""Bytes of any message: its header as Python objects."""
NUMBER_BYTES = 40
"""Bytes of a Python integer in a tuple."""


def bytes_of(header: StepHeader | ReplayHeader, message: Message) -> int:
    """Memory that a message takes until it has been run."""
    num_numbers = len(header.batch_index or ())
    if isinstance(header, StepHeader):
        num_numbers += 4 * len(header.timings)
    num_bytes = decompressed_bytes(message.header.get("tensors"), len(message.payload))
    return MESSAGE_BYTES + NUMBER_BYTES * num_numbers + len(message.payload) + num_bytes


class WaitingRoom:
    """The messages of one session, whose client is known by its peer id."""

    def __init__(self, budget: CacheBudget, limits: PeerLimits, peer_id: str) -> None:
        self._extra = budget.lease(0)
        self._limits, self._peer_id = limits, peer_id
        self._waiting_bytes = self._running_bytes = self._num_waiting = 0
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all that wait, and of the one that runs."""
        return self._waiting_bytes + self._running_bytes

    def enter(self, num_bytes: int, num_free_bytes: int) -> None:
        """Count a message of this many bytes, where `num_free_bytes` are free to wait.

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

    def forget(self, num_bytes: int) -> None:
        """Forget a message that was refused after all."""
        if not self._closed:
            self._waiting_bytes -= num_bytes
            self._num_waiting -= 1
            self._give_back(num_bytes)

    def begin(self, num_bytes: int) -> None:
        """Note that a message has its turn to run."""
        self._waiting_bytes -= num_bytes
        self._num_waiting -= 1
        self._running_bytes = num_bytes

    def end(self) -> None:
        """Note that what had begun to run has been run."""
        if not self._closed:
            num_bytes, self._running_bytes = self._running_bytes, 0
            self._give_back(num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self._limits.give_back(self._peer_id, num_bytes)
        if not self.num_bytes:
            self._extra.resize(0)

    def close(self) -> None:
        """Give everything back, as nothing will be run any more; harmless when done twice."""
        if not self._closed:
            self._limits.give_back(self._peer_id, self.num_bytes)
            self._extra.release()
            self._closed = True
