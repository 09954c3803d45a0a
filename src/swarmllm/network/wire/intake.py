"""Bounds on what peers have sent and nobody has taken yet.

`streams/connection` makes one for all its clients, `wire/stream` tells it what each stream holds. Pure but for the
ending of streams, which it is handed.
"""

from collections import Counter
from typing import Protocol

from swarmllm.machine_memory import total_memory_bytes
from swarmllm.network.wire.frames import MAX_MESSAGE_BYTES

MAX_BYTES_PER_PEER = 4 * MAX_MESSAGE_BYTES
"""Assumed: twice what a client's batches for one server take when they all arrive at once."""
MEMORY_SHARE = 0.25
"""Share of the machine's memory for all peers together; but one message of the largest size always goes in. Assumed."""


class Holder(Protocol):
    """A stream, as far as it is looked at here."""

    peer_id: str

    def sent_too_much(self) -> None:
        """End, and forget what has come."""


class Intake:
    """Counts the bytes of several streams: unfinished messages and those that wait to be taken.

    A peer that has too many loses the stream on which they grew; if all together have too many, it is the largest
    stream of the peer that has most: so nobody who sends little is in danger, however many others there are.
    """

    def __init__(self, max_bytes_per_peer: int = MAX_BYTES_PER_PEER, max_bytes: int | None = None) -> None:
        machine = int(total_memory_bytes() * MEMORY_SHARE)
        self._max_bytes_per_peer = max_bytes_per_peer
        self._max_bytes = max(MAX_MESSAGE_BYTES, machine) if max_bytes is None else max_bytes
        self._of_peers: Counter[str] = Counter()
        self._of_streams: dict[Holder, int] = {}
        self.num_bytes = 0

    def holds(self, stream: Holder, num_bytes: int) -> None:
        """Note how many bytes that stream holds now; 0 when it has ended."""
        more = num_bytes - self._of_streams.get(stream, 0)
        if not more:
            return
        self.num_bytes += more
        self._of_peers[stream.peer_id] += more
        if num_bytes:
            self._of_streams[stream] = num_bytes
        else:
            del self._of_streams[stream]
            if not self._of_peers[stream.peer_id]:
                del self._of_peers[stream.peer_id]
        if more > 0 and self._of_peers[stream.peer_id] > self._max_bytes_per_peer:
            stream.sent_too_much()
        elif more > 0 and self.num_bytes > self._max_bytes:
            greediest = max(self._of_peers, key=lambda peer_id: self._of_peers[peer_id])
            theirs = (held for held in self._of_streams if held.peer_id == greediest)
            max(theirs, key=lambda held: self._of_streams[held]).sent_too_much()
