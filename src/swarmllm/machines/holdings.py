"""Models whose pieces are on this machine, in its store or in directories of its user. No network.

    <store>/<digest>/<directory of the model>/    a partial directory (`models/checkpoint/manifest`)
    <store>/local/                                 manifests of models elsewhere on this machine, with their samples

Calls block, and are made in threads. Several threads may write pieces of one model at a time.
"""

import errno
import hashlib
import os
import shutil
import threading
from pathlib import Path

import numpy as np

from swarmllm.data_structures import Span, size_in_words
from swarmllm.errors import WeightsError
from swarmllm.files import replaced
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.manifest import MANIFEST, SAMPLES, Manifest, Marks, Pieces, unpack_samples
from swarmllm.models.checkpoint.pieces import SharedModel, needed_pieces

LEFT_BYTES = 256 << 20
"""Assumed: the disk keeps this much for others."""
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
        self.directory = store / manifest.digest / manifest.directory
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
        """Write a piece and mark it. False: it isn't this piece.

        Raises:
            WeightsError: the disk is full, or fails. Nothing is marked that isn't here.
        """
        place, expected = self.manifest.place(piece), self.manifest.digest_of(piece)
        digest = hashlib.sha256(data).digest()
        if len(data) != place.num_bytes or (expected is not None and expected != digest):
            return False
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
            raise self._no_room()

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

    def drop_wrong_files(self) -> list[str]:
        """Compare files that are whole now with the hub's digests, and drop the pieces of those that differ.

        Raises:
            OSError: they can't be read, or the result can't be written.
        """
        wrong = []
        for file in self.manifest.files:
            pieces = self.manifest.pieces_of([(file.name, 0, file.size)])
            if file.digests or not file.sha256 or file.name in self._right or not self.held[pieces].all():
                continue
            with (self.directory / file.name).open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest == file.sha256:
                self._right.add(file.name)
                continue
            with self._lock:
                self._marks.remove(np.flatnonzero(pieces).tolist())
            wrong.append(file.name)
        return wrong

    def sync(self) -> None:
        """Wait until all pieces are on the disk.

        Raises:
            WeightsError: the disk is full, or fails.
        """
        try:
            with self._lock:
                self._sync()
        except OSError as error:
            raise self._failed(error) from error

    def _sync(self) -> None:
        for file in self.manifest.files:
            with (self.directory / file.name).open("rb") as opened:
                os.fsync(opened.fileno())
        self._marks.synced()

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
        missing = size_in_words(shutil.disk_usage(self.directory).free)
        return WeightsError(
            f"the disk of {self.directory} is too full for {self.manifest.name} ({missing} are free): free some space, "
            "and loading goes on where it stopped"
        )


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
