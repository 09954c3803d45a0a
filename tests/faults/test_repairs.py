"""Whatever is left of a swarm, a session goes on as long as its servers together hold all blocks.

In process, over layouts and deaths at random; `test_failover` has real servers.
"""

import asyncio
from collections.abc import Callable, Sequence, Set
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fault_tools import at_token
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from swarm_in_process import Blocks, InProcessSwarm, Reference, Server
from swarm_models import OPTIONS, connected, generate_seeded, prompt
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.client.session import chain
from swarmllm.client.view import routes
from swarmllm.data_structures import RouteHop, ServerInfo, ServerState, Span
from swarmllm.errors import MissingBlocksError, PeerUnreachableError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.protocol import Message, MessageType
from swarmllm.server.device.forward_backward import Graph
from swarmllm.swarm import retry

NUM_BLOCKS = 6
PHASES = set(Phase) - {Phase.shrink}
"""A failing case is small as it is."""
HIDDEN = 64


spans = st.tuples(st.integers(0, NUM_BLOCKS), st.integers(0, NUM_BLOCKS)).filter(lambda ends: ends[0] < ends[1])


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Spans of servers that hold all blocks together."""
    found = draw(st.lists(spans, min_size=2, max_size=6))
    missing = set(range(NUM_BLOCKS)) - {block for span in found for block in range(*span)}
    return [*found, (min(missing), max(missing) + 1)] if missing else found


deaths = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 6)), max_size=4)
"""At the so many-th message that any server gets: which server dies."""


class Fate:
    """Kills servers while such messages are under way, but never the last one of a block."""

    def __init__(
        self,
        swarm: InProcessSwarm,
        deaths: list[tuple[int, int]],
        kinds: Set[MessageType] = frozenset({MessageType.STEP}),
    ) -> None:
        self._swarm, self._kinds = swarm, kinds
        self._deaths = dict(deaths)
        self._num_messages = 0

    def __call__(self, _: Server, message: Message) -> None:
        if message.type not in self._kinds:
            return
        victim = self._deaths.get(self._num_messages)
        self._num_messages += 1
        living = [server for server in self._swarm.servers if server.alive]
        if victim is not None and victim < len(self._swarm.servers):
            server = self._swarm.servers[victim]
            if self._swarm.covers([other for other in living if other is not server]):
                server.die()


def hidden_states(batch_size: int, seq_len: int) -> Tensor:
    return torch.randn(batch_size, seq_len, HIDDEN, generator=torch.Generator().manual_seed(seq_len))


def block_inputs(given: Tensor) -> BlockInputs:
    return BlockInputs(hidden_states=given, batch_size=given.shape[0], seq_len=given.shape[1])


def whole(blocks: Blocks, given: Tensor) -> Tensor:
    return blocks.all.forward(block_inputs(given), blocks.all.span)


def assert_session(swarm: InProcessSwarm, batch_size: int, lengths: list[int]) -> None:
    """A session of such steps gives what the whole model gives in one place."""
    tolerance = 0.1 if swarm.view.config.compression == "int8" else 1e-4
    reference = Reference(swarm.blocks.all)
    with swarm.session(max_length=64, batch_size=batch_size) as session:
        for length in lengths:
            given = hidden_states(batch_size, length)
            torch.testing.assert_close(session.step(given), reference.step(given), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@settings(max_examples=300, phases=PHASES)
@given(
    layouts(),
    st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=7, max_size=7),
    deaths,
    st.integers(1, 3),
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.sampled_from([4, 1024]),
    st.booleans(),
    st.sampled_from(["none", "int8"]),
)
def test_the_text_goes_on_after_any_deaths(
    blocks: Blocks,
    layout: list[tuple[int, int]],
    speeds: list[float],
    deaths: list[tuple[int, int]],
    batch_size: int,
    lengths: list[int],
    chunk_tokens: int,
    dials_itself: bool,
    compression: str,
) -> None:
    announced: list[dict[str, Any]] = [{"decode_ms_per_block": speed} for speed, _ in zip(speeds, layout, strict=False)]
    with InProcessSwarm(
        blocks,
        layout,
        announced=announced,
        dials_itself=dials_itself,
        prefill_chunk_tokens=chunk_tokens,
        compression=compression,
    ) as swarm:
        swarm.on_message = Fate(swarm, deaths)
        assert_session(swarm, batch_size, lengths)


NAMED = {
    # layout, the route at first as (server, start, end), who dies
    "before a server's own blocks": ([(0, 3), (0, 6)], [(0, 0, 3), (1, 3, 6)], 0),
    "behind a server's own blocks": ([(0, 6), (3, 6)], [(0, 0, 3), (1, 3, 6)], 1),
    "between a server's own blocks": ([(0, 6), (2, 4)], [(0, 0, 2), (1, 2, 4), (0, 4, 6)], 1),
}


@pytest.mark.parametrize("dials_itself", [True, False])
@pytest.mark.parametrize("case", NAMED)
def test_the_lost_blocks_go_to_a_neighbour(blocks: Blocks, case: str, dials_itself: bool) -> None:
    layout, route, victim = NAMED[case]
    with InProcessSwarm(blocks, layout, dials_itself=dials_itself, max_retries=1, min_gain_to_move=1) as swarm:
        swarm.first_route([swarm.hop(*hop) for hop in route])
        reference = Reference(blocks.all)
        with swarm.session(max_length=64) as session:
            for length in (5, 1, 1, 3):
                if length == 3:
                    swarm.kill(swarm.servers[victim])
                given = hidden_states(1, length)
                torch.testing.assert_close(session.step(given), reference.step(given))
            assert session.num_repairs == 1
        assert swarm.view.blamed == {swarm.servers[victim].peer_id}


@pytest.mark.parametrize("case", NAMED)
def test_inputs_that_a_thread_has_copied_are_replayed(
    blocks: Blocks, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long inputs are; here, all."""
    monkeypatch.setattr(chain, "COPIED_IN_THREAD_BYTES", 0)
    test_the_lost_blocks_go_to_a_neighbour(blocks, case, True)


