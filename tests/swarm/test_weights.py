"""Servers whose files differ although their configs, sizes and names don't: they are told apart, and never mixed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command
from safetensors.torch import load_file, save_file
from swarm_models import OPTIONS, assert_same_tokens, connected, load_local, prompt, wait_until
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.errors import MissingBlocksError
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint

pytestmark = pytest.mark.rotates(3)

LONG = {"max_new_tokens": 12}


def copied(source: Path, target: Path, change: Callable[[str, Tensor], None]) -> Path:
    """A copy of which some tensors are changed; each file is written anew, under its name and of its size."""
    shutil.copytree(source, target)
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            change(name, tensor)
        new = path.with_suffix(".new")
        save_file(tensors, new, metadata={"format": "pt"})
        assert new.stat().st_size == path.stat().st_size
        new.replace(path)
    return target


def merged(name: str, tensor: Tensor) -> None:
    """The change of the blocks by a merged adapter of rank 1."""
    if "_proj" in name:
        generator = torch.Generator().manual_seed(len(name))
        rows, columns = (torch.randn(size, generator=generator) for size in tensor.shape)
        tensor += 0.05 * torch.outer(rows, columns)


def damaged(name: str, tensor: Tensor) -> None:
    """Some numbers of one block, where samples don't look."""
    if "layers.5.self_attn.q_proj" in name:
        tensor[0, :8] += 30


def addresses(*servers: LocalServer) -> list[str]:
    return [maddr for server in servers for maddr in server.maddrs]


def test_a_merged_fine_tune_is_a_model_of_its_own(llama: Path, local: PreTrainedModel, tmp_path: Path) -> None:
    """In one swarm, with equal shapes, embeddings and head; the servers of halves have no block in common."""
    tuned = copied(llama, tmp_path / llama.name, merged)
    with LocalSwarm(llama, spans=[(0, 4), (4, 8)], **OPTIONS) as swarm:
        swarm.add_server((0, 4), model=tuned)
        swarm.add_server((4, 8), model=tuned)
        ids = prompt()
        with connected(llama, swarm.initial_peers) as model, connected(tuned, swarm.initial_peers) as other:
            text = assert_same_tokens(model, local, ids, **LONG)
            assert assert_same_tokens(other, load_local(tuned), ids, **LONG).tolist() != text.tolist(), "the control"
            for client in (model, other):
                assert len(client.swarm.servers()) == 2
        said = command("status", "--initial_peers", *swarm.initial_peers)
        assert said.returncode == 0
        assert f"2 models are called {llama.name}: their config or weights differ" in said.stdout
        for directory in (llama, tuned):
            assert fingerprint(open_checkpoint(str(directory)))[:12] in said.stdout


@pytest.mark.rotates(3)
def test_what_samples_miss_is_seen_when_blocks_are_read(llama: Path, local: PreTrainedModel, tmp_path: Path) -> None:
    """One of three servers of the same blocks has a damaged file: no client uses it beside the others."""
    bad = copied(llama, tmp_path / llama.name, damaged)
    assert fingerprint(open_checkpoint(str(bad))) == fingerprint(open_checkpoint(str(llama)))
    with LocalSwarm(llama, spans=[(0, 4), (4, 8), (2, 8)], **OPTIONS) as swarm:
        odd = swarm.add_server((4, 8), model=bad, throughput=1e6)
        ids = prompt()

        def assert_left_out(model: Any) -> None:
            assert_same_tokens(model, local, ids, **LONG)
            assert odd.peer_id not in {hop.server.peer_id for hop in model.swarm.route()}
            assert odd.peer_id in {server.peer_id for server in model.swarm.servers()}

        said = command("status", "--initial_peers", *swarm.initial_peers).stdout
        assert f"weights differ: …{odd.peer_id[-6:]} made blocks 5:6 of other files than most servers" in said
        with connected(llama, swarm.initial_peers, route_timeout_s=3) as model:
            with model.inference_session(max_length=64):
                assert_left_out(model)
                swarm.servers[1].kill()
                assert_left_out(model)
            swarm.servers[2].kill()
            with pytest.raises(MissingBlocksError, match=r"; 1 with other weights than those in use were left out"):
                model.generate(ids, **LONG)
            # Having been told, whoever begins anew takes what there is.
            got = model.generate(ids, do_sample=False, **LONG)
            expected = load_local(bad).generate(ids, do_sample=False, **LONG)
            assert got.tolist() == expected.tolist() != local.generate(ids, do_sample=False, **LONG).tolist()


@pytest.mark.rotates(3)
def test_a_server_whose_files_become_others_says_so_and_loads_none_of_them(
    llama: Path, local: PreTrainedModel, tmp_path: Path
) -> None:
    """Its directory gets the next fine-tune while it runs; later the swarm needs it for other blocks."""
    files, halves = tmp_path / "files" / llama.name, [(0, 4), (4, 8)]
    shutil.copytree(llama, files)
    with LocalSwarm(files, spans=halves, update_period=1, **OPTIONS) as swarm:
        mover = swarm.add_server(num_blocks=4)
        assert mover.span is not None
        here = (mover.span.start, mover.span.end)
        (gap,) = set(halves) - {here}
        next_files = copied(llama, tmp_path / "next", merged)
        for path in next_files.glob("*.safetensors"):
            path.replace(files / path.name)

        def log(server: LocalServer) -> str:
            return server.log_path.read_text(errors="replace")

        for server in swarm.servers:
            wait_until(lambda: "changed on disk" in log(server), "a word in the log")  # noqa: B023
        ids = prompt()
        with connected(llama, swarm.initial_peers) as model:
            assert_same_tokens(model, local, ids, **LONG)
            swarm.servers[halves.index(gap)].stop()
            wait_until(lambda: f"blocks {gap[0]}:{gap[1]} can't be loaded" in log(mover), "a try to move")
            assert {(s.start, s.end) for s in model.swarm.servers() if s.peer_id == mover.peer_id} == {here}
            for path in llama.glob("*.safetensors"):
                shutil.copy(path, files / path.name)
            assert_same_tokens(model, local, ids, **LONG)
            assert {(s.start, s.end) for s in model.swarm.servers() if s.peer_id == mover.peer_id} == {gap}
