"""Messages between members, without a network."""

import asyncio
import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from swarmllm.errors import PeerUnreachableError
from swarmllm.network.p2p.identity import Identity
from swarmllm.training import members as module
from swarmllm.training.differences import Rules, SharedState, quantize
from swarmllm.training.members import Members, Membership, saved_homes
from swarmllm.training.rounds import Fetch, Offer, Position, WantHeader

RUN, OWN = Identity.generate(), Identity.generate()
PAYLOAD = quantize(np.ones(8, np.float32)).packed()
SHA256 = hashlib.sha256(PAYLOAD).hexdigest()


def members(directory: Path) -> Members:
    """A member at round 3."""
    me = Membership(
        run=RUN,
        own=OWN,
        name="",
        shapes="0" * 64,
        rules=Rules(),
        texts=b"",
        directory=directory,
        patience_s=9,
        vote_s=9,
    )
    found = Members(me, SharedState.initial(np.zeros(8, np.float32)), lambda *_, **__: None)
    found.rounds.advance(Position(round=3, digest="a" * 64))
    return found


def offer(home: Identity, round_number: int = 3, base: str = "a" * 64) -> Offer:
    fields = {"run": RUN.peer_id, "peer_id": home.peer_id, "sha256": SHA256}
    return Offer(**fields, round=round_number, base=base).signed(home)


def test_homes_are_kept_whatever_a_member_announces(tmp_path: Path) -> None:
    """The newest first, and without addresses that would keep this home from starting again."""
    home, (first, hidden, *others) = members(tmp_path), [Identity.generate().peer_id for _ in range(70)]
    circuit = f"/ip4/45.1.1.1/tcp/1/p2p/{first}/p2p-circuit"
    for peer_id in (first, *others):
        home._keep_addresses(peer_id, ("/ip4/45.1.1.1/tcp/1", "/ip4/10.0.0.1/tcp/1", "x"))
    home._keep_addresses(hidden, (circuit, "nonsense", "/ip4/10.0.0.1/tcp/5"))
    home._keep_addresses(others[0], ("/ip4/45.1.1.1/tcp/1", "/ip4/10.0.0.1/tcp/1", "x"))  # seen again
    home._keep_addresses(others[1], ("/ip4/45.1.1.1/tcp/2",))
    kept = saved_homes(tmp_path)
    assert kept[:3] == [f"/ip4/45.1.1.1/tcp/2/p2p/{others[1]}"] + [
        f"{addr}/p2p/{others[0]}" for addr in ("/ip4/45.1.1.1/tcp/1", "/ip4/10.0.0.1/tcp/1")
    ]
    assert kept[3] == f"/ip4/10.0.0.1/tcp/5/p2p/{hidden}"
    assert len(kept) <= 64
    again = members(tmp_path)
    assert [again._ways_to(one) for one in (others[1], hidden)] == [[kept[0]], [kept[3]]]
    (tmp_path / "homes.txt").write_text(f"{circuit}/p2p/{hidden}\nnonsense\n{kept[0]}\n")  # of an earlier version
    assert saved_homes(tmp_path) == [kept[0]]


def test_lost_homes_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they announced, and if one is forgotten meanwhile; those that are here stay the newest."""
    monkeypatch.setattr(module, "REUNION_S", 0.0)
    home, homes = members(tmp_path), [Identity.generate().peer_id for _ in range(module.DIALLED * 3)]
    for peer_id in homes:
        home._keep_addresses(peer_id, ("x", "/ip4/45.1.1.1/tcp/1"))
    before, dialled = list(home._homes), list[str]()

    async def meet(maddrs: list[str]) -> None:
        (maddr,) = maddrs
        dialled.append(maddr.rpartition("/")[2])
        home._homes.pop(homes[-1], None)
        await asyncio.sleep(0)
        raise PeerUnreachableError("gone")

    async def scene() -> None:
        home._peer = SimpleNamespace(meet=meet)  # type: ignore[assignment]
        task = asyncio.create_task(home._keep_meeting())
        while len(dialled) < 3 * len(homes) and not task.done():  # noqa: ASYNC110 - the task has no event
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

    asyncio.run(scene())
    assert set(dialled[: len(homes) - 1]) >= set(homes[:-1])
    assert list(home._homes) == before[:-1]


def test_equal_differences_of_two_homes_both_count(tmp_path: Path) -> None:
    """One came. The other one is fetched, though its bytes are the same."""
    first, second = Identity.generate(), Identity.generate()

    async def scene() -> None:
        home = members(tmp_path)
        await home._take_difference(first.peer_id, offer(first), bytearray(PAYLOAD))
        asked: list[WantHeader] = []

        async def answer(holder: str, want: WantHeader) -> bytes:
            asked.append(want)
            await home._take_difference(holder, offer(second), bytearray(PAYLOAD))
            return b""

        home.exchange.ask = answer  # type: ignore[method-assign, assignment]
        await home._fetch(Fetch(second.peer_id, SHA256, ("holder",)))
        assert [want.difference for want in asked] == [(second.peer_id, "a" * 64, SHA256)]
        assert home.rounds.needed() == {offer(one).entry for one in (first, second)}

    asyncio.run(scene())


def test_a_wrong_answer_ends_the_search(tmp_path: Path) -> None:
    """Equal bytes of another home, or of another round, are not the difference that a round needs."""
    liar, wanted = Identity.generate(), Identity.generate()

    async def scene() -> None:
        home = members(tmp_path)
        asked: list[str] = []

        async def answer(holder: str, want: WantHeader) -> bytes:
            asked.append(holder)
            await home._take_difference(holder, offer(liar), bytearray(PAYLOAD))
            await home._take_difference(holder, offer(wanted, 4, "b" * 64), bytearray(PAYLOAD))
            return b""

        home.exchange.ask = answer  # type: ignore[method-assign, assignment]
        await home._fetch(Fetch(wanted.peer_id, SHA256, ("holder", "other")))
        assert asked == ["holder", "other"]
        assert offer(wanted).entry not in home.rounds.needed()

    asyncio.run(scene())
