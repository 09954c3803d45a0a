"""Hidden states between blocks, as servers show them: with any layout, deaths, lies, and servers that are too old."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from swarm_in_process import Blocks, InProcessSwarm, Server
from test_repairs import Fate, deaths, hidden_states, layouts
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.inner_states import InnerStates
from swarmllm.network.wire.protocol import MessageType
from swarmllm.network.wire.tensor_codec import decode_tensors, encode_tensors

PHASES = set(Phase) - {Phase.shrink}
KNOWING = {"inner_states": True}
IMPATIENT: dict[str, Any] = {"max_retries": 0, "route_timeout_s": 0.5}
wishes = st.tuples(st.frozensets(st.integers(0, 5)), st.booleans()).filter(any)


def watched(given: Tensor, wish: tuple[frozenset[int], bool]) -> BlockInputs:
    inner = InnerStates(wish[0], attentions=wish[1], num_heads=4)
    return BlockInputs(hidden_states=given, batch_size=given.shape[0], seq_len=given.shape[1], inner=inner)


def shown(inputs: BlockInputs) -> list[Tensor]:
    """All that was found, in the order of blocks."""
    assert inputs.inner is not None
    maps = [(block_idx, place, one) for block_idx in range(6) for _, place, one in inputs.inner.maps.get(block_idx, ())]
    return [inputs.inner.found[idx] for idx in sorted(inputs.inner.found)] + [one for _, _, one in maps]


def assert_same(got: BlockInputs, wanted: BlockInputs) -> None:
    assert got.inner is not None
    assert wanted.inner is not None
    assert got.inner.found.keys() == wanted.inner.found.keys()
    assert len(shown(got)) == len(shown(wanted))
    for one, other in zip(shown(got), shown(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@settings(max_examples=150, phases=PHASES)
@given(
    layouts(),
    deaths,
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 9), wishes), min_size=2, max_size=5),
    st.sampled_from([4, 1024]),
    st.booleans(),
    st.booleans(),
)
def test_a_text_shows_the_same_after_any_deaths(
    blocks: Blocks,
    layout: list[tuple[int, int]],
    dying: list[tuple[int, int]],
    batch_size: int,
    steps: list[tuple[int, tuple[frozenset[int], bool]]],
    chunk_tokens: int,
    push: bool,
    dials_itself: bool,
) -> None:
    with InProcessSwarm(
        blocks,
        layout,
        announced=[KNOWING] * len(layout),
        prefill_chunk_tokens=chunk_tokens,
        push=push,
        dials_itself=dials_itself,
    ) as swarm:
        swarm.on_message = Fate(swarm, dying)
        cache = blocks.all.new_cache(blocks.all.span)
        with swarm.session(max_length=64, batch_size=batch_size) as session:
            for length, wish in steps:
                got, wanted = (watched(hidden_states(batch_size, length), wish) for _ in range(2))
                output = session.run_step(got)
                torch.testing.assert_close(
                    output, blocks.all.forward(wanted, blocks.all.span, cache), rtol=1e-4, atol=1e-4
                )
                assert_same(got, wanted)


@pytest.mark.slow
@settings(max_examples=100, phases=PHASES)
@given(layouts(), st.integers(1, 5), st.integers(1, 40), wishes, st.booleans(), st.integers(0, 1 << 16))
def test_a_batch_shows_the_same(
    blocks: Blocks,
    layout: list[tuple[int, int]],
    batch_size: int,
    length: int,
    wish: tuple[frozenset[int], bool],
    push: bool,
    answer_bytes: int,
) -> None:
    with InProcessSwarm(blocks, layout, announced=[KNOWING] * len(layout), push=push) as swarm:
        got, wanted = (watched(hidden_states(batch_size, length), wish) for _ in range(2))
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr("swarmllm.client.view.connection.ANSWER_BYTES", answer_bytes)
            output = swarm.batches(got, Span(0, 6))
            torch.testing.assert_close(output, blocks.all.forward(wanted, blocks.all.span), rtol=1e-4, atol=1e-4)
        assert_same(got, wanted)


ALL = (frozenset(range(6)), False)
BOTH = (frozenset(range(6)), True)


def run(swarm: InProcessSwarm, kind: str, wish: tuple[frozenset[int], bool]) -> BlockInputs:
    inputs = watched(hidden_states(2, 5), wish)
    if kind == "batch":
        with torch.no_grad():
            swarm.batches(inputs, Span(0, 6))
    else:
        with swarm.session(max_length=16, batch_size=2) as session:
            session.run_step(inputs)
    return inputs


@pytest.mark.parametrize("kind", ["batch", "session"])
def test_old_servers_are_left_out(blocks: Blocks, kind: str) -> None:
    """They would ignore the wish; here they are the faster ones."""
    spans, fast = [(0, 3), (3, 6), (0, 3), (3, 6)], {"decode_ms_per_block": 0.1, "throughput": 1e4}
    with InProcessSwarm(blocks, spans, announced=[fast, fast, KNOWING, KNOWING]) as swarm:
        asked: set[int] = set()
        swarm.on_message = lambda server, message: (
            asked.add(swarm.servers.index(server)) if message.header.get("inner") else None
        )
        assert len(shown(run(swarm, kind, ALL))) == 6
        assert asked == {2, 3}


@pytest.mark.parametrize("kind", ["batch", "session"])
def test_too_old_servers_are_told_of(blocks: Blocks, kind: str) -> None:
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], announced=[KNOWING, {}]) as swarm:
        with pytest.raises(ConfigurationError, match="older version"):
            run(swarm, kind, ALL)
        with swarm.session(max_length=16) as session:  # nobody is avoided for what he can't know
            assert session.step(hidden_states(1, 3)).shape == (1, 3, 64)


def test_a_session_that_began_on_an_old_server_leaves_it(blocks: Blocks) -> None:
    fast = {"decode_ms_per_block": 0.1}
    with InProcessSwarm(blocks, [(0, 6), (0, 6)], announced=[fast, KNOWING]) as swarm:
        cache, span = blocks.all.new_cache(blocks.all.span), blocks.all.span
        with swarm.session(max_length=32) as session:
            given = hidden_states(1, 4)
            session.step(given)
            assert session.route[0].server.peer_id == swarm.servers[0].peer_id
            blocks.all.forward(replace(watched(given, ALL), inner=None), span, cache)
            got, wanted = (watched(hidden_states(1, 2), BOTH) for _ in range(2))
            session.run_step(got)
            blocks.all.forward(wanted, span, cache)
            assert_same(got, wanted)
            assert session.route[0].server.peer_id == swarm.servers[1].peer_id


def no_numbers(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    tensors["block_outputs"].view(-1)[3] = torch.nan


def huge(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    tensors["block_outputs"] = tensors["block_outputs"] * 1e30


def fewer(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    tensors["block_outputs"] = tensors["block_outputs"][1:]


def others(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    header["blocks"] = [block_idx + 1 for block_idx in header["blocks"]]


def nothing(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    tensors.pop("block_outputs")


def wide(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    header["attentions"] = [(idx, place, (*shape[:3], 2 * shape[3])) for idx, place, shape in header["attentions"]]
    tensors["attentions"] = torch.cat([tensors["attentions"]] * 2)


def endless(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    header["attentions"] = [(idx, place, (1 << 24,) * 4) for idx, place, _ in header["attentions"]]


def negative(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    header["attentions"] = [(idx, place, (-1, -1, 5, 5)) for idx, place, _ in header["attentions"]]


def of_others(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    header["attentions"] = [((idx + 3) % 6, place, shape) for idx, place, shape in header["attentions"]]


LIES = [no_numbers, huge, fewer, others, nothing, wide, endless, negative, of_others]


@pytest.mark.parametrize("kind", ["batch", "session"])
@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_right_is_found_out(blocks: Blocks, kind: str, lie: Any) -> None:
    """The liar is blamed, and another server takes its place."""
    spans, fast = [(0, 3), (3, 6), (0, 3)], {"decode_ms_per_block": 0.1, "throughput": 1e4, **KNOWING}
    with InProcessSwarm(blocks, spans, announced=[fast, KNOWING, KNOWING]) as swarm:
        liar = swarm.servers[0]

        def on_send(server: Server, kind: MessageType, header: dict[str, Any], chunks: Any) -> Any:
            if server is liar and kind is MessageType.RESULT and header.get("blocks"):
                payload = bytearray(b"".join(bytes(chunk) for chunk in chunks))
                tensors = decode_tensors(header["tensors"], payload, max_bytes=len(payload))
                lie(tensors, header)
                header["tensors"], chunks = encode_tensors(tensors)
            return kind, header, chunks

        swarm.on_send = on_send
        got, wanted = run(swarm, kind, BOTH), watched(hidden_states(2, 5), BOTH)
        blocks.all.forward(wanted, blocks.all.span)
        assert_same(got, wanted)
        assert liar.peer_id in swarm.view.blamed


def test_a_server_that_shows_nothing_is_blamed(blocks: Blocks) -> None:
    """The last server has answered in time: it isn't at fault."""
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], announced=[KNOWING] * 2, step_timeout_s=1.0, **IMPATIENT) as swarm:
        silent = swarm.servers[0]
        swarm.on_send = lambda server, kind, header, chunks: (
            (kind, {"id": 1 << 40}, ()) if server is silent and header.get("shows") else (kind, header, chunks)
        )
        with pytest.raises(SwarmError, match="did not finish"):
            run(swarm, "session", ALL)
        assert swarm.view.blamed == {silent.peer_id}


