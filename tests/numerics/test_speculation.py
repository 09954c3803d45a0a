"""Speculation changes nothing about what is generated: the same tokens, the same scores, the same distribution.

In one process: two spans and a session that takes steps ahead, but computes each when its result is asked for.
"""

import itertools
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_swarm import InProcessRunner, InProcessSession, Route
from safetensors.torch import load_file, save_file
from tests.numerics.tiny_models import VOCABULARY as VOCABULARY_OF_TINY
from tests.numerics.tiny_models import save_tiny, tiny_model
from tests.planners import FixedPlanner
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from swarmllm.client.speculative_generation import (
    _can_guess_again,
    _load_draft_model,
    load_mtp_head,
    wanted_mtp_weights,
)
from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.shell.loading import load_client_shell
from swarmllm.models.shell.remote_cache import RemoteCache
from swarmllm.models.span.loading import load_block_span
from swarmllm.speculation.drafters import MTP_KIND, BestDrafter, ModelDrafter, MtpDrafter, NGramDrafter
from swarmllm.speculation.planner import Plan, Planner
from swarmllm.speculation.sampling_loop import Speculation, kwargs_behind

VOCABULARY = 12


class AheadSession(InProcessSession):
    """Steps ahead, each computed when its result is asked for."""

    def __init__(self, route: Route) -> None:
        super().__init__(route)
        self.under_way: deque[tuple[BlockInputs, int]] = deque()
        self.max_length = 10_000
        self.timings = ((0, 0, 1000), (2, 0, 1000))
        self.step_s = 0.1
        self.most_under_way = self.num_abandoned = 0

    def send(self, inputs: BlockInputs, position: int) -> None:
        end = self.position
        if self.under_way:
            end = self.under_way[-1][1] + self.under_way[-1][0].seq_len
        assert position == end
        self.under_way.append((inputs, position))
        self.most_under_way = max(self.most_under_way, len(self.under_way))

    def receive(self) -> Tensor:
        inputs, position = self.under_way.popleft()
        assert position == self.position
        return self.run_step(inputs)

    def abandon(self) -> None:
        self.num_abandoned += len(self.under_way)
        self.under_way.clear()


class AheadRunner(InProcessRunner):
    """Its sessions take steps ahead."""

    def new_cache_session(self, batch_size: int, max_length: int | None) -> AheadSession:
        return AheadSession(self.route)


class Obsessed(NGramDrafter):
    """Guesses the same token all the time."""

    def begin(self) -> bool:
        return True

    def more(self, count: int) -> list[int]:
        return [5] * count

    def kinds(self, count: int) -> list[tuple[int, float]]:
        return [(0, 0.5)] * count


class Speculating:
    """Stands for the client's mixin."""

    drafter: Any = NGramDrafter
    planner = FixedPlanner()
    session: AheadSession

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        self.session = model_kwargs["past_key_values"].session
        speculation = Speculation(self, "past_key_values", self.session, self.drafter(), self.planner)
        return speculation.write_text(
            input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
        )


def save_sharp_llama(directory: Path, sharpness: float) -> Path:
    """Few tokens and sharp distributions, so that guesses are right often enough."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
        tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_attention_heads=2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(sharpness)
    model.save_pretrained(directory)
    return directory


def client_ahead(directory: Path, mixin: type) -> Any:
    """A client of two spans in this process, whose sessions take steps ahead."""
    checkpoint = open_checkpoint(str(directory))
    spans = [Span(0, 2), Span(2, 4)]
    blocks = [load_block_span(checkpoint, span, dtype=torch.float32, progress=False) for span in spans]
    return load_client_shell(
        checkpoint,
        model_class=LlamaForCausalLM,
        mixin=mixin,
        dtype="auto",
        runner=AheadRunner(list(zip(blocks, spans, strict=True))),
        traits=blocks[0].traits,
        progress=False,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_llama(tmp_path_factory.mktemp("speculation"), 4)


@pytest.fixture(scope="module")
def local(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory).requires_grad_(False)


@pytest.fixture(scope="module")
def ahead(directory: Path) -> Any:
    return client_ahead(directory, Speculating)


def generate(model: Any, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        ids = torch.tensor([[1, 2, 3, 4, 1, 2]])
        return model.generate(ids, **{"max_new_tokens": 32, "do_sample": False, **options})


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "processors": {"do_sample": True, "top_p": 0.8, "repetition_penalty": 1.1, "no_repeat_ngram_size": 4},
    "end": {"eos_token_id": 7, "do_sample": True},
}


def by_head(directory: Path, model: Any, planner: Planner) -> Any:
    """Drafters like the client's: a head of random weights guesses, alone or beside n-grams."""
    checkpoint = open_checkpoint(str(directory))
    head = load_mtp_head(model, wanted_mtp_weights(checkpoint), torch.float32)
    return {
        "alone": lambda: MtpDrafter(lambda: head),
        "beside n-grams": lambda: BestDrafter([NGramDrafter(), MtpDrafter(lambda: head)], planner),
    }


