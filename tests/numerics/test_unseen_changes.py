"""Changes of a model without touching a block are one sentence at the next forward; undone, all is as before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.numerics.in_process_swarm import InProcessRunner, InProcessSwarm, SwarmUser
from tests.numerics.test_training_surface import IDS, assert_same, load_local, lora, results, tuned
from tests.numerics.tiny_models import save_tiny
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import MistralForCausalLM

from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.shell.loading import load_client_shell


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Clients by architecture, each opened once."""
    opened: dict[str, Any] = {}

    def client(model_type: str) -> Any:
        if model_type not in opened:
            directory: Path = tmp_path_factory.mktemp(model_type)
            save_tiny(model_type, directory)
            opened[model_type] = InProcessSwarm(directory).client
        return opened[model_type]

    return client


FIELDS: list[tuple[str, str, Any]] = [
    ("llama", "is_causal", False),
    ("llama", "num_hidden_layers", 2),
    ("mistral", "sliding_window", 2),
    ("gpt2", "n_layer", 2),
    ("gemma2", "layer_types", ["full_attention"] * 4),
    ("gemma3_text", "use_bidirectional_attention", True),
]


@pytest.mark.parametrize(("model_type", "field", "value"), FIELDS)
def test_a_config_that_the_blocks_read(model_type: str, field: str, value: Any, clients: Callable[[str], Any]) -> None:
    client = clients(model_type)
    expected, was = client(IDS, use_cache=False).logits, getattr(client.config, field, None)
    setattr(client.config, field, value)
    try:
        with pytest.raises(ConfigurationError, match="set it back") as caught:
            client(IDS, use_cache=False)
    finally:
        setattr(client.config, field, was)
    assert "\n" not in str(caught.value)
    assert torch.equal(client(IDS, use_cache=False).logits, expected)


def test_a_list_changed_in_place(clients: Callable[[str], Any]) -> None:
    client = clients("gemma2")
    kinds = client.config.layer_types
    kinds[0], kinds[1] = kinds[1], kinds[0]
    try:
        with pytest.raises(ConfigurationError, match=r"config\.layer_types"):
            client(IDS, use_cache=False)
    finally:
        kinds[0], kinds[1] = kinds[1], kinds[0]


def test_a_config_that_concerns_what_is_here(clients: Callable[[str], Any]) -> None:
    client = clients("llama")
    expected = client(IDS, use_cache=False).logits
    changes = {"use_cache": False, "pad_token_id": 5, "output_attentions": False, "problem_type": "regression"}
    changes |= {"pretraining_tp": 1, "a_note": "of the user's"}
    was = {name: getattr(client.config, name, None) for name in changes}
    client.config.update(changes)
    assert torch.equal(client(IDS).logits, expected)
    client.config.update(was)


@pytest.mark.parametrize("name", ["is_causal", "position_bias"])
def test_arguments_for_attention(name: str, clients: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} can't be given"):
        clients("llama")(IDS, **{name: torch.zeros(1)})


PACKED = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), "use_cache": False}
ENDS = torch.tensor([0, 3, 7], dtype=torch.int32)


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next"])
def test_packed_texts_in_recurrent_blocks(model_type: str, clients: Callable[[str], Any]) -> None:
    """Locally, too, they are kept apart only by kernels of other packages, and refused without."""
    with pytest.raises(ConfigurationError, match="give each text a row of its own"):
        clients(model_type)(IDS[:1], seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32), **PACKED)


def test_packed_texts_in_attention(clients: Callable[[str], Any]) -> None:
    """Positions say where each begins; what else is given for flash attention's kernels changes nothing."""
    client = clients("llama")
    kernels = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 4, "max_length_k": 4}
    packed = client(IDS[:1], **PACKED, **kernels).logits
    alone = [client(IDS[:1, :3], use_cache=False).logits, client(IDS[:1, 3:], use_cache=False).logits]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


def test_hooks_on_all_modules(clients: Callable[[str], Any]) -> None:
    client = clients("llama")
    expected = client(IDS, use_cache=False).logits
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ConfigurationError, match="put hooks on whole blocks"):
            client(IDS, use_cache=False)
    finally:
        handle.remove()
    assert torch.equal(client(IDS, use_cache=False).logits, expected)


