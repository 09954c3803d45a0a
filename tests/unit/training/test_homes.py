"""Where the homes of a run are: what a home remembers of the others, without a network."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmllm.errors import PeerUnreachableError
from swarmllm.network.p2p.identity import Identity
from swarmllm.training import homes as module
from swarmllm.training.homes import Homes, saved_homes


def known_in(directory: Path) -> Homes:
    return Homes(directory, "run", "own", {}, lambda *_: None, lambda *_, **__: None)  # type: ignore[arg-type, return-value]


def test_homes_are_kept_whatever_a_member_announces(tmp_path: Path) -> None:
    """The newest first, and without addresses that would keep this home from starting again."""
    home, (first, hidden, *others) = known_in(tmp_path), [Identity.generate().peer_id for _ in range(70)]
    circuit = f"/ip4/45.1.1.1/tcp/1/p2p/{first}/p2p-circuit"
    for peer_id in (first, *others):
        home.keep_addresses(peer_id, ("/ip4/45.1.1.1/tcp/1", "/ip4/10.0.0.1/tcp/1", "x"))
    home.keep_addresses(hidden, (circuit, "nonsense", "/ip4/10.0.0.1/tcp/5"))
    home.keep_addresses(others[0], ("/ip4/45.1.1.1/tcp/1", "/ip4/10.0.0.1/tcp/1", "x"))  # seen again
    home.keep_addresses(others[1], ("/ip4/45.1.1.1/tcp/2",))
    kept = saved_homes(tmp_path)
    assert kept[:3] == [f"/ip4/45.1.1.1/tcp/2/p2p/{others[1]}"] + [
        f"{addr}/p2p/{others[0]}" for addr in ("/ip4/45.1.1.1/tcp/1", "/ip4/10.0.0.1/tcp/1")
    ]
    assert kept[3] == f"/ip4/10.0.0.1/tcp/5/p2p/{hidden}"
    assert len(kept) <= 64
    again = known_in(tmp_path)
    assert [again._ways_to(one) for one in (others[1], hidden)] == [[kept[0]], [kept[3]]]
    (tmp_path / "homes.txt").write_text(f"{circuit}/p2p/{hidden}\nnonsense\n{kept[0]}\n")  # of an earlier version
    assert saved_homes(tmp_path) == [kept[0]]


def test_lost_homes_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they announced, and if one is forgotten meanwhile; those that are here stay the newest."""
    monkeypatch.setattr(module, "REUNION_S", 0.0)
    home, homes = known_in(tmp_path), [Identity.generate().peer_id for _ in range(module.DIALLED * 3)]
    for peer_id in homes:
        home.keep_addresses(peer_id, ("x", "/ip4/45.1.1.1/tcp/1"))
    before, dialled = list(home._known), list[str]()

    async def meet(maddrs: list[str]) -> None:
        (maddr,) = maddrs
        dialled.append(maddr.rpartition("/")[2])
        home._known.pop(homes[-1], None)
        await asyncio.sleep(0)
        raise PeerUnreachableError("gone")

    async def scene() -> None:
        peer: Any = SimpleNamespace(meet=meet)
        task = asyncio.create_task(home.keep_meeting(peer))
        while len(dialled) < 3 * len(homes) and not task.done():  # noqa: ASYNC110 - the task has no event
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

    asyncio.run(scene())
    assert set(dialled[: len(homes) - 1]) >= set(homes[:-1])
    assert list(home._known) == before[:-1]
