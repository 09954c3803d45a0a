"""Parts of the gateway by themselves: text that comes token by token, sampling, the picture of a large swarm."""

import asyncio
import random
import threading
from typing import Any

import pytest
import torch

from swarmllm.data_structures import RouteHop, ServerInfo, ServerState, Span, SwarmSnapshot
from swarmllm.decoding.options import DecodingOptions
from swarmllm.errors import MissingBlocksError, PeerUnreachableError, SwarmError
from swarmllm.gateway.engine.engine import Engine
from swarmllm.gateway.engine.generation import Generation, GenerationOptions
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.metrics import GatewayMetrics
from swarmllm.gateway.monitor import Contact, SwarmPicture
from swarmllm.gateway.sampling import Sampler, SamplingOptions
from swarmllm.gateway.text import StopFinder, TextRow


class Bytes:
    """A tokenizer whose tokens are bytes."""

    all_special_ids = ()

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(token)

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain", "Zoë — ünïcode", "👩‍🚀 in 宇宙", "a\nb"])
def test_text_comes_in_whole_characters(text: str) -> None:
    row = TextRow(Bytes(), b"prompt: ")
    pieces = [row.add(byte) for byte in text.encode()]
    assert "".join(pieces) + row.end() == text
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("aaab", ["aab"], "a"),
        ("ababac rest", ["abac"], "ab"),
        ("no such thing", ["thong"], "no such thing"),
        ("ends with th", ["that"], "ends with th"),
        ("x END y", ["END", " E"], "x"),
    ],
)
def test_stop_strings(text: str, stop: list[str], expected: str) -> None:
    finder = StopFinder(stop)
    found = ""
    for character in text:
        found += finder.take(character, last=False)
        assert expected.startswith(found)
        if finder.stopped_by is not None:
            break
    assert found + finder.take("", last=True) == expected
    assert (finder.stopped_by is not None) == (expected != text)


def choices(options: SamplingOptions, scores: torch.Tensor, steps: int = 200) -> list[int]:
    sampler = Sampler(options, 1)
    ids = torch.zeros((1, 1), dtype=torch.long)
    return [int(sampler(ids, scores[None].clone()).argmax()) for _ in range(steps)]


def test_sampling_follows_the_distribution_and_its_own_seed_only() -> None:
    scores = torch.tensor([0.5, 0.25, 0.2, 0.05]).log()
    first = choices(SamplingOptions(seed=1), scores, 2000)
    torch.manual_seed(123)
    assert choices(SamplingOptions(seed=1), scores, 2000) == first
    assert choices(SamplingOptions(seed=2), scores, 2000) != first
    assert first.count(0) / 2000 == pytest.approx(0.5, abs=0.05)
    assert set(choices(SamplingOptions(seed=1, top_k=2), scores)) == {0, 1}
    assert set(choices(SamplingOptions(seed=1, top_p=0.6), scores)) == {0, 1}
    assert set(choices(SamplingOptions(seed=1, decoding=DecodingOptions(min_p=0.45)), scores)) == {0, 1}
    assert set(choices(SamplingOptions(seed=1, temperature=0), scores)) == {0}
    assert set(choices(SamplingOptions(seed=1, temperature=0, logit_bias={0: -5}), scores)) == {1}
    assert choices(SamplingOptions(seed=1, temperature=0, presence_penalty=1.9), scores, 4) == [0, 1, 2, 0]


def server(number: int, start: int, end: int, **more: Any) -> ServerInfo:
    return ServerInfo(peer_id=f"{number:046d}", start=start, end=end, throughput=100.0, cache_tokens_left=1000, **more)


def test_the_failure_of_a_server_is_told_once_for_each_route() -> None:
    told: list[Any] = []
    options = GenerationOptions(sampling=SamplingOptions(seed=1), max_tokens=1)
    generation = Generation(Any, GatewayMetrics(), [1], options, told.append)
    dead, gap = PeerUnreachableError("it is dead", "A"), MissingBlocksError("nobody serves them", (4,))
    failures: list[SwarmError] = [dead, dead, gap, dead, gap]
    for _ in range(2):
        for failure in failures:
            generation.on_failure(failure)
        generation.on_route([RouteHop(server(1, 0, 8), Span(0, 8))], 0.1)
    assert [(event.name, event.details.get("peer_id")) for event in told] == [
        ("shard_status", "A"),
        ("shard_status", None),
        ("route", None),
        ("shard_status", "A"),
        ("shard_status", None),
        ("shard_failover", None),
    ]