QUICK = [
    ("greedy", NGramDrafter, Plan(2, 3)),
    ("sampled", NGramDrafter, Plan(16, 2)),
    ("sampled", Obsessed, Plan(1, 1)),
    ("processors", NGramDrafter, Plan(1, 8)),
    ("end", Obsessed, Plan(2, 3)),
]
PLANS = [Plan(1, 1), Plan(1, 8), Plan(2, 3), Plan(16, 2)]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=f"{case[0]}-{case[1].__name__}-{case[2]}")
    for case in itertools.product(OPTIONS, (NGramDrafter, Obsessed), PLANS)
]


@pytest.mark.rotates(3)
@pytest.mark.parametrize(("kind", "drafter", "plan"), CASES)
def test_the_same_tokens(ahead: Any, local: PreTrainedModel, kind: str, drafter: type, plan: Plan) -> None:
    ahead.drafter, ahead.planner.fixed = drafter, plan
    expected, generated = generate(local, **OPTIONS[kind]), generate(ahead, **OPTIONS[kind])

    assert generated.tolist() == expected.tolist()
    assert ahead.session.position == generated.shape[1] - 1, "the session has seen what a plain one would have"
    assert not ahead.session.under_way


@pytest.fixture(scope="module")
def with_head(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint with a head beside it, which says of a token mostly that it comes again."""
    copied = Path(shutil.copytree(directory, tmp_path_factory.mktemp("head") / "checkpoint"))
    block = {
        name: tensor for name, tensor in load_file(directory / "model.safetensors").items() if ".layers.3." in name
    }
    head = {name.replace(".3.", ".4."): tensor.clone() for name, tensor in block.items()}
    head |= {f"model.layers.4.{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    head["model.layers.4.eh_proj.weight"] = torch.cat([torch.eye(32), torch.eye(32)], dim=1)
    save_file(head, copied / "mtp.safetensors")
    return copied


@pytest.mark.rotates(3)
@pytest.mark.parametrize(
    "plan", [Plan(1, 1), Plan(1, 8), Plan(2, 3), pytest.param(Plan(16, 2), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("who", ["alone", "beside n-grams"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_the_same_tokens_with_a_head(
    ahead: Any, local: PreTrainedModel, with_head: Path, kind: str, who: str, plan: Plan
) -> None:
    ahead.planner, made = FixedPlanner(plan), []
    new = by_head(with_head, ahead, ahead.planner)[who]
    ahead.drafter = lambda: made.append(new()) or made[-1]
    expected, generated = generate(local, **OPTIONS[kind]), generate(ahead, **OPTIONS[kind])

    assert generated.tolist() == expected.tolist()
    assert ahead.session.position == generated.shape[1] - 1
    assert any(kind <= MTP_KIND for kind in ahead.planner.judged), "the head never guessed"
    if who == "alone":  # however often it was wrong: it knows what a new one would know
        fresh = new()
        with fresh.following(local), torch.no_grad():
            local(generated[:, :-1])
        for tokens in generated[0, :-1].tolist(), generated[0, -1:].tolist():
            fresh.extend(tokens)
        assert fresh.begin()
        assert made[0].begin()
        torch.testing.assert_close(_state(made[0]), _state(fresh), rtol=1e-3, atol=1e-4)


def _state(drafter: MtpDrafter) -> Tensor:
    drafter.more(1)
    return drafter._last_state


@pytest.mark.parametrize("name", ["mamba", "zamba2", "gemma3_text"])
def test_a_small_model_of_any_kind_guesses(name: str) -> None:
    model = tiny_model(name)
    assert _can_guess_again(model)
    drafter = ModelDrafter(model, model.config.vocab_size)
    text: list[int] = []
    for more in ([5, 6, 7, 8, 9, 10, 11], [12], [13, 14]):
        drafter.extend(more)
        text += more
        assert drafter.begin()
        expected = model.generate(torch.tensor([text]), max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert drafter.more(3) == expected[0, len(text) :].tolist()


@pytest.mark.parametrize("name", ["rwkv", "recurrent_gemma"])
def test_a_small_model_that_cannot_be_told_that_it_was_wrong_is_refused(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    with pytest.raises(ConfigurationError, match=r"can't go on from before a wrong guess.*: use another one"):
        _load_draft_model(str(tmp_path), VOCABULARY_OF_TINY, torch.device("cpu"))


def test_inputs_of_later_tokens_are_those_of_one_token_after_the_other(local: PreTrainedModel) -> None:
    given = {"token_type_ids": torch.tensor([[0, 2]]), "position_ids": torch.tensor([[4, 5]])}
    got = kwargs_behind(local, {**given, "attention_mask": torch.tensor([[0, 1]])}, 3)
    assert got["token_type_ids"].tolist() == [[0, 2, 2, 2, 2]]
    assert got["position_ids"].tolist() == [[4, 5, 6, 7, 8]]
    assert got["attention_mask"].tolist() == [[0, 1, 1, 1, 1]]


def test_guesses_do_run_ahead(ahead: Any) -> None:
    ahead.drafter, ahead.planner.fixed = NGramDrafter, Plan(2, 3)
    generate(ahead)
    assert ahead.session.most_under_way == 3
    assert ahead.session.num_abandoned > 0


class Seen(LogitsProcessor, BaseStreamer):
    """Notes what processors and streamers are shown."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.streamed: list[list[int]] = []
        self.ended = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.texts.append(input_ids[0].tolist())
        return scores

    def put(self, value: Tensor) -> None:
        self.streamed.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_processors_and_streamers_see_the_same(ahead: Any, local: PreTrainedModel) -> None:
    ahead.drafter, ahead.planner.fixed = NGramDrafter, Plan(2, 3)
    plain, fast = Seen(), Seen()
    for model, seen in ((local, plain), (ahead, fast)):
        generate(model, logits_processor=LogitsProcessorList([seen]), streamer=seen)
    assert vars(plain) == vars(fast)


def test_scores_and_logits(ahead: Any, local: PreTrainedModel) -> None:
    ahead.drafter, ahead.planner.fixed = NGramDrafter, Plan(2, 3)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": 0.7}
    expected, got = generate(local, **options, do_sample=True), generate(ahead, **options, do_sample=True)
    assert got.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.stack(got.scores), torch.stack(expected.scores), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


class MarkovChain:
    """A "model" whose next token depends on the last one by a table: quick, and its distribution is known exactly."""

    config = LlamaConfig(num_hidden_layers=1)

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def get_decoder(self) -> "MarkovChain":
        return self

    def forward(self, input_ids: Tensor, past_key_values: RemoteCache, **_: Any) -> CausalLMOutputWithPast:
        inputs = BlockInputs(hidden_states=input_ids[..., None], batch_size=1, seq_len=input_ids.shape[1])
        last = past_key_values.session.run_step(inputs)[..., 0]
        return CausalLMOutputWithPast(logits=self.table[last], past_key_values=past_key_values)

    __call__ = forward

    def _prefill(self, input_ids: Tensor, _: Any, kwargs: dict[str, Any], **__: Any) -> CausalLMOutputWithPast:
        return self.forward(input_ids, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int, **kwargs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids[:, -next_sequence_length:], **kwargs}

    def _update_model_kwargs_for_generation(self, _: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs


class EchoSession(AheadSession):
    """Its blocks change nothing."""

    def __init__(self) -> None:
        super().__init__([])
        self.length = 0

    @property
    def position(self) -> int:
        return self.length

    @position.setter
    def position(self, value: int) -> None:
        self.length = value

    def run_step(self, inputs: BlockInputs, part: Any = None) -> Tensor:
        self.length += inputs.seq_len
        return inputs.hidden_states


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("drafter", [NGramDrafter, Obsessed])
def test_samples_follow_the_distribution(drafter: type) -> None:
    """Chi-square of the transitions in 24 000 sampled tokens against the table that they were drawn from."""
    num_texts, num_tokens = 40, 600
    table = 0.7 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))
    planner, seen = FixedPlanner(Plan(2, 2)), torch.zeros(VOCABULARY, VOCABULARY)
    config = GenerationConfig(do_sample=True, max_length=num_tokens + 1)
    stop = StoppingCriteriaList([MaxLengthCriteria(num_tokens + 1)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2026)
        for first in range(num_texts):
            session = EchoSession()
            speculation = Speculation(MarkovChain(table), "past_key_values", session, drafter(), planner)
            cache = RemoteCache(MarkovChain.config, session, 1)
            prompt = torch.tensor([[first % VOCABULARY]])
            text = speculation.write_text(
                prompt, LogitsProcessorList(), stop, config, None, {"past_key_values": cache}
            )[0]
            assert len(text) == num_tokens + 1
            seen.index_put_((text[:-1], text[1:]), torch.tensor(1.0), accumulate=True)
    expected = seen.sum(1, keepdim=True) * torch.softmax(table, dim=-1)
    assert expected.min() > 5, "cells must not be too rare for the test"
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = VOCABULARY * (VOCABULARY - 1)
    # Wilson and Hilferty 1931: the cube root of chi-square over its degrees of freedom is nearly normal.
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert planner.right.total() > 0, "no guess was ever right"
    assert abs(deviation) < 3.3, f"chi-square {statistic:.1f} with {freedom} degrees of freedom: one in a thousand"
