"""Speed and memory of this machine alone."""

import pytest
import torch

from swarmllm.client.view.swarm_view import decode_ms, product_ms


def test_time_is_for_reading_the_weights_once() -> None:
    megabyte = decode_ms(1_000_000)
    assert megabyte is not None
    assert megabyte > 0
    assert decode_ms(3_000_000) == pytest.approx(3 * megabyte)


def test_what_does_not_fit_has_no_time() -> None:
    assert decode_ms(1 << 60) is None


def test_a_larger_matrix_takes_longer() -> None:
    assert product_ms(torch.ones(4096, 1024)) > product_ms(torch.ones(8, 8)) > 0
