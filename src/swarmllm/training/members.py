"""The network's side of a run: one peer, a stream to each other member, the rounds, and their log.

`Together` starts it in an event loop of its own and hands it differences. `homes` finds the other members. Of two
streams between the same ones, the one that the smaller peer id has opened remains. Both prove with the run key's
signature that they are members.

A bad message of a member ends nothing: it is refused and logged, and nobody waits for its difference in that round.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmllm.data_structures import MAX_ADDRS, PeerModel
from swarmllm.errors import ConfigurationError, LocalProtocolError, PeerError, RemoteProtocolError, SwarmError
from swarmllm.files import replaced
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.frames import LARGE_RUN_TYPES, Message, MessageType
from swarmllm.network.wire.messages import parse
from swarmllm.network.wire.protocol import FrameStream, hello, raise_error, send_error, welcome
from swarmllm.training import common_texts
from swarmllm.training.differences import MAX_PAST, Difference, Rules, SharedState, limits, unpack
from swarmllm.training.exchange import FETCH_S, Counts, Exchange
from swarmllm.training.homes import MAX_TOLD, Homes, RunRecord
from swarmllm.training.rounds import (
    MAX_MEMBERS,
    Adopt,
    Apply,
    Fetch,
    MemberHeader,
    Offer,
    Position,
    Rounds,
    SendVote,
    StateHeader,
    VoteHeader,
    WantHeader,
    is_member,
    membership,
)
from swarmllm.training.run_log import add_line
from swarmllm.training.trained import disagreement
from swarmllm.version import __version__

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks at the records of members."""
GREETING_S = 10.0
ALONE_AFTER_S = 120.0
"""Seconds that a home with a saved state waits for the others. Assumed: restarted ones are there by then."""
TELL_WAIT_S = 60.0
"""Seconds between two lines that say which homes are missing."""
TELL_ROUND_S = 20.0
"""Seconds between two looks at a round that doesn't end."""
REFUSED_S = 15.0
"""A state that nobody could send is asked for again after this time."""
STATE_FILE, TEXTS_FILE = "state.bin", "common_texts.json"


@dataclass(frozen=True, kw_only=True)
class Membership:
    """This home as a member of a run."""

    run: Identity
    """The run's key."""
    own: Identity
    name: str
    shapes: str
    """SHA-256 of the shapes of the trained tensors, in hex."""
    trained: Mapping[str, str] = field(default_factory=dict)
    """Names of parameters, base model and adapter (`trained.description`)."""
    rules: Rules
    texts: bytes
    """The common texts that this home names (`common_texts.packed`)."""
    directory: Path
    patience_s: float
    vote_s: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """Claims of this home about its steps and values."""

    tokens: int = 0
    loss: float | None = None
    own_loss: float | None = None
    shared_loss: float | None = None


