"""The kinds of texts of a chaos run: each is a function that a local model and a distributed one run alike.

Every step calls `progress`, by which `chaos_run` disturbs the text and measures how long it waited. What a function
returns is what has to be the same: tokens, or losses and gradients.
"""

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import peft
import torch
from chaos_plan import Kind
from chaos_swarm import QUANT_TYPE
from tests.swarm.test_dropout import with_the_same_masks
from tests.swarm.test_peft import tuned
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from swarmllm import embedded_model_path
from swarmllm.client.speculative_generation import Speculator
from swarmllm.data_structures import Span
from swarmllm.demo.local_swarm import embedded_heldout_texts
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import QuantizedWeight, resolve_quantization
from swarmllm.models.span.loading import load_block_span

Result = list[Tensor]

MAX_LENGTH = 1600
"""Tokens that a session may have."""


@dataclass
class Progress(StoppingCriteria):
    """Told after each step of a text; never stops it."""

    on_step: Callable[[int], object] = lambda steps: None
    times: list[float] = field(default_factory=list)
    session: Any = None
    """The session of the text, if it opened one itself."""

    def begin(self) -> None:
        self.tick()

    def tick(self) -> None:
        self.times.append(time.monotonic())
        self.on_step(self.steps)

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.tick()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@cache
def _corpus() -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    return torch.cat([tokenizer(text, return_tensors="pt").input_ids for text in embedded_heldout_texts()], dim=1)


@cache
def _draft() -> Any:
    """Guesses well at times: the same model without its upper half."""
    return AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32, num_hidden_layers=4)


def _prompt(choice: random.Random, shortest: int = 8, longest: int = 80) -> Tensor:
    """Token ids `[1, seq]` from somewhere in stories that the model was not trained on."""
    length = choice.randint(shortest, longest)
    start = choice.randrange(_corpus().shape[1] - length)
    return _corpus()[:, start : start + length]


def _repetitive(choice: random.Random) -> Tensor:
    return _prompt(choice, 10, 24).repeat(1, choice.randint(2, 4))


@contextmanager
def _session(model: Any, progress: Progress, batch_size: int = 1) -> Iterator[Any]:
    """A session of the distributed model; the local one has none."""
    if not hasattr(model, "inference_session"):
        yield None
        return
    with model.inference_session(max_length=MAX_LENGTH, batch_size=batch_size) as session:
        progress.session = session
        yield session


def _generate(model: Any, progress: Progress, ids: Tensor, num_tokens: int, **options: Any) -> Tensor:
    progress_ = StoppingCriteriaList([progress])
    settings = {"do_sample": False, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens, **options}
    settings.setdefault("attention_mask", torch.ones_like(ids))
    tokens: Tensor = model.generate(ids, stopping_criteria=progress_, **settings)
    return tokens


def _alone(choice: random.Random, model: Any, progress: Progress, ids: Tensor, num: int, **options: Any) -> Result:
    """One call of generate(), within a session of its own or not."""
    batch_size = ids.shape[0] * options.get("num_beams", 1)
    with _session(model, progress, batch_size) if choice.random() < 0.5 else nullcontext():
        return [_generate(model, progress, ids, num, **options)]


def beam(choice: random.Random, model: Any, progress: Progress) -> Result:
    ids = _prompt(choice)
    return _alone(choice, model, progress, ids, choice.randint(8, 20), num_beams=choice.randint(2, 4))


def chat(choice: random.Random, model: Any, progress: Progress) -> Result:
    ids, turns = _prompt(choice), []
    with _session(model, progress):
        for _ in range(3):
            ids = _generate(model, progress, ids, choice.randint(4, 9))
            turns.append(ids)
            ids = torch.cat([ids, _prompt(choice, 3, 20)], dim=1)
    return turns


@torch.no_grad()
def roll_back(choice: random.Random, model: Any, progress: Progress) -> Result:
    """An own loop of steps, which goes back to an earlier position now and then."""
    ids, seen = _prompt(choice), []
    with _session(model, progress) as session:
        for _ in range(choice.randint(10, 20)):
            if session is None:
                logits = model(ids).logits
            else:
                logits = model.head(session.step(model.embed(ids[:, session.position :])))
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            seen.append(ids)
            progress.tick()
            if choice.random() < 0.3:
                kept = choice.randrange(1, ids.shape[1] - 1)
                ids = torch.cat([ids[:, :kept], _prompt(choice, 1, 6)], dim=1)
                if session is not None:
                    session.position = min(kept, session.position)
    return seen


def assisted(choice: random.Random, model: Any, progress: Progress) -> Result:
    return _alone(choice, model, progress, _prompt(choice), choice.randint(12, 28), assistant_model=_draft())


@contextmanager
def _guessing(model: Any) -> Iterator[None]:
    """Guess as a client with `speculation="ngram"` does. The local model does not."""
    if not hasattr(model, "speculator"):
        yield
        return
    before = model.speculator
    config = replace(model.swarm.config, speculation="ngram")
    model.speculator = Speculator(config, open_checkpoint(model.name_or_path), model)
    try:
        yield
    finally:
        model.speculator = before


