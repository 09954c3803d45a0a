"""The list of a model's files, cut into pieces with digests, and directories that hold only some of the pieces. Pure.

A `Manifest` names every file that a machine needs to open a model. Its digest is the model's name among machines that
pass weights on. A file is cut into pieces of `piece_bytes`; each has a number, and the numbers of all files are one
row. Some bytes are needed whatever a machine does with the model (`always`): small files, headers of weights. From a
local directory come also `SAMPLES`, a last file of the manifest that isn't in the directory: the bytes that
`fingerprint` reads of all tensors. So a machine with few pieces computes the same fingerprint as one with all of them.

A partial directory has every file in its full size, with holes for missing pieces. Next to them lie the manifest
(`MANIFEST`), and one record for each piece that was verified and written (`Marks`). A hole reads as zeros, so
`weight_files` and `stored_files` ask `PartialFiles` before they read a tensor: a missing piece is an error, not zeros.

Manifests come from peers. All sizes and names are checked here, although the digest has proven that a member chose
them.
"""

import base64
import errno
import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from struct import Struct
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, model_validator

from swarmllm.data_structures import PeerModel, PeerText
from swarmllm.errors import BlockWeightsNotFoundError, CorruptWeightsError
from swarmllm.files import replace_file, replaced

PIECE_BYTES = 1 << 20
"""Assumed: large enough that digests are a small part of the traffic (32 bytes for each piece), and small enough that a
tensor of a block seldom brings many bytes of its neighbours."""
MAX_PIECE_BYTES = 4 << 20
MAX_MANIFEST_BYTES = 64 << 20
"""Enough for a model of a terabyte in pieces of 1 MiB, whose manifest has 45 MB."""
MAX_PIECES = 1 << 20
MAX_FILES = 4096
DIGEST_BYTES = 32
MANIFEST, MARKS, SYNCED, SAMPLES = (f".swarmllm-{name}" for name in ("manifest", "pieces", "synced", "samples"))
"""Names of files in a partial directory. No file of a manifest but the last one begins with a dot."""
_RECORD = Struct(f"<I{DIGEST_BYTES}s")
_RANGE = Struct("<HQI")
"""A record of SAMPLES: number of the file, first byte, number of bytes; the bytes follow."""
_PLAIN = re.compile(r"[^./\\\0][^/\\\0]{0,199}")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)

Pieces = npt.NDArray[np.bool_]
"""One truth value for each piece."""
Range = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
"""Bytes [start, end) of a file."""


class ManifestFile(PeerModel):
    """One file of a model."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    size: Annotated[int, Field(ge=0, le=1 << 44)]
    digests: str = ""
    """SHA-256 of each piece, one after the other in base64. Empty if only the hub knows the content."""
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the whole file, where the hub tells it."""
    always: Annotated[tuple[Range, ...], Field(max_length=4096)] = ()
    """Ranges that every machine needs."""


class Place(NamedTuple):
    """The place of one piece."""

    number: int
    """Number of the file."""
    file: ManifestFile
    start: int
    num_bytes: int


