"""Models that come and go while a gateway runs. Each is opened at its first use, and closed when its last request has
ended."""

import asyncio
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_gateway import DTYPE, RunningGateway, local_swarm, running_gateway, wait_until

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.config import ClientModelConfig
from swarmllm.errors import ConfigurationError
from swarmllm.gateway.engine import model_choice
from swarmllm.gateway.engine.model_choice import ModelChoice
from swarmllm.gateway.engine.offered_model import OfferedModel
from swarmllm.gateway.errors import ApiError

PROMPT = "Once upon a time"
Settings = Callable[[], Awaitable[ClientModelConfig]]


@pytest.fixture(scope="module")
def servers(other: Path) -> Iterator[LocalSwarm]:
    """One server of each model."""
    with local_swarm((0, 8)) as swarm:
        swarm.add_server((0, 6), model=other)
        yield swarm


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    """A gateway that begins without a model."""
    with running_gateway([], model=()) as gateway:
        yield gateway


def settings_for(swarm: LocalSwarm, place: str | Path | None = None) -> Settings:
    async def settings() -> ClientModelConfig:
        return ClientModelConfig(
            model=str(place or embedded_model_path()), initial_peers=swarm.initial_peers, dtype=DTYPE
        )

    return settings


@contextmanager
def offered(gateway: RunningGateway, **settings: Settings) -> Iterator[None]:
    """Within the block these models are offered. At its end they are closed."""
    models = gateway.gateway.models
    for name, one in settings.items():
        gateway.run(models.offer, name, one)
    try:
        yield
    finally:
        for name in settings:
            if name in models:
                gateway.run(models.withdraw, name)
        wait_until(lambda: not models._leaving and not models._dropped, "all models were closed")


def ask(gateway: RunningGateway, model: str | None, max_tokens: int = 8) -> Any:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "model": model}
    return gateway.http.post("/v1/completions", json=body)


def text_of(gateway: RunningGateway, model: str | None, max_tokens: int = 8) -> str:
    answer = ask(gateway, model, max_tokens)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def error_of(gateway: RunningGateway, model: str | None) -> tuple[int, str, str]:
    answer = ask(gateway, model)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


@pytest.fixture(scope="module")
def expected(greedy: Any, tokenizer: Any) -> Callable[[int], str]:
    """The embedded model's text, from this process alone."""
    return lambda max_tokens: greedy(tokenizer(PROMPT).input_ids, max_tokens)


def test_no_model_is_a_normal_state(gateway: RunningGateway) -> None:
    http = gateway.http
    assert http.get("/v1/models").json() == {"object": "list", "data": []}
    assert http.get("/api/tags").json() == http.get("/api/ps").json() == {"models": []}
    assert error_of(gateway, None) == (503, "no_model", model_choice.NO_MODEL)
    assert error_of(gateway, "m") == (
        404,
        "model_not_found",
        f"the model 'm' is not served here; {model_choice.NO_MODEL}",
    )
    health = http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "waiting")
    assert health.json()["reason"] == gateway.swarm()["waiting"] == model_choice.NO_MODEL
    assert http.get("/metrics").status_code == 200
    for path in ("/", "/swarm"):
        assert http.get(path).status_code == 200


def test_a_model_is_opened_once_at_its_first_use(
    gateway: RunningGateway, servers: LocalSwarm, other: Path, expected: Callable[[int], str]
) -> None:
    num_calls, inner = 0, settings_for(servers)

    async def counted() -> ClientModelConfig:
        nonlocal num_calls
        num_calls += 1
        return await inner()

    with offered(gateway, first=counted, second=settings_for(servers, other)):
        assert [one["id"] for one in gateway.http.get("/v1/models").json()["data"]] == ["first", "second"]
        assert [one["model"] for one in gateway.http.get("/api/tags").json()["models"]] == ["first", "second"]
        assert gateway.http.get("/health").json()["status"] == "unopened"
        assert gateway.swarm()["waiting"]
        assert not list(gateway.gateway.models)
        with ThreadPoolExecutor() as at_once:
            texts = set(at_once.map(lambda name: text_of(gateway, name), ["first", None] * 3))
        assert texts == {expected(8)}
        assert num_calls == 1
        (opened,) = gateway.gateway.models
        assert opened.name == "first"
        assert "max_model_len" not in gateway.http.get("/v1/models").json()["data"][1]
        assert gateway.http.get("/v1/models/second").json()["max_model_len"] == 2048  # asking for it opens it
        assert text_of(gateway, "second") != expected(8)
        gateway.wait_until_seen(1)
        assert gateway.swarm()["model"] == "first"
        assert 'swarmllm_swarm_missing_blocks{model="first"} 0.0' in gateway.http.get("/metrics").text
    assert gateway.http.get("/v1/models").json()["data"] == []
    assert 'swarmllm_swarm_missing_blocks{model="first"}' not in gateway.http.get("/metrics").text