def ngram(choice: random.Random, model: Any, progress: Progress) -> Result:
    ids, num_tokens = _repetitive(choice), choice.randint(16, 36)
    with _guessing(model):
        return _alone(choice, model, progress, ids, num_tokens)


def prompt_lookup(choice: random.Random, model: Any, progress: Progress) -> Result:
    guesses = choice.randint(2, 8)
    return _alone(
        choice, model, progress, _repetitive(choice), choice.randint(12, 32), prompt_lookup_num_tokens=guesses
    )


def sampling(choice: random.Random, model: Any, progress: Progress) -> Result:
    ids, num_tokens = _prompt(choice), choice.randint(12, 28)
    options = {"temperature": choice.uniform(0.5, 1.5), "top_k": choice.choice([0, 20]), "top_p": 0.95}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(choice.randrange(1000))
        return _alone(choice, model, progress, ids, num_tokens, do_sample=True, **options)


def guessed_sampling(choice: random.Random, model: Any, progress: Progress) -> Result:
    with _guessing(model):
        return sampling(choice, model, progress)


def dropout(choice: random.Random, model: Any, progress: Progress) -> Result:
    """Each forward draws what an adapter leaves out. A server that takes over must leave out the same."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.3)
    ids, num_tokens = _repetitive(choice), choice.randint(8, 20)
    is_local = not hasattr(model, "speculator")
    adapted = tuned(copy.deepcopy(model) if is_local else model, config)
    if is_local:
        with_the_same_masks(adapted)
    try:
        adapted.train()
        with _guessing(model), torch.random.fork_rng(devices=[]):
            torch.manual_seed(choice.randrange(1000))
            return _alone(choice, adapted.get_base_model(), progress, ids, num_tokens, do_sample=True)
    finally:
        adapted.unload()
        model.eval()


def padded_batch(choice: random.Random, model: Any, progress: Progress) -> Result:
    rows = [_prompt(choice, 3, 70)[0] for _ in range(choice.randint(2, 6))]
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = row
        mask[index, longest - len(row) :] = 1
    return _alone(choice, model, progress, ids, choice.randint(8, 18), attention_mask=mask)


def long_prefill(choice: random.Random, model: Any, progress: Progress) -> Result:
    return _alone(choice, model, progress, _prompt(choice, 300, 900), 5)


def training(choice: random.Random, model: Any, progress: Progress) -> Result:
    """A few steps on a soft prompt of two vectors."""
    embed = model.get_input_embeddings()
    with torch.no_grad():
        soft = embed(_prompt(choice, 2, 2)).clone()
    seen = []
    for _ in range(3):
        ids = _prompt(choice, 8, 40).repeat(choice.randint(1, 6), 1)
        soft.requires_grad_().grad = None
        inputs = torch.cat([soft.expand(ids.shape[0], -1, -1), embed(ids).detach()], dim=1)
        labels = torch.cat([torch.full((ids.shape[0], 2), -100), ids], dim=1)
        loss = model(inputs_embeds=inputs, labels=labels).loss
        progress.tick()
        loss.backward()
        progress.tick()
        seen += [loss.detach(), soft.grad]
        soft = (soft - 0.01 * soft.grad).detach()
    return seen


_WORK: dict[Kind, Callable[[random.Random, Any, Progress], Result]] = {
    Kind.BEAM: beam,
    Kind.CHAT: chat,
    Kind.ROLL_BACK: roll_back,
    Kind.ASSISTED: assisted,
    Kind.NGRAM: ngram,
    Kind.PROMPT_LOOKUP: prompt_lookup,
    Kind.SAMPLING: sampling,
    Kind.PADDED_BATCH: padded_batch,
    Kind.LONG_PREFILL: long_prefill,
    Kind.TRAINING: training,
    Kind.GUESSED_SAMPLING: guessed_sampling,
    Kind.DROPOUT: dropout,
}


def work(model: Any, kind: Kind, variant: int, progress: Progress) -> Result:
    """Generate, or train: the same for the same kind and variant, whose model ever it is."""
    progress.begin()
    return _WORK[kind](random.Random(f"{kind.value} {variant}"), model, progress)


@cache
def _local() -> Any:
    """The local model, with the weights that the servers' stand for."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).requires_grad_(False)
    blocks = model.get_decoder().layers
    checkpoint, quantization = open_checkpoint(str(embedded_model_path())), resolve_quantization(QUANT_TYPE)
    served = load_block_span(
        checkpoint, Span(0, len(blocks)), dtype=torch.float32, quantization=quantization, progress=False
    )
    for name, weight in served.slots.named_modules():
        if isinstance(weight, QuantizedWeight):
            blocks.get_parameter(name).data = weight.dequantize().contiguous()
    return model


@cache
def expected(kind: Kind, variant: int) -> tuple[Result, int]:
    """The text or losses of the local model, and its number of steps."""
    progress = Progress()
    result = work(_local(), kind, variant, progress)
    return result, progress.steps


def same(got: Result, wanted: Result) -> bool:
    """Tokens to the last one, numbers as exactly as float32 sums them in another order."""
    return all(
        torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
        if one.is_floating_point()
        else torch.equal(one, other)
        for one, other in zip(got, wanted, strict=True)
    )
