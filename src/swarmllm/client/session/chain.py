"""A chain of servers that holds the KV caches of one text: each step goes through all of them.

`InferenceSession` and `session/legs` call `run_step`, `send`, `receive` … from their threads; the rest runs in the
client's event loop. `session_text` knows what the servers have seen, `open_route` which servers they are, `in_flight`
which requests wait for an answer.

Steps can be sent before the results of earlier ones are known, as speculation does (`speculation/sampling_loop`).
Rolling back costs no message: a step that starts before the end of another one makes the servers forget everything
behind its start.

    event                                     what happens
    send, at the end of what is under way     the step follows it
    send, at a lower position                 everything under way is stale; the step starts from there
    receive                                   the result of the oldest step under way, after a repair if need be
    a repair, or a move to a better route     what is under way is sent again, in the new version; stale steps are not
    a stale step fails                        the servers drop all steps of that version, so the chain is repaired

Before each step, `_make_ready` repairs what is broken:

1. Hops with a broken stream or a lost session are replaced: a new route for exactly their blocks, new sessions.
2. Every hop is linked to its successor anew, in a new version of the chain. Steps of earlier versions are dropped.
3. The caches of new hops are rebuilt by replaying inputs. The hop before them has kept what it sent; if the first hop
   is new, the client has. Other hops keep their caches. Servers that round to 16 bits compute the steps as they were
   computed at first, one by one: long calls are rounded otherwise, and the text would go on with other words.
4. Steps without an answer are sent again. A hop that ran one before rolls its cache back to the start of the step.

A move to a better route is the same from 2. on, but opens the new sessions before it closes the old ones.
"""

import asyncio
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swarmllm.client.batches.spot_checks import SpotChecks
from swarmllm.client.session.in_flight import InFlight, PendingStep, plausible_outputs
from swarmllm.client.session.open_route import Hop, OpenRoute, SessionSettings
from swarmllm.client.session.session_text import SessionText, owned
from swarmllm.client.view.connection import Result, tokens_at_once
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits, RouteHop, Span
from swarmllm.errors import (
    CacheFullError,
    ConfigurationError,
    CorruptActivationsError,
    PeerError,
    SessionClosedError,
    SessionTooLargeError,
    SwarmError,
)
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.liveness import MEASURED_BYTES
from swarmllm.network.wire.messages import Pieces, Timings
from swarmllm.swarm.retry import Retries
from swarmllm.swarm.route_costs import RouteCosts
from swarmllm.swarm.routing import MAX_REPLAY_S, step_by_step_ms

logger = logging.getLogger(__name__)

MIN_TOKENS_LEFT = 64
"""Fewest tokens that are expected to follow when a chain decides about a move. Assumed: the end of an answer of some
sentences."""
CHUNK_S = 0.25
"""Longest time of a prompt's chunk on one server, unless it has no more than `prefill_chunk_tokens`. Assumed: over slow
links, which the announced throughput includes, short chunks keep a pipeline of servers busier."""
CHUNKS_PER_SERVER = 2
"""Chunks of a prompt for each of several servers, so that they work at once. Measured (two servers of one thread, 128
tokens in two chunks, times that of one): hidden 2048 × 16 in Q4_K 0.77 (random weights), SmolLM2 0.85."""
LEAST_CHUNK_TOKENS = 64
"""Fewest tokens of such a chunk: with fewer, servers that share pages of 64 tokens (`prefix_cache`) would compute what
they have. Two chunks of 64 take 1.02 times the processor time of one of 128 (measured, one matrix in q4_k)."""
STEPS_AT_ONCE = 32
"""Most steps of a request to compute a text again step by step. Two such requests are under way. Assumed: the gaps
between them are short, and their messages few compared with the 1024 that may wait."""
TOKENS_AT_ONCE = 1024
"""Most positions (batch × seq) of such a request, unless a step alone has more."""
COPIED_IN_THREAD_BYTES = 1 << 20
"""The inputs of longer steps are copied in a thread. Measured: 16 MiB take 3 ms, most of it for new memory."""
REQUEST_S = 5.0
"""Longest expected time of such a request. Assumed: an answer in this time shows that the servers work."""
TOO_SMALL_S = 1e4
"""Servers without room for the session are avoided like servers with a ban of this many seconds, longer than any."""


