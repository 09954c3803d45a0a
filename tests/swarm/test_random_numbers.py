"""Random numbers: after the same seed a client draws as many as the local model, so all that follows is the same.

Texts, losses and the state of torch's generator are compared over any sequence of calls, with each kind of guesses.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from delay_proxies import DelayProxies
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from swarm_models import OPTIONS, connected, load_local, save_head_beside
from tests.numerics.tiny_models import save_tiny
from tests.planners import FixedPlanner, NotedPlanner
from tests.swarm.test_dropout import with_the_same_masks
from tests.swarm.test_peft import tuned
from torch import Tensor
from transformers import DynamicCache

from swarmllm import ClientConfig, LocalSwarm
from swarmllm.client.speculative_generation import Speculator
from swarmllm.models.checkpoint.checkpoint import open_checkpoint

pytestmark = pytest.mark.rotates(6, whole_file=True)

DELAY_MS = 15.0
"""One way; a round trip is more than the 20 ms from which on `auto` guesses."""
NUM_TOKENS = 10
DROPOUT = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", lora_dropout=0.3)


@dataclass
class Pair:
    """The client and the local model, which are told the same."""

    client: Any
    local: Any
    directory: Path
    guessing: Any
    """The distributed model of the client, which may be within one of peft."""

    def guess(self, kind: str, *, always: bool) -> NotedPlanner:
        """From now on the client speculates in this way; with `always`, however near the servers are."""
        kind = str(self.directory) if kind == "model" else kind
        config = ClientConfig(speculation=kind)
        self.guessing.speculator = speculator = Speculator(config, open_checkpoint(str(self.directory)), self.guessing)
        least_s = speculator.planner.min_latency_s
        speculator.planner = planner = FixedPlanner() if always else NotedPlanner(min_latency_s=least_s)
        return planner


@pytest.fixture(scope="module")
def far_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Its embeddings drop out in train mode, on the client's machine; its server is far away."""
    directory = tmp_path_factory.mktemp("gpt2")
    save_tiny("gpt2", directory)
    settings = json.loads((directory / "config.json").read_text())
    rates = {"embd_pdrop": 0.3, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    (directory / "config.json").write_text(json.dumps(settings | rates))
    local = load_local(directory)
    with (
        DelayProxies() as proxies,
        LocalSwarm(directory, num_servers=1, **OPTIONS, **proxies.in_front_of_new_server(DELAY_MS)) as swarm,
        connected(directory, swarm.initial_peers) as client,
    ):
        yield Pair(client, local, directory, client)


@pytest.fixture(scope="module")
def near_llama(llama: Path, swarm: LocalSwarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Adapters inside its blocks drop out in train mode; it has a head for multi-token prediction."""
    directory = save_head_beside(llama, tmp_path_factory.mktemp("head") / "checkpoint")
    local = with_the_same_masks(tuned(load_local(llama), DROPOUT))
    with connected(directory, swarm.initial_peers) as client:
        yield Pair(tuned(client, DROPOUT), local, directory, client)


def repetitive(length: int, seed: int, rows: int = 1) -> Tensor:
    """Token ids `[rows, length]` of a text that repeats itself, so that there is something to guess from."""
    some = torch.randint(3, 90, (rows, 4), generator=torch.Generator().manual_seed(seed))
    return some.repeat(1, -(-length // 4))[:, :length]


Call = Callable[[Any], Any]
"""One call, of the client or of the local model; returns something to compare."""
TEXT: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "pad_token_id": 0, "eos_token_id": None}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": True, "num_beams": 2},
}


def a_text(data: st.DataObject) -> Call:
    rows = data.draw(st.sampled_from([1, 1, 2]), "rows")
    ids = repetitive(data.draw(st.integers(1, 14), "length"), data.draw(st.integers(0, 9), "text"), rows)
    options = TEXT | WAYS[data.draw(st.sampled_from(["greedy", "sampled", "sampled", "several", "beams"]), "way")]
    return lambda model: model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options).tolist()


def a_conversation(data: st.DataObject, *, may_switch: bool) -> Call:
    """Each turn goes on where the one before has ended: in a session, or locally on its cache. Between two of them
    something else is computed. `may_switch`: turns may differ in whether the model is in train mode.
    """
    training = data.draw(st.booleans(), "train")
    turn = st.tuples(st.integers(0, 9), st.booleans(), st.booleans() if may_switch else st.just(training))
    turns, between = data.draw(st.lists(turn, min_size=2, max_size=3), "turns"), a_loss(data)

    def talk(model: Any) -> Any:
        base = getattr(model, "get_base_model", lambda: model)()
        is_client = hasattr(base, "inference_session")
        given = {} if is_client else {"past_key_values": DynamicCache()}
        ids, losses = torch.empty(1, 0, dtype=torch.long), []
        with base.inference_session(max_length=64) if is_client else nullcontext():
            for seed, sampled, training in turns:
                ids = torch.cat([ids, repetitive(5, seed)], dim=1)
                ids = model.train(training).generate(input_ids=ids, do_sample=sampled, **TEXT, **given)
                losses.append(between(model.train(not training)))
        return ids.tolist(), losses

    return talk


def a_loss(data: st.DataObject) -> Call:
    ids = repetitive(9, data.draw(st.integers(0, 9), "text"))
    return lambda model: round(model(input_ids=ids, labels=ids, use_cache=False).loss.item(), 4)


def a_mode(data: st.DataObject) -> Call:
    training = data.draw(st.booleans(), "train")
    return lambda model: model.train(training) and None


def noise(data: st.DataObject) -> Call:
    """A hook on the embeddings, as NEFTune's, for one text."""
    text = a_text(data)

    def call(model: Any) -> Any:
        hook = lambda _, __, output: output + 0.5 * torch.rand_like(output)  # noqa: E731
        handle = model.get_input_embeddings().register_forward_hook(hook)
        try:
            return text(model)
        finally:
            handle.remove()

    return call


def compare(pair: Pair, data: st.DataObject) -> None:
    conversation = partial(a_conversation, may_switch=pair.client is pair.guessing)
    kinds = st.sampled_from([a_text, a_text, a_text, conversation, a_loss, a_mode, a_mode, noise])
    calls = [data.draw(kinds, "call")(data) for _ in range(data.draw(st.integers(1, 4), "calls"))]
    training, found = data.draw(st.booleans(), "train"), []
    for model in (pair.client, pair.local):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model.train(training)
            found.append(([call(model) for call in calls], torch.rand(1).item()))
    assert found[0] == found[1]


def any_order(num_examples: int) -> settings:
    """Each example takes about a second, so none is looked for that is simpler."""
    return settings(
        max_examples=num_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )


KINDS = [pytest.param("model", marks=pytest.mark.slow), "ngram"]


@pytest.mark.parametrize("kind", ["auto", *KINDS])
@any_order(5)
@given(data=st.data())
def test_far_away(far_gpt2: Pair, kind: str, data: st.DataObject) -> None:
    """Dropout of what is on the client's machine."""
    far_gpt2.guess(kind, always=False)
    compare(far_gpt2, data)


@pytest.mark.parametrize("kind", ["mtp", *KINDS])
@any_order(5)
@given(data=st.data())
def test_always_ahead(near_llama: Pair, kind: str, data: st.DataObject) -> None:
    """Dropout of adapters inside remote blocks, whose seeds the client draws."""
    near_llama.guess(kind, always=True)
    compare(near_llama, data)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["auto", "ngram", "model", "mtp"])
@any_order(60)
@given(data=st.data())
def test_many_orders(far_gpt2: Pair, near_llama: Pair, kind: str, data: st.DataObject) -> None:
    far = kind != "mtp" and data.draw(st.booleans(), "far")
    pair = far_gpt2 if far else near_llama
    pair.guess(kind, always=not far)
    compare(pair, data)


def test_guesses_were_sent(far_gpt2: Pair, near_llama: Pair) -> None:
    """The control: in eval mode, and without hooks, these clients do guess."""
    for pair, kind in ((far_gpt2, "auto"), (near_llama, "ngram")):
        planner = pair.guess(kind, always=pair is near_llama)
        for model in (pair.client, pair.local):
            model.eval()
        ids, options = repetitive(12, 3), {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        texts = [model.generate(input_ids=ids, **options).tolist() for model in (pair.client, pair.local)]
        assert texts[0] == texts[1]
        assert planner.judged, "nothing was guessed"
