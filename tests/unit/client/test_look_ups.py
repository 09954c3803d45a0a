"""Errors about missing blocks name the mend, and a swarm that was started again is found."""

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmllm.client.text_generation import with_model_here
from swarmllm.client.view import servers as servers_module
from swarmllm.client.view.servers import LookUps
from swarmllm.config import ClientConfig
from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.errors import MissingBlocksError
from swarmllm.network.p2p.discovery import HERE_FILE, SwarmHere, find_swarm_here
from swarmllm.network.p2p.identity import Identity

SWARM, OTHER = (Identity.generate().peer_id for _ in range(2))


class Empty:
    """A directory in which no other model is announced."""

    async def models(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("missing", "private", "end"),
    [
        ((2, 3), None, "--block_indices 2:4 --initial_peers /ip4/1.2.3.4/tcp/5/p2p/12D3"),
        ((2, 3), "friends", "--block_indices 2:4 --initial_peers INVITE"),
        ((), None, "of org/model (waited 33 s)"),  # spans that can't be joined
    ],
)
async def test_missing_blocks(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[int, ...], private: str | None, end: str
) -> None:
    config = ClientConfig(initial_peers=("/ip4/1.2.3.4/tcp/5/p2p/12D3",), swarm_name=private)
    look_ups = LookUps(config, name="org/model", fingerprint="f", num_blocks=4, check_greeting=lambda *_: None)
    monkeypatch.setattr(look_ups, "_directory", Empty(), raising=False)
    look_ups.snapshot = SwarmSnapshot(4, (ServerInfo(peer_id="1" * 52, start=0, end=2),))
    error = await look_ups.explained(MissingBlocksError("nobody serves them", missing), None, "", 32.8)
    assert str(error).endswith(end)
    assert error.block_idxs == missing


@pytest.mark.parametrize(
    ("settings", "missing", "said"),
    [
        ({"allowed_servers": ()}, 1, "servers that your allowed_servers leaves out: change it"),
        ({"allowed_servers": (OTHER,)}, 1, "servers that your allowed_servers leaves out: change it"),
        ({"blocked_servers": (SWARM,)}, 0, "servers that your blocked_servers leaves out: change it"),
        ({"blocked_servers": (OTHER,)}, 0, "serves no model"),
        ({"blocked_servers": (SWARM,)}, 3, "serves no model"),  # that server hasn't this block either
    ],
)
async def test_servers_that_are_left_out_are_named(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], missing: int, said: str
) -> None:
    class Directory(Empty):
        async def servers(self, fingerprint: str) -> tuple[ServerInfo, ...]:
            return (ServerInfo(peer_id=SWARM, start=0, end=2),)

    config = ClientConfig(initial_peers=("/ip4/1.2.3.4/tcp/5",), **settings)
    look_ups = LookUps(config, name="org/model", fingerprint="f", num_blocks=4, check_greeting=lambda *_: None)
    monkeypatch.setattr(look_ups, "_directory", Directory(), raising=False)
    monkeypatch.setattr(look_ups, "_peer", SimpleNamespace(is_alone=False))
    await look_ups.refresh()
    look_ups.snapshot = SwarmSnapshot(4)
    given = MissingBlocksError(f"nobody serves block {missing}", (missing,))
    assert said in str(await look_ups.explained(given, None, ""))
    # Another server has all blocks, so something else is missing.
    look_ups.snapshot = SwarmSnapshot(4, (ServerInfo(peer_id="1" * 52, start=0, end=4),))
    assert "start servers with --adapters" in str(await look_ups.explained(given, "theirs", ""))


@pytest.mark.parametrize(
    ("alone", "said"), [(True, "no peer of the swarm that this one has met answers"), (False, "serves no model at all")]
)
async def test_a_swarm_that_is_gone_is_told_from_one_without_the_model(
    monkeypatch: pytest.MonkeyPatch, alone: bool, said: str
) -> None:
    look_ups = LookUps(ClientConfig(), name="org/model", fingerprint="f", num_blocks=4, check_greeting=lambda *_: None)
    monkeypatch.setattr(look_ups, "_directory", Empty(), raising=False)
    monkeypatch.setattr(look_ups, "_peer", SimpleNamespace(is_alone=alone))
    error = await look_ups.explained(MissingBlocksError("nobody serves them", (0,)), None, "")
    assert said in str(error)


@pytest.mark.parametrize(("initial_peers", "joined"), [((), ["/ip4/1.2.3.4/tcp/6/p2p/12D3"]), (("/ip4/1.2.3.4",), [])])
async def test_a_swarm_of_the_local_network_that_was_started_again_is_found(
    monkeypatch: pytest.MonkeyPatch, initial_peers: tuple[str, ...], joined: list[str]
) -> None:
    """Its servers have new addresses. Where addresses were given, only those count."""
    told: list[str] = []
    looks = 0

    async def find_swarm(*_: Any, **__: Any) -> tuple[str, ...]:
        nonlocal looks
        looks += 1
        return ("/ip4/1.2.3.4/tcp/6/p2p/12D3",)

    async def no_servers(_: str) -> tuple[ServerInfo, ...]:
        return ()

    monkeypatch.setattr(servers_module, "find_swarm", find_swarm)
    config = ClientConfig(initial_peers=initial_peers)
    look_ups = LookUps(config, name="org/model", fingerprint="f", num_blocks=4, check_greeting=lambda *_: None)
    monkeypatch.setattr(look_ups, "_directory", SimpleNamespace(servers=no_servers), raising=False)
    monkeypatch.setattr(look_ups, "_peer", SimpleNamespace(is_alone=True, join_by=told.extend))
    for _ in range(3):  # one look in five seconds is enough
        await look_ups.refresh()
        await asyncio.sleep(0)
    assert told == joined
    assert looks == len(joined)


