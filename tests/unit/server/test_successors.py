"""Servers that may come next in a route, and the announced round trips to them."""

import asyncio

from swarmllm.data_structures import MAX_ROUND_TRIPS, ServerInfo, ServerState, Span, SwarmSnapshot
from swarmllm.errors import PeerUnreachableError
from swarmllm.network.wire.stream import FrameStream
from swarmllm.server.peers.other_servers import PINGS_PER_PERIOD, PROBES, Successors, likely_successors

ME = "me".ljust(46, "x")


def server(name: str, start: int, end: int, state: int = ServerState.ONLINE) -> ServerInfo:
    return ServerInfo(peer_id=name.ljust(46, "x"), start=start, end=end, state=state)


class Pings:
    """Stands for a stream: answers pings after so many milliseconds."""

    def __init__(self, ms: float, mbps: float | None = 1.0) -> None:
        self.ms, self.mbps, self.ended = ms, mbps, False

    async def ping(self) -> float:
        return self.ms / 1e3

    async def measure_rate(self) -> float | None:
        return self.mbps

    def abort(self) -> None:
        self.ended = True


def test_successors_hold_the_block_behind_the_last() -> None:
    next_one, overlapping = server("next", 4, 8), server("overlapping", 2, 6)
    others = [server("before", 0, 4), server("later", 5, 8), server("leaving", 4, 8, ServerState.LEAVING)]
    snapshot = SwarmSnapshot(8, (ServerInfo(peer_id=ME, start=0, end=4), next_one, overlapping, *others))
    assert likely_successors(snapshot, ME, Span(0, 4)) == [next_one, overlapping]
    assert likely_successors(snapshot, ME, Span(4, 8)) == []


async def test_the_nearest_are_announced_and_the_unreachable_left_out() -> None:
    distances = {server(str(index), 4, 8).peer_id: 10.0 + index for index in range(MAX_ROUND_TRIPS + 4)}
    gone = server("gone", 4, 8)
    streams: list[Pings] = []

    async def look() -> SwarmSnapshot:
        near = (ServerInfo(peer_id=peer_id, start=4, end=8) for peer_id in distances)
        return SwarmSnapshot(8, (gone, *near))

    async def open_stream(other: ServerInfo) -> FrameStream:
        if other is gone:
            raise PeerUnreachableError("gone", other.peer_id)
        streams.append(Pings(distances[other.peer_id]))
        return streams[-1]  # type: ignore[return-value]

    successors = Successors(look, open_stream, period_s=0.0)
    running = asyncio.create_task(successors.ping_forever(ME, lambda: Span(0, 4)))
    nearest = tuple(distances.items())[:MAX_ROUND_TRIPS]
    async with asyncio.timeout(120):
        while successors.announced != nearest:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
    running.cancel()
    assert all(stream.ended for stream in streams[:-PINGS_PER_PERIOD])


async def test_the_network_is_probed_at_joining_and_the_best_of_three_counts() -> None:
    """The first look fails, then there is no other server; the second connection doesn't tell."""
    other, me = server("other", 0, 4), ServerInfo(peer_id=ME, start=4, end=8)
    looks: list[SwarmSnapshot | None] = [None, SwarmSnapshot(8, (me,)), *[SwarmSnapshot(8, (me, other))] * 6]
    probes, rates, streams = 0, [30.0, None, 80.0, 20.0], []
    done = asyncio.Event()

    async def look() -> SwarmSnapshot:
        if not looks:
            done.set()
            await asyncio.Event().wait()
        found = looks.pop(0)
        if found is None:
            raise PeerUnreachableError("nobody answers")
        return found

    async def open_stream(asked: ServerInfo) -> FrameStream:
        nonlocal probes
        assert asked is other, "not itself"
        streams.append(Pings(1.0, rates[probes]))
        probes += 1
        return streams[-1]  # type: ignore[return-value]

    successors = Successors(look, open_stream, period_s=0.0)
    running = asyncio.create_task(successors.ping_forever(ME, lambda: Span(4, 8)))
    async with asyncio.timeout(120):
        await done.wait()
    running.cancel()
    assert (probes, successors.mbps) == (PROBES, 80.0)
    assert all(stream.ended for stream in streams)


async def test_a_server_alone_or_out_of_reach_knows_no_rate() -> None:
    async def look() -> SwarmSnapshot:
        return SwarmSnapshot(8, (server("other", 0, 4),))

    tried = asyncio.Event()

    async def open_stream(other: ServerInfo) -> FrameStream:
        tried.set()
        raise PeerUnreachableError("gone", other.peer_id)

    successors = Successors(look, open_stream, period_s=1e6)
    running = asyncio.create_task(successors.ping_forever(ME, lambda: Span(4, 8)))
    async with asyncio.timeout(120):
        await tried.wait()
    running.cancel()
    assert successors.mbps is None
