"""Pass the weights of models on from machine to machine, and take them from others or from the hub.

`WeightStore` is the store of one machine. `serve` gives pieces to other members of the swarm, `fetch` takes those of
some blocks. `machines/holdings` has the files, `machines/downloads` the taking side, `models/checkpoint/manifest` the
list of pieces. The agent decides which blocks.

Trust. A command of a member names a model by the digest of its manifest, and the manifest has the digest of each piece.
So a machine that gives other bytes is found out at once: it is told, and banned. Pieces of a model that nobody had
before come from the hub, by its commit; then the manifest has no digests. Each machine compares such a model with what
the hub says (`machines/hub`). Strangers get nothing, and can give nothing.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path

from huggingface_hub import constants

from swarmllm.config import default_cache_dir
from swarmllm.data_structures import Span, size_in_words
from swarmllm.errors import (
    BlocksNotServedError,
    ConfigurationError,
    CorruptWeightsError,
    PeerUnreachableError,
    RemoteProtocolError,
    ServerOverloadedError,
    SwarmError,
    WeightsError,
)
from swarmllm.files import replaced
from swarmllm.machines.downloads import Board, Counted, Download, Giver, Members, Progress, ask_manifest
from swarmllm.machines.holdings import Holding, PartialModel, WholeModel, is_full, note_use, surplus
from swarmllm.machines.hub import Files, Hub, liars, refuse_other, words_of, wrong_pieces
from swarmllm.machines.membership import is_of_own_network, own_networks
from swarmllm.machines.records import MAX_GIVEN, is_membership
from swarmllm.models.checkpoint.manifest import MANIFEST, PIECE_BYTES, Manifest, Pieces
from swarmllm.models.checkpoint.pieces import cached_on_hub, describe, describe_on_hub, remembered
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.messages import ErrorHeader, WeightsHeader, WeightsResult, parse
from swarmllm.network.wire.protocol import FrameStream, HelloHeader, Message, MessageType, send_error, welcome
from swarmllm.network.wire.stream import Intake
from swarmllm.server.downloads import in_background
from swarmllm.version import __version__

logger = logging.getLogger(__name__)

__all__ = ["Giver", "Progress", "WeightStore"]

FAR_MBPS = 200.0
"""Most megabits a second to machines outside of the local network, if nobody sets a limit. Assumed: a connection that
its owner also uses."""
LOCAL = "local"
"""Directory of the store for manifests of models elsewhere on this machine."""
MAX_TAKERS = 64
"""Most streams of takers, together. Each holds two pieces at most: assumed to be little beside a model."""
MAX_STREAMS_PER_TAKER = 4
"""A machine takes some models at a time, one stream each."""
UNREAD_BYTES, UNREAD_BYTES_PER_TAKER = 64 << 20, 8 << 20
"""Most bytes of requests that wait."""
SEND_S = 60.0
"""A taker that doesn't read a piece in this time is cut off. Assumed: 1 MiB in a minute is slower than any useful
connection."""
IDLE_S = 120.0
"""A taker that asks for nothing for so long is cut off; it can come again."""


class WeightStore:
    """The models of which this machine has pieces."""

    def __init__(
        self,
        directory: Path,
        peer: Peer,
        *,
        swarm_id: str,
        member: str,
        upload_mbps: float | None = None,
        shares: bool = True,
        hub: Hub | None = None,
    ) -> None:
        """`member`: the proof that this machine is a member (`records.membership`). `upload_mbps`: megabits per second
        for all takers together; None: `FAR_MBPS` to those outside of the local network. Without `shares` nobody gets
        anything. Without `hub` nothing comes from the hub."""
        self._directory, self._shares, self._hub = directory, shares, hub
        self._swarm_id = swarm_id
        self._members = Members(peer, member)
        self._pace, self._near_pace = Pace(upload_mbps or FAR_MBPS), Pace(upload_mbps)
        if upload_mbps is not None:
            self._near_pace = self._pace
        self._intake = Intake(UNREAD_BYTES_PER_TAKER, UNREAD_BYTES)
        self._takers: Counter[str] = Counter()
        self._models: dict[str, Holding] = {}
        self._boards: dict[str, Board] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._syncing: set[asyncio.Task[None]] = set()
        self._needed: set[str] = set()
        self._said: dict[str, Files] = {}
        """The hub's word about models, by the digest of the manifest."""

    # Models

    async def start(self) -> None:
        """Find the models of earlier times. Call it once, before anything else.

        Raises:
            OSError: the store's directory can't be made or read.
        """
        for holding in await in_background(partial(_found, self._directory)):
            self._models[holding.manifest.digest] = holding

    def gives(self) -> tuple[str, ...]:
        """Digests of the manifests of models of which this machine gives pieces, the newest first."""
        return tuple(reversed(self._models))[:MAX_GIVEN] if self._shares else ()

    async def add_local(self, place: str | Path, *, piece_bytes: int = PIECE_BYTES) -> Manifest:
        """Give the pieces of a model that is whole on this machine. Its bytes are read once, until its files change.

        Raises:
            ConfigurationError: there is no such model here, or only parts of it.
            WeightsError: files are missing or damaged.
        """
        cache_dir = self._directory / LOCAL
        model = await in_background(partial(describe, place, cache_dir=cache_dir, piece_bytes=piece_bytes))
        self._models.pop(model.manifest.digest, None)
        self._models[model.manifest.digest] = WholeModel(model)
        return model.manifest

    async def add_from_hub(self, name: str, *, revision: str | None = None, piece_bytes: int = PIECE_BYTES) -> Manifest:
        """Look at a model of the hub, of which machines then fetch their pieces.

        Raises:
            ConfigurationError: the hub has no such model, or can't be reached, or isn't used.
            WeightsError: files are missing or damaged.
        """
        if self._hub is None:
            raise ConfigurationError(f"{name} isn't on this machine, and this machine doesn't use the hub")
        look = partial(describe_on_hub, name, revision=revision, token=self._hub.token, piece_bytes=piece_bytes)
        manifest = await in_background(look)
        await self._model(manifest)
        return manifest

    async def manifest(self, digest: str, givers: Sequence[Giver]) -> Manifest:
        """The manifest with this digest, from this machine or from one of the givers.

        Raises:
            PeerError: none of them gives it.
        """
        if (known := self._models.get(digest)) is not None:
            return known.manifest
        reason: SwarmError | None = None
        for giver in givers:
            if self._members.is_banned(giver.peer_id):
                continue
            try:
                return await ask_manifest(self._members, giver, digest)
            except CorruptWeightsError as error:
                reason = error
                self._members.ban(giver.peer_id, str(error))
            except SwarmError as error:
                reason = error
        why = "no other machine has it" if reason is None else str(reason)
        raise PeerUnreachableError(f"the list of the model's files can't be fetched: {why}")

    def done_bytes(self, digest: str) -> int:
        """Bytes of a model that are on this machine."""
        model = self._models.get(digest)
        return 0 if model is None else model.manifest.num_bytes(model.held)

    # Room on the disk

    @property
    def kept_bytes(self) -> int:
        """Bytes of pieces in the store that nobody needs at present."""
        return sum(model.held_bytes for model in self._leftovers())

    async def need(self, digests: Collection[str]) -> None:
        """Note the models that this machine serves, or that the swarm wants. Pieces of others stay while they are few,
        and until their room is needed (`holdings.surplus`)."""
        if {*digests} == self._needed:
            return
        known = (self._models.get(digest) for digest in self._needed ^ {*digests})
        changed = [model for model in known if isinstance(model, PartialModel)]
        self._needed = {*digests}
        await in_background(partial(note_use, changed))
        for model in await in_background(partial(surplus, self._leftovers(), self._directory)):
            if model in self._leftovers():
                await self._remove(model)

    def _leftovers(self) -> list[PartialModel]:
        """Models in the store that nobody needs or fetches."""
        return [
            model
            for digest, model in self._models.items()
            if isinstance(model, PartialModel) and digest not in self._needed and not self._lock(digest).locked()
        ]

    async def _remove(self, model: PartialModel) -> None:
        """Delete the pieces of a model from the store."""
        digest = model.manifest.digest
        async with self._lock(digest):
            del self._models[digest]
            self._boards.pop(digest, None)
            num_bytes = model.held_bytes
            await in_background(model.remove)
            logger.info("removed %s of %s: nobody needs it", size_in_words(num_bytes), model.manifest.name)

    async def _make_room(self) -> bool:
        """Remove the model that nobody has needed for the longest time. False: there is none."""
        by_age = await in_background(partial(sorted, self._leftovers(), key=PartialModel.used_at))
        unused = [model for model in by_age if model in self._leftovers()]  # meanwhile one may have become needed
        if unused:
            await self._remove(unused[0])
        return bool(unused)

    def _lock(self, digest: str) -> asyncio.Lock:
        return self._locks.setdefault(digest, asyncio.Lock())

    async def _model(self, manifest: Manifest) -> Holding:
        found = self._models.get(manifest.digest)
        if found is None or (isinstance(found, WholeModel) and not await in_background(found.is_unchanged)):
            try:
                found = await in_background(partial(_held, manifest, self._directory))
            except OSError as error:
                raise WeightsError(f"{self._directory} can't hold {manifest.name}: {error.strerror}") from error
            self._models[manifest.digest] = found
        return found

    # Taking

    async def fetch(
        self,
        manifest: Manifest,
        span: Span | None,
        *,
        client: bool,
        givers: Callable[[], Sequence[Giver]],
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> Path:
        """Take the pieces of these blocks, or of a client, or of both. Returns the value of --model.

        Waits for machines that give pieces, as long as it takes, and goes on where an earlier call has stopped.
        `givers`: machines that give pieces of this model at present. `progress` is called at each piece.

        Raises:
            WeightsError: the disk is full or fails, or the model's files can't be used.
            SwarmError: swarmllm can't run the model.
        """
        counted = Counted(progress)
        async with self._lock(manifest.digest):
            while True:
                try:
                    model = await self._model(manifest)
                    if isinstance(model, PartialModel):
                        await self._take_needed(model, partial(model.needed, span, client=client), givers, counted)
                    else:
                        counted.tell(manifest, model.held, model.held)
                    return model.place
                except WeightsError as error:
                    if not is_full(error) or not await self._make_room():
                        raise

    async def _take_needed(
        self, model: PartialModel, needed: Callable[[], Pieces], givers: Callable[[], Sequence[Giver]], counted: Counted
    ) -> None:
        if model.manifest.commit:
            await self._hub_files(model.manifest)
        await in_background(model.recheck)
        await self._take(model, model.manifest.always_pieces(), givers, counted)
        await self._take(model, await in_background(needed), givers, counted)
        self._sync_later(model)

    def _sync_later(self, model: PartialModel) -> None:
        """Wait for the disk in the background. Until then, the pieces are read from memory; after a crash those that
        didn't reach the disk are fetched again."""

        async def sync() -> None:
            try:
                await in_background(model.sync)
            except WeightsError as error:
                logger.warning("%s", error)

        task = asyncio.get_running_loop().create_task(sync(), name=f"write {model.manifest.name}")
        self._syncing.add(task)
        task.add_done_callback(self._syncing.discard)

    async def close(self) -> None:
        """Wait until all pieces are on the disk."""
        await asyncio.gather(*self._syncing)

    async def _take(
        self, model: PartialModel, wanted: Pieces, givers: Callable[[], Sequence[Giver]], counted: Counted
    ) -> None:
        await in_background(partial(model.check_room, wanted))
        download = Download(model, wanted, self._board(model.manifest), self._members, self._hub, counted)
        await download.run(givers)
        if model.manifest.commit:
            await self._replace_wrong_pieces(model, download)

    async def _hub_files(self, manifest: Manifest) -> Files:
        """The hub's word about the files of a model. If the hub can't be asked, members are believed.

        Raises:
            CorruptWeightsError: the manifest says something else.
        """
        if self._hub is None:
            return words_of(manifest)
        if manifest.digest not in self._said:
            try:
                self._said[manifest.digest] = await in_background(partial(self._hub.files, manifest))
            except ConfigurationError as error:
                logger.warning("other machines are believed about %s: %s", manifest.name, error)
                return words_of(manifest)
        refuse_other(manifest, self._said[manifest.digest])
        return self._said[manifest.digest]

    async def _replace_wrong_pieces(self, model: PartialModel, download: Download) -> None:
        """Fetch pieces that aren't the hub's from there, and ban their givers.

        Raises:
            CorruptWeightsError: there are such pieces all the same, or the manifest is that of other files.
        """
        files = await self._hub_files(model.manifest)
        wrong = await in_background(partial(wrong_pieces, self._hub, model, files, download.given))
        if not wrong.any():
            return
        file = model.manifest.place(int(wrong.argmax())).file
        before = {
            piece: (giver, digest)
            for piece, giver in download.given.items()
            if wrong[piece] and (digest := model.digest_of(piece)) is not None
        }
        await in_background(partial(model.drop, wrong))
        if self._hub is not None and not file.digests:
            logger.warning("%s has other bytes than the hub's: it is fetched from the hub again", file.name)
            await download.run(list, alone=True)
            for giver in liars(before, model):
                self._members.ban(giver, f"its pieces of {file.name} aren't the hub's")
            wrong = await in_background(partial(wrong_pieces, self._hub, model, files, {}))
            if not wrong.any():
                return
            await in_background(partial(model.drop, wrong))
        reason = "its list of pieces is wrong" if file.digests else "try again later"
        raise CorruptWeightsError(f"{file.name} of {model.manifest.name} isn't what the hub says: {reason}")

    def _board(self, manifest: Manifest) -> Board:
        return self._boards.setdefault(manifest.digest, Board(manifest))

    # Giving

    def _check_member(self, peer_id: str, greeting: HelloHeader) -> None:
        """Refuse everybody but members.

        Raises:
            BlocksNotServedError: this peer hasn't proven that it is one, or this machine gives nothing.
        """
        if not is_membership(greeting.member, peer_id, self._swarm_id):
            raise BlocksNotServedError(
                "this machine gives weights to members of its swarm only: use the swarm's invite"
            )
        if not self._shares:
            raise BlocksNotServedError("this machine keeps its files (--no_share_weights)")

    async def serve(self, stream: FrameStream) -> None:
        """Greet another machine that has opened a stream, and answer it until the stream ends.

        Raises:
            SwarmError: the reason why it has ended.
        """
        peer_id = stream.peer_id
        stream.count_in(self._intake)
        await welcome(stream, software=__version__, accept=partial(self._check_member, peer_id))
        if self._takers.total() >= MAX_TAKERS or self._takers[peer_id] >= MAX_STREAMS_PER_TAKER:
            overloaded = ServerOverloadedError("this machine gives weights to too many others already")
            await send_error(stream, overloaded)
            raise overloaded
        stream.expect(frozenset({MessageType.WEIGHTS}))
        self._takers[peer_id] += 1
        boards: set[str] = set()
        try:
            await self._serve(stream, boards)
        finally:
            self._takers[peer_id] -= 1
            self._takers += Counter()  # forgets those with none
            for digest in boards & self._boards.keys():
                self._boards[digest].left(peer_id)

    async def _serve(self, stream: FrameStream, boards: set[str]) -> None:
        pace = self._near_pace if is_of_own_network(stream.host, own_networks()) else self._pace
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    message = await stream.receive()
            except TimeoutError:
                return
            if message.type is MessageType.ERROR:
                said = parse(ErrorHeader, message.header, stream.peer_id)
                logger.warning("%s says: %s", stream.peer_id, said.message)
                return
            if message.type is not MessageType.WEIGHTS:
                raise RemoteProtocolError(f"{message.type.name} to a machine that gives weights", stream.peer_id)
            header = parse(WeightsHeader, message.header, stream.peer_id)
            try:
                answer = await self._answer(stream.peer_id, header, message, boards)
            except BlocksNotServedError as error:
                await send_error(stream, error, id=header.id)
                continue
            result = WeightsResult(id=header.id, is_here=answer is not None)
            if header.wants == "piece" and answer:
                await pace.wait(len(answer), stream.gone)
            try:
                async with asyncio.timeout(SEND_S):
                    await stream.send(MessageType.RESULT, result.model_dump(), [answer or b""])
            except TimeoutError:
                logger.info("%s reads too slowly: its stream is cut", stream.peer_id)
                stream.abort()
                return

    async def _answer(self, peer_id: str, header: WeightsHeader, message: Message, boards: set[str]) -> bytes | None:
        model = self._models.get(header.manifest)
        if model is None:
            raise BlocksNotServedError("this machine has nothing of that model")
        manifest = model.manifest
        if header.wants == "manifest":
            return manifest.as_bytes()
        if isinstance(model, PartialModel) and model.is_unsure:
            await in_background(model.recheck)
        if header.wants == "piece":
            if header.piece >= manifest.num_pieces or not model.held[header.piece]:
                return None
            return await in_background(partial(_read_piece, model, header.piece))
        board = self._board(manifest)
        if header.manifest not in boards:
            boards.add(header.manifest)
            board.joined(peer_id)
        board.wants_of(peer_id, board.unpacked(bytes(message.payload), peer_id)[0])
        return board.packed(model.held, board.claims, board.wants)


def _held(manifest: Manifest, directory: Path) -> Holding:
    """The model in the hub's cache of this user, or else in the store. The store remembers its manifest."""
    hub_cache = Path(default_cache_dir() or constants.HF_HUB_CACHE)
    cached = cached_on_hub(manifest, hub_cache, directory / LOCAL)
    if cached is None:
        return PartialModel(manifest, directory)
    (directory / manifest.digest).mkdir(parents=True, exist_ok=True)
    with replaced(directory / manifest.digest / MANIFEST) as beside:
        beside.write_bytes(manifest.as_bytes())
    return WholeModel(cached)


def _read_piece(model: Holding, piece: int) -> bytes | None:
    try:
        return model.read(piece)
    except OSError as error:
        logger.warning("a piece of %s can't be read: %s", model.manifest.name, error)
        return None


def _found(directory: Path) -> list[Holding]:
    """The models of earlier times, the oldest first, those in the store before others."""
    directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, tuple[float, Holding]] = {}
    for path in directory.glob(f"[0-9a-f]*/**/{MANIFEST}"):
        try:
            manifest = Manifest.from_bytes(path.read_bytes(), path.relative_to(directory).parts[0])
            found[manifest.digest] = path.stat().st_mtime, _held(manifest, directory)
        except (OSError, SwarmError) as error:
            logger.warning("%s can't be used any more: %s", path.parent, error)
    others = [WholeModel(model) for model in remembered(directory / LOCAL)]
    return [model for _, model in sorted(found.values(), key=itemgetter(0))] + others


class Pace:
    """Spreads bytes over time. All who wait take turns in the order in which they came."""

    def __init__(self, mbps: float | None) -> None:
        self._bytes_per_s = None if mbps is None else mbps * 1e6 / 8
        self._free_at = 0.0

    async def wait(self, num_bytes: int, gone: asyncio.Future[None]) -> None:
        """Wait until so many bytes may go, or the taker has `gone`, who then leaves the turn to others."""
        if self._bytes_per_s is None:
            return
        now, takes_s = asyncio.get_running_loop().time(), num_bytes / self._bytes_per_s
        begin = max(now, self._free_at)
        self._free_at = begin + takes_s
        with suppress(TimeoutError):
            async with asyncio.timeout(begin - now):
                await asyncio.shield(gone)
        if gone.done():
            self._free_at -= takes_s
