"""Peers of one local network find each other; here on the loopback interface only, or between network namespaces."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import JOIN

from swarmllm import embedded_model_path
from swarmllm.errors import ConfigurationError, MissingBlocksError
from swarmllm.network.p2p import discovery
from swarmllm.network.p2p.discovery import (
    MAX_ADDRESSES,
    LanAnnouncement,
    find_any_swarm,
    find_machines,
    find_peers,
    find_swarm,
    lan_addresses,
)
from swarmllm.network.p2p.identity import Identity

pytestmark = pytest.mark.rotates(3)

LOOPBACK = ["127.0.0.1"]
OURS, THEIRS = "a" * 32, "b" * 32
ADDRS = ["/ip4/127.0.0.1/tcp/4000", "/ip4/192.0.2.7/tcp/4000"]


FIRST = Identity.generate().peer_id


def announcement(model: str = "ours", fingerprint: str = OURS, peer_id: str = FIRST) -> LanAnnouncement:
    return LanAnnouncement(peer_id, ADDRS, model=model, fingerprint=fingerprint)


@pytest.fixture(autouse=True)
def service(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name for this process alone: other swarms of this machine are not heard."""
    name = f"_swl{os.getpid()}._tcp.local."
    monkeypatch.setattr(discovery, "SERVICE", name)
    return name


async def until_refused() -> None:
    """On a busy machine one of several may be heard alone."""
    while True:
        await find_any_swarm(interfaces=LOOPBACK)


async def test_a_swarm_is_found_and_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with announcement() as first, announcement("theirs", THEIRS, Identity.generate().peer_id) as second:
        for one in (first, second):
            one.start(LOOPBACK)
            await one.announced()
        (maddr,) = await find_swarm("ours", OURS, interfaces=LOOPBACK)
        assert maddr == f"/ip4/192.0.2.7/tcp/4000/p2p/{FIRST}"
        with pytest.raises(ConfigurationError, match="several swarms"):
            await until_refused()
        usual_s = discovery.LOOK_S
        monkeypatch.setattr(discovery, "LOOK_S", 4)
        with pytest.raises(MissingBlocksError, match=r"only of .*theirs"):
            await find_swarm("third", "c" * 32, look_on_s=0, interfaces=LOOPBACK)
        monkeypatch.setattr(discovery, "LOOK_S", usual_s)
        await second.end()
        assert await find_any_swarm(interfaces=LOOPBACK) == (maddr,)


async def test_swarms_of_machines_disturb_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for a model skip them, and searches for machines skip models."""
    monkeypatch.setattr(discovery, "LOOK_S", 1.5)
    member = Identity.generate().peer_id
    machines = LanAnnouncement(member, ADDRS, model="machines of a", fingerprint=member, machines=True)
    async with machines, announcement() as model:
        machines.start(LOOPBACK)
        await machines.announced()
        with pytest.raises(MissingBlocksError, match="but machines of a, which `swarmllm up` joins: name peers"):
            await find_swarm("third", "c" * 32, look_on_s=0, interfaces=LOOPBACK)
        with pytest.raises(MissingBlocksError, match="no swarm was found"):
            await find_any_swarm(interfaces=LOOPBACK)
        model.start(LOOPBACK)
        await model.announced()
        (maddr,) = await find_any_swarm(interfaces=LOOPBACK)
        assert FIRST in maddr
        (found,) = await find_machines(interfaces=LOOPBACK)
        assert (found.peer_id, found.fingerprint, found.machines) == (member, member, True)


async def test_a_swarm_that_begins_later_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 0.05)
    finding = asyncio.create_task(find_swarm("ours", OURS, interfaces=LOOPBACK))
    while "because one may be starting" not in caplog.text:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)
    async with announcement() as first:
        first.start(LOOPBACK)
        (maddr,) = await finding
    assert FIRST in maddr
    assert "no swarm of ours" in caplog.text


async def test_looks_that_are_repeated_are_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_nobody(*_: Any, **__: Any) -> list[Any]:
        return []

    monkeypatch.setattr(discovery, "find_peers", find_nobody)
    caplog.set_level("INFO", "swarmllm")
    for _ in range(3):
        with pytest.raises(MissingBlocksError):
            await find_swarm("some/model", "repeated", look_on_s=0.0)
    assert sum("looking for a swarm of some/model" in message for message in caplog.messages) == 1


async def test_nonsense_of_others_is_skipped(service: str) -> None:
    from zeroconf import IPVersion
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

    good = Identity.generate().peer_id
    bad = {
        "nobody": {"fingerprint": OURS, "model": "m"},  # no peer id
        Identity.generate().peer_id: {"model": "m"},
        Identity.generate().peer_id + ".x": {"fingerprint": "../../etc", "model": "m"},
        good: {"fingerprint": OURS, "model": b"\x1b[2J\xff"},
    }
    network = AsyncZeroconf(interfaces=LOOPBACK, ip_version=IPVersion.V4Only)
    try:
        for name, properties in bad.items():
            info = AsyncServiceInfo(
                service,
                f"{name}.{service}",
                port=4000,
                properties=properties,
                server="x.local.",
                addresses=[socket.inet_aton(f"192.0.2.{i}") for i in range(1, 10)],
            )
            await (await network.async_register_service(info, cooperating_responders=True))
        (peer,) = await find_peers(lambda _: False, timeout_s=4, interfaces=LOOPBACK)
    finally:
        await network.async_close()
    assert peer.peer_id == good
    assert peer.model.isprintable()
    assert len(peer.maddrs) <= MAX_ADDRESSES


async def test_a_peer_of_this_machine_alone_announces_nothing() -> None:
    async with LanAnnouncement(Identity.generate().peer_id, ADDRS[:1], model="m", fingerprint=OURS) as alone:
        alone.start(LOOPBACK)
        assert alone._task is None


@pytest.mark.parametrize(
    ("addrs", "expected"),
    [
        (ADDRS, (("192.0.2.7",), 4000)),
        (["/ip4/0.0.0.0/tcp/1", "/ip6/::1/tcp/1", "/ip4/10.0.0.1/udp/1", "/ip4/x/tcp/1", "/dns/a/tcp/1"], ((), 0)),
        (["/ip4/10.0.0.1/tcp/1/p2p/x", "/ip4/10.0.0.1/tcp/1"], (("10.0.0.1",), 1)),
    ],
)
def test_addresses_for_others(addrs: list[str], expected: tuple[tuple[str, ...], int]) -> None:
    assert lan_addresses(addrs) == expected


# Two machines


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


@pytest.fixture
def two_machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them and no way out."""
    names = (f"swarmllm-a-{os.getpid()}", f"swarmllm-b-{os.getpid()}")
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
            ends = [f"swl{os.getpid()}a", f"swl{os.getpid()}b"]
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
                ip("link", "set", end, "netns", name)
                for args in (  # libp2p tells nobody of addresses that are neither public nor of home networks
                    ("addr", "add", f"192.168.77.{number}/24", "dev", end),
                    ("link", "set", end, "up"),
                    ("link", "set", "lo", "up"),
                ):
                    ip("-n", name, *args)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
        yield names


