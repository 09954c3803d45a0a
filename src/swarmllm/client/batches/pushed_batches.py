"""Batches that servers pass on to each other, as they do with the steps of sessions.

Every server of a chain gets its own request at once. The first one brings the tensors; each later one names its source,
each earlier one its target, by a secret of their own. So the hidden states take one way from server to server in place
of two by way of the client, and the same holds for gradients, from the last server to the first.

    a server of the chain                        what the client does
    answers, and its target has what it needs    waits for the next one
    answers, but can't reach its target          relays from there on, and remembers the pair
    fails, is lost, or doesn't answer in time    gives the chain up there, and says so to the servers behind
    falls silent before its turn has come        the same: its source would try for seconds to reach it

Whoever runs the chain (`batches/batch_runner`) then goes on by relaying, from the last hidden states that it has. The
answers bring those of every server if they are wanted, after they have been passed on.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from swarmllm.client.batches.hop_batches import BatchRequests, Neighbours
from swarmllm.client.view.connection import Result
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import RouteHop, ServerInfo
from swarmllm.errors import PeerError, PeerTimeoutError, SessionLostError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.messages import Predecessor, PushHeader, Target
from swarmllm.network.wire.protocol import MessageType

logger = logging.getLogger(__name__)

MAX_CHAINS = 32
"""Under way at a time; others are relayed. A server takes 64 requests of one stream, and those of a chain wait there
from its beginning."""
MAX_CHAIN_BYTES = 128 << 20
"""Bytes of hidden states in all chains, at one server: a quarter of what it takes from one peer."""
UNLINKED_S = 600.0
"""Seconds for which two servers of which one can't reach the other are not asked again. Assumed: mostly it is a NAT."""
WITHDRAWAL_TIMEOUT_S = 1.0


@dataclass(frozen=True, eq=False)
class Part:
    """The work of one server of a chain; only the first one's hidden states are sent."""

    hop: RouteHop
    inputs: BlockInputs
    forward: int | None = None

    @property
    def peer_id(self) -> str:
        return self.hop.server.peer_id


@dataclass(frozen=True, eq=False)
class Outcome:
    """The end of a chain's run: the answers of its first servers, and what went wrong behind them.

    Fewer answers than servers and no error: the last one that answered can't reach its target.
    """

    answers: list[Result]
    error: SwarmError | None = None


