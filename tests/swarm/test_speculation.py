"""Speculation over real servers: the tokens of the plain way, with several steps under way."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import assert_same_tokens, connected, generate_seeded, prompt, save_llama, wait_until
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.errors import ConfigurationError
from swarmllm.speculation.planner import PLAIN, Plan, Planner

NUM_TOKENS = 24


class FixedPlanner(Planner):
    """Always runs ahead, though loopback would not pay for it."""

    latency_pays = True

    def plan(self, acceptance: Sequence[float], max_tokens: int) -> Plan:
        return Plan(min(2, max_tokens), 4) if max_tokens > 0 else PLAIN

    def right(self) -> float:
        """Guesses that were right, of late."""
        return sum(accepted.right for accepted in self._accepted.values())


@pytest.fixture(scope="module")
def ahead(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    """Its draft model is the model itself: nearly all guesses are right."""
    with connected(llama, swarm.initial_peers, speculation=str(llama)) as model:
        model.speculator.planner = FixedPlanner()
        yield model


@pytest.fixture(scope="module")
def guessing(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    """It guesses from the text, which is mostly wrong."""
    with connected(llama, swarm.initial_peers, speculation="ngram") as model:
        model.speculator.planner = FixedPlanner()
        yield model


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.5}], ids=["greedy", "sampled"])
def test_the_same_tokens(ahead: Any, guessing: Any, local: PreTrainedModel, options: dict[str, Any]) -> None:
    ids = torch.cat([prompt(1, 6), prompt(1, 6), prompt(1, 3)], dim=1)
    for model in (ahead, guessing):
        model.speculator.planner = FixedPlanner()
        assert_same_tokens(model, local, ids, max_new_tokens=NUM_TOKENS, **options)
        assert model.speculator.planner._accepted, "nothing was guessed"
    if not options:
        assert ahead.speculator.planner.right() >= NUM_TOKENS / 2


def test_what_cannot_run_ahead_takes_the_plain_way(ahead: Any, local: PreTrainedModel) -> None:
    ahead.speculator.planner = FixedPlanner()
    assert_same_tokens(ahead, local, prompt(3), max_new_tokens=5)
    assert_same_tokens(ahead, local, prompt(), max_new_tokens=5, num_beams=3)
    assert_same_tokens(ahead, local, prompt(), max_new_tokens=5, num_return_sequences=2, do_sample=True)
    assert_same_tokens(ahead, local, prompt(), max_new_tokens=5, prompt_lookup_num_tokens=3)
    assert not ahead.speculator.planner._accepted


def test_a_conversation_goes_on_in_its_session(ahead: Any, local: PreTrainedModel) -> None:
    with ahead.inference_session(max_length=100) as session:
        first = assert_same_tokens(ahead, local, prompt(), max_new_tokens=NUM_TOKENS)
        assert session.position == first.shape[1] - 1
        longer = torch.cat([first, prompt(1, 4, seed=2)], dim=1)
        assert_same_tokens(ahead, local, longer, max_new_tokens=NUM_TOKENS)
        assert session.num_repairs == 0
        wait_until(lambda: not session._chain._in_flight, "the end of what was under way")


def test_the_session_may_end_with_the_last_token(ahead: Any, local: PreTrainedModel) -> None:
    expected = generate_seeded(local, prompt(), max_new_tokens=NUM_TOKENS)
    with ahead.inference_session(max_length=prompt().shape[1] + NUM_TOKENS - 1):
        assert generate_seeded(ahead, prompt(), max_new_tokens=NUM_TOKENS).tolist() == expected.tolist()


def test_draft_models_must_fit(llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    for wrong in ("no-such-model", str(save_llama(tmp_path / "other", num_blocks=1, vocab_size=64))):
        with pytest.raises(ConfigurationError), connected(llama, swarm.initial_peers, speculation=wrong):
            pass
