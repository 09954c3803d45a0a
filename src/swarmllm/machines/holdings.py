"""Models whose pieces are on this machine, in its store or in directories of its user. No network.

    <store>/<digest>/<directory of the model>/    a partial directory (`models/checkpoint/manifest`)
    <store>/local/                                 manifests of models elsewhere on this machine, with their samples

The pieces of models that nobody needs any more stay for a later command, up to `LEFTOVERS_SHARE` of the room, and until
another model needs it. Then the ones go first that nobody has needed for the longest time (`surplus`).

Calls block, and are made in threads. Several threads may write pieces of one model at a time.
"""

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from swarmllm.data_structures import Span, size_in_words
from swarmllm.errors import WeightsError
from swarmllm.files import replaced
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.manifest import (
    MANIFEST,
    MARKS,
    SAMPLES,
    SYNCED,
    Manifest,
    Marks,
    Pieces,
    unpack_samples,
)
from swarmllm.models.checkpoint.pieces import HubFile, SharedModel, needed_pieces

LEFT_BYTES = 256 << 20
"""Assumed: the disk keeps this much for others."""
LEFTOVERS_SHARE = 0.25
"""Most room on the disk for pieces that nobody needs, as a share of theirs and what is free."""
FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class Holding:
    """A model of which some pieces are here, or all."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    @property
    def held(self) -> Pieces:
        """The pieces that are here."""
        raise NotImplementedError

    @property
    def place(self) -> Path:
        """A value of --model."""
        raise NotImplementedError

    def read(self, piece: int) -> bytes | None:
        """A piece; None if it isn't here any more.

        Raises:
            OSError: it can't be read.
        """
        raise NotImplementedError


class WholeModel(Holding):
    """A model that the user has."""

    def __init__(self, model: SharedModel) -> None:
        super().__init__(model.manifest)
        self._model = model
        known = {Path(path).name for path in model.stamps} | {SAMPLES}
        here = (file for file in model.manifest.files if file.name in known)
        self._held = model.manifest.pieces_of((file.name, 0, file.size) for file in here)

    @property
    def held(self) -> Pieces:
        return self._held

    @property
    def place(self) -> Path:
        return self._model.directory / self.manifest.gguf

    def is_unchanged(self) -> bool:
        """True if the files look as they did when they were read."""
        return self._model.is_unchanged()

    def read(self, piece: int) -> bytes | None:
        place = self.manifest.place(piece)
        if place.file.name == SAMPLES:
            return self._model.samples[place.start : place.start + place.num_bytes]
        path = self._model.directory / place.file.name
        stat = path.stat()
        if self._model.stamps.get(str(path)) != (stat.st_size, stat.st_mtime_ns):
            return None  # the user has changed it
        return _read(path, place.start, place.num_bytes)


class PartialModel(Holding):
    """A model in the store."""

    def __init__(self, manifest: Manifest, store: Path) -> None:
        """Make its directory, or go on with it.

        Raises:
            OSError: it can't be made or read.
        """
        super().__init__(manifest)
        self.top = store / manifest.digest
        self.directory = self.top / manifest.directory
        self.directory.mkdir(parents=True, exist_ok=True)
        if not (self.directory / MANIFEST).exists():  # first of all: with it the directory counts as a partial one
            with replaced(self.directory / MANIFEST) as beside:
                beside.write_bytes(manifest.as_bytes())
        for file in manifest.files:
            with (self.directory / file.name).open("ab") as opened:
                opened.truncate(file.size)
        self._marks = Marks(self.directory, manifest)
        self._lock = threading.Lock()
        self._right: set[str] = set()
        """Files whose whole content was compared with the hub's digest."""

    @property
    def held(self) -> Pieces:
        return self._marks.held

    @property
    def place(self) -> Path:
        return self.directory / self.manifest.gguf

    def read(self, piece: int) -> bytes | None:
        place = self.manifest.place(piece)
        return _read(self.directory / place.file.name, place.start, place.num_bytes) if self.held[piece] else None

    def put(self, piece: int, data: bytes | bytearray) -> bool:
        """Write a piece and mark it, unless it is here already. False: it isn't this piece.

        Raises:
            WeightsError: the disk is full, or fails. Nothing is marked that isn't here.
        """
        place, expected = self.manifest.place(piece), self.manifest.digest_of(piece)
        digest = hashlib.sha256(data).digest()
        if len(data) != place.num_bytes or (expected is not None and expected != digest):
            return False
        if self.held[piece]:  # without a digest, this one could be another
            return True
        try:
            _write(self.directory / place.file.name, place.start, data)
            with self._lock:
                if not self.held[piece]:
                    self._marks.add(piece, digest)
        except OSError as error:
            raise self._failed(error) from error
        return True

    def check_room(self, wanted: Pieces) -> None:
        """Raise WeightsError if the disk has no room for these pieces."""
        missing = self.manifest.num_bytes(wanted & ~self.held)
        if missing and shutil.disk_usage(self.directory).free < missing + LEFT_BYTES:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise self._failed(full) from full

    @property
    def held_bytes(self) -> int:
        """Bytes of the pieces that are here."""
        return self.manifest.num_bytes(self.held)

    def used_at(self) -> float:
        """Time of the last `note_use`, or of the first piece, in seconds since 1970."""
        try:
            return self.top.stat().st_mtime
        except OSError:
            return 0.0

    def remove(self) -> None:
        """Delete everything of this model, and nothing that somebody else has put there."""
        names = [file.name for file in self.manifest.files]
        for name in (MARKS, SYNCED, *names, MANIFEST):  # without marks, none of the rest counts
            with suppress(OSError):
                (self.directory / name).unlink()
        directory = self.directory
        with suppress(OSError):  # it isn't empty
            while directory != self.top.parent:
                directory.rmdir()
                directory = directory.parent

    @property
    def is_unsure(self) -> bool:
        """True if the machine may have stopped before all marked pieces were on the disk. Call `recheck` then."""
        return bool(self._marks.unsure)

    def recheck(self) -> None:
        """Read pieces anew that may not have reached the disk before the machine stopped, and drop wrong ones.

        Raises:
            WeightsError: the disk is full, or fails.
        """
        try:
            self._recheck()
        except OSError as error:
            raise self._failed(error) from error

    def _recheck(self) -> None:
        with self._lock:
            wrong = []
            for piece in self._marks.unsure:
                place = self.manifest.place(piece)
                data = _read(self.directory / place.file.name, place.start, place.num_bytes)
                if hashlib.sha256(data).digest() != self._marks.digests.get(piece):
                    wrong.append(piece)
            if wrong:
                self._marks.remove(wrong)
        if self._marks.unsure:
            self._sync()

    def digest_of(self, piece: int) -> bytes | None:
        """SHA-256 of a piece that is here."""
        return self._marks.digests.get(piece)

    def is_right(self, piece: int) -> bool:
        """True if the whole file of this piece was compared with the hub's digest."""
        return self.manifest.place(piece).file.name in self._right

    def wrong_files(self, files: Mapping[str, HubFile]) -> Pieces:
        """Compare files that are whole now with the hub's digests. Returns the pieces of those that differ.

        Raises:
            OSError: they can't be read.
        """
        wrong = self.manifest.none()
        for file in self.manifest.files:
            pieces = self.manifest.pieces_of([(file.name, 0, file.size)])
            if file.name not in files or file.name in self._right or not self.held[pieces].all():
                continue
            if files[file.name].is_at(self.directory / file.name):
                self._right.add(file.name)
            else:
                wrong |= pieces
        return wrong

    def drop(self, pieces: Pieces) -> None:
        """Forget pieces that are wrong.

        Raises:
            OSError: the marks can't be written.
        """
        with self._lock:
            self._marks.remove(np.flatnonzero(pieces).tolist())

    def sync(self) -> None:
        """Wait until all pieces are on the disk.

        Raises:
            WeightsError: the disk is full, or fails.
        """
        try:
            self._sync()
        except OSError as error:
            raise self._failed(error) from error

    def _sync(self) -> None:
        with self._lock:
            marked = self._marks.state
        for file in self.manifest.files:
            with (self.directory / file.name).open("rb") as opened:
                os.fsync(opened.fileno())
        with self._lock:  # pieces that came meanwhile may be in memory only
            self._marks.synced(marked)

    def needed(self, span: Span | None, *, client: bool) -> Pieces:
        """The pieces of blocks or a client. Those that every machine needs must be here.

        Raises:
            SwarmError: this is no model that swarmllm can run.
        """
        self._put_samples()
        return needed_pieces(open_checkpoint(str(self.place)), self.manifest, span, client=client)

    def _put_samples(self) -> None:
        """Write the bytes that fingerprints read into pieces that aren't here."""
        if self.manifest.files[-1].name != SAMPLES:
            return
        first_of = self.manifest.first_pieces
        with self._lock:
            for index, start, data in unpack_samples(self.manifest, (self.directory / SAMPLES).read_bytes()):
                at = start
                while at < start + len(data):
                    piece = first_of[index] + at // self.manifest.piece_bytes
                    end = min(start + len(data), (at // self.manifest.piece_bytes + 1) * self.manifest.piece_bytes)
                    if not self.held[piece]:
                        _write(self.directory / self.manifest.files[index].name, at, data[at - start : end - start])
                    at = end

    def _failed(self, error: OSError) -> WeightsError:
        if error.errno in FULL:
            return self._no_room()
        return WeightsError(f"{self.directory} can't be used: {error.strerror or error}")

    def _no_room(self) -> WeightsError:
        free, left = size_in_words(shutil.disk_usage(self.directory).free), size_in_words(LEFT_BYTES)
        return WeightsError(
            f"the disk of {self.directory} is too full for {self.manifest.name} ({free} are free, and {left} stay "
            "free): free some space, and loading goes on where it stopped"
        )


def is_full(error: WeightsError) -> bool:
    """True if the reason is a full disk."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL


def note_use(models: Iterable[PartialModel]) -> None:
    """Note that somebody needs these models now, or did until now."""
    for model in models:
        with suppress(OSError):
            os.utime(model.top)


def surplus(leftovers: Iterable[PartialModel], store: Path) -> list[PartialModel]:
    """The models that must go, so that those that nobody needs have no more than their share of the room."""
    by_age = sorted(leftovers, key=PartialModel.used_at)
    if not by_age:
        return []
    kept = sum(model.held_bytes for model in by_age)
    most = LEFTOVERS_SHARE * (kept + shutil.disk_usage(store).free)
    found = []
    for model in by_age:
        if kept > most:
            found.append(model)
            kept -= model.held_bytes
    return found


def _read(path: Path, start: int, num_bytes: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), num_bytes, start)


def _write(path: Path, start: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of it; a full disk may write a part first."""
    with path.open("r+b", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(file.fileno(), rest, start)
            start, rest = start + written, rest[written:]