def test_unasked_for_is_refused(blocks: Blocks) -> None:
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], announced=[KNOWING] * 2, **IMPATIENT) as swarm:
        liar = swarm.servers[1]
        swarm.on_send = lambda server, kind, header, chunks: (
            (kind, header | {"shows": True}, chunks)
            if server is liar and kind is MessageType.RESULT and header.get("tensors")
            else (kind, header, chunks)
        )
        with swarm.session(max_length=16) as session, pytest.raises(SwarmError, match="not asked"):
            session.step(hidden_states(1, 4))


@pytest.mark.parametrize("kind", ["batch", "session"])
def test_a_server_answers_no_more_than_it_can(blocks: Blocks, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmllm.server.sessions.step_runner.MAX_ANSWER_BYTES", 1000)
    with (
        InProcessSwarm(blocks, [(0, 6)], announced=[KNOWING]) as swarm,
        pytest.raises(ConfigurationError, match="short"),
    ):
        run(swarm, kind, BOTH)


def test_what_is_shown_is_leased(blocks: Blocks) -> None:
    """While a step's inside is kept for its client, it counts as cache; then no more."""
    with InProcessSwarm(blocks, [(0, 6)], announced=[KNOWING]) as swarm:
        leased: list[int] = []
        budget = swarm.servers[0].sessions.budget
        swarm.on_send = lambda server, kind, header, chunks: (
            leased.append(budget.leased_bytes) if header.get("tensors") else None,
            (kind, header, chunks),
        )[1]
        with swarm.session(max_length=16, batch_size=2) as session:
            session.step(hidden_states(2, 5))
            session.run_step(watched(hidden_states(2, 5), ALL))
            session.step(hidden_states(2, 5))
        usual, shows, after = leased[0], max(leased), leased[-1]
        assert shows >= usual + 6 * 2 * 5 * 64 * 4
        assert after == usual


def test_random_requests_hurt_nobody(blocks: Blocks) -> None:
    """Wishes for blocks that a server hasn't got are somebody else's."""
    random = Random(0)
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], announced=[KNOWING] * 2) as swarm:
        for _ in range(10):
            wish = frozenset(random.sample(range(12), 4)), False
            got = run(swarm, random.choice(["batch", "session"]), wish)
            assert got.inner is not None
            assert got.inner.found.keys() == wish[0] & set(range(6))
