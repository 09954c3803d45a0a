"""Machines that choose a model of the hub, which none of them has: they download it once, all together."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hub_stub import HubStub, Repository, running_hub, use_hub
from running_machines import Machine, is_ready, online

from swarmllm import embedded_model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAME = "me/small"
THREE_BLOCKS = "0.0153GB"
PIECE = 1 << 20


@pytest.fixture
def hub() -> Iterator[HubStub]:
    with running_hub() as hub, pytest.MonkeyPatch.context() as monkeypatch:
        use_hub(hub, monkeypatch)
        files = {path.name: path.read_bytes() for path in Path(embedded_model_path()).iterdir() if path.is_file()}
        files.pop("mtp.safetensors")
        hub.repositories[NAME] = Repository(files, commit="e" * 40)
        yield hub


def test_three_machines_download_a_model_once(hub: HubStub, tmp_path: Path) -> None:
    with ExitStack() as running:

        def start(name: str, invite: str = "") -> Machine:
            return running.enter_context(Machine(tmp_path, name, invite=invite, max_memory=THREE_BLOCKS))

        a = start("a")
        machines = [a, *(start(name, a.tell(invite=True)) for name in ("b", "c"))]
        for machine in machines:
            machine.wait_for(lambda picture: len(picture["machines"]) == 3)
        a.tell(use=NAME)
        for machine in machines:
            machine.wait_for(lambda picture: is_ready(picture, NAME) and len(online(picture, NAME)) == 3)
        places = [Path(machine.tell(prepare=NAME)) for machine in machines]
        weights = hub.repositories[NAME].files["model.safetensors"]
        # Once, besides the header, which the first machine reads to list the files.
        assert len(weights) <= hub.sent["model.safetensors"] <= len(weights) + 2 * PIECE
        assert any((place / "model.safetensors").read_bytes() != weights for place in places)
        picture = a.wait_for(lambda picture: is_ready(picture, NAME))
        hosted = [one for machine in picture["machines"] for one in machine["hosted"]]
        assert sum(one["bytes_from_hub"] for one in hosted) <= hub.sent.total()
