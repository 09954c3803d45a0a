"""Adapters that servers offer: what a client with `active_adapter` gets is what peft computes with the local model."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from commands import command
from swarm_models import NUM_BLOCKS, OPTIONS, connected, generate_seeded, load_local, prompt, wait_until
from tests.numerics.adapter_makers import save_adapter
from torch import Tensor

from swarmllm import LocalSwarm
from swarmllm.errors import ConfigurationError, MissingBlocksError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning"),
]
LONG = 80
"""Tokens of a prompt: more than a page that servers share."""


@pytest.fixture(scope="module")
def shelf(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of adapters, as a server's owner would keep one."""
    directory = tmp_path_factory.mktemp("shelf")
    everywhere = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules="all-linear")
    save_adapter(llama, everywhere, directory / "poet", seed=1)
    some = peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    save_adapter(llama, some, directory / "clerk", seed=2)
    return directory


@pytest.fixture(scope="module")
def swarm(llama: Path, shelf: Path) -> Iterator[LocalSwarm]:
    """All blocks on one server without adapters and on one with; and once more with, in two parts."""
    spans = [(0, NUM_BLOCKS), (0, 3), (3, NUM_BLOCKS)]
    with LocalSwarm(llama, spans=spans, update_period=1, adapters=shelf, **OPTIONS) as swarm:
        swarm.add_server((0, NUM_BLOCKS), adapters=None)
        yield swarm


def expected(llama: Path, adapter: Path | None, ids: Tensor) -> list[list[int]]:
    local = load_local(llama)
    model = local if adapter is None else peft.PeftModel.from_pretrained(local, adapter)
    return generate_seeded(model, ids, max_new_tokens=12, attention_mask=torch.ones_like(ids)).tolist()


def generated(model: Any, ids: Tensor, **options: Any) -> list[list[int]]:
    return generate_seeded(model, ids, max_new_tokens=12, attention_mask=torch.ones_like(ids), **options).tolist()


def test_clients_with_different_adapters_at_once(llama: Path, shelf: Path, swarm: LocalSwarm) -> None:
    ids = prompt(1, LONG)
    wanted = {name: expected(llama, name and shelf / name, ids) for name in ("poet", "clerk", None)}
    assert len({str(text) for text in wanted.values()}) == 3, "the control: adapters make a difference"
    without = swarm.servers[-1].peer_id

    def ask(name: str | None) -> list[list[int]]:
        with connected(llama, swarm.initial_peers, active_adapter=name) as model:
            if name is not None:
                assert without not in {hop.server.peer_id for hop in model.swarm.route()}
            return generated(model, ids)

    names = ["poet", "clerk", None, "poet", "clerk"]
    with ThreadPoolExecutor(len(names)) as clients:
        for name, text in zip(names, clients.map(ask, names), strict=True):
            assert text == wanted[name], name


def test_gradients_pass_through_an_adapter_of_servers(llama: Path, shelf: Path, swarm: LocalSwarm) -> None:
    ids = prompt(2)

    def trained(model: Any) -> tuple[Tensor, Tensor]:
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        loss = model(inputs_embeds=embeds, labels=ids).loss
        loss.backward()
        return loss.detach(), embeds.grad

    local = peft.PeftModel.from_pretrained(load_local(llama), shelf / "poet")
    with connected(llama, swarm.initial_peers, active_adapter=str(shelf / "poet")) as model:
        for got, wanted in zip(trained(model), trained(local), strict=True):
            torch.testing.assert_close(got, wanted)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
        own = peft.get_peft_model(model, config)
        with pytest.raises(ConfigurationError, match="can't have one of yours as well"):
            own(input_ids=ids)


def test_an_adapter_that_some_blocks_lack_is_named(llama: Path, swarm: LocalSwarm) -> None:
    sentence = r"nobody serves blocks 0:8 of checkpoint with the adapter nobody-has-it: start servers with --adapters"
    with pytest.raises(MissingBlocksError, match=sentence):
        connected(llama, swarm.initial_peers, active_adapter="nobody-has-it", route_timeout_s=0.2).__enter__()


def test_what_is_put_on_the_shelf_later_is_offered(llama: Path, shelf: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    config = peft.LoHaConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"])
    late = save_adapter(llama, config, tmp_path / "late", seed=3)
    with connected(llama, swarm.initial_peers) as watching:

        def versions() -> set[str]:
            found = [server.adapters for server in watching.swarm.servers()]
            return {name for adapters in found for name in adapters if name.startswith("late@")}

        def everywhere() -> bool:
            servers = watching.swarm.servers()
            return len(versions()) == 1 and sum(versions() <= set(s.adapters) for s in servers) == 3

        shutil.copytree(late, shelf / "half" / "late")  # in one move, as a careful owner would
        (shelf / "half" / "late").rename(shelf / "late")
        (shelf / "half").rmdir()
        wait_until(everywhere, "the new adapter's announcement")
        first = versions()
        with connected(llama, swarm.initial_peers, active_adapter="late") as model:
            assert generated(model, prompt()) == expected(llama, late, prompt())
        shutil.rmtree(shelf / "late")
        wait_until(lambda: not versions(), "the end of the adapter's announcement")
        save_adapter(llama, config, shelf / "late", seed=4)
        wait_until(everywhere, "the announcement of another adapter under the old name")
        assert versions() != first
        with connected(llama, swarm.initial_peers, active_adapter="late") as model:
            assert generated(model, prompt()) == expected(llama, shelf / "late", prompt())


def test_a_server_dies_while_its_adapter_is_in_use(llama: Path, shelf: Path, swarm: LocalSwarm) -> None:
    ids = prompt()
    with (
        connected(llama, swarm.initial_peers, active_adapter="poet") as model,
        model.inference_session(max_length=64) as session,
    ):
        first = generated(model, ids)
        used = session.route[0].server.peer_id
        (server,) = [server for server in swarm.servers if server.peer_id == used]
        server.kill()
        session.position = 0
        assert generated(model, ids) == first == expected(llama, shelf / "poet", ids)
        left = {hop.server.peer_id for hop in session.route}
        assert not left & {used, swarm.servers[-1].peer_id}, "others with the adapter took over"


def test_a_server_does_not_start_with_an_adapter_that_it_cannot_offer(llama: Path, shelf: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(shelf / "poet", tmp_path / "bad")
    (bad / "adapter_model.safetensors").rename(bad / "adapter_model.bin")
    flags = ("--model", llama, "--num_blocks", 2, "--new_swarm", "--host_maddrs", "/ip4/127.0.0.1/tcp/0")
    ended = command("server", *flags, "--adapters", bad)
    assert ended.returncode == 1
    assert "is a pickle, which could run any code: save it as safetensors" in ended.stderr.splitlines()[-1]
