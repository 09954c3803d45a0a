"""Clients whose steps the servers compute together: each gets what it gets alone, whatever the others do."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from raw_peer import HIDDEN, RawPeer, RawPeers
from swarm_models import NUM_BLOCKS, OPTIONS, connected, generate_seeded, generate_together, prompt, wait_until
from tests.selection import sampled
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.network.wire.protocol import MessageType

LENGTHS = (5, 130, 17, 300, 60, 9)
NEW_TOKENS = 12
MEMORY_SLACK_BYTES = 16_000_000
"""Measured: 27 MB more after five rounds of 32 clients than after the first, then 0.1 MB; what the sessions of four
rounds hold is 40."""


@pytest.fixture(scope="module")
def expected(local: PreTrainedModel) -> list[list[int]]:
    return [generate_seeded(local, text, max_new_tokens=NEW_TOKENS)[0].tolist() for text in texts(LENGTHS)]


def texts(lengths: Sequence[int]) -> list[torch.Tensor]:
    return [prompt(1, length, seed=length) for length in lengths]


def test_each_client_gets_the_tokens_that_it_gets_alone(model: Any, expected: list[list[int]]) -> None:
    assert generate_together(model, texts(LENGTHS), NEW_TOKENS) == expected


def test_batching_can_be_switched_off(llama: Path, expected: list[list[int]]) -> None:
    with (
        LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], max_batch_sessions=1, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as model,
    ):
        assert generate_together(model, texts(LENGTHS), NEW_TOKENS) == expected


@pytest.mark.slow
def test_many_clients_leave_nothing_behind(llama: Path, local: PreTrainedModel) -> None:
    lengths = tuple(range(10, 330, 10))
    wanted = [generate_seeded(local, text, max_new_tokens=NEW_TOKENS)[0].tolist() for text in texts(lengths)]
    with (
        LocalSwarm(llama, spans=[(0, 3), (3, NUM_BLOCKS)], update_period=1, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as model,
    ):
        at_first = free_cache(model)
        with model.inference_session(max_length=512) as session:
            session.step(model.embed(prompt()))
            wait_until(lambda: all(map(int.__lt__, free_cache(model), at_first)), "the lease of a session")
            assert generate_together(model, texts(lengths), NEW_TOKENS) == wanted
        wait_until(lambda: free_cache(model) == at_first, "the end of all leases")
        for _ in range(5):  # until the allocators have what they need
            assert generate_together(model, texts(lengths), NEW_TOKENS) == wanted
        memory = resident_bytes(swarm)
        for _ in range(4):
            assert generate_together(model, texts(lengths), NEW_TOKENS) == wanted
        assert resident_bytes(swarm) == pytest.approx(memory, abs=MEMORY_SLACK_BYTES)


def resident_bytes(swarm: LocalSwarm) -> list[int]:
    return [psutil.Process(server.pid).memory_info().rss for server in swarm.servers]


def free_cache(model: Any) -> list[int]:
    servers = sorted(model.swarm.servers(), key=lambda server: server.start)
    return [server.cache_tokens_left for server in servers]


async def stall(raw: RawPeer) -> None:
    """Steps without end, and not one answer is read."""
    raw.stop_reading()
    session = await raw.open(max_length=512)
    while True:
        await raw.step(session, torch.zeros(1, 256, HIDDEN), seq_len=256)
        await asyncio.sleep(0)


async def vanish(raw: RawPeer) -> None:
    """The stream ends in the midst of a step, as a killed client's does."""
    session = await raw.open()
    await raw.answer()
    await raw.step(session)
    raw.stream.abort()


async def send_numbers_that_are_none(raw: RawPeer) -> None:
    session = await raw.open()
    await raw.answer()
    for position in range(16):
        hidden = torch.full((1, 1, HIDDEN), torch.nan)
        await raw.step(session, hidden, position=position, seq_len=1)
        await raw.answer()
    raw.stream.abort()


async def send_what_blocks_can_not_run(raw: RawPeer) -> None:
    session = await raw.open()
    await raw.answer()
    good, bad = torch.zeros(1, 1, HIDDEN), torch.ones(1, 3, 1, 2)  # a mask for three heads of four
    await raw.step(session, good, seq_len=1)
    await raw.answer()
    tensors = {"hidden_states": good, "attention_mask": bad}
    header = {"session": session, "epoch": 0, "position": 1, "batch_size": 1, "seq_len": 1}
    await raw.say(MessageType.STEP, tensors, **header)
    assert await raw.error() == "remote_protocol"
    await raw.step(session, good, epoch=1, position=1, seq_len=1)
    assert await raw.error() == "session_lost"  # its cache is gone, and nobody else's
    raw.stream.abort()


async def roll_back_and_forth(raw: RawPeer) -> None:
    session = await raw.open()
    await raw.answer()
    for position in (0, 4, 2, 0, 3):
        await raw.step(session, position=position)
        await raw.answer()
    raw.stream.abort()


MISBEHAVE = {
    one.__name__: one
    for one in (stall, vanish, send_numbers_that_are_none, send_what_blocks_can_not_run, roll_back_and_forth)
}


@pytest.mark.parametrize("name", sampled(list(MISBEHAVE), 3, always=["stall"]))
async def test_a_client_that_misbehaves_costs_the_others_nothing(
    swarm: LocalSwarm, model: Any, expected: list[list[int]], name: str
) -> None:
    """Over and over until the others are done."""
    misbehave = MISBEHAVE[name]

    async def go_on(peers: RawPeers, server: LocalServer) -> None:
        while True:
            raw = await peers.open_stream(server)
            try:
                await misbehave(raw)
                once.set()
            finally:
                raw.stream.abort()

    once = asyncio.Event()
    async with RawPeers.join(swarm.servers[0]) as peers:
        bad = asyncio.create_task(go_on(peers, swarm.servers[0]))
        others = asyncio.create_task(in_thread(lambda: generate_together(model, texts(LENGTHS), NEW_TOKENS)))
        await asyncio.wait({bad, others}, return_when=asyncio.FIRST_COMPLETED)
        if misbehave is not stall:
            waiting = asyncio.create_task(once.wait())
            await asyncio.wait({bad, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        bad.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bad
        assert await others == expected


async def in_thread(call: Callable[[], Any]) -> Any:
    """In a thread that ends with the call."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def run() -> None:
        try:
            loop.call_soon_threadsafe(done.set_result, call())
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            loop.call_soon_threadsafe(done.set_exception, error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return await done
    finally:
        thread.join()
