"""Spot checks: a sampled step or batch is run again on other servers and compared.

With `ClientConfig.verify_fraction = p`, each decode step of a session and each hop of a forward batch is checked with
probability p. A session's step is run again as one forward of everything since its beginning, boundary by boundary of
its route, so a check costs as much as a prefill; on a mismatch each server of the route is asked to do its part of the
same, to see whose differs. Nothing is checked where every block has only one server.

A server that is caught is quarantined: this client doesn't use it any more. Where two servers disagree and there is no
third one to ask, it is the checked one that goes; a liar who is chosen as a checker can so cost an honest server this
client's trust, but never make a wrong token pass.
"""

import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from torch import Tensor

from swarmllm.client.swarm_view import SwarmView
from swarmllm.data_structures import BlockTraits, RouteHop, ServerInfo
from swarmllm.errors import ConfigurationError, CorruptActivationsError, PeerError
from swarmllm.models.block_inputs import BlockInputs

logger = logging.getLogger(__name__)

TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
"""Largest accepted relative error by dtype. Assumed: some ten times what other batch shapes and threads change."""
QUANTIZED_TOLERANCES = {"none": 0.0, "int8": 0.15, "nf4": 0.5}
"""The same by `quant_type`, between a server that quantizes and one that doesn't. Measured on single tokens through all
blocks of the embedded model: up to 0.05 (int8) and 0.29 (nf4)."""

COMPRESSED_TOLERANCE = 0.05
"""The same for messages of 8 bits a value, which both sides of a comparison have rounded. Measured: 0.009 per boundary
(docs/benchmarks.md)."""

RunHop = Callable[[RouteHop, BlockInputs], Awaitable[Tensor]]


class SpotChecks:
    """`run_hop` runs one hop of a batch (`client/remote_autograd`)."""

    def __init__(self, view: SwarmView, traits: BlockTraits, run_hop: RunHop) -> None:
        self._view = view
        self._traits = traits
        self._run_hop = run_hop
        self._random = random.SystemRandom()  # a server must not be able to foresee which step is checked

    def due(self) -> bool:
        """Whether the next one is to be checked."""
        return self._random.random() < self._view.config.verify_fraction

    async def check_hop(self, hop: RouteHop, inputs: BlockInputs, outputs: Tensor) -> None:
        """Compare what `hop` made of `inputs` with another server's result.

        Raises:
            CorruptActivationsError: they differ, and `hop` is not the one that a third server contradicts.
        """
        second = await self._elsewhere(hop, inputs, {hop.server.peer_id})
        if second is None or self._agree(outputs, second[0], hop.server, *second[1]):
            return
        third = await self._elsewhere(hop, inputs, {hop.server.peer_id, *(server.peer_id for server in second[1])})
        if third is not None and self._agree(outputs, third[0], hop.server, *third[1]):
            for server in second[1]:
                self._quarantine(server)
            return
        raise self._quarantine(hop.server)

    async def check_session(self, route: Sequence[RouteHop], inputs: BlockInputs, outputs: Tensor) -> None:
        """Compare a session's last `outputs` with a forward of all its `inputs`, which end at the same position.

        Raises:
            CorruptActivationsError: some server of the route returned something else.
        """
        boundaries, checkers = [inputs], []
        for hop in route:
            result = await self._elsewhere(hop, boundaries[-1], {hop.server.peer_id})
            if result is None:
                return  # nobody else has these blocks
            boundaries.append(boundaries[-1].with_hidden(result[0]))
            checkers.append(result[1])
        axis = self._traits.batch_axis + 1
        count = outputs.shape[axis]
        expected = boundaries[-1].hidden_states.narrow(axis, boundaries[-1].seq_len - count, count)
        everybody = [*(hop.server for hop in route), *(server for servers in checkers for server in servers)]
        if self._agree(outputs, expected, *everybody):
            return
        for hop, before, after, servers in zip(route, boundaries, boundaries[1:], checkers, strict=False):
            own = await self._run_hop(hop, before)
            if not self._agree(own, after.hidden_states, hop.server, *servers):
                await self.check_hop(hop, before, own)
        # Each does its part right when asked for it alone: only the session was wrong, by whose fault can't be told.
        for hop in route:
            self._quarantine(hop.server)
        raise CorruptActivationsError("the servers of a session returned something else than others did")

    async def _elsewhere(
        self, hop: RouteHop, inputs: BlockInputs, without: set[str]
    ) -> tuple[Tensor, list[ServerInfo]] | None:
        """The hop's result from other servers, and which they were; None if there are none."""
        route = self._view.alternative(hop.span, without)
        if route is None:
            return None
        try:
            for part in route:
                inputs = inputs.with_hidden(await self._run_hop(part, inputs))
        except PeerError as error:
            self._view.report(error)
            return None
        except ConfigurationError:  # too many tokens for one batch
            return None
        self._view.counts["spot_checks"] += 1
        return inputs.hidden_states, [part.server for part in route]

    def _agree(self, first: Tensor, second: Tensor, *servers: ServerInfo) -> bool:
        tolerance = max(
            max(TOLERANCES.get(server.dtype, 0.1), QUANTIZED_TOLERANCES.get(server.quant_type, 0.5))
            for server in servers
        )
        if self._view.config.compression != "none":
            tolerance += COMPRESSED_TOLERANCE
        first, second = first.double(), second.double()
        return bool((first - second).norm() <= tolerance * second.norm())

    def _quarantine(self, server: ServerInfo) -> CorruptActivationsError:
        error = CorruptActivationsError("a spot check found wrong hidden states", server.peer_id)
        if server.peer_id in self._view.health.quarantined:
            return error  # another check, which ran at the same time, has told it
        self._view.counts["spot_checks_failed"] += 1
        self._view.health.quarantine(server.peer_id)
        logger.warning(
            "server %s (%s) returned wrong hidden states for blocks %s: this client doesn't use it any more",
            server.peer_id,
            server.public_name or "no name",
            server.span,
        )
        return error
