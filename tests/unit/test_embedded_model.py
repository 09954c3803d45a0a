"""The embedded checkpoint as files, and the generator of the texts that it was trained on."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer

from swarmllm.demo.local_swarm import embedded_heldout_texts, embedded_model_path

EXAMPLE = Path(__file__).parents[2] / "examples" / "embedded_model"
MAX_BYTES = 10_500_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(embedded_model_path()) / "tokenizer.json"))


@pytest.fixture
def corpus() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        import corpus  # type: ignore[import-not-found]

        yield corpus


def test_checkpoint_is_complete_and_small() -> None:
    files = {file.name: file.stat().st_size for file in Path(embedded_model_path()).iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "mtp.safetensors", "tokenizer.json"} <= set(
        files
    )
    assert sum(files.values()) <= MAX_BYTES


def test_config_describes_eight_llama_blocks_in_bfloat16() -> None:
    config = json.loads((Path(embedded_model_path()) / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 8
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert all(config[size] % 64 == 0 for size in ("hidden_size", "intermediate_size", "vocab_size"))


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time, there was a little fox.",
        '"Where is it?" asked Mia.\nNobody knew.',
        "Unknown words too: quantization, Łódź, 42 % – naïve 🦊",
        " two  spaces ",
    ],
)
def test_tokenizer_gives_back_every_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id("<s>")
    assert tokenizer.decode(ids) == text


def test_words_of_stories_are_short(tokenizer: Tokenizer) -> None:
    text = "One morning, Mia went to the market and bought three apples."
    assert len(tokenizer.encode(text).ids) < len(text) / 3.5


def test_held_out_texts_are_varied_documents() -> None:
    texts = embedded_heldout_texts()
    assert 40_000 < sum(map(len, texts)) < 80_000
    assert len(set(texts)) == len(texts)
    assert all(text.endswith("</s>") for text in texts)
    assert {text.split()[0] for text in texts} >= {"Once", "User:"}


def test_corpus_is_the_same_for_the_same_seed(corpus: ModuleType) -> None:
    first, again, other = (list(corpus.documents(seed, 30)) for seed in (5, 5, 6))
    assert first == again
    assert not set(first) & set(other)


def test_held_out_texts_come_from_the_corpus(corpus: ModuleType) -> None:
    seed = 99  # train.HELD_OUT_SEED, whose module would import torch
    texts = embedded_heldout_texts()
    assert list(corpus.documents(seed, len(texts))) == texts


def test_corpus_has_no_gaps_and_no_wrong_articles(corpus: ModuleType) -> None:
    for text in islice(corpus.documents(7, 300), 300):
        assert "{" not in text
        assert "  " not in text
        assert not any(f" a {vowel}" in text for vowel in "aeiou")
