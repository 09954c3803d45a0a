"""The embedded model makes sense: held-out perplexity as recorded, stories with one hero, answers to what was asked.

All of it in full precision and in the 8 bits that servers keep weights in by default.
"""

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from swarmllm.demo.local_swarm import embedded_heldout_texts, embedded_model_path
from swarmllm.models.quantization import Quantization
from swarmllm.models.quantization.loading import LoadingConfig
from swarmllm.network.wire.compression import compress

EXAMPLE = Path(__file__).parents[2] / "examples" / "embedded_model"

MAX_PERPLEXITY = 1.52  # docs/embedded-model.md records the measured one
PROMPTS = ["Once upon a time", "One morning, Mia", "The little fox", "Once upon a time, there was a clever owl"]
STORY_TOKENS = 200
LEAST = {  # of docs/embedded-model.md, with fewer stories, and room for what another processor rounds otherwise
    "greedy stories: name kept": 0.95,
    "sampled stories: name kept": 0.8,
    "answered facts": 0.88,
    "answered questions about a story": 0.84,
    "lists as they should be": 0.5,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture(scope="module", params=["none", "int8"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    options = {}
    if request.param != "none":
        options["quantization_config"] = LoadingConfig(Quantization(request.param), torch.device("cpu"))
    return AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32, **options).eval()


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLE)
    import score  # type: ignore[import-not-found]

    return score


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
    loss, num_tokens = 0.0, 0  # not in float32, in which two sums of so many tokens may be the same
    for text in embedded_heldout_texts():
        ids = tokenizer(text, return_tensors="pt").input_ids
        predicted = ids.shape[1] - 1
        loss += model(input_ids=ids, labels=ids).loss.item() * predicted
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


@pytest.mark.rotates(3)
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


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is the capital of Japan?", "Tokyo"),
        ("What is the opposite of hot?", "cold"),
        ("What colour is grass?", "green"),
        ("How many legs does a spider have?", "eight"),
        ("Which day comes after Monday?", "Tuesday"),
        ("Repeat this list: Zamilo, Tarena, Kobus.", "Zamilo, Tarena, Kobus."),
        ("Repeat this list: apple, pear, bun.", "pear, bun."),
        pytest.param(
            *("Repeat this list: apple, pear, bun.", "Apple, pear, bun."),
            marks=pytest.mark.xfail(reason="it knows few words with a capital; see docs/embedded-model.md"),
        ),
    ],
)
def test_chat_model_answers_the_question(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, answer: str
) -> None:
    assert answer.lower() in _answer(model, tokenizer, question).lower()


@pytest.mark.rotates(3)
@pytest.mark.parametrize("name", ["Mia", "Tom", "Zamila", "Koren"])
def test_story_keeps_the_name_of_its_hero(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, score: ModuleType, name: str
) -> None:
    begun = f"Once upon a time, there was a little {'girl' if name.endswith('a') else 'boy'} named {name}"
    text = begun + tokenizer.decode(_continue(model, tokenizer, begun, max_new_tokens=400))
    he = "she" if name.endswith("a") else "he"
    assert all(score.judged(score.Asked(begun, begun, name, he, ""), text).values()), text


def test_chat_turn_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    assert _answer(model, tokenizer, "What is the capital of France?").endswith(".</s>")


@pytest.mark.slow
def test_score_is_as_recorded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, score: ModuleType) -> None:
    found = score.score(score.Model(model, tokenizer), 40)
    shares = {row: [share for name, share in found.items() if name.startswith(row)] for row in LEAST}
    assert all(len(share) == 1 for share in shares.values())
    assert all(share >= least for (share,), least in zip(shares.values(), LEAST.values(), strict=True)), shares
