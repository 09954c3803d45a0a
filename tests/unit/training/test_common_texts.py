"""Common texts: their bytes, and the loss on them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmllm.errors import ConfigurationError, RemoteProtocolError
from swarmllm.training.common_texts import MAX_BYTES, MAX_TEXTS, digest, packed, text_loss, unpacked


def test_texts_arrive_as_they_were() -> None:
    texts = ("one", "zwei, größer", "\x00")
    data = packed(texts)
    assert unpacked(data, str(digest(data))) == texts
    assert packed(()) == b""
    assert digest(b"") is None


@pytest.mark.parametrize("texts", [["a"] * (MAX_TEXTS + 1), ["a" * MAX_BYTES], ["a", ""]])
def test_too_many_texts_are_told(texts: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="give at most"):
        packed(texts)


@pytest.mark.parametrize("data", [b"[", b"{}", b"[]", b"[1]", b'[""]', b"[" * 9000, b'["' + b"a" * MAX_BYTES + b'"]'])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpacked(data, str(digest(data)))


def test_other_texts_than_told_are_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        unpacked(packed(["mine"]), str(digest(packed(["yours"]))))


class Bigrams(torch.nn.Module):
    """The loss of a token is its distance from the one before. Dropout would spoil it."""

    device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        assert not self.training
        assert ((labels == -100) == (attention_mask == 0)).all()
        is_real = attention_mask[:, 1:].bool()
        return SimpleNamespace(loss=(input_ids[:, 1:] - input_ids[:, :-1]).abs()[is_real].float().mean())


def letters(text: str, truncation: bool, max_length: int) -> Any:
    return SimpleNamespace(input_ids=[ord(letter) for letter in text][:max_length])


def test_every_token_counts_once() -> None:
    """Texts of very different lengths, in several batches; one has nothing to predict."""
    model = Bigrams().train()
    model.frozen = torch.nn.Dropout().eval()
    texts = ["ab" * 300, "ac", "x", *(["az" * 2] * 9)]
    distances = [1] * 511 + [2] + [25] * 3 * 9  # 512 tokens of the first
    assert text_loss(model, letters, texts) == pytest.approx(sum(distances) / len(distances))
    assert model.training
    assert not model.frozen.training
    with pytest.raises(ConfigurationError, match="no token to predict"):
        text_loss(model, letters, ["x"])
