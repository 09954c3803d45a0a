"""Every model of transformers that takes pictures and text, its blocks on servers: equal to the local one, or refused.

In one process, two servers; `tests/swarm/test_vision_models.py` runs some of them through real ones.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics import tiny_vision_models
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.tiny_vision_models import IMAGE_TOKEN, inputs_of, names, save_tiny_model
from tests.selection import sampled
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from swarmllm.errors import ConfigurationError, UnsupportedModelError
from swarmllm.models.architecture import REFUSED_ARCHITECTURES, Task, check_supported, sees
from swarmllm.models.checkpoint.skeleton import block_bytes, client_tensor_names
from swarmllm.models.span.loading import span_tensor_names

ENCODER_DECODERS = frozenset(("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder"))
"""Of these, T5Gemma 2 runs as an encoder-decoder for text (`test_encoder_decoders`), and the others are refused."""
NO_TINY_MODEL = frozenset(("fast_vlm", "gemma3n", "perception_lm"))
"""Their towers are another package's; they are tried, and refused if their blocks differ."""
PICTURES_ONLY = frozenset(("blip-2", "instructblip", "instructblipvideo"))
"""They take no text without a picture."""
NO_GENERATE = frozenset(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"))
"""Their generate() doesn't take these inputs, locally either."""
NO_BEAMS = frozenset(("llama4",))
"""Locally neither: its pictures aren't repeated for each beam."""
ROUNDS_DIFFERENTLY = dict.fromkeys(("granite_docling", "qwen3_vl_moe", "step3p7"), 1e-6)
"""Relative tolerance: products of towers and experts depend on where in memory weights begin, and a local model that is
loaded again differs as much."""
REFUSED = [name for name in names() if name in REFUSED_ARCHITECTURES]
EXACT = [name for name in names() if name not in {*REFUSED, *NO_TINY_MODEL, *ENCODER_DECODERS}]


@pytest.mark.parametrize("name", sampled(EXACT, 8))
def test_vision_model_is_exact(name: str, tmp_path: Path) -> None:
    local = save_tiny_model(name, tmp_path)
    swarm = InProcessSwarm(tmp_path, task=Task.IMAGE_TEXT_TO_TEXT)
    client = swarm.client.eval()
    client.generation_config = copy.deepcopy(local.generation_config)
    given, relative = inputs_of(local), ROUNDS_DIFFERENTLY.get(name, 0.0)
    with torch.no_grad():
        for more in ({}, {"use_cache": False}):
            want, got = (model(**given, **more).logits for model in (local, client))
            _check_same(want, got, relative)
        if name not in PICTURES_ONLY:
            text = {key: given[key][:, :5] for key in ("input_ids", "attention_mask")}
            want, got = (model(**text, use_cache=False).logits for model in (local, client))
            _check_same(want, got, relative)
    if name not in NO_GENERATE:
        _check_generation(local, client, given)
    _check_gradients(local, client, given)


def _check_same(want: Tensor, got: Tensor, relative: float) -> None:
    assert float((want - got).abs().max()) <= relative * float(want.abs().max())


def _check_generation(local: PreTrainedModel, client: PreTrainedModel, given: dict[str, Any]) -> None:
    ways: tuple[dict[str, Any], ...] = (
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"do_sample": True, "temperature": 2.0},
    )
    seen: set[int] = set()
    for way in ways:
        if "num_beams" in way and local.config.model_type in NO_BEAMS:
            continue
        results = []
        for model in (local, client):
            torch.manual_seed(2)
            results.append(model.generate(**given, max_new_tokens=12, **way))
        assert torch.equal(*results), way
        seen |= {*results[0][:, -8:].flatten().tolist()}
    assert len(seen) > 6  # or equal tokens would show little


def _check_gradients(local: PreTrainedModel, client: PreTrainedModel, given: dict[str, Any]) -> None:
    """Those of the tower included: through hidden states, and through what is added between blocks."""
    labels = given["input_ids"].masked_fill(given["input_ids"] == IMAGE_TOKEN, -100)
    grads = []
    for model in (local, client):
        model.zero_grad()
        model(**given, labels=labels, use_cache=False).loss.backward()
        grads.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    want, got = grads
    here = {name for name, _ in client.named_parameters()}
    # Gemma 4 makes something of the embeddings for each block, which servers do: its weights are theirs.
    assert {one for one in want.keys() & here if ".per_layer_" not in one} == got.keys()
    largest = max(float(grad.norm()) for grad in want.values())
    for name, grad in got.items():  # the order of adding up differs
        assert float((grad - want[name]).norm()) <= 1e-4 * float(want[name].norm()) + 1e-7 * largest, name