class Members:
    """The members of a run, and the rounds with them. Everything runs in one event loop."""

    def __init__(self, me: Membership, state: SharedState, spawn: Callable[..., "asyncio.Task[Any]"]) -> None:
        self.me, self._spawn = me, spawn
        self.state = state
        """The newest shared state. Its arrays are never changed."""
        self._theirs: dict[str, str] = {}
        """Digests of others' common texts."""
        self.counts = Counts()
        self.rounds = Rounds(me.own.peer_id, patience_s=me.patience_s, vote_s=me.vote_s)
        self._streams: dict[str, FrameStream] = {}
        self.exchange = Exchange(self._streams, self.counts, me.texts)
        self._homes = Homes(me.directory, me.run.peer_id, me.own.peer_id, self._streams, self._dial, spawn)
        self._awaited: set[str] = set()
        """Members whose position must come soon."""
        self._named: dict[str, str] = {}
        """Names of members that have been there."""
        self._event = asyncio.Event()
        self._moved = asyncio.Condition()
        self._own_offer: Offer | None = None
        self._vote: VoteHeader | None = None
        self._problem: SwarmError | None = None
        self._peer: Peer | None = None

    # For `Together`

    async def start(self, **network: Any) -> None:
        """Join the swarm. `network`: arguments of `Peer.create`.

        Raises:
            ConfigurationError, PeerError: the swarm can't be joined.
        """
        self._peer = await Peer.create(**network)
        await self._peer.serve_streams(self._serve)

    @property
    def peer(self) -> Peer:
        assert self._peer is not None
        return self._peer

    @property
    def num_members(self) -> int:
        """Members that are there, with this one."""
        return len(self._streams) + 1

    async def join(self, wait_for: int, invite: Path, *, resumes: bool) -> None:
        """Meet the members and take their state, or begin with the own one if nobody has been in more rounds.

        `invite`: the file with which others come. One that `resumes` goes on alone if they don't: they may have ended.

        Raises:
            ConfigurationError: the others train something else, or by other rules.
        """
        self._spawn(self._homes.keep_announcing(self.peer, self._record), name="announce this home")
        await self._homes.look(self.peer, has_begun=False)
        await self._homes.wait_until_dialled()
        self._spawn(self._keep_looking(), name="look for members")
        self._spawn(self._homes.keep_meeting(self.peer), name="look for lost members")
        with suppress(TimeoutError):
            async with asyncio.timeout(GREETING_S), self._moved:
                await self._moved.wait_for(lambda: not self._awaited)
        if self._problem is not None:
            raise self._problem
        if not self.exchange.texts:
            await self._take_texts()
        if all(one is None or one.round < self.state.round for one in self.rounds.others.values()):
            await self._move_to(self.state, ())
        telling = self._spawn(self._tell_wait(wait_for, invite), name="tell that homes are missing")
        self._spawn(self._drive(), name="rounds").add_done_callback(self._driver_ended)
        self._spawn(self._tell_rounds(), name="tell that rounds don't end")
        if not await self._are_together(wait_for, ALONE_AFTER_S if resumes else None):
            here = min(wait_for, self.num_members)
            if here < wait_for:
                logger.warning("%d of %d homes are here after %.0f s; going on", here, wait_for, ALONE_AFTER_S)
            if not await self._are_together(here, ALONE_AFTER_S):  # those that are here may be slow to send their state
                await self._are_together(1, None)
        telling.cancel()
        if self._problem is not None:
            raise self._problem

    async def _are_together(self, wait_for: int, timeout_s: float | None) -> bool:
        """Wait until so many members have the same state, or there is a problem."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._moved:
                return await self._moved.wait_for(lambda: self._problem is not None or self._is_together(wait_for))
        return False

    async def _take_texts(self) -> None:
        """Get the common texts that most members name."""
        told = list(self._theirs.values())
        for digest in sorted(set(told), key=lambda one: (-told.count(one), one)):
            for holder in [peer_id for peer_id, theirs in self._theirs.items() if theirs == digest]:
                if (texts := await self.exchange.texts_of(holder, digest)) is not None:
                    self.exchange.texts = texts
                    return
        if told:
            logger.warning("nobody sends the common texts of this run, so this home doesn't measure on them")

    async def _tell_wait(self, wait_for: int, invite: Path) -> None:
        while True:
            if self.num_members < wait_for:
                text = "%d of %d homes are here; waiting for the others, which join with the invite in %s"
                logger.warning(text, self.num_members, wait_for, invite)
            await asyncio.sleep(TELL_WAIT_S)

    async def _tell_rounds(self) -> None:
        """Say which homes a round has waited for, and which ones have other values, if it lasts."""
        told: tuple[Position | None, set[str], set[str]] = None, set(), set()
        while True:
            await asyncio.sleep(TELL_ROUND_S)
            before, (was_missing, was_split) = told[0], told[1:]
            told = self.rounds.position, self.rounds.missing(), self.rounds.split_off()
            if told[0] is before and (missing := told[1] & was_missing):
                text = "round %d waits for %s, at most %.0f s"
                logger.warning(text, self.state.round, self._names(missing), self.me.patience_s)
            if split := told[2] & was_split:
                logger.warning("the run has split: %s have other values than this home", self._names(split))

    def _names(self, peer_ids: Iterable[str]) -> str:
        return ", ".join(sorted(self._named.get(peer_id) or peer_id for peer_id in peer_ids))

    def _is_together(self, wait_for: int) -> bool:
        own = self.rounds.position
        if own is None or wait_for <= 1:
            return own is not None
        theirs = list(self.rounds.others.values())
        return self.num_members >= wait_for and all(one is not None and one.key == own.key for one in theirs)

    def _driver_ended(self, task: "asyncio.Task[Any]") -> None:
        """Without rounds nobody may wait for one."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._problem = LocalProtocolError(f"the rounds of this run ended here: {error!r}")
            self._spawn(self._tell_moved(), name="tell that rounds ended")

    async def offer(self, difference: Difference, base: SharedState, report: Report) -> bool:
        """Send the own difference to `base`. False: there is a newer state, so make a new one."""
        position = self.rounds.position
        if base is not self.state or position is None or self.rounds.offered():
            return False
        payload = await asyncio.to_thread(difference.packed)
        sha256 = await asyncio.to_thread(lambda: hashlib.sha256(payload).hexdigest())
        if base is not self.state or self.rounds.position is not position:
            return False
        offer = Offer(
            run=self.me.run.peer_id,
            peer_id=self.me.own.peer_id,
            round=position.round,
            base=position.digest,
            sha256=sha256,
            tokens=report.tokens,
            loss=report.loss,
            own_loss=report.own_loss,
            shared_loss=report.shared_loss,
            name=self.me.name,
        ).signed(self.me.own)
        if not self.rounds.take_offer(offer, self._now()):
            return False
        self._own_offer = offer
        self.exchange.differences[offer.entry] = offer, difference
        self._broadcast(MessageType.DIFFERENCE, offer, payload)
        self._event.set()
        return True

    async def round_after(self, state: SharedState) -> None:
        """Return when there is a newer state than this one.

        Raises:
            SwarmError: there will be none.
        """
        async with self._moved:
            await self._moved.wait_for(lambda: self._problem is not None or self.state is not state)
        if self._problem is not None:
            raise self._problem

    async def trains(self, does: bool) -> None:
        """Say if others' rounds wait for this home's difference here."""
        self.rounds.trains = does
        self._event.set()

    async def leave(self) -> None:
        """Wait for members that are about to end the round that has ended here: they may need this one's messages.

        If most members have other values, wait for these.
        """
        self.rounds.trains = False
        self._event.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.me.vote_s), self._moved:
                await self._moved.wait_for(self._may_leave)
        if self.rounds.is_outvoted(self._now()):
            logger.warning("this home ends with other values than most homes of the run: start it again to get theirs")

    def _may_leave(self) -> bool:
        own = self.state.round
        is_needed = any(one is not None and one.round == own - 1 for one in self.rounds.others.values())
        return not is_needed and not self.rounds.is_outvoted(self._now())

    async def close(self) -> None:
        if self._peer is not None:
            await asyncio.gather(*(stream.close() for stream in self._streams.values()))
            await self._peer.close()

    # Meeting others

    def _record(self) -> RunRecord:
        position = self.rounds.position
        return RunRecord(
            member=membership(self.me.own.peer_id, self.me.run),
            addrs=self.peer.addrs[:MAX_ADDRS],
            name=self.me.name,
            round=position.round if position else 0,
            digest=position.digest if position else "0" * 64,
            tokens=min(self.state.tokens, MAX_TOLD),  # sums of claims
        )

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(PeerError):  # `keep_announcing` says it
                await self._homes.look(self.peer, has_begun=self.rounds.position is not None)
            if not self.exchange.texts:
                await self._take_texts()
            if self.rounds.position is None and not self._streams:
                logger.warning("the homes that were here have left: this home begins with its own values")
                await self._move_to(self.state, ())

    async def _dial(self, peer_id: str, addrs: tuple[str, ...]) -> None:
        stream = await self.peer.open_stream(peer_id, addrs)
        try:
            await hello(stream, fingerprint=self.me.run.peer_id, software=f"swarmllm {__version__}")
            await self._introduce(stream, self.me.own.peer_id)
        except BaseException as error:
            await stream.close()
            if isinstance(error, ConfigurationError):
                logger.warning("%s can't take part with this home: %s", peer_id, error)
            if isinstance(error, ConfigurationError) and self.rounds.position is None:
                self._problem = error
                await self._tell_moved()
            raise
        self._spawn(self._attend(stream), name=f"member {peer_id}")

    async def _serve(self, stream: FrameStream) -> None:
        await welcome(stream, software=f"swarmllm {__version__}")
        await self._introduce(stream, stream.peer_id)
        await self._attend(stream)

    async def _introduce(self, stream: FrameStream, opener: str) -> None:
        """Both sides show that they are members, and that they train the same by the same rules.

        The opener begins. Its second MEMBER says that it takes large messages now. So none comes too early.
        """
        stream.expect(frozenset())
        is_opener = opener == self.me.own.peer_id
        if is_opener:
            await stream.send(MessageType.MEMBER, self._own_header().model_dump())
        own, theirs = await self._checked_member(stream)
        stream.expect(LARGE_RUN_TYPES)
        await stream.send(MessageType.MEMBER, own.model_dump())
        if not is_opener:
            await self._checked_member(stream)
        before = self._streams.get(stream.peer_id)
        if before is not None and not before.closed:
            if opener != min(stream.peer_id, self.me.own.peer_id):
                raise PeerError("there is a stream between these members already", stream.peer_id)
            self._spawn(before.close(), name="close the second stream")
        self._streams[stream.peer_id] = stream
        self._homes.keep_addresses(stream.peer_id, theirs.addrs)
        if theirs.common is not None:
            self._theirs[stream.peer_id] = theirs.common
        self._named[stream.peer_id] = theirs.name
        self.rounds.meet(stream.peer_id)
        if theirs.has_state:
            self._awaited.add(stream.peer_id)
        logger.info("%s is in the run", theirs.name or stream.peer_id)

    def _own_header(self) -> MemberHeader:
        rules = self.me.rules
        return MemberHeader(
            member=membership(self.me.own.peer_id, self.me.run),
            size=self.state.values.size,
            shapes=self.me.shapes,
            trained=dict(self.me.trained),
            outer_lr=rules.outer_lr,
            outer_momentum=rules.outer_momentum,
            trim=rules.trim,
            common=common_texts.digest(self.exchange.texts),
            addrs=self.peer.addrs[:MAX_ADDRS],
            has_state=self.rounds.position is not None,
            is_new=self.rounds.position is None and not self.state.round,
            name=self.me.name,
        )

    async def _checked_member(self, stream: FrameStream) -> tuple[MemberHeader, MemberHeader]:
        """The own header, and that of the other side, which may take part."""
        async with asyncio.timeout(GREETING_S):
            message = await stream.receive()
        if message.type is MessageType.ERROR:
            raise_error(message.header, stream.peer_id)
        if message.type is not MessageType.MEMBER:
            raise RemoteProtocolError(f"{message.type.name} instead of MEMBER", stream.peer_id)
        own, theirs = self._own_header(), parse(MemberHeader, message.header, stream.peer_id)
        try:
            self._check(stream.peer_id, own, theirs)
        except SwarmError as error:
            await send_error(stream, error)
            raise
        return own, theirs

    def _check(self, peer_id: str, own: MemberHeader, theirs: MemberHeader) -> None:
        if not is_member(peer_id, theirs.member, self.me.run.peer_id):
            raise RemoteProtocolError("this peer is no member of this run: join with an invite to it", peer_id)
        if theirs.size != own.size or theirs.shapes != own.shapes:
            raise ConfigurationError(
                f"this run trains {theirs.size} and {own.size} values of different shapes in two homes: "
                "use the same model, the same kind of adapter, and the same optimizer groups everywhere"
            )
        names = self.me.name or "one home", theirs.name or "another one"
        if (differ := disagreement(own.trained, names[0], theirs.trained, names[1])) is not None:
            raise ConfigurationError(
                f"these homes train different things: {differ}. Use the same base model and adapter everywhere"
            )
        if theirs.rules != self.me.rules:
            raise ConfigurationError(
                f"homes have different rules, {theirs.rules} and {self.me.rules}: give the same settings everywhere"
            )
        pairs = (own, theirs), (theirs, own)
        are_others = None not in (own.common, theirs.common) and own.common != theirs.common
        if are_others or any(a.common and a.is_new and not b.is_new and not b.common for a, b in pairs):
            raise ConfigurationError("homes name different common texts: name them in the first home alone")
        if peer_id not in self._streams and self.num_members >= MAX_MEMBERS:
            raise ConfigurationError(f"this run has {MAX_MEMBERS} members, which is the most")

    async def _attend(self, stream: FrameStream) -> None:
        """Take this member's messages until its stream ends."""
        try:
            await self._catch_up(stream)
            while True:
                await self._take(stream, await stream.receive())
                self._event.set()
        finally:
            if self._streams.get(stream.peer_id) is stream:
                del self._streams[stream.peer_id]
                self._awaited.discard(stream.peer_id)
                self.rounds.leave(stream.peer_id)
                self._event.set()
                await self._tell_moved()
            await stream.close()

    async def _catch_up(self, stream: FrameStream) -> None:
        """Tell a member that has just come the own position, difference and vote."""
        position = self.rounds.position
        if position is None:
            return
        await stream.send(MessageType.POSITION, position.model_dump())
        offer = self._own_offer
        if offer is not None and (offer.round, offer.base) == position.key:
            await self.exchange.send_difference(stream, offer.entry)
        if self._vote is not None and (self._vote.round, self._vote.base) == position.key:
            await stream.send(MessageType.VOTE, self._vote.model_dump())

    # Messages

    async def _take(self, stream: FrameStream, message: Message) -> None:
        peer_id, now = stream.peer_id, self._now()
        if message.type is MessageType.POSITION:
            self.rounds.take_position(peer_id, parse(Position, message.header, peer_id), now)
            self._awaited.discard(peer_id)
            await self._tell_moved()
        elif message.type is MessageType.VOTE:
            self.rounds.take_vote(peer_id, parse(VoteHeader, message.header, peer_id), now)
        elif message.type is MessageType.DIFFERENCE:
            await self._take_difference(peer_id, parse(Offer, message.header, peer_id), message.payload)
        elif message.type is MessageType.WANT:
            want = parse(WantHeader, message.header, peer_id)
            self._spawn(self.exchange.take_question(stream, want), name="send what is wanted")
        elif message.type is MessageType.STATE:
            header = parse(StateHeader, message.header, peer_id)
            self.counts.received_bytes += len(message.payload)
            want = WantHeader(difference=header.difference, state=header.digest, offset=header.offset)
            self.exchange.take_answer(peer_id, want, bytes(message.payload))
        elif message.type is MessageType.ERROR:
            raise_error(message.header, peer_id)
        else:
            raise RemoteProtocolError(f"{message.type.name} doesn't belong into a run", peer_id)

    async def _take_difference(self, sender: str, offer: Offer, payload: bytearray) -> None:
        self.counts.received_bytes += len(payload)
        try:
            if not offer.is_genuine(self.me.run.peer_id):
                raise RemoteProtocolError("a difference is not signed by its member", sender)
            difference = await asyncio.to_thread(self._checked, offer, payload)
        except RemoteProtocolError as error:
            logger.warning(
                "the difference of %s doesn't count in round %d: %s", offer.name or sender, offer.round, error
            )
            if sender == offer.peer_id:
                self.counts.refused.append(sender)
                self.rounds.refuse(sender, offer, self._now())
        else:
            if self.rounds.take_offer(offer, self._now()):
                self.exchange.differences[offer.entry] = offer, difference
        self.exchange.take_answer(sender, WantHeader(difference=offer.entry))

    def _checked(self, offer: Offer, payload: bytearray) -> Difference:
        if hashlib.sha256(payload).hexdigest() != offer.sha256:
            raise RemoteProtocolError("a difference has another digest than its header says", offer.peer_id)
        return unpack(payload, self.state.values.size, offer.peer_id)

    def _broadcast(self, kind: MessageType, header: PeerModel, payload: bytes = b"") -> None:
        for stream in self._streams.values():
            self.counts.sent_bytes += len(payload)
            chunks = [payload] if payload else []
            self._spawn(stream.send(kind, header.model_dump(), chunks), name=f"send {kind.name}")

    # Rounds

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _drive(self) -> None:
        """Do what the rounds ask for."""
        while True:
            self._event.clear()
            actions = self.rounds.step(self._now())
            await asyncio.gather(*map(self._do, actions))  # several at once are fetches
            if not actions:
                wakes_at = self.rounds.wakes_at
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(wakes_at):
                        await self._event.wait()

    async def _do(self, action: SendVote | Fetch | Apply | Adopt) -> None:
        if isinstance(action, SendVote):
            self._vote = action.vote
            self._broadcast(MessageType.VOTE, action.vote)
        elif isinstance(action, Fetch):
            await self._fetch(action)
        elif isinstance(action, Apply):
            await self._apply(action.offers)
        else:
            await self._adopt(action)

    async def _fetch(self, fetch: Fetch) -> None:
        """Ask the holders one after the other, each once."""
        assert self.rounds.position is not None
        entry = fetch.peer_id, self.rounds.position.digest, fetch.sha256
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * FETCH_S):
                for holder in fetch.holders:
                    await self.exchange.ask(holder, WantHeader(difference=entry))
                    if entry in self.exchange.differences:
                        return
        names = self._names([fetch.peer_id]), self.state.round, self._names(fetch.holders)
        logger.warning("the difference of %s doesn't count here in round %d: it doesn't come from %s", *names)

    async def _adopt(self, adopt: Adopt) -> None:
        digest = adopt.position.digest
        if await asyncio.to_thread(self.state.digest) == digest:  # homes often begin with the same values
            await self._move_to(self.state, (), digest)
            return
        for holder in adopt.holders:
            state = await self.exchange.state_of(holder, digest, self.state.values.size)
            if state is not None and state.round == adopt.position.round:
                self._say_adopted(adopt, holder)
                await self._move_to(state, (), digest)
                return
        logger.warning("the state of round %d can't be had from %s", adopt.position.round, ", ".join(adopt.holders))
        self.rounds.give_up_state(digest, self._now() + REFUSED_S)

    def _say_adopted(self, adopt: Adopt, holder: str) -> None:
        number = adopt.position.round
        logger.info("the state of round %d comes from %s", number, self._names([holder]))
        if adopt.parts_at is None:
            return
        since = f"after round {adopt.parts_at}" if adopt.parts_at >= 0 else f"more than {MAX_PAST} rounds ago"
        logger.warning(
            "the run had split %s: this home, at round %d, takes the values of %s, at round %d. More homes have these, "
            "or as many and more rounds. Rounds of this home since then don't count",
            since,
            self.state.round,
            self._names(adopt.holders),
            number,
        )

    async def _apply(self, offers: tuple[Offer, ...]) -> None:
        differences = {offer.peer_id: self.exchange.differences[offer.entry][1] for offer in offers}
        tokens = sum(offer.tokens for offer in offers)
        state = await asyncio.to_thread(self.state.after, differences, tokens, self.me.rules)
        kept = await asyncio.to_thread(
            lambda: limits({one: difference.norm() for one, difference in differences.items()})
        )
        digest = await asyncio.to_thread(state.digest)
        chosen = tuple((offer.peer_id, offer.sha256) for offer in offers)
        self.counts.rounds += 1
        await asyncio.to_thread(self._write_line, offers, kept, state, digest)
        await self._move_to(state, chosen, digest)

    async def _move_to(self, state: SharedState, chosen: tuple[tuple[str, str], ...], digest: str = "") -> None:
        digest = digest or await asyncio.to_thread(state.digest)
        self.state = state
        position = Position(round=state.round, digest=digest, chosen=chosen, past=state.past)
        before = self.rounds.position
        self.rounds.advance(position)
        needed = self.rounds.needed()
        if before is not None:  # others may still ask for those that have counted
            needed |= {(peer_id, before.digest, sha256) for peer_id, sha256 in chosen}
        self.exchange.begin_round(digest, state, needed)
        self._broadcast(MessageType.POSITION, position)
        await asyncio.to_thread(self._save, state)
        await self._tell_moved()

    async def _tell_moved(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    def _save(self, state: SharedState) -> None:
        with replaced(self.me.directory / STATE_FILE, durable=False) as path:
            path.write_bytes(state.packed())

    def _write_line(self, offers: tuple[Offer, ...], kept: dict[str, float], state: SharedState, digest: str) -> None:
        members = [
            {**offer.model_dump(exclude={"run", "round"}), "share": round(kept[offer.peer_id], 6)} for offer in offers
        ]
        fields = {
            "run": self.me.run.peer_id,
            "round": state.round - 1,
            "digest": digest,
            "members": members,
            "refused": sorted(set(self.counts.refused)),
            "tokens": state.tokens,
            "sent_bytes": self.counts.sent_bytes,
            "received_bytes": self.counts.received_bytes,
            "at": round(time.time(), 3),
        }
        self.counts.refused.clear()
        add_line(self.me.directory, fields, self.me.own)
        who = ", ".join(f"{offer.name} {offer.tokens} tokens loss {offer.loss}" for offer in offers)
        logger.info("round %d of %d: %s", state.round - 1, len(offers), who)

    def note_end(self, shared_loss: float) -> None:
        """Write how good the last shared values are on the common texts."""
        fields = {"run": self.me.run.peer_id, "round": self.state.round, "members": [], "shared_loss": shared_loss}
        fields |= {"tokens": self.state.tokens, "at": round(time.time(), 3)}
        add_line(self.me.directory, fields, self.me.own)


def saved_state(directory: Path, size: int) -> SharedState | None:
    """The state of the last round before this process; None: there is none.

    Raises:
        ConfigurationError: it belongs to another model or adapter.
    """
    try:
        data = (directory / STATE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return SharedState.unpack(data, size)
    except RemoteProtocolError:
        raise ConfigurationError(
            f"{directory / STATE_FILE} is of another run, model or adapter: give another directory"
        ) from None