class ActivationNoise:
    """Normal noise on the hidden states that leave this machine (`ClientConfig.activation_noise`).

    Its standard deviation at each position is `scale` times the root mean square of the hidden states there. Noise is
    added once: repairs replay the same noisy values. docs/security.md has measurements of how much it hides.
    (HearthNet, section 5.9, proposes to study it.)
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._lock = threading.Lock()
        # Not torch's generator: users seed that one for sampling, and others must not guess the noise.
        self._generator = torch.Generator().manual_seed(secrets.randbits(63))

    def __call__(self, inputs: BlockInputs) -> BlockInputs:
        """The inputs with noise on their hidden states; gradients flow as without it."""
        if not self._scale:
            return inputs
        hidden = inputs.hidden_states
        with self._lock:
            noise = torch.randn(hidden.shape, generator=self._generator)
        size = hidden.detach().float().square().mean(dim=-1, keepdim=True).sqrt()
        return inputs.with_hidden(hidden + (noise.to(hidden.device) * size * self._scale).to(hidden.dtype))


def noise_for(config: ClientConfig, traits: BlockTraits) -> ActivationNoise:
    """The noise that the client's settings ask for.

    Raises:
        ConfigurationError: the blocks are given the text itself besides hidden states.
    """
    if config.activation_noise and traits.extra_inputs:
        raise ConfigurationError(
            f"the blocks of this model are given {' and '.join(traits.extra_inputs)} as well, which activation_noise "
            "doesn't hide: leave it out"
        )
    return ActivationNoise(config.activation_noise)


class Chain:
    """Neighbouring blocks on servers, with the KV caches of one text."""

    def __init__(
        self, view: SwarmView, text: SessionText, spot_checks: SpotChecks | None, span: Span, noise: ActivationNoise
    ) -> None:
        """`spot_checks` None: no step is checked."""
        self.view, self.text, self.spot_checks, self.span, self.noise = view, text, spot_checks, span, noise
        self.timings: Timings = ()
        """Times of the last step, per server: first block, µs in its queue, µs of computing."""
        self.on_failure: Callable[[SwarmError], None] | None = None
        """Called in the event loop with each failure, before it is repaired or raised."""
        self.on_route: Callable[[list[RouteHop], float], None] | None = None
        """Called in the event loop with each route when it is opened or repaired, and the seconds that took."""
        self.num_repairs = 0
        self._busy = asyncio.Lock()
        self._hops = OpenRoute(view, span)
        self._in_flight = InFlight(view, text, self._hops, self._busy)
        self._ahead: deque[PendingStep] = deque()
        """Steps of `send` under way, the oldest first."""
        self._closed = False
        self._stepping: asyncio.Task[object] | None = None
        self._news = 0
        """`LookUps.news` of the view when a better route was last looked for."""
        self._device = torch.device("cpu")
        """The device of the last inputs; results go there."""

    @property
    def route(self) -> list[RouteHop]:
        """The servers in use; empty before the first step."""
        return self._hops.route

    @property
    def num_under_way(self) -> int:
        """Steps that were sent, and whose results nobody has taken yet."""
        return len(self._in_flight)

    # ------------------------------------------------------------------ called from other threads

    def run_step(self, inputs: BlockInputs, *, has_noise: bool = False) -> Tensor:
        """Run the blocks on `inputs`, which follow the text's position; returns hidden states of that shape.

        `has_noise`: these very values were sent to a server before.

        Raises:
            SessionLengthExceededError: the session is too short for them; nothing has changed.
            ConfigurationError: they don't fit what the session has seen; nothing has changed.
            SessionClosedError: it has been closed.
            SwarmError: repairs failed, within the retries; the session stays usable as it was before.
        """
        return self._on_device(self.view.loop.run_coroutine(self._step(self._to_send(inputs, has_noise))), inputs)

    def send(self, inputs: BlockInputs, position: int) -> None:
        """Send a step that starts at `position`, and don't wait for its result.

        Raises:
            SessionLengthExceededError: the session is too short for it.
            ConfigurationError: it doesn't follow what the session has seen, or what is under way.
            SessionClosedError: the session has been closed.
        """
        self.view.loop.run_coroutine(self._send(self._to_send(inputs), position))

    def receive(self) -> Tensor:
        """The result of the oldest step under way: hidden states of the shape of its inputs.

        Raises:
            SwarmError: as `run_step`; nothing is under way then.
        """
        return self.view.loop.run_coroutine(self._receive()).to(self._device, non_blocking=self._device.type == "cuda")

    def abandon(self) -> None:
        """Drop the results of all steps under way."""
        self.view.loop.run_coroutine(self._abandon())

    def past(self) -> list[tuple[int, BlockInputs]]:
        """(position, inputs) of all that the blocks have seen, in as few calls as possible."""
        return self.view.loop.run_coroutine(self._past())

    def remember(self, inputs: BlockInputs, *, has_noise: bool = False) -> None:
        """Note that the blocks have seen `inputs` elsewhere. Servers compute them when the text goes on."""
        self.text.remember(self._to_send(inputs, has_noise))

    @property
    def position(self) -> int:
        """Positions that the blocks have seen."""
        return self.text.position

    @position.setter
    def position(self, value: int) -> None:
        self.text.position = min(self.text.position, value)

    def _to_send(self, inputs: BlockInputs, has_noise: bool = False) -> BlockInputs:
        self._device = inputs.hidden_states.device
        return (inputs if has_noise else self.noise(inputs)).on_host()

    def _on_device(self, hidden: Tensor, inputs: BlockInputs) -> Tensor:
        if inputs.inner is not None:
            inputs.inner.move(self._device)
        return hidden.to(self._device, non_blocking=self._device.type == "cuda")

    # ------------------------------------------------------------------ steps

    async def _step(self, inputs: BlockInputs) -> Tensor:
        async with self._busy:
            self._admit(self.text.position, inputs)
            self._stepping = asyncio.current_task()
            try:
                return await self._run_chunks(inputs)
            finally:
                self._stepping = None

    async def _past(self) -> list[tuple[int, BlockInputs]]:
        async with self._busy:
            return self.text.past()

    async def close(self) -> None:
        """Free the session on all servers, which do so when the streams end. A step under way is cancelled."""
        self._closed = True
        if self._stepping is not None:
            self._stepping.cancel()
        async with self._busy:
            self._hang_up()

    def _hang_up(self) -> None:
        """Leave all servers. Another step would open the chain again, and replay the inputs that the client kept."""
        self._hops.close()
        self._in_flight.is_linked = False
        self._in_flight.forget_abandoned()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("the session has been closed")

    def _admit(self, position: int, inputs: BlockInputs) -> None:
        self._check_open()
        if not self.text.admit(position, inputs):
            self._hang_up()

    async def _run_chunks(self, inputs: BlockInputs) -> Tensor:
        self.text.shows = inputs.inner is not None
        chunks: list[BlockInputs] = []
        outputs: list[Tensor] = []
        retries = self.view.retries()
        while not chunks or len(outputs) < len(chunks):
            try:
                if inputs.inner is not None:
                    self._hops.leave_out_old(inputs.inner)
                await self._make_ready()
                chunks = chunks or self._chunks(inputs)  # their size depends on the first route
                await self._send_chunks(chunks[len(outputs) :], outputs)
                if len(outputs) == len(chunks):
                    await self._verify(outputs)
            except SwarmError as error:
                await self._get_over(error, retries)
        if inputs.inner is not None:
            inputs.inner.join([chunk.inner for chunk in chunks], self.text.traits.batch_axis + 1)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=self.text.traits.batch_axis + 1)

    def _chunks(self, inputs: BlockInputs) -> list[BlockInputs]:
        num_tokens, inner = prompt_chunk_tokens(inputs, self._hops.route, self.view.config), inputs.inner
        if inner is None:
            return list(self.text.chunks(inputs, num_tokens))
        if inner.attentions:  # a row of weights has as many columns as the text positions
            return [inputs]
        return list(self.text.chunks(inputs, min(num_tokens, tokens_at_once(inner, inputs, self.span))))

    async def _send_chunks(self, chunks: Sequence[BlockInputs], outputs: list[Tensor]) -> None:
        """Send all chunks at once, then add their results to `outputs` in order."""
        steps: list[PendingStep] = []
        position = self.text.position
        try:
            for chunk in chunks:
                steps.append(self._in_flight.add(chunk, position))
                await self._send_step(steps[-1])
                position += chunk.seq_len
            for step in steps:
                output = await self._take_in(step)
                outputs.append(output)  # kept, even if the next one fails
        finally:
            for step in steps:
                self._in_flight.remove(step)

    async def _send_step(self, step: PendingStep) -> None:
        """Send the step to the first server, unless it has failed already.

        Raises:
            PeerError: the connection is broken.
        """
        if not step.done.done():
            inner = step.inputs.inner
            if inner is not None:
                step.to_show = {hop for hop in self._hops if inner.wants(hop.span)}
            step.inputs = await self._hops[0].send_step(step.request, self._in_flight.state, step.position, step.inputs)
            if sum(tensor.nbytes for tensor in step.inputs.tensors().values()) >= COPIED_IN_THREAD_BYTES:
                copying = asyncio.to_thread(owned, step.inputs)
                step.copying = self.view.loop.spawn(copying, name="copy the inputs of a step")
            else:
                step.inputs = owned(step.inputs)

    async def _take_in(self, step: PendingStep) -> Tensor:
        """Wait for the result of the next step, and note that all blocks have seen its positions.

        Raises:
            SwarmError: it has failed, or the result can't be right.
        """
        answer = await self._in_flight.answered(step)
        try:
            output = plausible_outputs(answer, step.inputs, self.text.traits)
        except PeerError:
            self._hops.lose(answer.peer_id)
            raise
        self.timings = answer.header.timings
        inputs = step.inputs if step.copying is None else await step.copying
        self.text.append(step.position, inputs, self._pieces(answer, step.inputs.seq_len))
        self.text.selection = None
        self._hops.step_went_well()
        return output

    def _pieces(self, answer: Result, seq_len: int) -> Pieces:
        """The pieces in which servers have computed a step, without those that can't be right."""
        if not answer.header.pieces:
            return ()
        spans = {(hop.span.start, hop.span.end) for hop in self._hops}
        told = {(start, end): lengths for start, end, lengths in answer.header.pieces if sum(lengths) == seq_len}
        return tuple((*span, lengths) for span, lengths in told.items() if span in spans)

    async def _get_over(self, error: SwarmError, retries: Retries) -> None:
        """Wait until another try makes sense.

        Raises:
            SwarmError: none does.
        """
        self._in_flight.is_linked = False
        if isinstance(error, CacheFullError) and self.text.room.ask_for_less():
            return
        if isinstance(error, SessionTooLargeError) and error.peer_id is not None:
            self.text.room.too_small.add(error.peer_id)
        self.view.report(error)
        if self.on_failure is not None:
            self.on_failure(error)
        logger.info("the route needs a repair: %s", error)
        try:
            await self.view.wait_after(error, retries, self.span)
        except SwarmError:
            self._hang_up()  # a caller that keeps the exception keeps this session; servers need not
            raise
        if error.said_by is not None:
            self._hops.lose(error.said_by)

    async def _verify(self, outputs: list[Tensor]) -> None:
        """Check the last step on other servers, if a check is due. A wrong step is taken back, so that it runs again.

        Raises:
            CorruptActivationsError: it was wrong.
        """
        if self.spot_checks is None or not self.spot_checks.due() or self.text.is_cut_ahead:
            return
        (_, inputs), *others = self.text.past()
        if others:  # steps with contrary masks can't be computed again as one forward
            return
        try:
            await self.spot_checks.check_session(self.route, inputs, outputs[-1])
        except CorruptActivationsError:
            is_tainted = False
            for hop in self._hops:  # all hops behind a wrong one have computed on its outputs
                is_tainted = is_tainted or hop.lost or hop.peer_id in self.view.blamed
                hop.lost = is_tainted
            self.text.position -= sum(output.shape[self.text.traits.batch_axis + 1] for output in outputs)
            outputs.clear()
            raise

    # ------------------------------------------------------------------ steps ahead

    async def _send(self, inputs: BlockInputs, position: int) -> None:
        async with self._busy:
            self._admit(position, inputs)
            end = self.text.position
            if self._ahead:
                last = self._ahead[-1]
                end = last.position + last.inputs.seq_len
            if position < end:
                self._drop_ahead()
                self.text.position = min(self.text.position, position)
            elif position > end:
                raise ConfigurationError(f"a step can't start at position {position}: {end} is known")
            step = self._in_flight.add(inputs, position)
            self._ahead.append(step)
            if self._in_flight.is_linked and self._hops.usable:
                try:
                    await self._send_step(step)
                except PeerError:
                    self._in_flight.is_linked = False  # receive() repairs, and sends it again
                except BaseException:  # no memory for a copy, say: nobody will receive it
                    if step in self._ahead:  # it has not been abandoned meanwhile
                        self._ahead.remove(step)
                        self._in_flight.abandon(step)
                    raise

    async def _receive(self) -> Tensor:
        async with self._busy:
            self._check_open()
            if not self._ahead:
                raise ConfigurationError("receive() needs a step that has been sent")
            self._stepping = asyncio.current_task()
            try:
                output = await self._oldest_result()
            except BaseException:
                self._drop_ahead()
                raise
            finally:
                self._stepping = None
            step = self._ahead.popleft()
            self._in_flight.remove(step)
            self._in_flight.forget_abandoned(before=step.request)
            return output

    async def _oldest_result(self) -> Tensor:
        retries = self.view.retries()
        while True:
            try:
                if await self._make_ready():
                    await self._send_ahead_again()
                output = await self._take_in(self._ahead[0])
                await self._verify([output])
                return output
            except SwarmError as error:
                await self._get_over(error, retries)

    async def _send_ahead_again(self) -> None:
        """After a repair, when all servers have dropped the steps under way."""
        steps, self._ahead = self._ahead, deque()
        for step in steps:
            self._in_flight.remove(step)
            self._ahead.append(self._in_flight.add(step.inputs, step.position))
        for step in self._ahead:
            await self._send_step(step)

    async def _abandon(self) -> None:
        self._drop_ahead()

    def _drop_ahead(self) -> None:
        for step in self._ahead:
            self._in_flight.abandon(step)
        self._ahead.clear()

    # ------------------------------------------------------------------ repairs and moves

    async def _make_ready(self) -> bool:
        """Repair what is broken, or move to a clearly better route; returns whether it did either.

        Raises:
            SwarmError: that failed; another try may succeed.
        """
        if not self._in_flight.is_linked or not self._hops.usable:
            await self._repair()
            return True
        return await self._move_if_better()

    async def _repair(self) -> None:
        """Make the chain complete and linked, with caches filled up to the text's position."""
        began_at = asyncio.get_running_loop().time()
        if self._hops:
            self.num_repairs += 1
            self.view.counts["repairs"] += 1
        await self._hops.look_after_accused(self.view.config.connect_timeout_s)
        self._in_flight.begin_version()  # after the look, which may find that a stream has broken
        await self._hops.complete(self._settings, self._in_flight.chain_version, self._costs())
        await self._rejoin(began_at)

    async def _move_if_better(self) -> bool:
        news = self.view.look_ups.news
        if news == self._news or not self.text.position:
            return False
        self._news = news
        # Nobody knows how much text will come. On average, a text that has run for some time is half over.
        tokens_left = min(self.text.room.max_length - self.text.position, max(MIN_TOKENS_LEFT, self.text.position))
        costs = self._hops.preferring_alike(self._costs(), self.span)
        target = self.view.routes.better(self._hops.route, costs, tokens_left)
        return target is not None and await self._move(target)

    async def _move(self, route: Sequence[RouteHop]) -> bool:
        """Take the route if all its servers can be opened, else stay; returns whether it was taken.

        Raises:
            SwarmError: the old route has been left, and the new one needs a repair.
        """
        began_at = asyncio.get_running_loop().time()
        if not await self._hops.exchange(route, self._settings, self._in_flight.chain_version + 1):
            return False
        self._in_flight.begin_version()
        self._in_flight.is_linked = False
        self.view.counts["moves"] += 1
        await self._rejoin(began_at)
        return True

    async def _rejoin(self, began_at: float) -> None:
        """Link the hops, and fill the caches of new ones."""
        await self._hops.link(self._in_flight.chain_version)
        if self.text.position:
            for before, run in list(self._hops.new_runs()):
                await self._replay(before, run)
        for hop in self._hops:
            hop.new = False
        self.text.computes_anew = False
        self._in_flight.is_linked = True
        if self.on_route is not None:
            self.on_route(self._hops.route, asyncio.get_running_loop().time() - began_at)

    async def _replay(self, before: Hop | None, run: Sequence[Hop]) -> None:
        """Fill the caches of the hops of `run` with what passed the boundary before them."""
        text, in_flight = self.text, self._in_flight
        logger.info("replaying %d tokens to rebuild %s", text.position, ", ".join(str(hop) for hop in run))
        if self._goes_step_by_step(before, run):
            await self._replay_steps(before, run)
            return
        *earlier, (position, inputs) = text.past()
        step = in_flight.add(inputs, position, run[-1], earlier)
        try:
            if before is None:
                for position, inputs in text.replay(chunk_tokens([hop.route_hop for hop in run], self.view.config)):
                    await run[0].send_step(
                        step.request, in_flight.state, position, inputs, replay_hops=len(run), exactly=True
                    )
            else:
                await before.send_replay(step.request, in_flight.state, text.position, len(run))
            await in_flight.answered(step)
        finally:
            in_flight.remove(step)

    def _goes_step_by_step(self, before: Hop | None, run: Sequence[Hop]) -> bool:
        """True if the hops of `run` must compute the steps as they were computed, and can."""
        can = before is None or before.route_hop.server.replays_steps
        if self.text.is_cut_ahead:
            return can
        if not can or self.text.computes_anew or all(hop.route_hop.server.rounds_finely for hop in run):
            return False
        replay_s = step_by_step_ms([hop.route_hop for hop in run], self._costs()) / 1e3
        if replay_s > MAX_REPLAY_S:
            logger.warning(
                "computing %d steps of the text again would take about %.0f s, so they are computed in long calls: the "
                "text may go on with other words", self.text.num_steps, replay_s,
            )  # fmt: skip
            return False
        return True

    async def _replay_steps(self, before: Hop | None, run: Sequence[Hop]) -> None:
        """`_replay` in the steps as they were computed; a few at a time, so that answers show that it goes on."""
        text, in_flight, block = self.text, self._in_flight, run[0].span.start
        cuts = text.cuts(block)
        step_s = step_by_step_ms([hop.route_hop for hop in run], self._costs()) / 1e3 / max(1, text.num_steps)
        most_steps = max(1, min(STEPS_AT_ONCE, int(REQUEST_S / max(step_s, 1e-3))))
        most_tokens = min(TOKENS_AT_ONCE, text.batch_size * text.room.max_length // 2)  # so many may wait on a server
        under_way: deque[PendingStep] = deque()
        try:
            for steps in _at_once(text.steps(block), most_steps, most_tokens):
                *earlier, (position, inputs) = steps
                first = steps[0][0]
                request = in_flight.add(inputs, position, run[-1], earlier)
                under_way.append(request)
                if before is None:
                    for at, one in steps:
                        await run[0].send_step(
                            request.request, in_flight.state, at, one, replay_hops=len(run), exactly=True, whole=True
                        )
                else:
                    within = [cut for cut in cuts if first <= cut < position + inputs.seq_len]
                    await before.send_replay(
                        request.request, in_flight.state, text.position, len(run),
                        steps=(first, position + 1), cuts=within,
                    )  # fmt: skip
                if len(under_way) > 1:
                    await in_flight.answered(under_way[0])
                    in_flight.remove(under_way.popleft())
            for request in under_way:
                await in_flight.answered(request)
        finally:
            for request in under_way:
                in_flight.remove(request)

    @property
    def _settings(self) -> SessionSettings:
        text = self.text
        return SessionSettings(
            self._in_flight.on_answer,
            text.batch_size,
            text.room.max_length,
            text.record_past or text.has_cut_steps,  # a replay goes back where the text went back
            text.adapter,
            text.source_length,
        )

    def _costs(self) -> RouteCosts:
        text = self.text
        costs = self.view.routes.costs(
            context_tokens=text.position,
            num_steps=text.num_steps,
            batch_size=text.batch_size,
            cache_tokens=text.batch_size * text.room.max_length,
            inner_states=text.shows,
        )
        return replace(costs, avoided_s=dict.fromkeys(text.room.too_small, TOO_SMALL_S))


def _at_once(
    steps: Iterable[tuple[int, BlockInputs]], most_steps: int, most_tokens: int
) -> Iterator[list[tuple[int, BlockInputs]]]:
    """Divide steps, given as (position, inputs), into requests."""
    found: list[tuple[int, BlockInputs]] = []
    num_tokens = 0
    for position, inputs in steps:
        more = inputs.batch_size * inputs.seq_len
        if found and (len(found) == most_steps or num_tokens + more > most_tokens):
            yield found
            found, num_tokens = [], 0
        found.append((position, inputs))
        num_tokens += more
    if found:
        yield found


def prompt_chunk_tokens(inputs: BlockInputs, route: Sequence[RouteHop], config: ClientConfig) -> int:
    """Tokens (batch × seq) of one step of this prompt: if there are several servers, at least `CHUNKS_PER_SERVER` steps
    for each of them. On CPUs no measured speed has a part in it, as other steps are rounded otherwise. Large messages
    stay large: over slow connections only these are timed and compressed."""
    servers, num_tokens = [hop.server for hop in route], inputs.batch_size * inputs.seq_len
    most = chunk_tokens(route, config)
    least = max(LEAST_CHUNK_TOKENS, *(one.batch_tokens for one in servers))
    large = -(-MEASURED_BYTES * num_tokens // inputs.hidden_states.nbytes)
    if min(most, num_tokens) >= large:
        least = max(least, large)
    wanted = CHUNKS_PER_SERVER * len(servers) if len(servers) > 1 else 1
    num_steps = max(1, min(wanted, num_tokens // least, inputs.seq_len))
    return min(most, inputs.batch_size * -(-inputs.seq_len // num_steps))


def chunk_tokens(route: Sequence[RouteHop], config: ClientConfig) -> int:
    """Most tokens of one step of a prompt: more than the setting if a device needs more for computing at full speed."""
    worth_asking_for = max(hop.server.batch_tokens for hop in route)
    in_time = int(CHUNK_S * min(hop.server.throughput for hop in route))
    return max(config.prefill_chunk_tokens, min(worth_asking_for, in_time, config.max_batch_tokens))
