"""Dropout of encoder-decoders in training: equal to a local model whose blocks, of both stacks, leave out the same."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.numerics.in_process_swarm import encoder_decoder_client
from tests.numerics.test_blocks_dropout import RATE, the_same_masks
from tests.numerics.tiny_encoder_decoders import inputs_of, save_tiny_model
from tests.selection import sampled
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from swarmllm.errors import RemoteProtocolError

RATES = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "dropout_rate"), RATE)
DROPS = ("t5", "umt5", "bart", "marian", "pegasus", "plbart", "m2m_100", "blenderbot", "t5gemma")
LABELS = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(2))


def save(name: str, directory: Path) -> Path:
    save_tiny_model(name, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(_with_rates(json.loads(path.read_text()))))
    return directory


def _with_rates(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _with_rates(value) if isinstance(value, dict) else RATES.get(key, value) for key, value in settings.items()
    }


def gradients(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model.train().zero_grad()
    output = model(**given, labels=LABELS, use_cache=False)
    output.loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": output.logits.detach(), **found}


@pytest.mark.parametrize("name", sampled(DROPS, 6, always=["t5"]))
def test_gradients_and_logits(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    local: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype="auto")
    client: Any = encoder_decoder_client(tmp_path)
    given = inputs_of(local)
    with the_same_masks(local):
        wanted = gradients(local, given)
    found = gradients(client, given)
    assert len(found) >= 2
    for key, value in found.items():
        assert float((value - wanted[key]).norm()) <= 1e-4 * float(wanted[key].norm()), key
    with torch.no_grad():
        quiet = client.eval()(**given, labels=LABELS).logits
    assert not torch.allclose(quiet, found["logits"], atol=1e-2), "the control"


def test_attention_in_pieces_is_refused_in_training(tmp_path: Path) -> None:
    """LongT5's weights are of pieces of the text, which no seeds of tokens fit."""
    client: Any = encoder_decoder_client(save("longt5", tmp_path)).train()
    with pytest.raises(RemoteProtocolError, match=r"can't be told from the tokens .*: call eval\(\) on the blocks"):
        client(**inputs_of(client), labels=LABELS, use_cache=False)


@pytest.mark.rotates(3)
@pytest.mark.parametrize("source_len", [9, 5])
def test_loras_dropout_of_a_source(source_len: int, tmp_path: Path) -> None:
    """Keys of cross-attention are made of the source: what is left out of it follows from its places."""
    save_tiny_model("bart", tmp_path)
    targets = ["encoder_attn.k_proj", "encoder_attn.v_proj", "self_attn.q_proj"]
    config = peft.LoraConfig(target_modules=targets, r=4, lora_dropout=0.5, init_lora_weights=False)
    ids, grads = torch.randint(3, 100, (2, source_len)), []
    for seed in (5, 5, 6):
        torch.manual_seed(1)
        client: Any = peft.get_peft_model(encoder_decoder_client(tmp_path), config).train()
        torch.manual_seed(seed)
        client(input_ids=ids, labels=LABELS, use_cache=False).loss.backward()
        grads.append({name: p.grad for name, p in client.named_parameters() if "lora_B" in name})
    assert any("encoder_attn" in name for name in grads[0])
    for name, grad in grads[0].items():
        assert torch.equal(grads[1][name], grad), name
        assert not torch.allclose(grads[2][name], grad), name
