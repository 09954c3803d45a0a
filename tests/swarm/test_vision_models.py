"""Models that see, their blocks on real servers, their towers here."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from swarm_models import OPTIONS
from tests.numerics.tiny_vision_models import inputs_of, tiny_model
from transformers import PreTrainedModel, Qwen3VLForConditionalGeneration

from swarmllm import AutoDistributedModel, AutoDistributedModelForCausalLM, DistributedModelForCausalLM, LocalSwarm
from swarmllm.errors import ConfigurationError, UnsupportedModelError

pytestmark = pytest.mark.rotates(6, whole_file=True)

SPANS = [(0, 1), (1, 3), (3, 4)]


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3"])
def local(request: pytest.FixtureRequest) -> PreTrainedModel:
    """With what is added between blocks and three axes of positions; and with masks of two kinds."""
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def model(local: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp(local.config.model_type)
    local.save_pretrained(directory)
    with (
        LocalSwarm(str(directory), spans=SPANS, **OPTIONS) as swarm,
        AutoDistributedModel.from_pretrained(str(directory), initial_peers=swarm.initial_peers) as model,
    ):
        model.generation_config = copy.deepcopy(local.generation_config)
        yield model


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beams"])
def test_tokens_are_those_of_the_local_model(model: Any, local: PreTrainedModel, options: dict[str, Any]) -> None:
    given = inputs_of(local)
    expected, found = (one.generate(**given, max_new_tokens=12, do_sample=False, **options) for one in (local, model))
    assert found.tolist() == expected.tolist()
    assert isinstance(model, DistributedModelForCausalLM)
    assert isinstance(model, type(local))


def test_gradients_reach_the_tower(model: Any, local: PreTrainedModel) -> None:
    given, grads = inputs_of(local), []
    for one in (local, model):
        one.zero_grad()
        one(**given, labels=given["input_ids"]).loss.backward()
        grads.append({name: part.grad for name, part in one.named_parameters() if part.grad is not None})
    want, got = grads
    assert any("visual" in name or "vision_tower" in name for name in got)
    largest = max(float(grad.norm()) for grad in want.values())
    for name, grad in got.items():
        assert float((grad - want[name]).norm()) <= 1e-4 * float(want[name].norm()) + 1e-6 * largest, name


def test_text_alone_in_a_session(model: Any, local: PreTrainedModel) -> None:
    """Also behind another text with a picture, whose positions must not move those of this one."""
    ids = torch.arange(5, 12)[None]
    want = local.generate(ids, max_new_tokens=8, do_sample=False)
    with model.inference_session(max_length=64) as session:
        begun = model.generate(ids, max_new_tokens=4, do_sample=False)
        with pytest.raises(ConfigurationError, match="inside an inference session, generate\\(\\) takes text alone"):
            model.generate(**inputs_of(local), max_new_tokens=2)
    model.generate(**inputs_of(local), max_new_tokens=2)
    with model.inference_session(max_length=64) as session:
        model.generate(ids, max_new_tokens=4, do_sample=False)
        got = model.generate(begun, max_new_tokens=4, do_sample=False)
        assert session.position == got.shape[1] - 1
    assert got.tolist() == want.tolist()


def turns(
    model: Any, ids: torch.Tensor, in_thread: Callable[[Callable[[], Any]], Any]
) -> tuple[list[int], torch.Tensor]:
    """A text about a picture, and what follows by its cache: two turns of `generate()`, or of a forward."""
    options = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 4}
    given = inputs_of(model)
    first = in_thread(lambda: model.generate(**given, **options))
    whole = torch.cat([first.sequences, ids], dim=1)
    past = in_thread(lambda: copy.deepcopy(first.past_key_values))
    second = in_thread(lambda: model.generate(whole, past_key_values=past, **options))
    begun = in_thread(lambda: torch.no_grad()(model)(**given, use_cache=True))
    logits = in_thread(lambda: torch.no_grad()(model)(input_ids=ids, past_key_values=begun.past_key_values).logits)
    return second.sequences.tolist(), logits


def test_a_text_with_a_picture_goes_on_in_another_thread(model: Any, local: PreTrainedModel) -> None:
    """As with transformers' streamers, for which each turn is written in a thread of its own.

    Other threads have another text behind them, whose positions are others.
    """
    ids = torch.arange(20, 24)[None]
    want, want_logits = turns(local, ids, lambda call: call())

    def alone(call: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    def behind_a_text(call: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model.generate, ids, max_new_tokens=2).result()
            return pool.submit(call).result()

    for in_thread in (alone, behind_a_text):
        got, logits = turns(model, ids, in_thread)
        assert got == want
        torch.testing.assert_close(logits, want_logits, rtol=1e-4, atol=1e-4)


def test_what_is_refused(model: Any, local: PreTrainedModel) -> None:
    given = inputs_of(local)
    with pytest.raises(ConfigurationError, match="embed\\(\\) takes text alone"):
        model.embed(given["input_ids"], pixel_values=given["pixel_values"])
    if isinstance(local, Qwen3VLForConditionalGeneration):
        with pytest.raises(UnsupportedModelError, match="use AutoDistributedModelForImageTextToText"):
            AutoDistributedModelForCausalLM.from_pretrained(model.name_or_path)


def test_own_loops_over_text(model: Any, local: PreTrainedModel) -> None:
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        want = local(input_ids=ids).logits
        with model.inference_session(max_length=32) as session:
            got = model.head(session.step(model.embed(ids)))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
