"""Speculation over real servers: the tokens of the plain way, with several steps under way."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import (
    TIMEOUT_S,
    assert_same_tokens,
    connected,
    generate_seeded,
    prompt,
    save_head_beside,
    save_llama,
    wait_until,
)
from tests.planners import FixedPlanner, NotedPlanner
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.client import speculative_generation
from swarmllm.errors import ConfigurationError
from swarmllm.speculation.drafters import MTP_KIND
from swarmllm.speculation.sampling_loop import Speculation

pytestmark = pytest.mark.rotates(3, whole_file=True)

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def ahead(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    """Its draft model is the model itself: nearly all guesses are right."""
    with connected(llama, swarm.initial_peers, speculation=str(llama)) as model:
        model.speculator.planner = FixedPlanner()
        yield model


def test_on_a_local_network_transformers_own_loop_writes_all_texts_but_those_that_measure(
    llama: Path, local: PreTrainedModel, swarm: LocalSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: list[int] = []
    run = Speculation.write_text

    def noted(speculation: Speculation, *args: Any) -> Any:
        ours.append(number)
        return run(speculation, *args)

    monkeypatch.setattr(Speculation, "write_text", noted)
    monkeypatch.setattr(speculative_generation, "LOOK_TEXTS", 4)
    monkeypatch.setattr(speculative_generation, "AUTO_LATENCY_S", 60.0)  # what is near, however busy this machine is
    ids = prompt()
    expected = generate_seeded(local, ids, max_new_tokens=6)
    with connected(llama, swarm.initial_peers) as model:
        for number in range(9):  # noqa: B007 - `noted` reads it
            assert generate_seeded(model, ids, max_new_tokens=6).tolist() == expected.tolist()
    assert ours == [0, 4, 8]


@pytest.fixture(scope="module")
def guessing(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    """It guesses from the text, which is mostly wrong."""
    with connected(llama, swarm.initial_peers, speculation="ngram") as model:
        model.speculator.planner = FixedPlanner()
        yield model


@pytest.fixture(scope="module")
def with_head(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head_beside(llama, tmp_path_factory.mktemp("head") / "checkpoint")


@pytest.fixture(scope="module")
def by_head(with_head: Path, swarm: LocalSwarm) -> Iterator[Any]:
    """Its checkpoint has a head for multi-token prediction; the servers' has none."""
    with connected(with_head, swarm.initial_peers, speculation="mtp") as model:
        model.speculator.planner = FixedPlanner()
        yield model


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.5}], ids=["greedy", "sampled"])
def test_the_same_tokens(
    ahead: Any, guessing: Any, by_head: Any, local: PreTrainedModel, options: dict[str, Any]
) -> None:
    ids = torch.cat([prompt(1, 6), prompt(1, 6), prompt(1, 3)], dim=1)
    for model in (ahead, guessing, by_head):
        model.speculator.planner = FixedPlanner()
        assert_same_tokens(model, local, ids, max_new_tokens=NUM_TOKENS, **options)
        assert model.speculator.planner.judged, "nothing was guessed"
    if not options:
        assert ahead.speculator.planner.right.total() >= NUM_TOKENS / 2


def test_what_cannot_run_ahead_takes_the_plain_way(ahead: Any, local: PreTrainedModel) -> None:
    ahead.speculator.planner = FixedPlanner()
    assert_same_tokens(ahead, local, prompt(3), max_new_tokens=5)
    assert_same_tokens(ahead, local, prompt(), max_new_tokens=5, num_beams=3)
    assert_same_tokens(ahead, local, prompt(), max_new_tokens=5, num_return_sequences=2, do_sample=True)
    assert_same_tokens(ahead, local, prompt(), max_new_tokens=5, prompt_lookup_num_tokens=3)
    assert not ahead.speculator.planner.judged


