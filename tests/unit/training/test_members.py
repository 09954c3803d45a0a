"""Messages between members, without a network."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from swarmllm.network.p2p.identity import Identity
from swarmllm.training.differences import Rules, SharedState, quantize
from swarmllm.training.members import Members, Membership
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


def test_a_home_can_be_found_however_many_tokens_others_claim(tmp_path: Path) -> None:
    home: Any = members(tmp_path)
    home._peer = SimpleNamespace(addrs=())
    home.state = replace(home.state, tokens=1 << 60)
    assert home._record().tokens == 1 << 53