def test_a_mask_that_is_trained(clients: Callable[[str], Any]) -> None:
    mask = torch.zeros(3, 1, 7, 7).masked_fill(~torch.ones(7, 7).tril().bool(), -1e9).requires_grad_()
    with pytest.raises(ConfigurationError, match="no gradient for attention_mask"):
        clients("llama")(IDS, attention_mask=mask)


def test_what_only_a_decoder_is_given(clients: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigurationError, match="encoder_hidden_states can't be given"):
        clients("gpt2")(IDS, encoder_hidden_states=torch.zeros(3, 4, 64))


ROTARY: dict[str, Callable[[Any], object]] = {
    "a hook": lambda model: model.rotary_emb.register_forward_hook(print),
    "another": lambda model: setattr(model, "rotary_emb", nn.Identity()),
    "frequencies in place": lambda model: model.rotary_emb.inv_freq.mul_(0.5),
    "other frequencies": lambda model: setattr(model.rotary_emb, "inv_freq", model.rotary_emb.inv_freq * 2),
    "a scale": lambda model: setattr(model.rotary_emb, "attention_scaling", 3.0),
}


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_embeddings(name: str, clients: Callable[[str], Any]) -> None:
    client = clients("llama")
    expected, rotary = client(IDS, use_cache=False).logits, client.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    try:
        with pytest.raises(ConfigurationError, match="servers") as caught:
            ROTARY[name](client.model), client(IDS, use_cache=False)
        assert "\n" not in str(caught.value)
    finally:
        rotary.inv_freq, rotary.attention_scaling = frequencies, 1.0
    assert torch.equal(client(IDS, use_cache=False).logits, expected)
    client.double().float()
    torch.testing.assert_close(client(IDS, use_cache=False).logits, expected)


CASTS: dict[str, Callable[[Any], object]] = {
    "to bfloat16 and back": lambda model: model.to(torch.bfloat16).float(),
    "to half and back": lambda model: model.half().float(),
    "used in bfloat16": lambda model: (model.bfloat16(), model(IDS), model.float(), model(IDS)),
    "used in all": lambda model: [model.to(dtype)(IDS) for dtype in (torch.half, torch.bfloat16, torch.float32)],
    "finer and coarser": lambda model: model.double().to(torch.bfloat16).half().double().float(),
}


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_casts_are_harmless(model_type: str, tmp_path: Path) -> None:
    """Their rounding of the rotary embeddings here changes nothing: nobody computes with them."""
    local = save_tiny(model_type, tmp_path)
    for parameter in local.parameters():
        parameter.data = parameter.data.mul(64).round().div(64)  # no cast rounds them
    local.save_pretrained(tmp_path / "coarse")
    client: Any = InProcessSwarm(tmp_path / "coarse").client
    with torch.no_grad():
        expected = client(IDS, use_cache=False).logits
        for cast in CASTS.values():
            cast(client)
            torch.testing.assert_close(client(IDS, use_cache=False).logits, expected)
        client.half()
        for part in client.modules():
            if "Rotary" in type(part).__name__:
                for key, value in part.named_buffers():
                    setattr(part, key, value * 2)
        with pytest.raises(ConfigurationError, match="of the rotary embeddings was changed"):
            client(IDS)
        with pytest.raises(ConfigurationError, match="of the rotary embeddings was changed"):
            client.float()(IDS)  # which a cast doesn't hide


