"""For each of the two models: its file, the local model, servers of unlike spans, and a client."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from swarm_models import OPTIONS
from tests.real.real_models import GEMMA, SMOLLM2, RealModel, read_model
from transformers import PreTrainedModel

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm
from swarmllm.models.checkpoint.checkpoint import load_tokenizer


class Served:
    """One of the models, local and in a swarm."""

    def __init__(self, real: RealModel, directory: Path) -> None:
        self.real = real
        self.path = real.file(directory)
        self.local: PreTrainedModel = read_model(real, self.path).requires_grad_(False)
        self.tokenizer = load_tokenizer(str(self.path))
        self._open = ExitStack()
        swarm = LocalSwarm(self.path, spans=list(real.spans), metrics_port=0, dtype="float32", **OPTIONS)
        self.swarm = self._open.enter_context(swarm)
        self.model = self._open.enter_context(self.connect(speculation="off"))

    def connect(self, swarm: LocalSwarm | None = None, dtype: str = "float32", **config: Any) -> Any:
        """A client of its swarm, or of another one; to be closed."""
        return AutoDistributedModel.from_pretrained(
            str(self.path),
            initial_peers=(swarm or self.swarm).initial_peers,
            dtype=dtype,
            client_config=ClientConfig(**config),
            progress=False,
        )

    def ids(self, text: str) -> Any:
        """Token ids `[1, seq]`."""
        return self.tokenizer(text, return_tensors="pt").input_ids

    def reused_tokens(self) -> float:
        """Those that its first server took from prefixes that others had computed."""
        address = re.search(r"metrics are at (http://\S+)", self.swarm.servers[0].log_path.read_text())
        assert address is not None
        with urlopen(address[1], timeout=120) as answer:
            found = re.search(r"^swarmllm_server_reused_tokens_total (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    def close(self) -> None:
        self._open.close()


def _served(real: RealModel, directory: Path) -> Iterator[Served]:
    if not real.is_here:
        pytest.skip(real.missing)
    served = Served(real, directory)
    yield served
    served.close()


TAKES_TURNS = pytest.mark.rotates(3, whole_file=True)
"""Mark of tests with Gemma, which takes half a minute of a core. SmolLM2 has the same tests on each commit."""


@pytest.fixture(scope="session", params=[SMOLLM2, pytest.param(GEMMA, marks=TAKES_TURNS)], ids=lambda one: one.name)
def served(request: pytest.FixtureRequest) -> Served:
    """Each of them in turn."""
    found: Served = request.getfixturevalue(request.param.name)
    return found


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The one that chats."""
    yield from _served(SMOLLM2, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The one with windows, 262,144 tokens and a tied head."""
    yield from _served(GEMMA, tmp_path_factory.mktemp("gemma"))