@contextlib.contextmanager
def running(machine: str, *args: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """A command on that machine; stopped as by Ctrl-C at the end."""
    with log.open("w") as file:
        process = subprocess.Popen(
            ["ip", "netns", "exec", machine, sys.executable, "-m", "swarmllm", *args],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until_joinable(process: subprocess.Popen[str], log: Path) -> list[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if match := JOIN.match(line.rstrip("\n")):
            return match[1].split()
    raise AssertionError(log.read_text())


def until_announced(log: Path) -> None:
    while "others on this network find the swarm" not in log.read_text():
        pass


@pytest.mark.slow
def test_two_machines_find_each_other_without_addresses(two_machines: tuple[str, str], tmp_path: Path) -> None:
    model = embedded_model_path()
    serve = ["server", "--model", model, "--num_threads", "1"]
    first_log, second_log = tmp_path / "first", tmp_path / "second"
    with (  # at the same time
        running(two_machines[0], *serve, "--block_indices", "0:4", "--new_swarm", log=first_log) as first,
        running(two_machines[1], *serve, "--block_indices", "4:8", log=second_log) as second,
    ):

        def at_second(*args: str) -> subprocess.CompletedProcess[str]:
            command = ["ip", "netns", "exec", two_machines[1], sys.executable, "-m", "swarmllm", *args]
            return subprocess.run(command, capture_output=True, text=True)

        early = at_second("generate", "--model", model, "--max_new_tokens", "5", "Once upon a time")
        assert early.returncode == 0, early.stderr
        until_joinable(first, first_log)
        until_joinable(second, second_log)
        until_announced(first_log)

        status = at_second("status", "--json")
        assert status.returncode == 0, status.stderr
        (swarm,) = json.loads(status.stdout)["models"]
        logs = first_log.read_text() + second_log.read_text() + status.stderr
        assert swarm["missing_blocks"] == [], logs
        assert len(swarm["servers"]) == 2, logs
        story = at_second("generate", "--model", model, "--max_new_tokens", "5", "Once upon a time")
        assert story.returncode == 0, story.stderr
        assert story.stdout.startswith("Once upon a time")
        assert "looking for a swarm" in story.stderr
        off = at_second("status", "--no_lan_discovery")
        assert off.returncode == 2


@pytest.mark.slow
def test_machines_that_start_at_once_are_one_swarm(
    two_machines: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find nobody, and found a swarm. Then one gives way, and becomes a member of the other one."""
    with contextlib.ExitStack() as stack:
        processes = []
        for number, machine in enumerate(two_machines):
            monkeypatch.setenv("SWARMLLM_STATE_DIR", str(tmp_path / str(number)))
            processes.append(
                stack.enter_context(running(machine, "up", "--public_name", f"m{number}", log=tmp_path / machine))
            )
        pages = [page_of(one) for one in processes]
        assert [page.partition("#")[0] for page in pages] == [f"http://192.168.77.{number}:8080/" for number in (1, 2)]
        first, second = ((tmp_path / str(number) / "swarm.key").read_bytes() for number in (0, 1))
        assert first == second
        show = ["ip", "netns", "exec", two_machines[1], sys.executable, "-m", "swarmllm", "use"]
        seen = ""
        while "m0" not in seen:
            seen = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        assert "m1" in seen


def page_of(process: subprocess.Popen[str]) -> str:
    """The address that a machine prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("swarmllm: open "):
            return line.split()[2]
    raise AssertionError("it ended")
