"""`--idle_unload`: blocks that nobody uses leave the memory, and come back for whoever asks, as if they had stayed."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from swarm_models import wait_until
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmllm import AutoDistributedModel, LocalSwarm, embedded_model_path
from swarmllm.data_structures import ServerState

pytestmark = pytest.mark.rotates(6, whole_file=True)

MODEL = embedded_model_path()
IDLE_S = 2.0
OPTIONS: dict[str, Any] = {"num_threads": 1, "quant_type": "none", "dtype": "float32", "update_period": 1}


@pytest.fixture(scope="module")
def swarm() -> Iterator[LocalSwarm]:
    with LocalSwarm(MODEL, spans=[(0, 4), (4, 8)], idle_unload=IDLE_S, **OPTIONS) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def local() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture
def model(swarm: LocalSwarm) -> Iterator[Any]:
    with AutoDistributedModel.from_pretrained(MODEL, initial_peers=swarm.initial_peers, dtype="float32") as model:
        yield model


def ids_of(seed: int, length: int) -> Tensor:
    return torch.randint(3, 500, (1, length), generator=torch.Generator().manual_seed(seed))


def greedy(model: Any, ids: Tensor, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    found: list[list[int]] = model.generate(ids, **options).tolist()
    return found


def wait_until_asleep(model: Any) -> None:
    """As everybody sees it: still online, and counted on."""

    def asleep() -> bool:
        servers = model.swarm.servers()
        assert all(server.state == ServerState.ONLINE and server.throughput > 0 for server in servers)
        return len(servers) == 2 and all(server.wake_s > 0 for server in servers)

    wait_until(asleep, "all blocks left the memory")


def generates(model: Any, local: Any) -> None:
    ids = ids_of(1, 20)
    assert greedy(model, ids) == greedy(local, ids)


def trains(model: Any, local: Any) -> None:
    ids = ids_of(2, 12)
    found, expected = (one.get_input_embeddings()(ids).detach().requires_grad_() for one in (model, local))
    for one, embeddings in ((model, found), (local, expected)):
        one(inputs_embeds=embeddings).logits.square().mean().backward()
    assert found.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("use", [generates, trains])
def test_sleeping_blocks_come_back_for_a_request(model: Any, local: Any, use: Callable[[Any, Any], None]) -> None:
    use(model, local)
    wait_until_asleep(model)
    use(model, local)
    assert all(count == 0 for name, count in model.swarm.counts.items() if name != "repairs"), model.swarm.counts


def test_several_requests_at_once_wait_for_the_same_load(swarm: LocalSwarm, model: Any, local: Any) -> None:
    wait_until_asleep(model)
    prompts = [ids_of(seed, 5 + seed) for seed in range(6)]
    with ThreadPoolExecutor() as at_once:
        found = list(at_once.map(lambda ids: greedy(model, ids), prompts))
    assert found == [greedy(local, ids) for ids in prompts]


def test_a_session_keeps_them(model: Any, local: Any) -> None:
    ids = ids_of(4, 10)
    with model.inference_session(max_length=64):
        first = torch.tensor(greedy(model, ids, max_new_tokens=2, min_new_tokens=2))
        time.sleep(3 * IDLE_S)
        assert not any(server.wake_s for server in model.swarm.servers())
        second = greedy(model, first, max_new_tokens=4, min_new_tokens=4)
    assert second == greedy(local, ids, max_new_tokens=6, min_new_tokens=6)


def test_their_memory_is_free_meanwhile(swarm: LocalSwarm, model: Any, local: Any) -> None:
    greedy(model, ids_of(5, 8))
    (server, _) = swarm.servers
    process = psutil.Process(server.pid)
    awake = process.memory_full_info().uss
    wait_until_asleep(model)
    blocks = sum(weight.nbytes for weight in local.model.layers[:4].parameters())
    wait_until(lambda: process.memory_full_info().uss < awake - 0.7 * blocks, "most of the blocks' memory was freed")


def test_one_that_sleeps_leaves_at_once() -> None:
    with LocalSwarm(MODEL, spans=[(0, 8)], idle_unload=0.5, **OPTIONS) as swarm:
        (server,) = swarm.servers
        wait_until(lambda: "they leave the memory" in server.log_path.read_text(), "the server sleeps")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert server.log_path.read_text().count("loading") < 3
