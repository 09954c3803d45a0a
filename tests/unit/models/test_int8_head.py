"""The rounded head is used where texts are written, and nowhere else."""

import pytest
import torch
from tests.numerics.tiny_models import tiny_model
from torch import nn
from transformers import PreTrainedModel

from swarmllm.errors import ConfigurationError
from swarmllm.models.quantization.packed import Int8
from swarmllm.models.shell.int8_head import Int8Head, round_head

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
    head.__class__ = Int8Head
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
