"""An attention mask has a column for each position: models pad and cut others without a word, here they are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics import test_task_classes
from tests.numerics.in_process_swarm import InProcessSwarm
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmllm.client.session.inference_session import block_inputs
from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import Task
from swarmllm.models.boundary.block_inputs import check_mask
from swarmllm.models.shell.client_shell import embed

SENTENCE = r"attention_mask must be \[\d, \d+\] or \[\d, 1, \d, \d+\]"


@pytest.fixture(scope="module")
def local(llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama, dtype="auto")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("bert")
    test_task_classes.save_tiny("bert", Task.SEQUENCE_CLASSIFICATION, directory)
    return InProcessSwarm(directory, task=Task.SEQUENCE_CLASSIFICATION).client


SIZES = st.integers(1, 6)


@given(batch=SIZES, seq=SIZES, past=st.integers(0, 5), rows=SIZES, columns=st.integers(1, 12), height=SIZES)
def test_one_column_for_each_position(batch: int, seq: int, past: int, rows: int, columns: int, height: int) -> None:
    flat, square = torch.ones(rows, columns), torch.ones(rows, 1, height, columns)
    for mask, good in (
        (flat, (rows, columns) == (batch, past + seq)),
        (square, rows in (1, batch) and (height, columns) == (seq, past + seq)),
    ):
        if good:
            check_mask(mask, batch, seq, past)
        else:
            with pytest.raises(ConfigurationError, match=SENTENCE):
                check_mask(mask, batch, seq, past)


@settings(max_examples=30)
@given(
    lengths=st.lists(SIZES, min_size=1, max_size=4),
    batch=st.integers(1, 3),
    use_cache=st.sampled_from([None, True, False]),
    with_gradients=st.booleans(),
)
def test_positions_that_begin_anew(
    client: Any, local: Any, lengths: list[int], batch: int, use_cache: bool | None, with_gradients: bool
) -> None:
    """Without a mask and without a cache they are several texts', for transformers; with a cache they are one's."""
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(batch, -1)
    ids = torch.randint(3, 90, positions.shape, generator=torch.Generator().manual_seed(sum(lengths)))
    with torch.set_grad_enabled(with_gradients):
        results = [model(ids, position_ids=positions, use_cache=use_cache).logits for model in (client, local)]
    torch.testing.assert_close(results[0], results[1])


def wrong(batch: int, seq: int) -> list[Tensor]:
    flat = [(batch, seq - 1), (batch, seq + 1), (batch, 1), (batch + 1, seq), (1, seq), (seq,)]
    square = [(batch, 1, seq, seq + 1), (batch, 1, seq - 1, seq), (batch + 1, 1, seq, seq)]
    return [torch.ones(shape, dtype=dtype) for shape in flat + square for dtype in (torch.int64, torch.bool)]


@settings(max_examples=6, deadline=None)
@given(batch=st.integers(2, 3), seq=st.integers(2, 6), grad=st.booleans())
def test_batches(client: Any, encoder: Any, batch: int, seq: int, grad: bool) -> None:
    ids = torch.ones(batch, seq, dtype=torch.int64)
    for mask in wrong(batch, seq):
        for model in (client, encoder):
            with torch.set_grad_enabled(grad), pytest.raises(ConfigurationError, match=SENTENCE):
                model(ids, attention_mask=mask)
        with pytest.raises(ConfigurationError, match=SENTENCE):
            client(inputs_embeds=torch.zeros(batch, seq, 64), attention_mask=mask)
        with pytest.raises(ConfigurationError, match=SENTENCE):
            embed(client, ids, attention_mask=mask)
        with pytest.raises(ConfigurationError, match=SENTENCE):
            block_inputs(BlockTraits(), 64, torch.zeros(batch, seq, 64), attention_mask=mask)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"use_cache": False}])
def test_texts(client: Any, options: dict[str, Any]) -> None:
    ids = torch.full((1, 5), 7)
    good = client.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, **options)
    assert good.shape[1] > ids.shape[1]
    for width in (4, 6, 1):
        with pytest.raises(ConfigurationError, match=SENTENCE):
            client.generate(ids, attention_mask=torch.ones(1, width), max_new_tokens=3, **options)


def test_steps_with_a_cache(client: Any) -> None:
    ids = torch.full((2, 5), 7)
    session = client.swarm_runner.new_cache_session(2, None)
    hidden = embed(client, ids)
    inputs = block_inputs(client.swarm_traits, 64, hidden, attention_mask=torch.ones(2, 5))
    assert inputs.attention_mask is not None
    for width in (5, 3, 9):
        with pytest.raises(ConfigurationError, match="5 earlier ones included"):
            block_inputs(client.swarm_traits, 64, hidden[:, :3], attention_mask=torch.ones(2, width), past=5)
    assert session.position == 0
