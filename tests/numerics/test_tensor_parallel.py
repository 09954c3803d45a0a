"""Blocks whose matrices are spread over processes: what they compute is what they compute in one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.numerics.exactness import CHECKS
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.test_sweep import ARCHITECTURES, ROUNDS_DIFFERENTLY
from tests.numerics.tiny_models import VARIANTS, save_tiny
from tests.selection import sampled

from swarmllm.models.parallel.group import Group
from swarmllm.models.parallel.shared import SharedWeight

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    group = Group([CPU, CPU])
    yield group
    group.close()


@pytest.mark.parametrize("model_type", sampled([*ARCHITECTURES, *VARIANTS], 4))
def test_exact(model_type: str, tmp_path: Path, group: Group) -> None:
    """Forward, steps with a cache, beams, padding and gradients, through two spans."""
    local = save_tiny(model_type, tmp_path)
    swarm = InProcessSwarm(tmp_path, tolerance=ROUNDS_DIFFERENTLY.get(model_type, 0.0), group=group)
    assert {check.__name__: problem for check in CHECKS if (problem := check(local, swarm)) is not None} == {}
    for server, _ in swarm.route:
        shared = [module for module in server.slots.modules() if isinstance(module, SharedWeight)]
        assert shared, "nothing is spread"