@pytest.mark.parametrize(("announced", "num_chunks"), [({}, 5), ({"batch_tokens": 32, "throughput": 1e5}, 2)])
def test_devices_get_prompts_and_replays_in_the_steps_that_keep_them_busy(
    blocks: Blocks, announced: dict[str, Any], num_chunks: int
) -> None:
    with InProcessSwarm(
        blocks, [(0, 6), (0, 6)], announced=[announced] * 2, prefill_chunk_tokens=8, min_gain_to_move=1
    ) as swarm:
        lengths: list[int] = []

        def note(_: Server, message: Message) -> None:
            if message.type is MessageType.STEP:
                lengths.append(message.header["seq_len"])

        swarm.on_message = note
        reference, given = Reference(blocks.all), hidden_states(1, 40)
        with swarm.session(max_length=64) as session:
            torch.testing.assert_close(session.step(given), reference.step(given))
            assert lengths == [40 // num_chunks] * num_chunks
            swarm.kill(swarm.server(session.route[0].server.peer_id))
            lengths.clear()
            given = hidden_states(1, 1)
            torch.testing.assert_close(session.step(given), reference.step(given))
            assert lengths == [*[40 // num_chunks] * num_chunks, 1]


def test_a_text_goes_on_with_the_same_rounding_if_it_can(blocks: Blocks, caplog: pytest.LogCaptureFixture) -> None:
    """Servers that round otherwise are faster, but come last. No session moves to them."""
    exact, coarse = {"decode_ms_per_block": 9.0}, {"quant_type": "nf4", "decode_ms_per_block": 1.0}
    with InProcessSwarm(blocks, [(0, 6)] * 3, announced=[exact, coarse, exact], min_gain_to_move=0.01) as swarm:
        swarm.first_route([swarm.hop(0, 0, 6)])
        reference = Reference(blocks.all)
        with swarm.session(max_length=64) as session:
            for taking_over in (0, 2, 1):
                for length in (5, 1, 1):
                    given = hidden_states(1, length)
                    torch.testing.assert_close(session.step(given), reference.step(given))
                    swarm.view.look_ups.news += 1  # so that it looks for a better route
                assert [hop.server.peer_id for hop in session.route] == [swarm.servers[taking_over].peer_id]
                assert ("the text may go on otherwise" in caplog.text) == (taking_over == 1)
                swarm.kill(swarm.servers[taking_over])


def test_rounding_is_noted_though_another_server_of_the_route_cannot_be_opened(blocks: Blocks) -> None:
    exact, coarse = {"decode_ms_per_block": 9.0}, {"quant_type": "nf4", "decode_ms_per_block": 1.0}
    layout = [(0, 3), (3, 6), (3, 6), (0, 3), (0, 3)]
    with InProcessSwarm(blocks, layout, announced=[exact, exact, exact, coarse, exact], min_gain_to_move=1) as swarm:
        swarm.first_route([swarm.hop(0, 0, 3), swarm.hop(1, 3, 6)])
        swarm.kill(swarm.servers[1])
        reference = Reference(blocks.all)
        with swarm.session(max_length=64) as session:
            for length, used in ((5, [0, 2]), (1, [4, 2])):
                given = hidden_states(1, length)
                torch.testing.assert_close(session.step(given), reference.step(given))
                assert [hop.server.peer_id for hop in session.route] == [swarm.servers[one].peer_id for one in used]
                swarm.kill(swarm.servers[0])


class Dials:
    """Which servers the client has tried to open sessions on, in this order."""

    def __init__(self, swarm: InProcessSwarm) -> None:
        self.servers: list[int] = []
        self._swarm, self._open = swarm, swarm.view.open_connection
        swarm.view.open_connection = self  # type: ignore[assignment]
        self.then: Callable[[], object] = lambda: None

    async def __call__(self, info: ServerInfo, *args: Any) -> Any:
        self.servers.append(self._swarm.servers.index(self._swarm.server(info.peer_id)))
        self.then()
        return await self._open(info, *args)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for missing blocks looks again at once."""
    monkeypatch.setattr(routes, "RETRY_LOOKUP_S", 0.01)
    monkeypatch.setattr(retry, "LOOK_AGAIN_S", 0.01)


@pytest.mark.usefixtures("impatient")
@settings(max_examples=25, phases=PHASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.booleans(), min_size=1, max_size=4), st.randoms(use_true_random=False), st.integers(0, 1))
def test_where_all_are_banned_each_is_tried_once(
    blocks: Blocks, alive: list[bool], order: Random, max_retries: int
) -> None:
    """The dead are the fastest, as they say."""
    alive = [*alive, True]
    announced = [{"decode_ms_per_block": 2.0 if one else 1.0} for one in alive]
    with InProcessSwarm(blocks, [(0, 6)] * len(alive), announced=announced, max_retries=max_retries) as swarm:
        servers = list(swarm.servers)
        order.shuffle(servers)
        for server in servers:
            swarm.view.report(PeerUnreachableError("gone", server.peer_id))
        for server, lives in zip(swarm.servers, alive, strict=True):
            if not lives:
                swarm.kill(server)
        dials = Dials(swarm)
        assert_session(swarm, 1, [3, 1])
        assert len(dials.servers) == len(set(dials.servers))


@pytest.mark.parametrize("is_banned", [False, True])
def test_a_repair_takes_known_servers_while_the_dht_is_silent(blocks: Blocks, is_banned: bool) -> None:
    """As it is for seconds when it asks a node that is frozen, which is what the repair is about."""
    answered = asyncio.Event()

    async def no_answer(_: str) -> Sequence[ServerInfo]:
        await answered.wait()
        return []

    with InProcessSwarm(blocks, [(0, 6), (0, 6)]) as swarm, swarm.session(max_length=64) as session:
        reference, given = Reference(blocks.all), hidden_states(1, 5)
        torch.testing.assert_close(session.step(given), reference.step(given))
        used = swarm.server(session.route[0].server.peer_id)
        if is_banned:
            (other,) = set(swarm.servers) - {used}
            swarm.view.report(PeerUnreachableError("gone", other.peer_id))
        swarm.view.look_ups._directory.servers = no_answer  # type: ignore[method-assign]
        swarm.kill(used)
        given = hidden_states(1, 1)
        torch.testing.assert_close(session.step(given), reference.step(given))
        assert not answered.is_set()
        blocks.loop.call_soon(_set(answered))


async def _set(event: asyncio.Event) -> None:
    event.set()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("num_tries", [1, 12])
def test_a_server_that_is_announced_and_dead_is_waited_for(blocks: Blocks, num_tries: int, in_batch: bool) -> None:
    """As one that isn't announced: up to `route_timeout_s`, whatever `max_retries` says."""
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], max_retries=1, route_timeout_s=60) as swarm:
        swarm.kill(swarm.servers[1])
        dials = Dials(swarm)

        def revive() -> None:
            swarm.servers[1].alive = dials.servers.count(1) > num_tries

        dials.then = revive
        if in_batch:
            given = hidden_states(1, 5)
            torch.testing.assert_close(swarm.batches(block_inputs(given), blocks.all.span), whole(blocks, given))
        else:
            assert_session(swarm, 1, [5, 1])


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("work", ["session", "batch", "backward"])
def test_in_the_end_the_missing_blocks_are_named(blocks: Blocks, work: str, is_listed: bool) -> None:
    """After one wait of `route_timeout_s`, and not one more for each retry."""
    given = hidden_states(1, 5)
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], max_retries=8, route_timeout_s=0.2) as swarm:
        output = swarm.batches(block_inputs(given.clone().requires_grad_()), blocks.all.span)
        swarm.kill(swarm.servers[1])
        swarm.servers[1].listed = is_listed
        with swarm.session() as session:
            works: dict[str, Callable[[], object]] = {
                "session": lambda: session.step(given),
                "batch": lambda: swarm.batches(block_inputs(given), blocks.all.span),
                "backward": output.sum().backward,
            }
            with pytest.raises(MissingBlocksError, match="blocks 3:6") as caught:
                works[work]()
        assert caught.value.block_idxs == (3, 4, 5)
        assert swarm.view.counts["missing_blocks"] == (work == "session" and not is_listed)
        assert swarm.view.blamed == {swarm.servers[1].peer_id}


