"""The models' own dropout in remote blocks: equal to a local model that leaves out the same."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.tiny_models import save_tiny
from tests.selection import sampled
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from swarmllm.errors import RemoteProtocolError
from swarmllm.models.adapters.dropout import draw_seeds, keep_mask_of_pairs, training
from swarmllm.models.architecture import Task, find_blocks, stack_module, stacks

RATE = 0.3
DROPS: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": RATE, "resid_pdrop": RATE},
    "llama": {"attention_dropout": RATE},
    "qwen2": {"attention_dropout": RATE},
    "opt": {"dropout": RATE, "attention_dropout": RATE, "layerdrop": 0.0},
    "bloom": {"hidden_dropout": RATE, "attention_dropout": RATE},
    "falcon": {"hidden_dropout": RATE, "attention_dropout": RATE},
    "gpt_neox": {"hidden_dropout": RATE, "attention_dropout": RATE},
    "phi": {"resid_pdrop": RATE, "attention_dropout": RATE},
    "bert": {"hidden_dropout_prob": RATE, "attention_probs_dropout_prob": RATE},
    "roberta": {"hidden_dropout_prob": RATE, "attention_probs_dropout_prob": RATE},
    "electra": {"hidden_dropout_prob": RATE, "attention_probs_dropout_prob": RATE},
}
ENCODERS = {"bert", "roberta", "electra"}
IDS = torch.randint(3, 90, (3, 7), generator=torch.Generator().manual_seed(1))


def save(model_type: str, directory: Path) -> Path:
    save_tiny(model_type, directory)
    settings = json.loads((directory / "config.json").read_text()) | DROPS[model_type]
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


@contextmanager
def the_same_masks(local: Any) -> Iterator[None]:
    """Each stack of the local model draws seeds where a client's does; its blocks alone leave out what they say."""
    with ExitStack() as hooks:
        for stack in stacks(local.config):
            _seed(local, stack, hooks)
        yield


def _seed(local: Any, stack: Any, hooks: ExitStack) -> None:
    found = find_blocks(local, stack).blocks
    blocks = {stack.span.start + idx: block for idx, block in enumerate(found)}
    drawn: list[tuple[Tensor, bool]] = []
    running = hooks.enter_context(ExitStack())

    def draw(_: Any, args: Any, kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("input_ids")
        given = kwargs["inputs_embeds"] if given is None else given
        drawn.append((draw_seeds(*given.shape[:2]), kwargs.get("past_key_values") is not None))

    def begin(*_: Any) -> None:
        running.enter_context(training(blocks, {}, drawn[-1][0], cached=drawn[-1][1]))

    module = stack_module(local, stack)
    hooks.callback(module.register_forward_pre_hook(draw, with_kwargs=True).remove)
    hooks.callback(found[0].register_forward_pre_hook(begin).remove)
    hooks.callback(found[len(found) - 1].register_forward_hook(lambda *_: running.close()).remove)


def gradients(model: Any, labels: Tensor, names: Callable[[str], bool]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model.train().zero_grad()
    output = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=labels)
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and names(name)}
    return {"logits": output.logits.detach(), **found}


@pytest.mark.parametrize("model_type", sampled(list(DROPS), 6, always=["gpt2", "bert"]))
def test_gradients_and_logits(model_type: str, tmp_path: Path) -> None:
    save(model_type, tmp_path)
    is_encoder = model_type in ENCODERS
    torch.manual_seed(2)
    cls = AutoModelForSequenceClassification if is_encoder else AutoModelForCausalLM
    task = Task.SEQUENCE_CLASSIFICATION if is_encoder else Task.CAUSAL_LM
    local: Any = cls.from_pretrained(tmp_path, dtype="auto")
    client: Any = InProcessSwarm(tmp_path, task=task).client
    client.load_state_dict({name: local.state_dict()[name] for name in client.state_dict()})
    labels = torch.zeros(3, dtype=torch.long) if is_encoder else IDS
    own = {name for name, _ in client.named_parameters()}
    with the_same_masks(local):
        wanted = gradients(local, labels, own.__contains__)
    found = gradients(client, labels, own.__contains__)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert float((found[name] - value).abs().max()) <= 1e-5 * max(1e-3, float(value.abs().max())), name
    with torch.no_grad():
        assert not torch.allclose(client.eval()(IDS).logits, found["logits"], atol=1e-3), "the control"
        torch.testing.assert_close(client(IDS).logits, local.eval()(IDS).logits)


def test_rates_that_are_switched_off(tmp_path: Path) -> None:
    """As trainers do that compare two models."""
    client: Any = InProcessSwarm(save("gpt2", tmp_path)).client
    expected = client.eval()(IDS, use_cache=False).logits
    for module in client.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0
    assert torch.equal(client.train()(IDS, use_cache=False).logits, expected)


def test_blocks_in_eval_mode(tmp_path: Path) -> None:
    client: Any = InProcessSwarm(save("opt", tmp_path)).client
    expected = client.eval()(IDS, use_cache=False).logits
    client.train()
    client.model.decoder.dropout = 0.0
    for block in client.model.decoder.layers.blocks():
        block.eval()
    assert torch.equal(client(IDS, use_cache=False).logits, expected)


def test_texts_in_train_mode(tmp_path: Path) -> None:
    """Each step draws its seeds, and the next token sees keys by their places."""
    save("gpt2", tmp_path)
    local: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    client: Any = InProcessSwarm(tmp_path).client
    texts = []
    for model in (client.train(), local.train()):
        torch.manual_seed(4)
        with the_same_masks(local) if model is local else torch.no_grad():
            texts.append(model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False, pad_token_id=0))
    assert torch.equal(*texts)


def test_what_no_seed_can_bring_back(tmp_path: Path) -> None:
    block = torch.nn.Identity()
    with training({0: block}, {}, torch.zeros(2, 3, dtype=torch.long), cached=False):
        for draw in (lambda: torch.rand(3), lambda: torch.nn.functional.dropout(torch.ones(5, 4))):
            with pytest.raises(RemoteProtocolError, match=r"call eval\(\) on the blocks"):
                draw()
    assert torch.rand(3).shape == (3,)


def test_the_share_of_weights_left_out() -> None:
    seeds = draw_seeds(4, 32)
    keep = keep_mask_of_pairs(seeds, seeds, 8, 77, RATE)
    assert keep.shape == (4, 8, 32, 32)
    for axes in ((0, 1), (1, 2), (2, 3), (0, 3)):
        share = keep.float().mean(dim=axes)
        assert float((share - (1 - RATE)).abs().max()) < 0.25
    assert abs(float(keep.float().mean()) - (1 - RATE)) < 0.01
    cut = keep_mask_of_pairs(seeds[:, 5:], seeds[:, 5:], 8, 77, RATE)
    assert torch.equal(cut, keep[..., 5:, 5:]), "what is cut away moves nothing"
