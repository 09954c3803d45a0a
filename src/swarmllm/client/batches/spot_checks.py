"""Spot checks: a sampled step or micro-batch is computed again on other servers and compared at each position.

With `ClientConfig.verify_fraction = p`, each decode step of a session and each hop of a forward is checked with
probability p. A session is checked by one forward of its whole text, server by server of its route, so a check costs
as much as a prefill. On a mismatch each server of the route computes its part of that forward, to find the one that
differs. Blocks with only one server aren't checked.

    two servers differ, and a third one      what follows
    agrees with one of them                  the other one is quarantined: this client doesn't use it any more
    agrees with neither, or doesn't exist    nothing is proven: all are avoided for a while, as after a fault
    only the session's results differ        the same for all servers of its route: each may have been lied to

Results that differ are never used, whichever server is to blame.
"""

import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from torch import Tensor

from swarmllm.client.view.servers import BY_COMPRESSION, honest_error
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import BlockTraits, RouteHop, ServerInfo
from swarmllm.errors import ConfigurationError, CorruptActivationsError, PeerError
from swarmllm.models.boundary.block_inputs import BlockInputs

logger = logging.getLogger(__name__)

RunHop = Callable[[RouteHop, BlockInputs], Awaitable[Tensor]]


class SpotChecks:
    """Compares servers. `run_hop` computes one hop's part of a forward (`batches/hop_batches`)."""

    def __init__(self, view: SwarmView, traits: BlockTraits, run_hop: RunHop) -> None:
        self._view = view
        self._traits = traits
        self._run_hop = run_hop
        self._random = random.SystemRandom()  # servers must not be able to predict which step is checked

    def due(self) -> bool:
        """True if the next step or hop is to be checked."""
        return self._random.random() < self._view.config.verify_fraction

    async def check_hop(self, hop: RouteHop, inputs: BlockInputs, outputs: Tensor) -> None:
        """Compare `outputs`, which `hop` computed from `inputs`, with another server's result.

        Raises:
            CorruptActivationsError: they differ, and no third server agrees with `hop`.
        """
        second = await self._elsewhere(hop, inputs, {hop.server.peer_id})
        if second is None or self._agree(outputs, second[0], inputs, hop.server, *second[1]):
            return
        third = await self._elsewhere(hop, inputs, {hop.server.peer_id, *(server.peer_id for server in second[1])})
        if third is not None and self._agree(outputs, third[0], inputs, hop.server, *third[1]):
            self._caught(second[1])
            return
        if third is not None and self._agree(second[0], third[0], inputs, *second[1], *third[1]):
            raise self._caught([hop.server])
        others = second[1] if third is None else [*second[1], *third[1]]
        raise self._doubted([hop.server, *others], "two servers differ, and no third one shows which is right")

    async def check_session(self, route: Sequence[RouteHop], inputs: BlockInputs, outputs: Tensor) -> None:
        """Compare a session's last `outputs` with a forward of all its `inputs`, which end at the same position.

        Raises:
            CorruptActivationsError: they differ.
        """
        boundaries, checkers = [inputs], []
        for hop in route:
            result = await self._elsewhere(hop, boundaries[-1], {hop.server.peer_id})
            if result is None:
                return  # no other server has these blocks
            boundaries.append(boundaries[-1].with_hidden(result[0]))
            checkers.append(result[1])
        axis = self._traits.batch_axis + 1
        count = outputs.shape[axis]
        expected = boundaries[-1].hidden_states.narrow(axis, boundaries[-1].seq_len - count, count)
        everybody = [*(hop.server for hop in route), *(server for servers in checkers for server in servers)]
        if self._agree(outputs, expected, inputs, *everybody):
            return
        num_caught = len(self._view.health.quarantined)
        for hop, before, after, servers in zip(route, boundaries, boundaries[1:], checkers, strict=False):
            own = await self._run_hop(hop, before)
            if not self._agree(own, after.hidden_states, before, hop.server, *servers):
                await self.check_hop(hop, before, own)
                # The servers asked for comparison were wrong, so nothing has been compared yet.
                if len(self._view.health.quarantined) > num_caught:
                    await self.check_session(route, inputs, outputs)
                return
        # Each server is right when asked alone: only the session was wrong, and the client can't know who is at fault.
        raise self._doubted([hop.server for hop in route], "a session returned something else than others did")

    async def _elsewhere(
        self, hop: RouteHop, inputs: BlockInputs, without: set[str]
    ) -> tuple[Tensor, list[ServerInfo]] | None:
        """(the hop's result from other servers, these servers); None if there are none."""
        costs = self._view.routes.costs(row_tokens=inputs.row_tokens)
        route = self._view.routes.alternative(hop.span, without, costs=costs)
        if route is None:  # better a doubtful server than none: a single one could answer anything
            route = self._view.routes.alternative(hop.span, without, even_avoided=True, costs=costs)
        if route is None:
            return None
        try:
            for part in route:
                inputs = inputs.with_hidden(await self._run_hop(part, inputs))
        except PeerError as error:
            self._view.report(error)
            return None
        except ConfigurationError:  # too many tokens for one request
            return None
        self._view.counts["spot_checks"] += 1
        return inputs.hidden_states, [part.server for part in route]

    def _agree(self, first: Tensor, second: Tensor, inputs: BlockInputs, *servers: ServerInfo) -> bool:
        """True if they agree at each position that isn't padding; both end with the last position of `inputs`."""
        config, axis = self._view.config, self._traits.batch_axis
        tolerance = min(config.verify_tolerance, max(map(honest_error, servers)))
        if config.compression != "none":
            tolerance += BY_COMPRESSION
        first, second = (
            tensor.double().movedim((axis, axis + 1), (0, 1)).flatten(start_dim=2) for tensor in (first, second)
        )
        right = (first - second).norm(dim=-1) <= tolerance * second.norm(dim=-1)  # [batch, seq]; NaN is never right
        mask = inputs.attention_mask
        if mask is not None and mask.ndim == 2:
            right |= ~mask[:, -right.shape[1] :].bool()
        return bool(right.all())

    def _caught(self, servers: Sequence[ServerInfo]) -> CorruptActivationsError:
        """Judge servers whose common result was wrong: a single one has lied, of several at least one has."""
        if len(servers) > 1:
            return self._doubted(servers, "of several servers, some returned wrong hidden states")
        (server,) = servers
        error = CorruptActivationsError("a spot check found wrong hidden states", server.peer_id)
        if server.peer_id in self._view.health.quarantined:
            return error  # another check, at the same time, has reported it
        self._view.counts["spot_checks_failed"] += 1
        self._view.health.quarantine(server.peer_id)
        logger.warning(
            "server %s (%s) returned wrong hidden states for blocks %s: this client doesn't use it any more",
            server.peer_id,
            server.public_name or "no name",
            server.span,
        )
        return error

    def _doubted(self, servers: Sequence[ServerInfo], what: str) -> CorruptActivationsError:
        """Judge servers when one of them is wrong, and the client can't know which one."""
        self._view.counts["spot_checks_undecided"] += 1
        peer_ids = [server.peer_id for server in servers]
        for peer_id in peer_ids:
            self._view.report(CorruptActivationsError(what, peer_id))
        logger.warning("%s: this client avoids %s for a while", what, ", ".join(peer_ids))
        return CorruptActivationsError(what)
