"""The embedded model writes English: held-out perplexity as recorded, and greedy text that goes somewhere."""

import itertools
import math
import re
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from swarmllm.demo.embedded_model import embedded_heldout_texts, embedded_model_path
from swarmllm.network.wire.compression import compress

MAX_PERPLEXITY = 2.05  # docs/embedded-model.md records the measured one
PROMPTS = ["Once upon a time", "One morning, Mia", "The little fox", "Once upon a time, there was a clever owl"]
STORY_TOKENS = 200


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).eval()


def _continue(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, **options: object) -> list[int]:
    """Ids of the greedy continuation, without the prompt."""
    ids = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**ids, do_sample=False, **options)
    return output[0, ids.input_ids.shape[1] :].tolist()


def _answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def _sentences(text: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if sentence]


def _perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    loss = torch.zeros(())
    num_tokens = 0
    for text in embedded_heldout_texts():
        ids = tokenizer(text, return_tensors="pt").input_ids
        predicted = ids.shape[1] - 1
        loss += model(input_ids=ids, labels=ids).loss * predicted
        num_tokens += predicted
    return math.exp(loss / num_tokens)


@pytest.mark.slow
@torch.no_grad()
def test_held_out_perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    exact = _perplexity(model, tokenizer)
    assert exact < MAX_PERPLEXITY

    # As if each block were on another server, and all hidden states went in 8 bits.
    hooks = [block.register_forward_pre_hook(_in_8_bits) for block in model.get_decoder().layers]
    compressed = _perplexity(model, tokenizer)
    for hook in hooks:
        hook.remove()
    assert compressed != exact
    assert compressed == pytest.approx(exact, rel=0.005)


def _in_8_bits(block: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    packed = compress(args[0])
    assert packed is not None
    return packed.decompress(), *args[1:]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_story_does_not_go_in_circles(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str
) -> None:
    ids = _continue(model, tokenizer, prompt, max_new_tokens=STORY_TOKENS)
    assert len(ids) == STORY_TOKENS or ids[-1] == tokenizer.eos_token_id
    sentences = _sentences(tokenizer.decode(ids, skip_special_tokens=True))
    assert len(sentences) >= 6
    assert len(set(sentences)) >= 0.9 * len(sentences)
    assert all(first != second for first, second in itertools.pairwise(sentences))


@pytest.mark.slow
def test_stories_end_and_another_begins(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Whoever asks for more than a story, as benchmarks do, gets new documents, also beyond the training length."""
    ids = _continue(model, tokenizer, "Once upon a time", max_new_tokens=1200, eos_token_id=None)
    assert len(ids) == 1200
    assert ids.count(tokenizer.eos_token_id) >= 3
    assert ids.count(tokenizer.bos_token_id) >= 2


@pytest.mark.xfail(
    reason="trained too briefly: it answers in sentences, but not the question; see docs/embedded-model.md"
)
@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is the opposite of hot?", "cold"),
        ("Repeat this list: apple, pear, bun.", "Apple, pear, bun."),
    ],
)
def test_chat_model_answers_the_question(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, answer: str
) -> None:
    assert answer.lower() in _answer(model, tokenizer, question).lower()


def test_chat_turn_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    assert _answer(model, tokenizer, "What is the capital of France?").endswith(".</s>")
