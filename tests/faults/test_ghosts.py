"""Records of servers that aren't there: they attract nobody, say nothing about the model, and keep nobody waiting.

In process; `test_ghost_swarm` has real servers.
"""

import time
from typing import Any

import pytest
import torch
from swarm_in_process import Blocks, InProcessSwarm, Reference

from swarmllm.data_structures import BlockTraits, ServerInfo, Span
from swarmllm.errors import MissingBlocksError, PeerUnreachableError
from swarmllm.network.p2p.verified_peers import AGAIN_S, _Verdict

NUM_BLOCKS, HIDDEN = 6, 64
SEDUCTIVE: dict[str, Any] = {"throughput": 1e8, "decode_ms_per_block": 0.001, "cache_tokens_left": 1 << 40}
LIES = BlockTraits(batch_axis=1, block_output=3, extra_inputs=("input_ids",), chunked_prefill=False, rollback=False)


def ghost(number: int, start: int = 0, end: int = NUM_BLOCKS, **fields: Any) -> ServerInfo:
    return ServerInfo(peer_id=f"ghost{number}".ljust(46, "x"), start=start, end=end, **SEDUCTIVE, **fields)


def check_session(swarm: InProcessSwarm) -> None:
    reference = Reference(swarm.blocks.all)
    with swarm.session(max_length=64) as session:
        for length in (5, 1, 1):
            given = torch.randn(1, length, HIDDEN)
            torch.testing.assert_close(session.step(given), reference.step(given), rtol=1e-4, atol=1e-4)


async def new_traits(swarm: InProcessSwarm) -> BlockTraits:
    """As a new client learns them."""
    swarm.view = await swarm.new_view()
    return await swarm.view.traits()


def test_ghost_traits(blocks: Blocks) -> None:
    """A record's claims about blocks change nothing. Only servers of the route count, when they are greeted."""
    with InProcessSwarm(blocks, [(0, 3), (3, 6)]) as swarm:
        honest = swarm.traits
        swarm.ghosts = [ghost(number, traits=LIES) for number in range(3)]
        swarm.traits = blocks.loop.run_coroutine(new_traits(swarm))
        assert swarm.traits == honest
        check_session(swarm)
        # Nor do lying records of servers that are there.
        for server in swarm.servers:
            server.info = server.info.model_copy(update={"traits": LIES})
        assert blocks.loop.run_coroutine(new_traits(swarm)) == honest


def test_a_flood_of_ghosts_stops_no_client(blocks: Blocks) -> None:
    """More of them than a step has retries, each faster than anybody, before the client has met a server."""
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], max_retries=2) as swarm:
        swarm.ghosts = [ghost(number) for number in range(40)]
        swarm.traits = blocks.loop.run_coroutine(new_traits(swarm))
        check_session(swarm)
        assert not swarm.view.counts["repairs"]


def test_a_living_server_is_found_behind_dead_ones(blocks: Blocks) -> None:
    """It was refuted itself, and has been at fault more often than they: they would have been tried before."""
    span = (0, blocks.num_blocks)
    with InProcessSwarm(blocks, [span, span], route_timeout_s=5.0) as swarm, swarm.session() as session:
        reference, view = Reference(blocks.all), swarm.view
        given = torch.randn(1, 4, blocks.all.embedding_dim)
        torch.testing.assert_close(session.step(given), reference.step(given))
        (hop,) = session.route
        (other,) = (server for server in swarm.servers if server.peer_id != hop.server.peer_id)
        swarm.ghosts = [ghost(number) for number in range(20)]
        blocks.loop.run_coroutine(view.look_ups.refresh())
        for peer_id in (*(one.peer_id for one in swarm.ghosts), other.peer_id, other.peer_id):
            view.health.report(PeerUnreachableError("gone", peer_id), time.monotonic())
            view.look_ups.verified._verdicts[peer_id] = _Verdict(None, time.monotonic() - AGAIN_S)
        view.health._avoid_until[other.peer_id] += 1
        swarm.kill(swarm.server(hop.server.peer_id))
        torch.testing.assert_close(session.step(given), reference.step(given))


def test_ghosts_that_come_later_interrupt_no_session(blocks: Blocks) -> None:
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], max_retries=0, update_period_s=0.001, ping_period_s=0.001) as swarm:
        check_session(swarm)
        swarm.ghosts = [ghost(number) for number in range(40)]
        blocks.loop.run_coroutine(swarm.view.look_ups.refresh())
        for _ in range(5):
            check_session(swarm)
        assert not swarm.view.blamed


def test_ghosts_alone_are_named_in_the_end(blocks: Blocks) -> None:
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], route_timeout_s=0.2) as swarm:
        swarm.servers[1].listed = False
        swarm.ghosts = [ghost(0, 3), ghost(1, 3)]
        with pytest.raises(MissingBlocksError, match="blocks 3:6") as caught:
            blocks.loop.run_coroutine(new_traits(swarm))
        assert caught.value.block_idxs == (3, 4, 5)


def test_a_boast_takes_no_batches_from_others(blocks: Blocks) -> None:
    announced = [{"throughput": 1e9}, {"throughput": 100.0}, {"throughput": 100.0}]
    with InProcessSwarm(blocks, [(0, 6)] * 3, announced=announced) as swarm:
        for server in swarm.servers:
            blocks.loop.run_coroutine(swarm.view.look_ups.verified.greet(server.info))
        routes = blocks.loop.run_coroutine(swarm.view.routes.parallel(Span(0, 6), 128, 3))
        assert len(routes) == 2 + 1
        assert min(share for _, share in routes) > 1 / 20