class Manifest(PeerModel):
    """The files of one model."""

    name: Annotated[PeerText, Field(min_length=1, max_length=200)]
    """Name of the directory or GGUF file, or hub id; for people."""
    piece_bytes: Annotated[int, Field(ge=64, le=MAX_PIECE_BYTES)] = PIECE_BYTES
    files: Annotated[tuple[ManifestFile, ...], Field(min_length=1, max_length=MAX_FILES)]
    gguf: str = ""
    """Name of the first GGUF file, if the model is one."""
    repository: str = ""
    """Hub id, if the commit is known."""
    commit: Annotated[str, Field(pattern=r"^([0-9a-f]{40})?$")] = ""
    folder: str = ""
    """Folder within the repository, without a slash at its end."""

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        """Check everything that code relies on."""
        names = [file.name for file in self.files]
        plain = names[:-1] if names[-1] == SAMPLES else names
        if not all(_PLAIN.fullmatch(name) and name.isprintable() for name in plain) or len(set(names)) < len(names):
            raise ValueError("names of files must be plain and different")
        if self.gguf and self.gguf not in plain:
            raise ValueError("it names a GGUF file that it lacks")
        if bool(self.commit) != bool(self.repository):
            raise ValueError("a commit needs a repository")
        if self.repository and not _HUB_ID.fullmatch(self.repository):
            raise ValueError("it names no repository of the hub")
        if self.folder and not (self.commit and all(map(_PLAIN.fullmatch, self.folder.split("/")))):
            raise ValueError("its folder isn't within a repository")
        if not self.commit and not _PLAIN.fullmatch(self.name):
            raise ValueError("its name can't be that of a directory")
        if self.num_pieces > MAX_PIECES:
            raise ValueError(f"it has more than {MAX_PIECES} pieces")
        for file in self.files:
            if any(not start < end <= file.size for start, end in file.always):
                raise ValueError(f"a range of {file.name} is outside of it")
            if not file.digests and not self.commit and file.size:
                raise ValueError(f"nobody knows the content of {file.name}")
        for file, digests in zip(self.files, self._digests, strict=True):
            if file.digests and len(digests) != DIGEST_BYTES * self._count(file):
                raise ValueError(f"{file.name} has another number of pieces than digests")
        return self

    @classmethod
    def from_bytes(cls, data: bytes, digest: str) -> Self:
        """Read what `as_bytes` has made.

        Raises:
            CorruptWeightsError: it isn't the manifest with this digest, or no manifest at all.
        """
        if len(data) > MAX_MANIFEST_BYTES or hashlib.sha256(data).hexdigest() != digest:
            raise CorruptWeightsError("this is another manifest than the one that was asked for")
        try:
            found = cls.model_validate_json(data)
        except (ValidationError, RecursionError) as error:
            first = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else "too deep"
            raise CorruptWeightsError(f"a manifest is not valid: {first}") from None
        if found.as_bytes() != data:
            raise CorruptWeightsError("a manifest is not written in the usual way")
        return found

    def as_bytes(self) -> bytes:
        """The canonical form."""
        return self._canonical

    @cached_property
    def _canonical(self) -> bytes:
        fields = self.model_dump(mode="json", exclude_defaults=True)
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form, in hex."""
        return hashlib.sha256(self.as_bytes()).hexdigest()

    @property
    def num_pieces(self) -> int:
        return sum(map(self._count, self.files))

    @property
    def directory(self) -> Path:
        """Path of the model's directory below that of the store. `checkpoint/sources` tells the commit by it, and
        servers the model's name."""
        if not self.commit:
            return Path("model" if self.gguf else self.name)
        owner, name = self.repository.split("/")
        return Path(f"models--{owner}--{name}", "snapshots", self.commit, self.folder)

    def file(self, name: str) -> ManifestFile:
        """The file of that name.

        Raises:
            BlockWeightsNotFoundError: the model has none.
        """
        found = next((file for file in self.files if file.name == name), None)
        if found is None:
            raise BlockWeightsNotFoundError(f"the model {self.name} has no file {name}")
        return found

    def place(self, piece: int) -> Place:
        """The place of this piece, which must be one of the manifest's."""
        index = bisect_right(self.first_pieces, piece) - 1
        file, start = self.files[index], (piece - self.first_pieces[index]) * self.piece_bytes
        return Place(index, file, start, min(self.piece_bytes, file.size - start))

    def digest_of(self, piece: int) -> bytes | None:
        """SHA-256 of a piece; None if only the hub knows it."""
        index, _, start, _ = self.place(piece)
        at = start // self.piece_bytes * DIGEST_BYTES
        return self._digests[index][at : at + DIGEST_BYTES] or None

    def none(self) -> Pieces:
        """No pieces."""
        return np.zeros(self.num_pieces, np.bool_)

    def pieces_of(self, ranges: Iterable[tuple[str, int, int]]) -> Pieces:
        """The pieces that hold these bytes: (name of a file, first byte, the byte after the last).

        Raises:
            BlockWeightsNotFoundError: the model has no such file, or it isn't that long.
        """
        found, index_of = self.none(), {file.name: index for index, file in enumerate(self.files)}
        for name, start, end in ranges:
            if name not in index_of or end > self.files[index_of[name]].size:
                raise BlockWeightsNotFoundError(f"the model {self.name} has no bytes {start} to {end} of {name}")
            if start < end:
                first = self.first_pieces[index_of[name]]
                found[first + start // self.piece_bytes : first + (end - 1) // self.piece_bytes + 1] = True
        return found

    def always_pieces(self) -> Pieces:
        """The pieces that every machine needs."""
        return self.pieces_of((file.name, start, end) for file in self.files for start, end in file.always)

    def num_bytes(self, pieces: Pieces) -> int:
        """Bytes of these pieces."""
        total = 0
        for file, first in zip(self.files, self.first_pieces, strict=True):
            own = pieces[first : first + self._count(file)]
            count = int(np.count_nonzero(own))
            total += count * self.piece_bytes
            if count and own[-1]:
                total -= -file.size % self.piece_bytes
        return total

    def _count(self, file: ManifestFile) -> int:
        return -(-file.size // self.piece_bytes)

    @cached_property
    def first_pieces(self) -> list[int]:
        """The number of the first piece of each file."""
        return [0, *accumulate(map(self._count, self.files[:-1]))]

    @cached_property
    def _digests(self) -> list[bytes]:
        """The digests of each file's pieces, one after the other."""
        return [base64.b64decode(file.digests, validate=True) for file in self.files]


class Marks:
    """The pieces that were verified and written into a partial directory: first the piece, then its mark.

    A mark is a record of fixed size at the end of a file, with the piece's SHA-256. So a process that is killed leaves
    whole marks, and perhaps half of one, which is cut off. A machine that loses power may keep a mark and lose the
    piece: `unsure` lists the pieces that may not have reached the disk.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Read the marks of earlier times.

        Raises:
            OSError: they can't be read.
        """
        self._path, self._synced = directory / MARKS, directory / SYNCED
        self.held = manifest.none()
        self.digests: dict[int, bytes] = {}
        """SHA-256 of each piece that is here."""
        data = self._path.read_bytes() if self._path.exists() else b""
        self._num_bytes = len(data) - len(data) % _RECORD.size
        self._num_removals = 0
        order = []
        for piece, digest in _RECORD.iter_unpack(data[: self._num_bytes]):
            if piece < manifest.num_pieces:
                order.append(piece)
                self.held[piece], self.digests[piece] = True, digest
        self.unsure = order[self._read_synced() // _RECORD.size :]

    def _read_synced(self) -> int:
        """Bytes of marks whose pieces are on the disk."""
        try:
            return min(int(self._synced.read_text()), self._num_bytes)
        except (OSError, ValueError):
            return 0

    def add(self, piece: int, digest: bytes) -> None:
        """Mark a piece that has been written.

        Raises:
            OSError: the mark can't be written, and the piece counts as missing.
        """
        record = _RECORD.pack(piece, digest)
        with self._path.open("r+b" if self._path.exists() else "wb", buffering=0) as file:
            file.truncate(self._num_bytes)  # half a mark of a process that was killed
            file.seek(self._num_bytes)
            if file.write(record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._num_bytes += len(record)
        self.held[piece], self.digests[piece] = True, digest

    def remove(self, pieces: Iterable[int]) -> None:
        """Unmark pieces that aren't what they should be.

        Raises:
            OSError: the marks can't be written.
        """
        self._num_removals += 1
        for piece in pieces:
            self.held[piece] = False
            self.digests.pop(piece, None)
        replace_file(self._synced, "0")
        with replaced(self._path) as beside:
            beside.write_bytes(b"".join(_RECORD.pack(*one) for one in self.digests.items()))
        self._num_bytes = _RECORD.size * len(self.digests)

    @property
    def state(self) -> tuple[int, int]:
        """The marks there are, for `synced`."""
        return self._num_removals, self._num_bytes

    def synced(self, state: tuple[int, int]) -> None:
        """Note that the pieces of this `state` are on the disk. Call it after they were.

        Raises:
            OSError: it can't be written.
        """
        if state[0] != self._num_removals:  # the marks have other places now
            return
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            os.fsync(file.fileno())
        replace_file(self._synced, str(state[1]))
        self.unsure = []


class PartialFiles:
    """The pieces that a directory has of its files."""

    def __init__(self, directory: Path) -> None:
        """Read the manifest and the marks.

        Raises:
            CorruptWeightsError: they are damaged.
        """
        self._directory = directory
        try:
            data = (directory / MANIFEST).read_bytes()
            self._manifest = Manifest.from_bytes(data, hashlib.sha256(data).hexdigest())
            self._held = Marks(directory, self._manifest).held
        except OSError as error:
            raise CorruptWeightsError(f"the list of pieces in {directory} can't be read: {error.strerror}") from error

    def require(self, filename: str, start: int, num_bytes: int, what: str) -> None:
        """Check that these bytes are here; `what` they are, for people.

        Raises:
            BlockWeightsNotFoundError: some of their pieces are missing.
        """
        wanted = self._manifest.pieces_of([(filename, start, start + num_bytes)])
        if (wanted & ~self._held).any():
            self._held = Marks(self._directory, self._manifest).held  # more may have come
        if (wanted & ~self._held).any():
            raise BlockWeightsNotFoundError(
                f"{what} is not on this machine, which has only parts of {self._manifest.name}: use the whole model"
            )


def partial_files(directory: Path) -> PartialFiles | None:
    """The pieces that this directory has, if it is a partial one; None of a usual directory.

    Raises:
        CorruptWeightsError: the list of pieces is damaged.
    """
    try:
        stamp = (directory / MANIFEST).stat().st_mtime_ns
    except OSError:
        return None
    return _partial_files(directory, stamp)


@lru_cache(8)
def _partial_files(directory: Path, _: int) -> PartialFiles:
    return PartialFiles(directory)


class RequiredTensor:
    """A lazy tensor that is read only if all of its bytes are here, for transformers' loader.

    Slices are for fingerprints alone. Their bytes are in SAMPLES, and so in every partial directory.
    """

    def __init__(self, lazy: Any, require: Callable[[], None]) -> None:
        self._lazy, self._require = lazy, require

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            self._require()
        return self._lazy[index]

    def get_shape(self) -> list[int]:
        return list(self._lazy.get_shape())

    def get_dtype(self) -> str:
        return str(self._lazy.get_dtype())


def pack_samples(ranges: Iterable[tuple[int, int, bytes]]) -> bytes:
    """The content of SAMPLES: (number of the file, first byte, bytes)."""
    return b"".join(_RANGE.pack(index, start, len(data)) + data for index, start, data in ranges)


def unpack_samples(manifest: Manifest, data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The same from a peer's bytes.

    Raises:
        CorruptWeightsError: they are of another form, or for places outside of the files.
    """
    at = 0
    while at < len(data):
        if at + _RANGE.size > len(data):
            raise CorruptWeightsError(f"the samples of {manifest.name} end too early")
        index, start, num_bytes = _RANGE.unpack_from(data, at)
        at += _RANGE.size
        if index >= len(manifest.files) - 1 or start + num_bytes > manifest.files[index].size:
            raise CorruptWeightsError(f"the samples of {manifest.name} are for places outside of its files")
        if at + num_bytes > len(data):
            raise CorruptWeightsError(f"the samples of {manifest.name} end too early")
        yield index, start, data[at : at + num_bytes]
        at += num_bytes