def test_the_readme_counts_them(repo_root: Path) -> None:
    assert len(EXACT) >= 50
    refused = len({*REFUSED, *ENCODER_DECODERS} - {"t5gemma2"})
    text = " ".join((repo_root / "README.md").read_text().split())
    assert f"Of the {len(names())} model types that transformers has for text from pictures, {len(EXACT)} were" in text
    assert f"{refused} are refused with the reason, T5Gemma 2 runs for text, and {len(NO_TINY_MODEL)}, of which" in text


@pytest.mark.parametrize("name", [*REFUSED, *sorted(ENCODER_DECODERS - {"t5gemma2"})])
def test_refused_with_a_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{name} (can't be split over servers: it|is no encoder-decoder)"):
        check_supported(AutoConfig.for_model(name))


def test_a_picture_matters(tmp_path: Path) -> None:
    """Or the comparisons would show little."""
    for name in ("llava", "gemma3", "qwen3_vl"):
        model = save_tiny_model(name, tmp_path / name)
        given, other = inputs_of(model), inputs_of(model, seed=4)
        with torch.no_grad():
            want = model(**given).logits
            got = model(**{**given, "pixel_values": other["pixel_values"]}).logits
        assert float((want - got).abs().max()) > 0.1


def test_servers_and_clients_read_their_own_tensors(tmp_path: Path) -> None:
    save_tiny_model("llava", tmp_path)
    swarm = InProcessSwarm(tmp_path, task=Task.IMAGE_TEXT_TO_TEXT)
    checkpoint = swarm.checkpoint
    here = client_tensor_names(checkpoint)
    assert any("vision_tower" in name for name in here)
    for _, span in swarm.route:
        names_of_span = span_tensor_names(checkpoint, span)
        assert not {*names_of_span} & {*here}
        assert all("language_model" in name for name in names_of_span)
    assert len(block_bytes(checkpoint)) == checkpoint.num_blocks
    assert sees(checkpoint.config)


def test_ids_besides_embeddings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text model alone is exact with them (`test_sweep`)."""
    monkeypatch.setitem(tiny_vision_models.SPECIFIC["qwen4_exp"]["text_config"], "ple_layer_ids", [1, 3])
    given = inputs_of(save_tiny_model("qwen4_exp", tmp_path))
    client = InProcessSwarm(tmp_path, task=Task.IMAGE_TEXT_TO_TEXT).client
    with pytest.raises(ConfigurationError, match="is given ple_input_ids besides embeddings, which servers don't take"):
        client(**given)


def test_what_cannot_travel_is_refused(tmp_path: Path) -> None:
    save_tiny_model("llava", tmp_path)
    client = InProcessSwarm(tmp_path, task=Task.IMAGE_TEXT_TO_TEXT).client
    ids = torch.arange(3, 9)[None]
    with pytest.raises(ConfigurationError, match="is given pictures besides embeddings"):
        client.get_decoder()(input_ids=ids, pictures=[torch.ones(1)])


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "paligemma"])
def test_batches_with_padding(name: str, tmp_path: Path) -> None:
    """Two texts with a picture each, of different lengths, in one batch: also the replay of what was said before."""
    local = save_tiny_model(name, tmp_path)
    client = InProcessSwarm(tmp_path, task=Task.IMAGE_TEXT_TO_TEXT).client.eval()
    client.generation_config = copy.deepcopy(local.generation_config)
    one = inputs_of(local)
    length = one["input_ids"].shape[1]
    per_token = {key: value for key, value in one.items() if value.shape == (1, length)}
    both = {key: torch.cat([value, value]) for key, value in one.items() if key not in per_token}
    for key, value in per_token.items():
        fill = 3 if key == "input_ids" else 0
        padded = torch.cat([torch.full((1, 2), fill), value], dim=1)
        longer = torch.cat([torch.full((1, 2), {"input_ids": 9, "attention_mask": 1}.get(key, 0)), value], dim=1)
        both[key] = torch.cat([padded, longer])
    for way in ({"do_sample": False}, {"num_beams": 2, "do_sample": False}):
        want, got = (model.generate(**both, max_new_tokens=10, **way) for model in (local, client))
        assert torch.equal(want, got)
    if name == "qwen3_vl":  # the local model itself can't go on with a batch so
        return
    with torch.no_grad():  # a cache that is made only when it is continued: servers compute what it holds once more
        outputs = [model(**both) for model in (local, client)]
        token = torch.tensor([[7], [8]])
        mask = torch.cat([both["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=1)
        more = [
            model(input_ids=token, attention_mask=mask, past_key_values=output.past_key_values).logits
            for model, output in zip((local, client), outputs, strict=True)
        ]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    torch.testing.assert_close(*more, rtol=1e-4, atol=1e-5)
