"""What peers have sent and nobody has taken yet: how much of it there may be, and whether a message goes on at all.

Used by `network/stream` for each of its streams, and by `server/handler`, which counts those of all its clients
together. Pure but for the ending of streams, which it is handed.
"""

from collections import Counter
from typing import Protocol

import psutil

from swarmllm.network.frames import CHUNK_BYTES, MAX_MESSAGE_BYTES, Message

MESSAGE_OVERHEAD_BYTES = 512
"""Counted per message in the inbox, so that very many empty ones fill it too."""
HEADER_FACTOR = 64
"""Counted per byte of a packed header: one byte can unpack into an empty dict."""
MAX_BYTES_PER_PEER = 4 * MAX_MESSAGE_BYTES
"""Assumed: twice what a client's batches for one server take when they all arrive at once."""
MEMORY_SHARE = 0.25
"""Of the machine's memory, for all peers together; but one message of the largest size always goes in. Assumed."""
PROGRESS_BYTES = CHUNK_BYTES
"""A message begun must end or bring so much more in the time that `FrameStream` gives it, however many frames it has:
256 KiB in 30 s is slower than any link worth using."""


def memory_of(message: Message) -> int:
    """About what a message takes in the inbox, at worst."""
    return len(message.payload) + HEADER_FACTOR * message.header_bytes + MESSAGE_OVERHEAD_BYTES


class Progress:
    """Of the message that has begun on one stream."""

    def __init__(self, now: float) -> None:
        self._num_messages = self._num_bytes = 0
        self._since = now

    def restart(self, now: float) -> None:
        """What the peer sends can't be seen, or couldn't: that isn't its fault."""
        self._since = now

    def stalled_s(self, num_messages: int, num_bytes: int, now: float) -> float:
        """How long nothing has gone on, where so many messages are complete and the next one has so many bytes."""
        if not num_bytes or num_messages != self._num_messages or num_bytes - self._num_bytes >= PROGRESS_BYTES:
            self._num_messages, self._num_bytes, self._since = num_messages, num_bytes, now
        return now - self._since


class Holder(Protocol):
    """A stream, as far as it is looked at here."""

    peer_id: str

    def sent_too_much(self) -> None:
        """End, and forget what has come."""


class Intake:
    """Bytes of several streams, unfinished messages and those that wait to be taken.

    A peer that has too many loses the stream on which they grew; if all together have too many, it is the largest
    stream of the peer that has most: so nobody who sends little is in danger, however many others there are.
    """

    def __init__(self, max_bytes_per_peer: int = MAX_BYTES_PER_PEER, max_bytes: int | None = None) -> None:
        machine = int(psutil.virtual_memory().total * MEMORY_SHARE)
        self._max_bytes_per_peer = max_bytes_per_peer
        self._max_bytes = max(MAX_MESSAGE_BYTES, machine) if max_bytes is None else max_bytes
        self._of_peers: Counter[str] = Counter()
        self._of_streams: dict[Holder, int] = {}
        self.num_bytes = 0

    def holds(self, stream: Holder, num_bytes: int) -> None:
        """So much is held for that stream now; 0 when it has ended."""
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