@pytest.mark.parametrize("how", ["by method", "by attribute"])
def test_a_norm_inside_a_block_is_trained(how: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    found = []
    for model in (InProcessSwarm(tmp_path).client, load_local(tmp_path)):
        norm = model.model.layers[1].input_layernorm
        if how == "by method":
            assert norm.weight.requires_grad_() is norm.weight
        else:
            norm.weight.requires_grad = True
        found.append(results(model))
    assert "model.layers.1.input_layernorm.weight" in found[0]
    assert_same(*found)


def test_transforms_of_torch_func(clients: Callable[[str], Any]) -> None:
    client = clients("llama")
    scale = torch.ones(64)

    def loss(weight: Tensor) -> Any:
        return torch.func.functional_call(client, {"model.norm.weight": weight}, (IDS,), {"labels": IDS}).loss

    with pytest.raises(ConfigurationError, match=r"call backward\(\)"):
        torch.func.grad(loss)(scale)
    assert torch.autograd.grad(loss(scale.requires_grad_()), scale)[0].isfinite().all()


# ---------------------------------------------------------------------- layers of peft that compute something else


class Bent(peft.tuners.lora.Linear):
    """A LoRA of one's own."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x, *args, **kwargs).tanh()


class BentLinear(nn.Linear):
    """A matrix of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def layer_of(adapted: Any) -> Any:
    return adapted.base_model.model.model.layers[1].self_attn.q_proj


def set_item(module: Any, name: str, value: Any) -> None:
    getattr(module, name)["default"] = value


CHANGED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a forward of its own": (lambda layer: setattr(layer, "forward", lambda x: x), "a forward of its own"),
    "another class": (lambda layer: setattr(layer, "__class__", Bent), "a forward of its own"),
    "another matrix": (lambda layer: setattr(layer.lora_A["default"], "__class__", BentLinear), "a forward of its own"),
    "a bias": (lambda layer: setattr(layer.lora_A["default"], "bias", nn.Parameter(torch.ones(4))), "has a bias"),
    "no dropout": (lambda layer: set_item(layer, "lora_dropout", nn.ReLU()), "is no dropout"),
    "a trained scale": (
        lambda layer: set_item(layer, "scaling", nn.Parameter(torch.ones(()))),
        "can't be trained: make it a number",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_layer_of_peft_that_was_changed(name: str, clients: Callable[[str], Any]) -> None:
    change, sentence = CHANGED[name]
    adapted = tuned(clients("llama"), lora())
    try:
        change(layer_of(adapted))
        with pytest.raises(ConfigurationError, match=sentence) as caught:
            adapted(IDS, use_cache=False)
        assert "\n" not in str(caught.value)
    finally:
        adapted.unload()


def test_a_class_of_layers_of_ones_own(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    config = lora()
    config._register_custom_module({nn.Linear: Bent})
    with pytest.raises(ConfigurationError, match="a forward of its own"):
        peft.get_peft_model(InProcessSwarm(tmp_path).client, config)


def test_weights_that_are_made_of_others(clients: Callable[[str], Any], tmp_path: Path) -> None:
    """A parametrization changes no forward: it has its exact effect."""
    save_tiny("llama", tmp_path)
    found = []
    for model in (clients("llama"), load_local(tmp_path)):
        adapted = tuned(model, lora())
        parametrizations.weight_norm(layer_of(adapted).lora_A["default"])
        found.append(results(adapted))
        adapted.unload()
    assert any("original0" in key for key in found[0])
    assert_same(*found)


# ---------------------------------------------------------------------- config fields for from_pretrained


def opened_with(directory: Path, **options: Any) -> Any:
    runner, traits = InProcessRunner([]), BlockTraits()
    return load_client_shell(
        open_checkpoint(str(directory)),
        model_class=MistralForCausalLM,
        mixin=SwarmUser,
        dtype="auto",
        runner=runner,
        traits=traits,
        progress=False,
        **options,
    )


def test_config_fields_for_from_pretrained(tmp_path: Path) -> None:
    """As transformers takes them; those of blocks only as the checkpoint has them."""
    save_tiny("mistral", tmp_path)
    model = opened_with(tmp_path, use_cache=False, pad_token_id=7, sliding_window=5, attn_implementation="eager")
    assert (model.config.use_cache, model.config.pad_token_id, model.config.sliding_window) == (False, 7, 5)
    assert model.config._attn_implementation == "eager"
    for name, value in {"sliding_window": 3, "num_hidden_layers": 2, "attention_dropout": 0.1}.items():
        with pytest.raises(ConfigurationError, match=f"^{name}=.* can't be given here") as caught:
            opened_with(tmp_path, **{name: value})
        assert "\n" not in str(caught.value)
