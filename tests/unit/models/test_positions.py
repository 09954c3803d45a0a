"""Positions of calls that run together: on one device, whoever has counted them."""

from types import SimpleNamespace
from typing import Any

import torch

from swarmllm.models.span.packing import _all_positions


def call(position_ids: torch.Tensor | None) -> Any:
    inputs = SimpleNamespace(position_ids=position_ids, batch_size=1, seq_len=2)
    return SimpleNamespace(inputs=inputs, cache=SimpleNamespace(length=3), end_position=5)


def test_sent_positions_decide_the_device() -> None:
    sent = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    assert {one.device.type for one in _all_positions([call(None), call(sent)])} == {"meta"}


def test_counted_positions_stay_on_the_host() -> None:
    assert [one.tolist() for one in _all_positions([call(None), call(None)])] == [[[3, 4]], [[3, 4]]]
