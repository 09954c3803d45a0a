"""Several threads and tasks with one model: each has its own session, and closing ends all of them in one way."""

import asyncio
import copy
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import OPTIONS, assert_same_tokens, connected, generate_seeded, prompt
from tiny_models import save_tiny
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.errors import ConfigurationError, SessionClosedError, SwarmError

pytestmark = pytest.mark.rotates(6, whole_file=True)

NEW_TOKENS = 6


def on_a_session(model: Any, ids: Tensor) -> list[int]:
    with model.inference_session(max_length=64) as session:
        first = model.generate(ids, max_new_tokens=NEW_TOKENS - 2, do_sample=False)
        whole = model.generate(first, max_new_tokens=2, do_sample=False)
        assert session.position == whole.shape[1] - 1
        return whole[0].tolist()


def in_one_go(model: Any, ids: Tensor) -> list[int]:
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()


def by_hand(model: Any, ids: Tensor) -> list[int]:
    with model.inference_session(max_length=64) as session, torch.no_grad():
        feed = ids
        for _ in range(NEW_TOKENS):
            feed = model.head(session.step(model.embed(feed)))[:, -1:].argmax(-1)
            ids = torch.cat([ids, feed], dim=1)
        return ids[0].tolist()


def with_the_cache(model: Any, ids: Tensor) -> list[int]:
    feed, cache = ids, None
    for _ in range(NEW_TOKENS):
        output = model(feed, past_key_values=cache)
        feed, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        ids = torch.cat([ids, feed], dim=1)
    return ids[0].tolist()


def without_a_cache(model: Any, ids: Tensor) -> list[int]:
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0].tolist()


WAYS = (on_a_session, in_one_go, by_hand, with_the_cache, without_a_cache)


class Worker(threading.Thread):
    """Writes the same texts over and over, each way that there is, until it is told to stop or an error comes."""

    def __init__(self, model: Any, expected: dict[int, list[int]], seed: int, rounds: int) -> None:
        super().__init__(name=f"worker {seed}")
        self._model, self._expected, self._rounds = model, expected, rounds
        self._random = random.Random(seed)
        self.began = threading.Event()
        self.wrong: list[str] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            for _ in range(self._rounds):
                self.began.set()
                text, write = self._random.choice(list(self._expected)), self._random.choice(WAYS)
                if write(self._model, prompt(seed=text)) != self._expected[text]:
                    self.wrong.append(f"{write.__name__} of text {text}")
        except (RuntimeError, ValueError, OSError, ExceptionGroup, SwarmError) as error:
            self.error = error


@pytest.fixture(scope="module")
def expected(local: PreTrainedModel) -> dict[int, list[int]]:
    return {seed: in_one_go(local, prompt(seed=seed)) for seed in range(4)}


def test_threads_do_not_disturb_each_other(model: Any, expected: dict[int, list[int]]) -> None:
    workers = [Worker(model, expected, seed, rounds=4) for seed in range(5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert not worker.is_alive()
        assert worker.error is None
        assert worker.wrong == []


@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_closing_in_the_midst(llama: Path, swarm: LocalSwarm, expected: dict[int, list[int]], seed: int) -> None:
    """After some moment, whatever the threads are doing then."""
    with connected(llama, swarm.initial_peers) as model:
        workers = [Worker(model, expected, 10 * seed + index, rounds=1000) for index in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            assert worker.began.wait(30)
        moment = random.Random(seed)
        for _ in range(moment.randrange(4)):  # as long as this takes
            in_one_go(model, prompt())
        model.close()
        for worker in workers:
            worker.join(60)
            assert not worker.is_alive()
            assert type(worker.error) is SessionClosedError, worker.error
            assert worker.wrong == []


def test_the_session_of_another_thread_is_left_alone(model: Any, local: PreTrainedModel) -> None:
    with model.inference_session(max_length=64) as session:
        story = assert_same_tokens(model, local, prompt(), max_new_tokens=4)
        thread = threading.Thread(
            target=assert_same_tokens, args=(model, local, prompt(seed=1)), kwargs={"max_length": 14}
        )
        thread.start()
        thread.join()
        assert session.position == story.shape[1] - 1
        assert model.active_cache_session() is session
    assert model.active_cache_session() is None


def test_tasks_have_sessions_of_their_own(model: Any, expected: dict[int, list[int]]) -> None:
    """`to_thread` takes the task's session along."""

    async def write(text: int) -> list[int]:
        with model.inference_session(max_length=64) as session:
            await asyncio.sleep(0)
            assert model.active_cache_session() is session
            whole = await asyncio.to_thread(in_one_go, model, prompt(seed=text))
            assert session.position == len(whole) - 1
            return whole

    async def write_all() -> list[list[int]]:
        return await asyncio.gather(*map(write, expected))

    assert asyncio.run(write_all()) == list(expected.values())


def test_two_texts_at_once_on_one_session_are_refused(model: Any, local: PreTrainedModel) -> None:
    def generate_again(_ids: Tensor, scores: Tensor) -> Tensor:
        with pytest.raises(ConfigurationError, match="for each text"):
            model.generate(prompt(seed=1), max_new_tokens=2)
        return scores

    with model.inference_session(max_length=64):
        text = generate_seeded(model, prompt(), max_new_tokens=4, logits_processor=[generate_again])
        assert text.tolist() == generate_seeded(local, prompt(), max_new_tokens=4).tolist()


@pytest.mark.parametrize("change", [copy.deepcopy, copy.copy])
def test_a_cache_is_of_use_in_any_thread(
    model: Any, expected: dict[int, list[int]], change: Callable[[Any], Any]
) -> None:
    cache = model(prompt()[:, :-1]).past_key_values
    found: list[int] = []

    def go_on() -> None:
        logits = model(prompt()[:, -1:], past_key_values=change(cache)).logits
        found.append(int(logits[0, -1].argmax()))

    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join()
    assert found == [expected[0][prompt().shape[1]]]


def test_what_was_embedded_outside_of_the_session_is_refused_where_its_position_matters(tmp_path: Path) -> None:
    """GPT-2 adds positions to what enters the blocks, Llama doesn't."""
    save_tiny("gpt2", tmp_path)
    with (
        LocalSwarm(tmp_path, num_servers=1, **OPTIONS) as swarm,
        connected(tmp_path, swarm.initial_peers) as model,
        model.inference_session(max_length=32) as session,
    ):
        first, second = prompt(1)[:, :5], prompt(1)[:, 5:7]
        model.eval()
        with torch.no_grad():
            outside = in_a_thread(lambda: model.embed(first))
            assert torch.equal(outside, model.embed(first))
            session.step(outside)
            outside = in_a_thread(lambda: model.embed(second))
            with pytest.raises(ConfigurationError, match="embedded for position 0, but the session stands at 5"):
                session.step(outside)
            positions = torch.tensor([[5, 6]])
            given = in_a_thread(lambda: model.embed(second, position_ids=positions))
            assert torch.equal(given, model.embed(second))
            session.step(given)


def in_a_thread(call: Callable[[], Tensor]) -> Tensor:
    """The result in a thread that knows nothing of this one's sessions."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
