"""Places at a relay, and bytes that pass."""

import asyncio
from types import SimpleNamespace

import pytest

from swarmllm.network.relay import service as service_module
from swarmllm.network.relay.service import BURST_S, ByteBucket, Caller, Places


def caller(name: str, host: str) -> Caller:
    return Caller(name, host, through_relay=False)


def test_places_of_one_of_a_host_and_of_all() -> None:
    places = Places(of_peer=2, of_host=3, in_all=5)
    taken = [places.take(caller("mallory", "h1")) for _ in range(4)]
    assert taken == [True, True, False, False]
    assert [places.take(caller(f"invented {n}", "h1")) for n in range(3)] == [True, False, False]
    assert [places.take(caller(f"honest {n}", f"h{n}")) for n in range(2, 6)] == [True, True, False, False]
    assert len(places) == 5
    for _ in range(2):
        places.leave(caller("mallory", "h1"))
    assert len(places) == 3
    assert places.take(caller("mallory", "h1"))
    assert len(places._taken) == 1 + 4 + 3  # nothing is kept of those who have left


class Clock:
    """Time that passes only where somebody sleeps, or a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        sleep = asyncio.sleep

        async def pass_time(seconds: float) -> None:
            self.slept.append(seconds)
            self.now += seconds
            await sleep(0)

        fake = SimpleNamespace(
            sleep=pass_time, Lock=asyncio.Lock, get_running_loop=lambda: SimpleNamespace(time=lambda: self.now)
        )
        monkeypatch.setattr(service_module, "asyncio", fake)


async def test_bytes_pass_at_the_rate_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    bucket = ByteBucket(1000.0)
    host = bucket.lock_of("h1")
    await bucket.take(int(1000 * BURST_S), host)
    assert clock.slept == []  # what was quiet before passes at once
    for _ in range(10):
        await bucket.take(500, host)
    assert clock.now == pytest.approx(105.0)
    clock.now += 3600
    await bucket.take(250, host)
    await bucket.take(1000, host)
    assert clock.slept[-1] == pytest.approx(1.0)  # an hour of rest saves up no more than the burst
    assert bucket.num_bytes == 250 + 5000 + 1250


async def test_hosts_take_turns_however_many_wait_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    bucket = ByteBucket(1000.0)
    order: list[str] = []

    async def take(host: str) -> None:
        await bucket.take(1000, bucket.lock_of(host))
        order.append(host)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(50):
            tasks.create_task(take("flood"))
        for _ in range(2):
            tasks.create_task(take("honest"))
    assert order.index("honest") <= 2
    assert [at for at, host in enumerate(order) if host == "honest"][1] <= 4
    assert not bucket._turn_of_host  # forgotten with its last user
