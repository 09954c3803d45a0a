"""Recipes of embeddings in a checkpoint's files: honoured, or refused when the model is opened."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from embedding_models import KINDS, POOLINGS, describe, pooled, save
from transformers import BertForMaskedLM, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

from swarmllm import embedded_model_path
from swarmllm.errors import ConfigurationError
from swarmllm.gateway.engine.embedding_model import EmbeddingRecipe, recipe_of
from swarmllm.gateway.engine.model_choice import ModelChoice
from swarmllm.gateway.settings import GatewayConfig
from swarmllm.models.checkpoint.checkpoint import open_checkpoint


@pytest.mark.parametrize("how", POOLINGS)
def test_poolings_are_those_of_sentence_transformers(how: str, tmp_path: Path) -> None:
    directory = save(KINDS["bert"], tmp_path / "checkpoint")
    describe(directory, {f"pooling_mode_{name}": name == how for name in POOLINGS}, normalize=False)
    recipe = recipe_of(open_checkpoint(str(directory)))
    assert recipe is not None
    hidden, lengths = torch.randn(4, 9, 5, generator=torch.Generator().manual_seed(2)), (9, 1, 4, 7)
    mask = torch.tensor([[1] * length + [0] * (9 - length) for length in lengths])
    expected = torch.stack([pooled(row[:length], how) for row, length in zip(hidden, lengths, strict=True)])
    torch.testing.assert_close(recipe.embed(hidden, mask), expected)


def test_several_poolings_are_joined(tmp_path: Path) -> None:
    directory = save(KINDS["bert"], tmp_path / "checkpoint")
    describe(directory, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, normalize=True)
    assert recipe_of(open_checkpoint(str(directory))) == EmbeddingRecipe(pooling=("cls", "mean"), normalize=True)
    describe(directory, {"pooling_mode": "max"}, normalize=False)
    assert recipe_of(open_checkpoint(str(directory))) == EmbeddingRecipe(pooling=("max",))


def test_unknown_recipes_are_refused_at_the_start(tmp_path: Path) -> None:
    directory = save(KINDS["bert"], tmp_path / "checkpoint")

    def refuses(what: str) -> None:
        with pytest.raises(ConfigurationError, match=what):
            recipe_of(open_checkpoint(str(directory)))

    describe(directory, {"pooling_mode": "attention"}, normalize=False)
    refuses("pools by attention, and the gateway knows cls, max, mean")
    describe(directory, {}, normalize=False)
    refuses("pools by no way")
    describe(directory, {"pooling_mode": "cls", "include_prompt": False}, normalize=False)
    assert recipe_of(open_checkpoint(str(directory))) == EmbeddingRecipe(pooling=("cls",)), "there is no prompt"
    (directory / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "Q: "}, "default_prompt_name": "query"})
    )
    refuses("leaves its prompt out when it pools")
    shutil.rmtree(directory / "1_Pooling")
    refuses("lacks 1_Pooling/config.json")
    modules = json.loads((directory / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    modules.pop(1)
    (directory / "modules.json").write_text(json.dumps(modules))
    refuses("has a module Dense behind the model")
    (directory / "modules.json").write_text('{"a": 1}')
    refuses("is no list of modules")
    (directory / "modules.json").write_text("[")
    refuses("is not valid JSON")


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    BertForSequenceClassification(KINDS["bert"].config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="tells 2 classes of texts apart, and a gateway offers"):
        ModelChoice.open(GatewayConfig(model=(str(tmp_path),), initial_peers=()))


def test_an_encoder_that_fills_gaps_embeds(tmp_path: Path) -> None:
    BertForMaskedLM(KINDS["bert"].config).save_pretrained(tmp_path)
    assert recipe_of(open_checkpoint(str(tmp_path))) == EmbeddingRecipe()


def test_a_model_that_writes_text_has_no_recipe(tmp_path: Path) -> None:
    T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ).save_pretrained(tmp_path)
    assert recipe_of(open_checkpoint(str(tmp_path))) is None
    describe(tmp_path, {"pooling_mode": "mean"}, normalize=True)
    with pytest.raises(ConfigurationError, match="embeds by one stack of an encoder-decoder"):
        recipe_of(open_checkpoint(str(tmp_path)))
    assert recipe_of(open_checkpoint(embedded_model_path())) is None
