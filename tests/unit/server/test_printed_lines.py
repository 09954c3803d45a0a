"""The lines of a server on standard output, which programs read."""

from types import SimpleNamespace
from typing import Any

import pytest

from swarmllm.data_structures import Span
from swarmllm.demo.local_swarm import _SERVING
from swarmllm.server.server import _print_online


@pytest.mark.parametrize("name", ["owner/name", "/data/a b/ü", "/data/two\nlines\t\x1b[31m"])
def test_two_lines_whatever_the_path_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    record: Any = SimpleNamespace(
        span=Span(0, 4), peer=SimpleNamespace(peer_id="Qm", join_maddrs=["/ip4/1.2.3.4/tcp/1"])
    )
    checkpoint: Any = SimpleNamespace(name=name)
    _print_online(checkpoint, record)
    serving, join = capsys.readouterr().out.splitlines()
    found = _SERVING.match(serving)
    assert found is not None
    assert found[4] == "Qm"
    assert join == "swarmllm: join with --initial_peers /ip4/1.2.3.4/tcp/1"