def test_an_answer_under_way_goes_on_to_its_end(
    gateway: RunningGateway, servers: LocalSwarm, expected: Callable[[int], str]
) -> None:
    """The model is withdrawn in the middle of it, and another one of the same name comes."""
    models, num_tokens = gateway.gateway.models, 60
    with offered(gateway, m=settings_for(servers)):
        stream = gateway.openai.completions.create(
            model="m", prompt=PROMPT, max_tokens=num_tokens, temperature=0, stream=True
        )
        text = next(stream).choices[0].text
        old = weakref.ref(next(iter(models)))
        gateway.run(models.withdraw, "m")
        assert gateway.gateway.engine.num_under_way == 1
        assert error_of(gateway, "m")[:2] == (404, "model_not_found")
        gateway.run(models.offer, "m", settings_for(servers))
        assert text_of(gateway, "m") == expected(8)
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == expected(num_tokens)
        wait_until(lambda: not models._leaving, "the old client left the swarm")
        assert old() is None  # its weights are free
        assert text_of(gateway, "m") == expected(8)


def test_a_failure_is_told_and_tried_again(
    gateway: RunningGateway, servers: LocalSwarm, expected: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, inner, num_calls = True, settings_for(servers), 0

    async def settings() -> ClientModelConfig:
        nonlocal num_calls
        num_calls += 1
        if broken:
            raise ConfigurationError("its files are gone")
        return await inner()

    monkeypatch.setattr(model_choice, "RETRY_AFTER_S", 1000)
    with offered(gateway, bad=settings, good=settings_for(servers)):
        for _ in range(2):
            told = "bad can't be opened here now: its files are gone"
            assert error_of(gateway, "bad") == (503, "configuration", told)
        assert num_calls == 1
        assert text_of(gateway, "good") == text_of(gateway, None) == expected(8)
        monkeypatch.setattr(model_choice, "RETRY_AFTER_S", 0)
        broken = False
        assert text_of(gateway, "bad") == expected(8)


def test_requests_wait_only_so_long(
    gateway: RunningGateway, servers: LocalSwarm, expected: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile other models answer. Taking the model away ends its opening, and tells those that wait."""
    cancelled: list[bool] = []

    async def never() -> ClientModelConfig:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        raise AssertionError

    with offered(gateway, slow=never, good=settings_for(servers)), ThreadPoolExecutor() as threads:
        waiting = threads.submit(error_of, gateway, "slow")
        wait_until(lambda: gateway.gateway.models.offers[0].opening, "the request waits")
        with monkeypatch.context() as patch:
            patch.setattr(model_choice, "OPENING_S", 0.01)
            assert error_of(gateway, "slow")[:2] == (503, "model_opening")
        assert text_of(gateway, "good") == expected(8)
        gateway.run(gateway.gateway.models.withdraw, "slow")
        assert waiting.result()[:2] == (404, "model_not_found")
        assert cancelled == [True]


def test_a_name_is_offered_once(gateway: RunningGateway, servers: LocalSwarm) -> None:
    with offered(gateway, m=settings_for(servers)), pytest.raises(ConfigurationError, match="'m' is offered already"):
        gateway.run(gateway.gateway.models.offer, "m", settings_for(servers))


@pytest.mark.slow
def test_a_model_whose_client_died_is_opened_anew(
    gateway: RunningGateway, servers: LocalSwarm, expected: Callable[[int], str]
) -> None:
    models = gateway.gateway.models
    with offered(gateway, m=settings_for(servers)):
        before = set(psutil.Process().children(recursive=True))
        assert text_of(gateway, "m") == expected(8)
        (old,) = models
        (daemon,) = [one for one in psutil.Process().children() if one not in before and "p2pd" in one.name()]
        daemon.kill()
        wait_until(lambda: old not in list(models), "the loss was noticed")
        assert text_of(gateway, "m") == expected(8)


class FakeModel(OfferedModel):
    """It notes whether it is closed while it is used."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._uses, self._unused = 0, asyncio.Event()
        self.swarm = SimpleNamespace(swarm=SimpleNamespace(counts=Counter(opened=1)))
        self.num_closed = 0

    def close(self) -> None:
        assert not self._uses
        self.num_closed += 1


async def turns(number: int) -> None:
    """Turns of the event loop."""
    for _ in range(number):
        await asyncio.sleep(0)


class Play:
    """Requests, offers and failures in any order."""

    def __init__(self) -> None:
        self.models = ModelChoice()
        self.opened: list[FakeModel] = []
        self.num_opening = self.most_opening = 0
        self.failing = False
        self.requests: list[tuple[asyncio.Task[None], asyncio.Event]] = []

    def open(self, _config: object, name: str, _max_length: object) -> FakeModel:
        """In place of opening a client."""
        if self.failing:
            raise ConfigurationError("it fails")
        self.opened.append(FakeModel(name))
        return self.opened[-1]

    async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """In place of a thread: some turns of the loop later."""
        self.num_opening += function == self.open
        self.most_opening = max(self.most_opening, self.num_opening)
        try:
            await turns(3)
            return function(*args)
        finally:
            self.num_opening -= function == self.open

    async def settings(self) -> Any:
        await asyncio.sleep(0)

    async def use(self, name: str | None, end: asyncio.Event) -> None:
        with suppress(ApiError):
            async with self.models.using(self.models.any, name) as model:
                await end.wait()
                assert isinstance(model, FakeModel)
                assert not model.num_closed

    async def act(self, action: str, name: str) -> None:
        if action == "offer" and name not in self.models:
            self.models.offer(name, self.settings)
        elif action == "withdraw" and name in self.models:
            self.models.withdraw(name)
        elif action == "lose":
            for model in tuple(self.models):
                if model.name == name:
                    self.models.reopen(model)
        elif action == "use":
            end = asyncio.Event()
            self.requests.append((asyncio.ensure_future(self.use(name if name != "a" else None, end)), end))
        elif action == "end" and self.requests:
            self.requests[0][1].set()
            self.requests.append(self.requests.pop(0))
        elif action == "fail":
            self.failing = not self.failing
        elif action == "wait":
            await turns(20)
        await turns(1)

    async def end(self) -> None:
        for _, end in self.requests:
            end.set()
        for offer in self.models.offers:
            self.models.withdraw(offer.name)
        await asyncio.gather(*(task for task, _ in self.requests))
        await self.models.settle()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "withdraw", "lose", "use", "use", "end", "fail", "wait"]),
        st.sampled_from("abc"),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_no_model_is_closed_while_it_is_used_and_none_is_forgotten(actions: list[tuple[str, str]]) -> None:
    async def play() -> None:
        one, counted = Play(), 0
        patch.setattr(model_choice, "_open", one.open)
        patch.setattr(asyncio, "to_thread", one.in_thread)
        for action in actions:
            await one.act(*action)
            before, counted = counted, one.models.counts()["opened"]
            assert counted >= before  # counts of closed clients stay
        await one.end()
        assert [model.num_closed for model in one.opened] == [1] * len(one.opened)
        assert one.models.counts()["opened"] == len(one.opened)
        assert not one.models._leaving
        assert not one.models._dropped
        assert one.most_opening <= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_choice, "RETRY_AFTER_S", 0)
        asyncio.run(play())