class PushedBatches:
    """Runs chains; one object per model, in the client's event loop."""

    def __init__(self, view: SwarmView, requests: BatchRequests) -> None:
        self._view = view
        self._requests = requests
        self._unlinked: dict[tuple[str, str], float] = {}
        self._num_chains = 0
        self._num_bytes = 0
        self.num_pushed = 0
        """Tensors that went from server to server so far."""

    def chain_length(self, servers: Sequence[ServerInfo], inputs: BlockInputs) -> int:
        """Count the servers, from the first one on, that can pass such a micro-batch on to each other; at least 1.

        With spot checks nothing is pushed: they compare what a server has made of what it was given, and where servers
        pass on, it could show this client something else than its target.
        """
        config = self._view.config
        num_bytes = self._num_bytes + inputs.hidden_states.nbytes
        if not config.push or config.verify_fraction or self._num_chains >= MAX_CHAINS:
            return 1
        if self._num_chains and num_bytes > MAX_CHAIN_BYTES:
            return 1
        num_tokens, now = inputs.num_positions, time.monotonic()
        length = 1
        for one, other in pairwise(servers):
            fits = num_tokens <= min(one.max_batch_tokens, other.max_batch_tokens)
            if not fits or self._unlinked.get((one.peer_id, other.peer_id), now) > now:
                break
            length += 1
        return length

    async def run(
        self,
        kind: MessageType,
        parts: Sequence[Part],
        grad_outputs: Tensor | None = None,
        *,
        keep: bool = False,
        without_pushed: bool = False,
    ) -> Outcome:
        """FORWARD or BACKWARD through all parts in this order; `without_pushed`: nobody answers what is passed on."""
        timeout_s = 2 * len(parts) * self._view.config.step_timeout_s  # the last one waits for all before it

        def request(part: Part, neighbours: Neighbours) -> Awaitable[Result]:
            return self._requests.send(
                kind,
                part.hop,
                part.inputs,
                grad_outputs,
                keep=keep,
                forward=part.forward,
                neighbours=neighbours,
                timeout_s=timeout_s,
            )

        num_bytes = parts[0].inputs.hidden_states.nbytes
        self._num_chains += 1
        self._num_bytes += num_bytes
        try:
            async with asyncio.TaskGroup() as tasks:
                return await self._follow(
                    [
                        _Link(part, neighbours, tasks.create_task(_outcome(request(part, neighbours))))
                        for part, neighbours in _with_neighbours(parts, without_pushed)
                    ]
                )
        finally:
            self._num_chains -= 1
            self._num_bytes -= num_bytes

    async def _follow(self, chain: Sequence["_Link"]) -> Outcome:
        """Wait for one server after the other; those that are left behind are told not to wait."""
        answers: list[Result] = []
        try:
            for index, link in enumerate(chain):
                found = await self._answer(link, chain[index + 1 :])
                if isinstance(found, SwarmError):
                    source = link.neighbours.source
                    if source is not None and isinstance(found, PeerError) and found.is_hearsay:
                        self._unlink(source.peer_id, link.part.peer_id)  # from now on this client sees who is right
                    return Outcome(answers, found)
                answers.append(found)
                if link.neighbours.target is not None:
                    if not found.header.pushed:
                        self._unlink(link.part.peer_id, link.neighbours.target.peer_id)
                        break
                    self.num_pushed += 1
            return Outcome(answers)
        finally:
            await self._withdraw([link for link in chain if not link.answer.done()])
            for link in chain:
                link.answer.cancel()

    async def _answer(self, link: "_Link", behind: Sequence["_Link"]) -> Result | SwarmError:
        """The answer of a server whose source has done its part; if none comes, it is clear who is to blame."""
        config, source = self._view.config, link.neighbours.source
        deadline = time.monotonic() + config.step_timeout_s
        under_way = {one.answer for one in (link, *behind)}
        while not link.answer.done() and (left_s := deadline - time.monotonic()) > 0:
            _, under_way = await asyncio.wait(under_way, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for other in behind:
                error = other.error
                if isinstance(error, PeerTimeoutError) and not error.is_hearsay and not link.answer.done():
                    return error
        if not link.answer.done() and source is not None:
            await self._withdraw([link])  # changes nothing if it has what it needs
            await asyncio.wait({link.answer}, timeout=config.connect_timeout_s)
            if link.answer.done() and isinstance(link.answer.result(), SessionLostError):
                self._unlink(source.peer_id, link.part.peer_id)
        if link.answer.done():
            return link.error or link.answer.result()
        return PeerTimeoutError(f"no answer within {config.step_timeout_s:.0f} s", link.part.peer_id)

    async def _withdraw(self, chain: Sequence["_Link"]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHDRAWAL_TIMEOUT_S):
                for link in chain:
                    connection = self._requests.opened(link.part.peer_id)
                    if link.neighbours.source is not None and connection is not None:
                        with suppress(PeerError):
                            await connection.send(MessageType.PUSH, PushHeader(token=link.neighbours.source.token))

    def _unlink(self, source: str, target: str) -> None:
        now = time.monotonic()
        if self._unlinked.get((source, target), now) <= now:  # once is enough for all micro-batches
            logger.info("%s doesn't pass on to %s, so batches go through this client there", source, target)
        self._unlinked = {pair: until for pair, until in self._unlinked.items() if until > now}
        self._unlinked[source, target] = now + UNLINKED_S


@dataclass(frozen=True, eq=False)
class _Link:
    """One server's request that is under way."""

    part: Part
    neighbours: Neighbours
    answer: "asyncio.Task[Result | SwarmError]"

    @property
    def error(self) -> SwarmError | None:
        """The error so far. A server may say that its source gave it something wrong, which proves nothing."""
        error = self.answer.result() if self.answer.done() else None
        return error if isinstance(error, SwarmError) else None


def _with_neighbours(parts: Sequence[Part], without_pushed: bool) -> Iterator[tuple[Part, Neighbours]]:
    """Each part, with what its request says about its neighbours."""
    source: Predecessor | None = None
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        if after is None:
            yield part, Neighbours(source)
            return
        token = secrets.token_hex(16)
        target = Target(peer_id=after.peer_id, addrs=after.hop.server.addrs, token=token)
        yield part, Neighbours(source, target, without_pushed)
        source = Predecessor(peer_id=part.peer_id, token=token)


async def _outcome(request: Awaitable[Result]) -> Result | SwarmError:
    try:
        return await request
    except SwarmError as error:
        return error
