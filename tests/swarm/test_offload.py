"""Servers with more blocks than memory: the same tokens and gradients, and what is asked for is done or refused."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, connected, generate_seeded, prompt
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.server.__main__ import parse_config

pytestmark = pytest.mark.rotates(6, whole_file=True)

HALF = NUM_BLOCKS // 2
ASKED = ["--model", "M", "--new_swarm"]


@pytest.fixture(scope="module")
def swarm(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """All blocks of one server are offloaded, and two of the other's."""
    options = {"cache_dir": str(tmp_path_factory.mktemp("cache")), **OPTIONS}
    with LocalSwarm(llama, spans=[(0, HALF)], offload=HALF, **options) as swarm:
        swarm.add_server((HALF, NUM_BLOCKS), offload=2)
        yield swarm


@pytest.mark.parametrize(
    ("rows", "options"),
    [(1, {}), (3, {"num_beams": 3}), (2, {"do_sample": True}), (1, {"prompt_lookup_num_tokens": 3})],
)
def test_tokens(llama: Path, swarm: LocalSwarm, local: PreTrainedModel, rows: int, options: dict[str, Any]) -> None:
    with connected(llama, swarm.initial_peers) as model:
        ids = prompt(rows, 9)
        expected = generate_seeded(local, ids, max_new_tokens=8, **options)
        assert generate_seeded(model, ids, max_new_tokens=8, **options).tolist() == expected.tolist()


def test_gradients_of_an_adapter(llama: Path, swarm: LocalSwarm, local: PreTrainedModel) -> None:
    ids = prompt(3, 12)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, copy.deepcopy(config))
        found = {}
        for seed in range(2):
            adapted(input_ids=prompt(3, 12, seed=seed), labels=ids).loss.backward()
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                found[name] = parameter.grad
        return found

    expected = gradients(copy.deepcopy(local))
    with connected(llama, swarm.initial_peers) as model:
        found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_what_cannot_be_read_any_more_is_asked_of_others(llama: Path, local: PreTrainedModel) -> None:
    """The file of one server is cut off, as by a disk that fails: clients go to the other one, and it goes on."""
    expected = generate_seeded(local, prompt(), max_new_tokens=12)
    with (
        LocalSwarm(llama, spans=[(0, NUM_BLOCKS)] * 2, offload=NUM_BLOCKS, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as model,
        model.inference_session(max_length=64) as session,
    ):
        begun = generate_seeded(model, prompt(), max_new_tokens=4)
        used = session.route[0].server.peer_id
        server = next(server for server in swarm.servers if server.peer_id == used)
        (file,) = (fd for fd in Path(f"/proc/{server.pid}/fd").iterdir() if "(deleted)" in str(fd.readlink()))
        os.truncate(file, 0)
        found = generate_seeded(model, begun, max_new_tokens=8)
        assert session.route[0].server.peer_id != used
        assert server.alive
        assert "can't read offloaded blocks from" in server.log_path.read_text()
    assert found.tolist() == expected.tolist()


def test_as_many_as_do_not_fit(llama: Path, local: PreTrainedModel) -> None:
    """A server that is told its memory serves the blocks, and promises no more memory than there is."""
    config, num_tokens = local.config, 512
    block = 4 * sum(parameter.numel() for parameter in local.model.layers[0].parameters())
    cache = num_tokens * NUM_BLOCKS * 2 * config.num_key_value_heads * config.head_dim * 4
    limit = (4 * block + cache) / 1e9
    options = {"max_memory": f"{limit:.7f}", "attn_cache_tokens": num_tokens, "prefix_cache_tokens": 0, **OPTIONS}
    with pytest.raises(SwarmError, match="serve fewer"):
        LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], **options).start()
    with (
        LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], offload="auto", **options) as swarm,
        connected(llama, swarm.initial_peers) as model,
    ):
        assert "of the 8 blocks are on disk" in swarm.servers[0].log_path.read_text()
        generated = generate_seeded(model, prompt(), max_new_tokens=4)
    assert generated.tolist() == generate_seeded(local, prompt(), max_new_tokens=4).tolist()


def test_what_is_read() -> None:
    assert parse_config(ASKED).offload == 0
    assert parse_config([*ASKED, "--num_blocks", "4", "--offload", "auto"]).offload is None
    assert parse_config([*ASKED, "--block_indices", "2:5", "--offload", "3"]).offload == 3


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--offload", "1"], "0 .none., auto, or at least 2"),
        (["--offload", "-2"], "0 .none., auto, or at least 2"),
        (["--offload", "auto"], "--offload auto needs --num_blocks or --block_indices"),
        (["--offload", "5", "--num_blocks", "4"], "of 4 blocks, 5 can't be offloaded"),
        (["--offload", "5", "--block_indices", "2:5"], "of 3 blocks, 5 can't be offloaded"),
    ],
)
def test_what_is_refused(flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        parse_config([*ASKED, *flags])
