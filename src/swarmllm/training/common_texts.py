"""Common texts of a run: their bytes, their limits, and the loss of a model on them.

The first home names the texts. Homes compare their digest, and one that has none gets the bytes from a member. So all
measure the same. Nobody trains on them, so they show how good the shared values are for everybody.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from swarmllm.errors import ConfigurationError, RemoteProtocolError

MAX_BYTES = 1 << 16
"""Most bytes of all texts as JSON. They are measured twice a round, so a few thousand tokens are enough."""
MAX_TEXTS = 256
MAX_TOKENS = 512
"""Most tokens of a text that `text_loss` reads."""
ROWS = 8
"""Texts in one forward of `text_loss`."""


def packed(texts: Sequence[str]) -> bytes:
    """The bytes of texts; none for no texts.

    Raises:
        ConfigurationError: there are too many.
    """
    if not texts:
        return b""
    data = json.dumps(list(texts), ensure_ascii=False, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES or len(texts) > MAX_TEXTS or not all(texts):
        raise ConfigurationError(
            f"{len(texts)} common texts of {len(data)} bytes: give at most {MAX_TEXTS}, of {MAX_BYTES} bytes in all, "
            "and no empty one"
        )
    return data


def unpacked(data: bytes, sha256: str, peer_id: str | None = None) -> tuple[str, ...]:
    """The texts in bytes of another member.

    Raises:
        RemoteProtocolError: they aren't those with this digest, or no texts.
    """
    try:
        texts = json.loads(data) if len(data) <= MAX_BYTES and digest(data) == sha256 else None
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RemoteProtocolError("common texts make no sense", peer_id)
    if not 0 < len(texts) <= MAX_TEXTS:
        raise RemoteProtocolError(f"{len(texts)} common texts instead of 1 to {MAX_TEXTS}", peer_id)
    return tuple(texts)


def digest(data: bytes) -> str | None:
    """SHA-256 of packed texts, in hex; None for none."""
    return hashlib.sha256(data).hexdigest() if data else None


@torch.no_grad()
def text_loss(model: Any, tokenizer: Any, texts: Sequence[str]) -> float:
    """The mean loss per token of a causal model on these texts, without dropout; at most 512 tokens of each count."""
    ids = [tokenizer(text, truncation=True, max_length=MAX_TOKENS).input_ids for text in texts]
    ids = sorted((row for row in ids if len(row) > 1), key=len)
    if not ids:
        raise ConfigurationError("the common texts have no token to predict: give longer ones")
    total, modes = 0.0, {module: module.training for module in model.modules()}
    model.eval()
    try:
        for start in range(0, len(ids), ROWS):
            rows = ids[start : start + ROWS]
            longest = max(map(len, rows))
            filled = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
            mask = torch.arange(longest)[None] < torch.tensor([[len(row)] for row in rows])
            labels = filled.masked_fill(~mask, -100).to(model.device)
            found = model(input_ids=filled.to(model.device), attention_mask=mask.long().to(model.device), labels=labels)
            total += found.loss.item() * sum(len(row) - 1 for row in rows)
    finally:
        for module, was_training in modes.items():  # some may be in eval mode while others train
            module.training = was_training
    return total / sum(len(row) - 1 for row in ids)
