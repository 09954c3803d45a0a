"""Every encoder-decoder of transformers, both stacks on servers: equal to the local model, or refused with a reason.

In one process, each stack on two servers; `tests/swarm/test_encoder_decoders.py` runs some of them through real ones.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics.in_process_swarm import InProcessRunner, SwarmUser
from tests.numerics.tiny_encoder_decoders import BASE, names, save_tiny_model, tiny_config, tiny_model
from tests.selection import sampled
from transformers import PreTrainedModel

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, UnsupportedModelError
from swarmllm.models.architecture import REFUSED_ARCHITECTURES, blocks_class, check_supported, parts_of, stacks
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.shell.loading import load_client_shell
from swarmllm.models.span.loading import load_block_span

REFUSED = [name for name in names() if name in REFUSED_ARCHITECTURES]
EXACT = [name for name in names() if name not in REFUSED_ARCHITECTURES]


def client_of(path: Path, model_class: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """A client whose stacks are on two servers each, the first of which has more than it is used for."""
    checkpoint = open_checkpoint(str(path))
    halves = []
    for stack in stacks(checkpoint.config):
        start, end = stack.span.start, stack.span.end
        cut = start + 2
        first = load_block_span(checkpoint, Span(start, end), progress=False)
        second = load_block_span(checkpoint, Span(cut, end), progress=False)
        route = [(first, Span(start, cut)), (second, Span(cut, end))]
        halves.append((InProcessRunner(route), first.traits))
    encoder, (runner, traits) = halves
    return load_client_shell(
        checkpoint,
        model_class=model_class or blocks_class(checkpoint.config),
        mixin=SwarmUser,
        dtype="auto",
        runner=runner,
        traits=traits,
        encoder=encoder,
        progress=False,
    )


def inputs_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Two texts of different lengths."""
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 100, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", sampled(EXACT, 6))
def test_encoder_decoder_is_exact(name: str, tmp_path: Path) -> None:
    local, client = tiny_model(name), client_of(save_tiny_model(name, tmp_path))
    client.generation_config = copy.deepcopy(local.generation_config)
    given = inputs_of(local)
    target = torch.randint(3, 100, (2, 5))
    with torch.no_grad():
        for more in ({}, {"use_cache": False}):
            want = local(**given, decoder_input_ids=target, **more).logits
            got = client(**given, decoder_input_ids=target, **more).logits
            torch.testing.assert_close(
                got, want, rtol=1e-4, atol=1e-4
            )  # at most rounding: the local model with a cache
    check_generation(local, client, given)
    check_gradients(local, client, given, labels=target)


def check_generation(local: PreTrainedModel, client: PreTrainedModel, given: dict[str, Any]) -> None:
    ways: tuple[dict[str, Any], ...] = (
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
        {"do_sample": True, "temperature": 2.0},
        {"do_sample": False, "use_cache": False},
    )
    seen: set[int] = set()
    for way in ways:
        results = []
        for model in (local, client):
            torch.manual_seed(2)
            results.append(model.generate(**given, max_new_tokens=8, **way))
        assert torch.equal(*results), way
        seen |= {*results[0].flatten().tolist()}
    assert len(seen) > 8  # or equal tokens would show little


def check_gradients(local: PreTrainedModel, client: PreTrainedModel, given: dict[str, Any], **labels: Any) -> None:
    grads = []
    for model in (local, client):
        model.zero_grad()
        model(**given, **labels, use_cache=False).loss.backward()
        grads.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    want, got = grads
    for name, grad in got.items():  # the order of adding up differs
        assert float((grad - want[name]).norm()) <= 1e-4 * float(want[name].norm()), name
    assert any("embed" in name or "shared" in name for name in got)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="can't be split over servers: it"):
        check_supported(tiny_config(name))


def test_the_readme_counts_them(repo_root: Path) -> None:
    """A type is exact if one of its variants is."""
    exact, types = ({BASE.get(name, name) for name in some} for some in (EXACT, names()))
    text = " ".join((repo_root / "README.md").read_text().split())
    assert f"{len(exact)} of the {len(types)} model types that transformers has with an encoder" in text
    assert f"the other {len(types - exact)} are refused with the reason (a sweep over all of them through" in text


def test_an_encoder_that_pads_the_text(tmp_path: Path) -> None:
    """Whatever its length; what servers are not told of is refused."""
    local, client = tiny_model("led"), client_of(save_tiny_model("led", tmp_path))
    target = torch.randint(3, 100, (2, 5))
    for length in range(1, 10):
        given = {key: value[:, :length] for key, value in inputs_of(local).items()}
        with torch.no_grad():
            want, got = (model(**given, decoder_input_ids=target).logits for model in (local, client))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            with pytest.raises(ConfigurationError, match="leave global_attention_mask out"):
                client(**given, decoder_input_ids=target, global_attention_mask=torch.ones(2, length))


def test_blocks_are_numbered_one_stack_after_the_other(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_tiny_model("t5", tmp_path)))
    assert checkpoint.num_blocks == 7
    assert parts_of(checkpoint.config, Span(3, 6)) == [Span(3, 4), Span(4, 6)]
    with pytest.raises(UnsupportedModelError, match="are in the encoder and in the decoder"):
        load_block_span(checkpoint, Span(3, 5), progress=False)


def test_another_source_mask_in_mid_text_is_refused(tmp_path: Path) -> None:
    client = client_of(save_tiny_model("bart", tmp_path))
    given = inputs_of(client)
    first = client(**given, decoder_input_ids=torch.tensor([[5], [6]]), use_cache=True)
    again = {**given, "attention_mask": torch.ones_like(given["attention_mask"])}
    with torch.no_grad(), pytest.raises(ConfigurationError, match="has changed since the text began"):
        client(**again, decoder_input_ids=torch.tensor([[7], [8]]), past_key_values=first.past_key_values)