def test_a_conversation_goes_on_in_its_session(ahead: Any, by_head: Any, local: PreTrainedModel) -> None:
    for model in (ahead, by_head):  # a head sees only what is new of the second text
        with model.inference_session(max_length=100) as session:
            first = assert_same_tokens(model, local, prompt(), max_new_tokens=NUM_TOKENS)
            assert session.position == first.shape[1] - 1
            longer = torch.cat([first, prompt(1, 4, seed=2)], dim=1)
            assert_same_tokens(model, local, longer, max_new_tokens=NUM_TOKENS)
            assert session.num_repairs == 0
            wait_until(lambda session=session: session.num_under_way == 0, "the end of what was under way")


def test_a_kept_cache_goes_on_with_the_whole_text_or_with_its_new_tokens_alone(
    ahead: Any, by_head: Any, local: PreTrainedModel
) -> None:
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    for model in (local, ahead, by_head):
        begun = model.generate(prompt(), **options)
        new = torch.cat([begun.sequences[:, -1:], prompt(1, 4, seed=2)], dim=1)
        given = {"attention_mask": torch.ones(1, begun.sequences.shape[1] + 4, dtype=torch.long)}
        text = torch.cat([begun.sequences, prompt(1, 4, seed=2)], dim=1)
        kept = copy.deepcopy(begun.past_key_values)
        whole = model.generate(text, **options, past_key_values=kept)
        alone = model.generate(new, **given, **options, past_key_values=begun.past_key_values)
        if model is local:
            expected = whole.sequences.tolist(), alone.sequences.tolist(), kept.get_seq_length()
        assert (whole.sequences.tolist(), alone.sequences.tolist(), kept.get_seq_length()) == expected
        assert alone.past_key_values.get_seq_length() == kept.get_seq_length()


def test_a_far_swarm_has_the_head_guess_by_itself(with_head: Path, swarm: LocalSwarm, local: PreTrainedModel) -> None:
    with connected(with_head, swarm.initial_peers) as model:
        model.speculator.planner = near = NotedPlanner(min_latency_s=TIMEOUT_S)
        assert_same_tokens(model, local, prompt(), max_new_tokens=NUM_TOKENS)
        assert not any(kind <= MTP_KIND for kind in near.judged), "it is near, so far"
        model.speculator.planner = planner = FixedPlanner()
        planner.saw_verdict(MTP_KIND, 30, 0)
        assert_same_tokens(model, local, prompt(), max_new_tokens=NUM_TOKENS)
        assert planner.judged[MTP_KIND] > 30, "the head was asked"


def test_a_text_may_have_other_threads_beside_it(by_head: Any, local: PreTrainedModel) -> None:
    by_head.speculator.planner = FixedPlanner()
    prompts = [prompt(seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        generated = list(threads.map(lambda ids: by_head.generate(ids, max_new_tokens=8, do_sample=False), prompts))
    for ids, tokens in zip(prompts, generated, strict=True):
        assert tokens.tolist() == local.generate(ids, max_new_tokens=8, do_sample=False).tolist()


def test_the_session_may_end_with_the_last_token(ahead: Any, local: PreTrainedModel) -> None:
    expected = generate_seeded(local, prompt(), max_new_tokens=NUM_TOKENS)
    with ahead.inference_session(max_length=prompt().shape[1] + NUM_TOKENS - 1):
        assert generate_seeded(ahead, prompt(), max_new_tokens=NUM_TOKENS).tolist() == expected.tolist()


def test_a_head_that_is_not_there_is_refused(llama: Path, swarm: LocalSwarm) -> None:
    with (
        pytest.raises(ConfigurationError, match="has no head for multi-token prediction: use"),
        connected(llama, swarm.initial_peers, speculation="mtp"),
    ):
        pass


def test_draft_models_must_fit(llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    for wrong in ("no-such-model", str(save_llama(tmp_path / "other", num_blocks=1, vocab_size=64))):
        with pytest.raises(ConfigurationError), connected(llama, swarm.initial_peers, speculation=wrong):
            pass