async def test_the_agent_of_this_machine_is_found_while_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMLLM_STATE_DIR", str(tmp_path))
    assert await find_swarm_here() is None
    agent = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = agent.sockets[0].getsockname()[1]
    told = {"name": "ho\x1bme", "swarm_name": "s", "initial_peers": [f"/ip4/127.0.0.1/tcp/{port}/p2p/12D3"]}
    told["places"] = ["/models/a"]
    (tmp_path / HERE_FILE).write_text(json.dumps({**told, "models": {"f": "org/model"}}))
    found = await find_swarm_here()
    assert found == SwarmHere("ho?me", "s", tuple(told["initial_peers"]), {"f": "org/model"}, ("/models/a",))
    del told["places"]
    (tmp_path / HERE_FILE).write_text(json.dumps({**told, "models": {}}))
    earlier = await find_swarm_here()
    assert earlier is not None
    assert earlier.places == ()
    for damaged in ("", "[]", json.dumps(told), json.dumps({**told, "models": []})):
        (tmp_path / HERE_FILE).write_text(damaged)
        assert await find_swarm_here() is None
    agent.close()
    await agent.wait_closed()
    (tmp_path / HERE_FILE).write_text(json.dumps({**told, "models": {}}))
    assert await find_swarm_here() is None  # it was killed


def test_a_command_without_a_model_takes_the_one_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMLLM_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("SWARMLLM_INITIAL_PEERS", raising=False)
    assert with_model_here(["--seed", "1"]) == ["--seed", "1"]
    file = tmp_path / "model.gguf"
    file.touch()
    with socket.create_server(("127.0.0.1", 0)) as agent:
        maddr = f"/ip4/127.0.0.1/tcp/{agent.getsockname()[1]}/p2p/12D3"

        def told(places: Any) -> str:
            here = {"name": "home", "swarm_name": "s", "initial_peers": [maddr], "models": {}, "places": places}
            return json.dumps(here)

        (tmp_path / HERE_FILE).write_text(told([str(file)]))
        assert with_model_here(["--seed", "1"]) == ["--model", str(file), "--seed", "1"]
        asked = (["--model", "m"], ["--model=m"], ["--config", "f"], ["--initial-peers", "a"], ["--initial_peers=a"])
        for words in (*asked, ["--help"], ["-h"]):
            assert with_model_here(words) == words
        others = [str(file), str(tmp_path)], [str(file), ""], [""], [str(tmp_path / "gone")], [], 3, [3]
        for places in others:  # of two models, which one is meant isn't known
            (tmp_path / HERE_FILE).write_text(told(places))
            assert with_model_here([]) == []
        (tmp_path / HERE_FILE).write_text(told([str(file)]))
    assert with_model_here([]) == [], "the agent was killed"


@pytest.mark.parametrize(
    ("looks", "joined"),
    [
        ([{"f": "org/model"}], "here"),
        ([{}, {"f": "org/model"}], "here"),  # `swarmllm use` was called a moment ago
        ([{"g": "other"}, {"g": "other"}], "other: give it this one by `swarmllm use org/model`; besides, no swarm"),
        ([None], "no swarm"),
    ],
)
async def test_a_client_on_a_machine_of_a_swarm_uses_that_swarm(
    monkeypatch: pytest.MonkeyPatch, looks: list[dict[str, str] | None], joined: str
) -> None:
    async def here() -> SwarmHere | None:
        models = looks.pop(0)
        return None if models is None else SwarmHere("home", SWARM, ("here",), models, ())

    async def find_swarm(*_: Any, **__: Any) -> tuple[str, ...]:
        raise MissingBlocksError("no swarm")

    async def create(*, initial_peers: tuple[str, ...], **_: Any) -> Any:
        return SimpleNamespace(prefer_records=lambda _: None, addresses=initial_peers)

    monkeypatch.setattr(servers_module, "find_swarm_here", here)
    monkeypatch.setattr(servers_module, "find_swarm", find_swarm)
    monkeypatch.setattr(servers_module.Peer, "create", create)
    look_ups = LookUps(ClientConfig(), name="org/model", fingerprint="f", num_blocks=4, check_greeting=lambda *_: None)
    if joined != "here":
        with pytest.raises(MissingBlocksError, match=joined):
            await look_ups.connect()
        return
    await look_ups.connect()
    assert look_ups.peer.addresses == ("here",)  # type: ignore[attr-defined]
    assert look_ups._directory._swarm_name == SWARM
    monkeypatch.setattr(look_ups, "_directory", Empty())
    look_ups.snapshot = SwarmSnapshot(4, (ServerInfo(peer_id="1" * 52, start=0, end=2),))
    assert "`swarmllm use` shows" in str(await look_ups.explained(MissingBlocksError("none", (2, 3)), None, ""))
