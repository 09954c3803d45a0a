"""A peer in its process: whatever the event loop and the thread, with its daemon's end, and with its imports."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest
import uvloop
from echo_peers import FINGERPRINT, MODEL, greeted, info, polite_echo
from tests import forked

from swarmllm.client.view.event_loop import EventLoop
from swarmllm.errors import PeerUnreachableError
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.protocol import MessageType

pytestmark = pytest.mark.rotates(6, whole_file=True)


def test_no_daemon_survives_its_killed_process() -> None:
    code = (
        "import asyncio\n"
        "from swarmllm.network.p2p.peer import Peer\n"
        "async def main():\n"
        "    peer = await Peer.create()\n"
        "    print(peer.daemon_pid, flush=True)\n"
        "    await peer.daemon_exited()\n"
        "asyncio.run(main())\n"
    )
    process = forked.popen([sys.executable, "-c", code], stderr=sys.__stderr__, stdout=subprocess.PIPE)
    daemon = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    daemon.wait(timeout=120)


@pytest.mark.parametrize(
    ("loop_factory", "in_thread"),
    [
        (asyncio.new_event_loop, False),
        (uvloop.new_event_loop, True),
        pytest.param(asyncio.new_event_loop, True, marks=pytest.mark.slow),
        pytest.param(uvloop.new_event_loop, False, marks=pytest.mark.slow),
    ],
)
def test_any_event_loop_in_any_thread(loop_factory: Callable[[], asyncio.AbstractEventLoop], in_thread: bool) -> None:
    results: list[object] = []

    async def scenario() -> None:
        async with await Peer.create() as server:
            await server.serve_streams(polite_echo)
            await BlockDirectory(server).announce(MODEL, info(server))
            async with await Peer.create(initial_peers=server.join_maddrs, client_mode=True) as client:
                (found,) = await BlockDirectory(client).servers(FINGERPRINT)
                stream = await greeted(client.open_stream(found.peer_id, found.addrs))
                await stream.send(MessageType.STEP, {"id": 1}, [bytes(1 << 20)])
                results.append(len((await stream.receive()).payload))
            os.kill(server.daemon_pid, signal.SIGKILL)
            await server.daemon_exited()

    def run() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(scenario())

    if in_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    assert results == [1 << 20]


def reap(*_: object) -> None:
    """As programs with children of their own do: whoever has ended is theirs."""
    with suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def ignore(*_: object) -> None:
    pass


@pytest.mark.parametrize(
    ("signum", "handler"),
    [
        (signal.SIGCHLD, ignore),
        (signal.SIGCHLD, reap),
        (signal.SIGCHLD, signal.SIG_IGN),
        (signal.SIGTERM, ignore),
        (signal.SIGTERM, signal.SIG_IGN),
        (signal.SIGINT, signal.SIG_IGN),
    ],
)
def test_a_daemon_ends_and_is_noticed_with_any_signal_handler(signum: int, handler: Any) -> None:
    """uvloop learns of a child's end by SIGCHLD, until somebody else handles that: torch's DataLoader does."""
    loop = EventLoop()
    killed, closed = (loop.run_coroutine(Peer.create()) for _ in range(2))
    before = signal.signal(signum, handler)
    try:
        started_later = loop.run_coroutine(Peer.create())
        os.kill(os.getpid(), signum)
        daemons = [psutil.Process(peer.daemon_pid) for peer in (closed, started_later)]
        os.kill(killed.daemon_pid, signal.SIGKILL)
        loop.run_coroutine(asyncio.wait_for(killed.daemon_exited(), 120))
        with pytest.raises(PeerUnreachableError, match="has exited"):
            loop.run_coroutine(killed.open_stream(closed.peer_id))
        for peer in (closed, started_later, killed):
            loop.run_coroutine(asyncio.wait_for(peer.close(), 120))
        assert not any(daemon.is_running() for daemon in daemons)
    finally:
        signal.signal(signum, before)
        loop.close()


IMPORTS = """
import sys
def imported(*names):
    return [name for name in names if name in sys.modules]
heavy = ("hivemind.averaging", "hivemind.moe", "hivemind.optim", "scipy")
import swarmllm.network.wire.protocol, swarmllm.network.wire.tensor_codec, swarmllm.network.p2p.block_directory
assert imported("hivemind", "multiaddr", "scipy") == []
import swarmllm.network.p2p.peer
assert imported("hivemind.dht.node", *heavy) == ["hivemind.dht.node"]
print("only what is needed")
import hivemind
from hivemind import DHT
hivemind.Optimizer, hivemind.p2p.P2P
assert imported("hivemind.optim") == ["hivemind.optim"]
print("all of hivemind")
"""


def test_only_what_is_needed_is_imported_and_hivemind_is_whole_for_others_in_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.stdout == "only what is needed\nall of hivemind\n", done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_daemon_that_ends_closes_only_its_own_files(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A file that is opened right after gets the number of one that was closed."""

    async def scenario() -> list[int]:
        counts = []
        for _ in range(3):
            peer = await Peer.create()
            await peer.close()
            opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
            for _ in range(10):
                await asyncio.sleep(0)
            for number in opened:
                os.close(number)  # fails if somebody else has closed it
            counts.append(psutil.Process().num_fds())
        return counts

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        counts = runner.run(scenario())
    assert counts[1] == counts[2], "no file is left open"