def test_the_server_that_takes_over_dies_during_the_replay(blocks: Blocks) -> None:
    with (
        InProcessSwarm(blocks, [(0, 6)] * 3, prefill_chunk_tokens=4, min_gain_to_move=1) as swarm,
        swarm.session(max_length=64) as session,
    ):
        reference, given = Reference(blocks.all), hidden_states(1, 12)
        torch.testing.assert_close(session.step(given), reference.step(given))
        first, died = swarm.server(session.route[0].server.peer_id), []

        def die(server: Server, message: Message) -> None:
            if message.type is MessageType.STEP and not died:
                died.append(server)
                server.die()

        swarm.kill(first)
        swarm.on_message = die
        given = hidden_states(1, 1)
        torch.testing.assert_close(session.step(given), reference.step(given))
        assert died != [first]
        assert session.num_repairs == 2


ROUTES = {
    "neighbours": ([(0, 6), (2, 4)], [(0, 0, 2), (0, 2, 5), (0, 5, 6)]),
    "twice": ([(0, 6), (2, 4)], [(0, 0, 2), (1, 2, 4), (0, 4, 6)]),
    "both": ([(0, 6), (2, 4)], [(0, 0, 1), (0, 1, 2), (1, 2, 3), (1, 3, 4), (0, 4, 6)]),
}


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("dials_itself", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_a_batch_takes_one_server_twice(blocks: Blocks, route: str, dials_itself: bool, batch_size: int) -> None:
    layout, hops = ROUTES[route]
    with InProcessSwarm(blocks, layout, dials_itself=dials_itself, max_retries=0, max_parallel_routes=1) as swarm:
        swarm.first_route([swarm.hop(*hop) for hop in hops])
        given = hidden_states(batch_size, 80).requires_grad_()
        output = swarm.batches(block_inputs(given), blocks.all.span)
        output.square().sum().backward()
        assert swarm.view.blamed == set()
        num_links = len(hops) - 1 if dials_itself else sum(one[0] != other[0] for one, other in pairwise(hops))
        assert (swarm.batches.pushed.num_pushed > 0) == (num_links > 0)
    graph = Graph.record(blocks.all, block_inputs(given.detach()), blocks.all.span)
    torch.testing.assert_close(output, graph.outputs)
    torch.testing.assert_close(given.grad, graph.gradients(2 * output.detach())["hidden_states"])


@pytest.mark.slow
@pytest.mark.parametrize("case", NAMED)
def test_on_real_servers(llama: Path, local: PreTrainedModel, case: str) -> None:
    layout, route, victim = NAMED[case]
    with (
        LocalSwarm(llama, spans=layout, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers, min_gain_to_move=1, speculation="off") as model,
    ):
        infos = {server.peer_id: server for server in model.swarm.servers()}
        found, first = model.swarm.routes.find, [infos[swarm.servers[number].peer_id] for number, _, _ in route]

        async def find_route(*_: Any) -> list[RouteHop]:
            model.swarm.routes.find = found
            return [RouteHop(server, Span(start, end)) for server, (_, start, end) in zip(first, route, strict=True)]

        model.swarm.routes.find = find_route
        ids = prompt()
        kill = at_token(3, swarm.servers[victim].kill)
        generated = generate_seeded(model, ids, max_new_tokens=8, logits_processor=kill)
        assert model.swarm.counts["repairs"] >= 1
        assert model.swarm.health.blamed(now=0.0) == {swarm.servers[victim].peer_id}
    assert generated.tolist() == generate_seeded(local, ids, max_new_tokens=8).tolist()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("is_loaded", [True, False])
def test_opening_a_model_waits_for_blocks_that_are_being_loaded(
    blocks: Blocks, is_loaded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than for those that nobody has: two terminals may have been started together."""
    start_timeout_s = 120.0 if is_loaded else 0.2
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], route_timeout_s=0.1, start_timeout_s=start_timeout_s) as swarm:
        loading = swarm.servers[1]
        loading.info = loading.info.model_copy(update={"state": ServerState.JOINING, "public_name": "bob"})
        view, num_looks = blocks.loop.run_coroutine(swarm.new_view()), 0
        look = view.look_ups.refresh

        async def looking() -> Any:
            nonlocal num_looks
            num_looks += 1
            if is_loaded and num_looks == 40:
                loading.info = loading.info.model_copy(update={"state": ServerState.ONLINE})
            return await look()

        view.look_ups.refresh = looking  # type: ignore[method-assign]
        if is_loaded:
            assert blocks.loop.run_coroutine(view.traits()) == swarm.traits
        else:
            with pytest.raises(MissingBlocksError, match="blocks 3:6"):
                blocks.loop.run_coroutine(view.traits())
    (told,) = [record.getMessage() for record in caplog.records if "looking again" in record.getMessage()]
    assert "blocks 3:6, but bob is loading them" in told


def test_a_server_that_takes_long_to_be_reached_is_left_for_another(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is frozen: it takes streams, and greets nobody. Session and batch alike."""
    monkeypatch.setattr(retry, "LEAST_DIAL_S", 0.05, raising=False)
    end = blocks.num_blocks
    with InProcessSwarm(blocks, [(0, end), (0, end)], announced=[{"decode_ms_per_block": 0.5}, {}]) as swarm:
        frozen = swarm.servers[0].peer_id
        open_stream, left = swarm.view.look_ups.verified.open_stream, []

        async def open_unless_frozen(server: ServerInfo, **options: Any) -> Any:
            if server.peer_id != frozen:
                return await open_stream(server, **options)
            try:
                async with asyncio.timeout(10):
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                left.append(server)
                raise
            raise AssertionError("this test waited for the one that is frozen")

        monkeypatch.setattr(swarm.view.look_ups.verified, "open_stream", open_unless_frozen)
        given = hidden_states(1, 5)
        with swarm.session(max_length=64) as session:
            torch.testing.assert_close(session.step(given), whole(blocks, given))
        swarm.view.health.succeeded(frozen)
        torch.testing.assert_close(swarm.batches(block_inputs(given), blocks.all.span), whole(blocks, given))
        assert [server.peer_id for server in left] == [frozen, frozen]


def test_a_server_that_takes_long_is_waited_for_where_nobody_else_serves_its_blocks(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "LEAST_DIAL_S", 0.0, raising=False)
    monkeypatch.setattr(retry, "SLOWEST_DIALS", 0, raising=False)
    end = blocks.num_blocks
    with InProcessSwarm(blocks, [(0, 3), (3, end)]) as swarm, swarm.session(max_length=64) as session:
        given = hidden_states(1, 5)
        torch.testing.assert_close(session.step(given), whole(blocks, given))
        assert session.num_repairs == 0
        assert not swarm.view.blamed
