"""A p2pd whose start is cancelled."""

import asyncio
from contextlib import suppress

import pytest
import uvloop

from swarmllm.network.p2p.daemon import Daemon
from swarmllm.network.p2p.identity import Identity


@pytest.mark.parametrize("turns", range(1, 5))
def test_a_start_that_is_cancelled_ends_quietly(turns: int) -> None:
    async def cancel_after() -> None:
        starting = asyncio.create_task(
            Daemon.start(Identity.generate(), host_maddrs=["/ip4/127.0.0.1/tcp/0"], announce_maddrs=None, listen=True)
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await (await starting).end()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(cancel_after())
