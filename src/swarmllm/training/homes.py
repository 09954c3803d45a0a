"""Where the homes of a run are: their records in the DHT, and addresses that outlive a process.

Members find each other by records under a key that only they know. Each dials the others. One that has been there is
dialled again when it is gone: both may have gone on alone.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from swarmllm.data_structures import MAX_ADDRS, PeerModel, PeerText
from swarmllm.errors import PeerError
from swarmllm.files import read_text, replace_file
from swarmllm.network.p2p.addresses import usable_peers
from swarmllm.network.p2p.block_directory import run_key
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.protocol import FrameStream
from swarmllm.training.rounds import Digest, RoundNumber, Signature, is_member

logger = logging.getLogger(__name__)

REUNION_S = 20.0
"""Seconds between two attempts to reach homes that have been there: each of them may have gone on alone."""
DIALLED = 4
"""Most such homes that are dialled at a time."""
RECORD_S = 60.0
"""Lifetime of a record. It is renewed at every third of it."""
WAYS = 4
"""Most addresses of a home by which it is looked for."""
MAX_KEPT_ADDRS = 64
HOMES_FILE = "homes.txt"
MAX_TOLD = 1 << 53
"""Most tokens of a run in a record. JavaScript's numbers count no further."""


class RunRecord(PeerModel):
    """A member's record in the DHT."""

    member: Signature
    addrs: Annotated[tuple[Annotated[PeerText, Field(max_length=256)], ...], Field(max_length=MAX_ADDRS)] = ()
    name: Annotated[PeerText, Field(max_length=64)] = ""
    round: RoundNumber = 0
    digest: Digest = "0" * 64
    tokens: Annotated[int, Field(ge=0, le=MAX_TOLD)] = 0
    loss: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)] | None = None


class Homes:
    """The homes of one run, as one of them knows them."""

    def __init__(
        self,
        directory: Path,
        run: str,
        own: str,
        streams: Mapping[str, FrameStream],
        dial: Callable[[str, tuple[str, ...]], Coroutine[Any, Any, None]],
        spawn: Callable[..., "asyncio.Task[Any]"],
    ) -> None:
        """`run`, `own`: peer ids. `streams`: those to members that are here. `dial` opens one, by id and addresses."""
        self._directory, self._run, self._own, self._streams = directory, run, own, streams
        self._dial, self._spawn = dial, spawn
        self._known = _known_homes(directory)
        """Addresses of the members that have been there, by peer id, also before this process."""
        self._dialling: dict[str, asyncio.Task[Any]] = {}
        self._seen: set[str] = set()

    async def keep_announcing(self, peer: Peer, record: Callable[[], RunRecord]) -> None:
        """Store this home's record, again and again."""
        while True:
            text = record().model_dump_json(exclude_none=True)
            try:
                await peer.dht_store({run_key(self._run): text}, time.time() + RECORD_S)
            except PeerError as error:
                logger.warning("other homes can't find this one: %s", error)
            await asyncio.sleep(RECORD_S / 3)

    async def look(self, peer: Peer, *, has_begun: bool) -> None:
        """Read the records of all members, and dial those that aren't here.

        Once this home `has_begun`, new members with larger peer ids dial it.

        Raises:
            PeerError: the swarm can't be reached.
        """
        for peer_id, text in (await peer.dht_read(run_key(self._run))).items():
            try:
                record = RunRecord.model_validate_json(text)
            except ValidationError:
                continue
            if peer_id == self._own or not is_member(peer_id, record.member, self._run):
                continue
            self.keep_addresses(peer_id, record.addrs)
            is_new = peer_id not in self._seen
            self._seen.add(peer_id)
            if peer_id in self._streams or peer_id in self._dialling:
                continue
            if is_new and has_begun and peer_id < self._own:
                continue  # it dials this one
            task = self._dialling[peer_id] = self._spawn(self._dial(peer_id, record.addrs), name=f"dial {peer_id}")
            task.add_done_callback(partial(self._dialled, peer_id))

    async def wait_until_dialled(self) -> None:
        """Return when each dialled home is here, or can't be reached."""
        await asyncio.gather(*self._dialling.values(), return_exceptions=True)

    async def keep_meeting(self, peer: Peer) -> None:
        """Dial homes that have left: if they went on elsewhere, both find each other's records then."""
        dialled_at: dict[str, float] = {}
        while True:
            await asyncio.sleep(REUNION_S)
            here = self._streams.keys() | self._dialling.keys()
            lost = {home: ways for home in self._known if home not in here and (ways := self._ways_to(home))}
            dialled_at = {home: dialled_at.get(home, 0.0) for home in lost}
            for home in sorted(lost, key=dialled_at.__getitem__)[:DIALLED]:
                dialled_at[home] = time.monotonic()
                with suppress(PeerError):
                    await peer.meet(lost[home])

    def keep_addresses(self, peer_id: str, addrs: tuple[str, ...]) -> None:
        """Write down where this member is: this home may start again when those of its invite have left."""
        before = self._known.pop(peer_id, None)
        self._known[peer_id] = addrs  # at the end, as the one that was seen last
        if before != addrs:
            while len(self._known) > MAX_KEPT_ADDRS:
                del self._known[next(iter(self._known))]
            newest_first = [maddr for home in reversed(self._known) for maddr in self._ways_to(home)]
            replace_file(self._directory / HOMES_FILE, "".join(f"{one}\n" for one in newest_first[:MAX_KEPT_ADDRS]))

    def _ways_to(self, home: str) -> list[str]:
        """Its addresses, as far as they make sense: a member may announce anything."""
        return usable_peers(f"{addr}/p2p/{home}" for addr in self._known[home])[:WAYS]

    def _dialled(self, peer_id: str, _: "asyncio.Task[Any]") -> None:
        self._dialling.pop(peer_id, None)


def saved_homes(directory: Path) -> list[str]:
    """Addresses of the members that were there before this process."""
    path = directory / HOMES_FILE
    return usable_peers(read_text(path).split()) if path.exists() else []


def _known_homes(directory: Path) -> dict[str, tuple[str, ...]]:
    """The same by peer id."""
    homes: dict[str, tuple[str, ...]] = {}
    for maddr in reversed(saved_homes(directory)):
        addr, _, peer_id = maddr.partition("/p2p/")
        homes[peer_id] = (addr, *homes.get(peer_id, ()))
    return homes
