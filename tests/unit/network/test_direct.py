"""Direct connections: a door on loopback, and streams that move through it. No daemon."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import uvloop
from tests.direct_streams import HOST, SERVER_ID, greeted, opened_door, use, wait_until

from swarmllm.errors import ConfigurationError
from swarmllm.files import PrivateDirectory
from swarmllm.network.p2p import direct
from swarmllm.network.p2p.addresses import hosts_of
from swarmllm.network.p2p.direct import DirectDialler, Door, _listen, _socket_beside, dial
from swarmllm.network.wire.messages import DirectOffer

BIG = 2 << 20


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("where", ["over TLS", "on one machine"])
def test_a_stream_that_is_used_moves(loop_factory: Callable[[], asyncio.AbstractEventLoop], where: str) -> None:
    mistakes: list[dict[str, object]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: mistakes.append(context))
        dialler, change = DirectDialler(), {"directory": ""} if where == "over TLS" else {"port": 1}
        async with opened_door() as door, greeted(door, dialler, change) as (client, server):
            assert client.offered is not None  # signs of life are no use
            await use(client, server, BIG)
            await wait_until(lambda: client.is_moved and server.is_moved)
            transport = client._transport
            assert (transport.get_extra_info("ssl_object") is not None) == (where == "over TLS")
            if where == "over TLS":
                for side in (client, server):  # small messages would wait for each other
                    own = side._transport.get_extra_info("socket")
                    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            await use(client, server, BIG)
            await client.ping()
            assert client.offered is None
            await server.close()
            await client.gone
            await dialler.close()
        assert transport.is_closing()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
    assert not mistakes


@pytest.mark.parametrize(
    "change",
    [
        {"directory": "", "certificate": bytes(32)},
        {"directory": "", "ticket": bytes(32)},
        {"directory": "../../etc", "port": 1},
    ],
)
async def test_a_stream_stays_where_it_is(change: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    """If anything is wrong; and the next stream to that peer isn't tried for a while."""
    caplog.set_level("DEBUG", logger="swarmllm.network.p2p.direct")
    dialler = DirectDialler()
    async with opened_door() as door:
        async with greeted(door, dialler, change) as (client, server):
            await use(client, server)
            await asyncio.gather(*dialler._tasks)
            await use(client, server, BIG)
            assert not client.is_moved
            assert "can't be reached directly" in caplog.text
        async with greeted(door, dialler, {}) as (client, server):
            await use(client, server)
            assert not dialler._tasks
        await dialler.close()


async def test_far_peers_are_left_to_the_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a shorter round trip shows that it was the machine that was busy."""
    dialler = DirectDialler()
    async with opened_door() as door, greeted(door, dialler) as (client, server):
        monkeypatch.setattr(direct, "NEAR_S", -1.0)
        await use(client, server)
        assert client.offered is not None
        monkeypatch.setattr(direct, "NEAR_S", 60.0)
        await use(client, server)
        await wait_until(lambda: client.is_moved)
        await dialler.close()


async def test_a_moved_stream_that_falls_silent_is_a_failure() -> None:
    """A firewall may let a connection begin, and nothing more."""
    dialler = DirectDialler()
    async with opened_door() as door:
        async with greeted(door, dialler, {}) as (client, server):
            await use(client, server)
            await wait_until(lambda: client.is_moved and server.is_moved)
            server._transport.pause_reading()
            client.start_keepalive(interval_s=0.01, misses=3)
            await client.gone
        assert SERVER_ID in dialler._failed_at
        await dialler.close()


@pytest.fixture
def private() -> Iterator[Path]:
    with PrivateDirectory(max_path_bytes=90) as directory:
        yield directory.path


def test_the_socket_of_another_user_is_not_used(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _socket_beside(private.name) == os.fspath(private / "direct.sock")
    private.chmod(0o755)
    assert _socket_beside(private.name) is None
    private.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 1 + private.stat().st_uid)
    assert _socket_beside(private.name) is None


def test_an_offer_names_no_other_place(private: Path) -> None:
    link = private.with_name("swarmllm-abcdefgh")
    link.symlink_to(private)
    try:
        for name in (link.name, "", ".", f"{private.name}/", f"x/../{private.name}", private.parent.name):
            assert _socket_beside(name) is None
    finally:
        link.unlink()


def test_all_addresses_share_one_port() -> None:
    hosts = hosts_of(["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.2/tcp/31337", "/dns4/localhost/tcp/0", "/ip4/127.0.0.1"])
    assert hosts == (HOST, "127.0.0.2")
    bound = _listen(hosts, 0)
    try:
        assert len({one.getsockname()[1] for one in bound}) == 1
        bound[0].listen()
        with pytest.raises(OSError, match="in use"):
            _listen([HOST], bound[0].getsockname()[1])
    finally:
        for one in bound:
            one.close()


async def test_a_port_that_is_taken(private: Path) -> None:
    with socket.create_server((HOST, 0)) as taken, pytest.raises(ConfigurationError, match="--direct_port"):
        Door.open(private, [HOST], taken.getsockname()[1])


async def test_dialling_a_closed_door() -> None:
    async with opened_door() as door:
        offer = DirectOffer(port=door.port, certificate=bytes(32), ticket=bytes(32))
    with pytest.raises(OSError, match="failed"):
        await dial(HOST, offer)


@pytest.mark.parametrize("error", ["EMFILE", "ECONNABORTED", "EPROTO"])
async def test_only_this_machine_closes_the_door_for_a_while(error: str) -> None:
    """A dialler that has left again, or whose network fails, costs the others no more than any connection."""

    class Failing(socket.socket):
        def accept(self) -> NoReturn:
            raise OSError(getattr(errno, error), error)

    loop = asyncio.get_running_loop()
    async with opened_door() as door:
        with Failing() as listener:
            before = loop.time()
            door._accept(listener)
            timer = door._resting.pop(listener)
            timer.cancel()
        is_long = timer.when() >= before + direct.OUT_OF_FILES_S
        assert is_long == (error == "EMFILE")