def test_a_full_queue_refuses_functions_too() -> None:
    async def fill() -> None:
        engine, may_end = Engine(GatewayMetrics(), max_concurrent=1, max_waiting=1), threading.Event()
        under_way = [asyncio.ensure_future(engine.compute(may_end.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="its queue is full") as refused:
            await engine.compute(may_end.wait)
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        may_end.set()
        assert await asyncio.gather(*under_way) == [True, True]
        await engine.close()

    asyncio.run(fill())


def test_the_picture_tells_what_changed() -> None:
    picture = SwarmPicture("m", "f", 8)
    first = [server(1, 0, 4), server(2, 4, 8), server(3, 4, 8)]
    everybody = {one.peer_id: Contact(True, 0.01) for one in first}
    assert picture.update(SwarmSnapshot(8, tuple(first)), everybody, 1.0) == []
    assert picture.as_json()["missing_blocks"] == []
    assert picture.as_json()["bottleneck"] == {"blocks": [0, 4], "tokens_per_s": 100.0}

    second = [server(1, 0, 4), server(3, 0, 4), server(4, 4, 8, state=ServerState.JOINING)]
    contacts = {first[0].peer_id: Contact(False), first[2].peer_id: Contact(True, 0.01)}
    events = picture.update(SwarmSnapshot(8, tuple(second)), contacts, 2.0)
    assert [(event["kind"], int(event["peer_id"])) for event in events] == [
        ("moved", 3),
        ("joined", 4),
        ("left", 2),
        ("unreachable", 1),
    ]
    shown = picture.as_json()
    assert shown["missing_blocks"] == [4, 5, 6, 7]
    assert [one["state"] for one in shown["servers"]] == ["unreachable", "online", "joining"]
    assert shown["route"] == []
    assert [event["kind"] for event in shown["events"]] == ["unreachable", "left", "joined", "moved"]


def test_the_expected_speed_counts_the_way_to_servers_and_the_head() -> None:
    """The best route is that of the nearest server."""
    near, far = server(1, 0, 8), server(2, 0, 8)
    for contacts, least_ms in (({}, 0.0), ({near.peer_id: Contact(True, 0.05), far.peer_id: Contact(True, 0.4)}, 50.0)):
        picture = SwarmPicture("m", "f", 8)
        picture.update(SwarmSnapshot(8, (far, near)), contacts, 1.0)
        shown = picture.as_json()
        assert least_ms < shown["expected_ms_per_token"] < least_ms + 20
    assert [hop["peer_id"] for hop in shown["route"]] == [near.peer_id]
    picture.head_ms = 30.0
    assert picture.as_json()["expected_ms_per_token"] == pytest.approx(shown["expected_ms_per_token"] + 30)


def test_blocks_on_a_single_server() -> None:
    """Blocks of one server that can be reached, of those that servers have to run."""
    picture = SwarmPicture("m", "f", 8, [Span(1, 8)])
    servers = (server(1, 0, 4), server(2, 4, 8), server(3, 2, 6, public_name="n"))
    picture.update(SwarmSnapshot(8, servers), {}, 1.0)
    alone = [(int(one["peer_id"]), one["blocks"]) for one in picture.as_json()["held_by_one"]]
    assert alone == [(1, [1, 2]), (2, [6, 8])]
    picture.update(SwarmSnapshot(8, servers), {servers[1].peer_id: Contact(False)}, 2.0)
    assert picture.as_json()["held_by_one"] == [
        {"peer_id": servers[0].peer_id, "public_name": "", "blocks": [1, 2]},
        {"peer_id": servers[2].peer_id, "public_name": "n", "blocks": [4, 6]},
    ]


def test_blocks_of_the_gateway_itself_are_not_missing() -> None:
    picture = SwarmPicture("m", "f", 8, [Span(2, 5), Span(6, 7)])
    picture.update(SwarmSnapshot(8, (server(1, 1, 4), server(2, 6, 8))), {}, 1.0)
    assert picture.missing_blocks() == picture.as_json()["missing_blocks"] == [4]
    picture.update(SwarmSnapshot(8, (server(1, 1, 5), server(2, 6, 8))), {}, 2.0)
    assert [hop["blocks"] for hop in picture.as_json()["route"]] == [[2, 5], [6, 7]]


def big_swarm(num_servers: int = 500, num_blocks: int = 126) -> SwarmSnapshot:
    """Spans of all lengths, a gap, and every state."""
    rng = random.Random(0)
    servers = []
    for number in range(num_servers):
        length = rng.choice((4, 8, 12, 20, 40))
        start = rng.randrange(0, num_blocks - length + 1)
        start, end = (start, start + length) if start + length <= 60 or start >= 63 else (63, 63 + length)
        servers.append(server(number, start, end, state=rng.choice((1, 1, 1, 1, 0, 2)), public_name=f"node-{number}"))
    return SwarmSnapshot(num_blocks, tuple(servers))


def test_the_picture_of_500_servers() -> None:
    snapshot = big_swarm()
    picture = SwarmPicture("m", "f", 126)
    picture.update(snapshot, {one.peer_id: Contact(True, 0.05) for one in snapshot.servers[:128]}, 1.0)
    shown = picture.as_json()
    assert len(shown["servers"]) == 500
    assert shown["missing_blocks"] == [60, 61, 62]
    assert {one["reachable"] for one in shown["servers"]} == {True, None}
