"""A server whose blocks are spread over two processes: the same tokens and gradients, also when one of them goes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
import torch
from commands import Running, command, sentence
from swarm_models import NUM_BLOCKS, assert_same_tokens, connected, generate_seeded, load_local, prompt
from tests.numerics.adapter_makers import save_adapter
from transformers import PreTrainedModel

ALL, HALF = ("--num_blocks", NUM_BLOCKS), NUM_BLOCKS // 2
FLAGS = ("--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--num_threads", 1, "--update_period", 2)
EXACT = ("--dtype", "float32", "--quant_type", "none")
TWO = ("--device", "cpu", "--tensor_parallel", 2)


def followers(pid: int) -> list[psutil.Process]:
    """The processes that have a part of the blocks, of all servers that this process watches."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "swarmllm.models.parallel.follower" in child.cmdline()]


def running(llama: Path, log: Path, *args: object, blocks: tuple[object, ...] = ALL) -> Running:
    return Running("server", "--model", llama, *blocks, *FLAGS, *args, log=log)


def ended_with_all(server: Running) -> bool:
    """Tell a server to leave; whether all that it has started left as well."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert server.stop(signal.SIGTERM) == 0
    return not psutil.wait_procs(processes, timeout=30)[1]


@pytest.fixture(scope="module")
def shelf(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("shelf")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return save_adapter(llama, config, directory / "poet", seed=1)


@pytest.fixture(scope="module")
def server(llama: Path, shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, list[str]]]:
    log = tmp_path_factory.mktemp("log") / "log"
    with running(llama, log, "--new_swarm", "--adapters", shelf, *EXACT, *TWO) as server:
        yield server, server.maddrs()
        assert len(followers(server.process.pid)) == 1
        assert ended_with_all(server)


@pytest.mark.slow
def test_same_tokens_and_gradients(llama: Path, local: PreTrainedModel, shelf: Path, server: Any) -> None:
    """Several rows, beams, padding, an adapter of the server and one of the client."""
    with connected(llama, server[1]) as model:
        assert_same_tokens(model, local, prompt(3), max_new_tokens=10)
        assert_same_tokens(model, local, prompt(), max_new_tokens=10, num_beams=3)
        mask = torch.ones(2, 9, dtype=torch.int64)
        mask[0, :4] = 0
        assert_same_tokens(model, local, prompt(2), attention_mask=mask, max_new_tokens=10)
        assert _gradient(model, prompt()).allclose(_gradient(local, prompt()), rtol=1e-4, atol=1e-7)
    expected = generate_seeded(peft.PeftModel.from_pretrained(load_local(llama), shelf), prompt(), max_new_tokens=10)
    with connected(llama, server[1], active_adapter="poet") as model:
        assert generate_seeded(model, prompt(), max_new_tokens=10).tolist() == expected.tolist()
    with connected(llama, server[1]) as model:
        own = peft.PeftModel.from_pretrained(model, shelf)
        assert generate_seeded(own, prompt(), max_new_tokens=10).tolist() == expected.tolist()


def _gradient(model: Any, ids: torch.Tensor) -> torch.Tensor:
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeddings, labels=ids).loss.backward()
    assert embeddings.grad is not None
    return embeddings.grad


@pytest.mark.slow
def test_int8_is_what_one_process_computes(llama: Path, tmp_path: Path) -> None:
    texts = []
    for name, together in (("one", ()), ("two", TWO)):
        with running(llama, tmp_path / name, "--new_swarm", "--quant_type", "int8", *together) as server:
            with connected(llama, server.maddrs()) as model:
                texts.append(generate_seeded(model, prompt(2), max_new_tokens=12).tolist())
            assert len(followers(server.process.pid)) == (1 if together else 0)
            assert ended_with_all(server)
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_goes(llama: Path, local: PreTrainedModel, tmp_path: Path, signum: int) -> None:
    """In the middle of a text, which another server goes on with; the server comes back as the same peer."""
    expected = generate_seeded(local, prompt(), max_new_tokens=12)
    first, second = ("--block_indices", f"0:{HALF}"), ("--block_indices", f"{HALF}:{NUM_BLOCKS}")
    with running(llama, tmp_path / "first", "--new_swarm", *EXACT, blocks=first) as founder:
        join = ("--initial_peers", *founder.maddrs(), *EXACT)
        with running(llama, tmp_path / "log", *join, *TWO, "--identity_path", tmp_path / "k", blocks=second) as server:
            said = server.lines_until_join()
            with (
                connected(llama, list(join[1:-4]), route_timeout_s=60) as model,
                model.inference_session(max_length=64),
            ):
                begun = generate_seeded(model, prompt(), max_new_tokens=4)
                with running(llama, tmp_path / "other", *join, blocks=second) as other:
                    other.lines_until_join()
                    (follower,) = followers(server.process.pid)
                    os.kill(follower.pid, signum)
                    assert generate_seeded(model, begun, max_new_tokens=8).tolist() == expected.tolist()
                    assert not psutil.wait_procs([follower], timeout=60)[1]
                    assert server.lines_until_join()[0] == said[0]
                    assert ended_with_all(other)
            assert "which has a part of this server's matrices" in (tmp_path / "log").read_text()
            assert ended_with_all(server)
        assert ended_with_all(founder)


@pytest.mark.slow
def test_no_follower_outlives_its_server(llama: Path, tmp_path: Path) -> None:
    """Not even one that is frozen when everybody else is killed."""
    with running(llama, tmp_path / "log", "--new_swarm", *EXACT, *TWO) as server:
        server.lines_until_join()
        processes = psutil.Process(server.process.pid).children(recursive=True)
        (follower,) = followers(server.process.pid)
        os.kill(follower.pid, signal.SIGSTOP)
        server.process.kill()
        assert not psutil.wait_procs(processes, timeout=30)[1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--device", "cpu", "cpu", "cpu", "--tensor_parallel", 2), "3 devices can't be divided into groups of 2"),
        (("--tensor_parallel", 2, "--offload", 2), "not both"),
        (("--device", "cpu", "cuda:0", "--tensor_parallel", 2), "of one kind"),
    ],
)
def test_what_cannot_be_shared(llama: Path, flags: tuple[object, ...], reason: str) -> None:
    result = command("server", "--model", llama, "--num_blocks", 4, "--new_swarm", *flags)
    assert result.returncode == 2
    assert reason in sentence(result.stderr)
