"""Calls that people try with a model of transformers: each works as there, or is refused in one sentence."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarmllm import AutoDistributedModel, LocalSwarm, embedded_model_path
from swarmllm.client.text_generation import open_model
from swarmllm.config import ClientModelConfig
from swarmllm.errors import ConfigurationError

pytestmark = pytest.mark.rotates(6, whole_file=True)

PATH = embedded_model_path()
SPANS = [(0, 4), (4, 8)]


@pytest.fixture(scope="module")
def swarm() -> Iterator[LocalSwarm]:
    with LocalSwarm(PATH, spans=SPANS) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: LocalSwarm) -> Iterator[Any]:
    with AutoDistributedModel.from_pretrained(PATH, initial_peers=swarm.initial_peers) as model:
        yield model


@pytest.fixture(scope="module")
def local() -> Any:
    return AutoModelForCausalLM.from_pretrained(PATH)


def test_it_is_counted_as_a_whole(model: Any, local: Any) -> None:
    assert model.num_parameters() == local.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == local.num_parameters(exclude_embeddings=True)
    layers, of_local = model.model.layers, local.model.layers
    assert len(layers) == len(list(layers)) == model.config.num_hidden_layers == len(of_local)
    for idx in (0, 3, -1):
        assert isinstance(layers[idx], type(of_local[idx]))
        assert layers[idx].self_attn.layer_idx == of_local[idx].self_attn.layer_idx
        assert layers[idx].mlp.up_proj.weight.shape == of_local[idx].mlp.up_proj.weight.shape
    assert [block.self_attn.layer_idx for block in layers[2:4]] == [2, 3]
    with pytest.raises(IndexError):
        layers[8]
    hidden = torch.randn(1, 2, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    positions = model.model.rotary_emb(hidden, torch.arange(2)[None])
    with torch.no_grad():  # a block by itself computes here, with weights that are read for it
        assert torch.equal(
            layers[3](hidden, position_embeddings=positions), of_local[3](hidden, position_embeddings=positions)
        )
    assert torch.equal(model.generate(IDS, max_new_tokens=4), model.generate(IDS, max_new_tokens=4))


IDS = torch.tensor([[5, 6, 7]])


def test_it_shows_its_swarm(model: Any, swarm: LocalSwarm) -> None:
    lines = repr(model).splitlines()
    first, second = (server.peer_id[-4:] for server in swarm.servers)
    assert lines[0] == "LlamaForCausalLM("
    host = socket.gethostname()
    assert lines[1] == f"  (swarm): embedded, 8 blocks, 2 servers: 0:4 by {host} …{first}, 4:8 by {host} …{second}"
    assert "(0-7): 8 x LlamaDecoderLayer(" in repr(model)
    assert repr(model.swarm) in lines[1]


@pytest.mark.parametrize(
    "options",
    [
        {"config": AutoConfig.from_pretrained(PATH)},
        {"load_in_8bit": True},
        {"subfolder": "x"},
        {"max_memory": {0: "10GB"}},
        {"variant": "fp16"},
        {"tp_plan": "auto"},
        {"offload_folder": "x"},
        {"state_dict": {}},
        {"output_loading_info": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"^{next(iter(options))} can't be given here: ") as refused:
        AutoDistributedModel.from_pretrained(PATH, initial_peers=["/ip4/127.0.0.1/tcp/1/p2p/Qm"], **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("device_map", ["cpu", torch.device("cpu"), {"": "cpu"}, "auto", None])
def test_one_device(swarm: LocalSwarm, device_map: Any) -> None:
    options = {"subfolder": "", "load_in_8bit": False, "max_memory": None}  # which ask for nothing
    with AutoDistributedModel.from_pretrained(
        PATH, initial_peers=swarm.initial_peers, device_map=device_map, **options
    ) as model:
        assert model.generate(IDS, max_new_tokens=2).shape == (1, 5)


@pytest.mark.parametrize("device_map", ["cuda:99", {"model": "cpu", "lm_head": "disk"}, "nowhere", 99])
def test_several_devices_or_none(swarm: LocalSwarm, device_map: Any) -> None:
    with pytest.raises(ConfigurationError, match="device_map must be auto or one device of this machine"):
        AutoDistributedModel.from_pretrained(PATH, initial_peers=swarm.initial_peers, device_map=device_map)


def test_a_missing_device_of_a_command_is_told_with_its_flag() -> None:
    """All commands of clients open their models so, the gateway as well."""
    config = ClientModelConfig(model=PATH, lan_discovery=False, device="cuda:99")
    with pytest.raises(ConfigurationError, match=r"^--device must be auto or one device of this machine"):
        open_model(config)
