"""Models that take pictures and text: batches, tensors on servers and clients, and what is refused.

`test_architectures` compares every one of them with the local model.
"""

import copy
from pathlib import Path

import pytest
import torch
from tests.numerics import tiny_vision_models
from tests.numerics.architectures import NO_TINY_MODEL, REFUSED_VISION, VISION, VISION_ENCODER_DECODERS
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.tiny_vision_models import inputs_of, names, save_tiny_model

from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import Task, has_vision
from swarmllm.models.checkpoint.skeleton import block_bytes, client_tensor_names
from swarmllm.models.span.loading import span_tensor_names


def test_the_readme_counts_them(repo_root: Path) -> None:
    refused = len({*REFUSED_VISION, *VISION_ENCODER_DECODERS} - {"t5gemma2"})
    text = " ".join((repo_root / "README.md").read_text().split())
    assert f"has {len(names())} model types that write text about pictures. {len(VISION)} of them are exact" in text
    assert (
        f"{refused} are refused with the reason. T5Gemma 2 runs for text only, and {len(NO_TINY_MODEL)}, whose" in text
    )
    assert "attempted (tiny random models of all types," in text


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
    assert has_vision(checkpoint.config)


def test_ids_besides_embeddings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text model alone is exact with them (`test_architectures`)."""
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
