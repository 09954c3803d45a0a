"""Models for tests with real servers, and how a swarm's answers are compared with the local model's."""

import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.request import urlopen

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from swarmllm import AutoDistributedModel, ClientConfig
from swarmllm.demo.local_swarm import LocalServer

NUM_BLOCKS = 8
EVERYTHING = (0, NUM_BLOCKS)
VOCABULARY = 128
TIMEOUT_S = 120.0
"""Seconds of a wait for a condition. Only what hangs takes so long."""
OPTIONS = {"num_threads": 1, "quant_type": "none"}
"""For every server: bit for bit what the local model computes in this process."""


def save_llama(directory: Path, *, seed: int = 0, num_blocks: int = NUM_BLOCKS, **config: Any) -> Path:
    """A llama whose random weights are large enough to make its blocks matter; it knows no end of text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, **config}
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=num_blocks,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=2048,
                bos_token_id=1,
                eos_token_id=None,
                pad_token_id=0,
                **settings,
            )
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(directory, max_shard_size="100KB")
    return directory


def save_head_beside(directory: Path, copied: Path) -> Path:
    """A copy of a llama's checkpoint with a head for multi-token prediction beside it: its last block once more."""
    shutil.copytree(directory, copied)
    model = AutoModelForCausalLM.from_pretrained(directory)
    size, number = model.config.hidden_size, model.config.num_hidden_layers
    tensors = {name: tensor.clone() for name, tensor in model.model.layers[-1].state_dict().items()}
    tensors |= {f"{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors["eh_proj.weight"] = torch.cat([torch.eye(size), torch.eye(size)], dim=1)
    save_file({f"model.layers.{number}.{name}": one for name, one in tensors.items()}, copied / "mtp.safetensors")
    return copied


def load_local(directory: Path) -> PreTrainedModel:
    """The reference: the whole model in this process, its weights frozen as those of a server are."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto").requires_grad_(False)


@contextmanager
def connected(directory: Path, initial_peers: list[str], **config: Any) -> Iterator[Any]:
    """A client, closed at the end."""
    model = AutoDistributedModel.from_pretrained(
        str(directory), initial_peers=initial_peers, client_config=ClientConfig(**config)
    )
    with model:
        yield model


def prompt(batch: int = 1, length: int = 9, seed: int = 0) -> Tensor:
    """Token ids `[batch, length]`, none of them special."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate_seeded(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """`generate()` from the same state of the random generator each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        output = model.generate(ids, **{"do_sample": False, "use_cache": True, **options})
    return output if isinstance(output, Tensor) else output.sequences


def assert_same_tokens(model: Any, local: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    """The swarm generates what the local model generates; returns it."""
    expected = generate_seeded(local, ids, **options)
    generated = generate_seeded(model, ids, **options)
    assert generated.tolist() == expected.tolist()
    return generated


def metric(server: LocalServer, name: str) -> float:
    """A metric of a server with `metrics_port=0`, as Prometheus reads it."""
    address = re.search(r"metrics are at (http://\S+)", server.log_path.read_text())
    assert address is not None
    with urlopen(address[1], timeout=120) as answer:
        value = re.search(rf"^swarmllm_server_{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert value is not None, f"no metric {name}"
    return float(value[1])


def names(route: Iterable[Any]) -> list[str]:
    """The peer ids of its servers."""
    return [hop.server.peer_id for hop in route]


def wait_until(happened: Callable[[], object], what: str) -> None:
    """Wait for a condition, not for a time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen in {TIMEOUT_S} s"
        time.sleep(0.005)


def generate_together(model: Any, prompts: Sequence[Tensor], num_tokens: int) -> list[list[int]]:
    """Greedy, each client in a thread of its own with its own session."""
    ends = Lock()  # the client's own layers are one set of modules

    def generate(ids: Tensor) -> list[int]:
        with torch.no_grad(), model.inference_session(max_length=ids.shape[1] + num_tokens) as session:
            tokens, feed = ids, ids
            for _ in range(num_tokens):
                with ends:
                    hidden = model.get_input_embeddings()(feed)
                hidden = session.step(hidden)
                with ends:
                    feed = model.head(hidden[:, -1:])[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, feed], dim=1)
            assert session.num_repairs == 0, "the session must not have noticed anything"
            return list(tokens[0].tolist())

    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(generate, prompts))
