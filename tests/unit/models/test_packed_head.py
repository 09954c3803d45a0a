"""A head in few bits is used where texts are written, and nowhere else."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.numerics.gguf_writer import save_gguf
from tests.numerics.tiny_models import tiny_model
from torch import nn
from transformers import PreTrainedModel

from swarmllm.errors import ConfigurationError
from swarmllm.models.checkpoint import stored_files
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.packed import Int8
from swarmllm.models.shell.packed_head import PackedHead, RoundedHead, keep_head_as_stored, round_head

HIDDEN, VOCABULARY = 32, 96


@pytest.fixture
def model() -> PreTrainedModel:
    """Its head is the embeddings' weight."""
    found = tiny_model("llama")
    found.config.tie_word_embeddings = True
    found.tie_weights()
    round_head(found)
    return found


def head_of(dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    head.__class__ = RoundedHead
    return head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_products_without_gradients_are_those_of_8_bits(dtype: torch.dtype, bias: bool) -> None:
    head = head_of(dtype, bias=bias)
    inputs = torch.randn(2, 3, HIDDEN, dtype=dtype)
    with torch.no_grad():
        rounded = head(inputs)
        expected = nn.functional.linear(inputs.float(), Int8.quantize(head.weight).dequantize().float())
        expected = expected if head.bias is None else expected + head.bias.float()
        exact = nn.functional.linear(inputs, head.weight, head.bias)
    torch.testing.assert_close(rounded.float(), expected, atol=2e-2, rtol=2e-2)
    assert rounded.dtype == dtype
    assert not torch.equal(rounded, exact)


def test_gradients_are_those_of_the_exact_weight() -> None:
    head = head_of(torch.float32)
    inputs = torch.randn(4, HIDDEN, requires_grad=True)
    outputs = head(inputs)
    assert torch.equal(outputs, nn.functional.linear(inputs, head.weight))
    outputs.sum().backward()
    torch.testing.assert_close(inputs.grad, head.weight.detach().sum(0).expand(4, -1))
    torch.testing.assert_close(head.weight.grad, inputs.detach().sum(0).expand(VOCABULARY, -1))


@pytest.mark.parametrize("by_data", [False, True], ids=["in place", "as peft merges"])
def test_a_changed_weight_is_rounded_anew(by_data: bool) -> None:
    head, inputs = head_of(torch.float32), torch.randn(1, HIDDEN)
    with torch.no_grad():
        before = head(inputs)
        assert torch.equal(head(inputs), before)
        (head.weight.data if by_data else head.weight).mul_(2)
        torch.testing.assert_close(head(inputs), 2 * before)


def test_tied_embeddings_and_saved_tensors_stay_exact(model: PreTrainedModel) -> None:
    names, ids = sorted(model.state_dict()), torch.tensor([[5, 7, 9]])
    embedded = model.get_input_embeddings()(ids)
    with torch.no_grad():
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.get_input_embeddings()(ids), embedded)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert sorted(model.state_dict()) == names


def test_only_linear_heads_can_be_rounded(model: PreTrainedModel) -> None:
    model.set_output_embeddings(nn.Embedding(3, 4))
    with pytest.raises(ConfigurationError, match="a Embedding"):
        round_head(model)
    with pytest.raises(ConfigurationError, match="no head for tokens"):
        round_head(model.model)


@pytest.mark.skipif(kernels.library() is None, reason="there is no compiler here")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("is_partial", [False, True], ids=["all files", "pieces of files"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_in_few_bits_is_multiplied_as_it_is_stored(
    tmp_path: Path, tied: bool, is_partial: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine that has got the head from others: all members' texts must be the same."""
    model = tiny_model("llama")
    model.config.tie_word_embeddings = tied
    model.tie_weights()
    model.save_pretrained(tmp_path / "plain")
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    path, weights = save_gguf(model, "llama", tmp_path / "plain", lambda name: 8 if name in ends else 0)
    if is_partial:
        monkeypatch.setattr(stored_files, "partial_files", lambda _: SimpleNamespace(require=lambda *_: None))
    head = model.lm_head
    inputs = torch.randn(2, 5, head.in_features).to(dtype)
    with torch.no_grad():
        head.weight.copy_(weights[ends[not tied]])
        model.to(dtype)
        keep_head_as_stored(model, open_checkpoint(str(path)))
        assert type(head) is PackedHead
        products = nn.functional.linear(inputs.double(), weights[ends[not tied]].double())
        torch.testing.assert_close(
            head(inputs).double(), products, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )
    assert torch.equal(head(inputs), nn.functional.linear(inputs, head.weight))  # gradients are recorded
    with torch.no_grad():
        head.weight.data.mul_(2)
        assert torch.equal(head(inputs), nn.functional.linear(inputs, head.weight))


def test_a_head_that_is_stored_whole_is_left_alone(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "plain")
    path, _ = save_gguf(model, "llama", tmp_path / "plain", lambda name: 8 if name.endswith("gate_proj.weight") else 0)
    keep_head_as_stored(model, open_checkpoint(str(path)))
    keep_head_as_stored(model, open_checkpoint(str(tmp_path / "plain")))
    assert type(model.lm_head) is nn.Linear
