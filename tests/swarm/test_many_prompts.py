"""Many prompts at once get what each of them gets alone, whatever happens to the others."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from swarm_models import generate_seeded, prompt
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

from swarmllm.errors import ConfigurationError

pytestmark = pytest.mark.rotates(6, whole_file=True)

LENGTHS = (5, 1, 12, 3, 65, 7, 2, 30, 9)


def prompts() -> list[Tensor]:
    return [prompt(1, length, seed=length) for length in LENGTHS]


@pytest.mark.parametrize("at_once", [1, 3, 16])
def test_as_one_by_one(model: Any, local: PreTrainedModel, at_once: int) -> None:
    expected = [generate_seeded(local, ids, max_new_tokens=6).tolist() for ids in prompts()]
    found = dict(model.generate_many(prompts(), at_once=at_once, max_new_tokens=6, do_sample=False))
    assert [found[index].tolist() for index in range(len(LENGTHS))] == expected


def test_each_ends_for_itself(model: Any) -> None:
    """The short ones come first, and prompts are taken as there is room."""
    taken, given = [], [4, 40, 4, 4]

    def lazily() -> Any:
        for index, length in enumerate(given):
            taken.append(index)
            yield prompt(1, length)[0].tolist()

    class AtLength(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            return torch.full((1,), input_ids.shape[1] in (6, 70))

    results = model.generate_many(
        lazily(), at_once=2, max_new_tokens=60, do_sample=False, stopping_criteria=[AtLength()]
    )
    assert taken == []
    order = [(index, output.shape[1]) for index, output in results]
    assert sorted(order) == [(0, 6), (1, 70), (2, 6), (3, 6)]
    assert order[-1] == (1, 70)
    assert taken == [0, 1, 2, 3]


def test_one_that_fails(model: Any, local: PreTrainedModel) -> None:
    bad = torch.tensor([[10_000_000]])
    given = [prompt(1, 4), bad, prompt(1, 6)]
    found = dict(model.generate_many(given, max_new_tokens=3, do_sample=False, return_exceptions=True))
    assert isinstance(found[1], IndexError)
    for index in (0, 2):
        assert found[index].tolist() == generate_seeded(local, given[index], max_new_tokens=3).tolist()
    with pytest.raises(IndexError):
        list(model.generate_many(given, max_new_tokens=3, do_sample=False))


def test_nobody_wants_the_rest(model: Any) -> None:
    results = model.generate_many([prompt(1, 4)] * 5, at_once=2, max_new_tokens=200, do_sample=False)
    first = model.generate_many([prompt(1, 4)], max_new_tokens=1)
    next(first)
    results.close()
    first.close()
    results = model.generate_many([prompt(1, 4), prompt(1, 5)], at_once=2, max_new_tokens=3, do_sample=False)
    next(results)
    results.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("swarmllm-many")]


def test_submitted(model: Any, local: PreTrainedModel) -> None:
    futures = [model.submit(ids, max_new_tokens=6, do_sample=False) for ids in prompts()]
    assert all(isinstance(future, Future) for future in futures)
    for ids, future in zip(prompts(), futures, strict=True):
        assert future.result(timeout=60).tolist() == generate_seeded(local, ids, max_new_tokens=6).tolist()
    with model.inference_session(max_length=64) as session:
        beside = model.submit(prompt(1, 9), max_new_tokens=3, do_sample=False)
        beside.result(timeout=60)
        assert session.position == 0, "a submitted text has its own session"


@pytest.mark.parametrize("wrong", ["text", [], [[1], [2]], torch.zeros(1, 3), None])
def test_prompts_that_are_none(model: Any, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be token ids"):
        model.submit(wrong)
    with pytest.raises(ConfigurationError, match="must be token ids"):
        list(model.generate_many([wrong]))
    with pytest.raises(ConfigurationError, match="at_once"):
        model.generate_many([], at_once=0)


def test_none_at_all(model: Any) -> None:
    assert list(model.generate_many([], progress=True)) == []
