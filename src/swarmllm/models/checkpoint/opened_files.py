"""The files of weights as they were when the checkpoint was opened: what is in them, by samples, and whether that is so
still.

Samples are compared with those of other machines (`fingerprint`), and with the same files later: a process that runs
for weeks must not load blocks of new files beside those of the old ones. Used through `Checkpoint.opened_files`.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from swarmllm.errors import CorruptWeightsError
from swarmllm.models.checkpoint.stored_files import StoredFiles
from swarmllm.models.checkpoint.weight_files import StoredPlace

SPOT_BYTES = 2048
SPOTS = 4
"""In each tensor, at least, so that each part of queries, keys and values in one tensor has one. A fine-tune changes
most numbers of what it changes at all: of 4096 in bfloat16, a change of a hundredth is missed once in 10^17 times."""
BYTES_PER_SPOT = 16 << 20
"""In larger tensors there are more spots: some are the experts of a block, of which a fine-tune may change a few."""

Stamp = tuple[int, int, int]


class OpenedFiles:
    """Which files there are, and what was in them when they were seen first."""

    def __init__(self, files: StoredFiles) -> None:
        self._files = files
        self._seen: dict[str, tuple[Stamp, str]] = {}

    def samples(self) -> dict[str, str | None]:
        """For each file a hash of samples of all its tensors; None for one that isn't on this machine.

        Raises:
            CorruptWeightsError: one is damaged.
        """
        for filename in self._files.filenames():
            path = self._files.local(filename)
            if filename not in self._seen and path is not None:
                self._seen[filename] = _stamp(path), self._sample(filename, path)
        return {name: self._seen[name][1] if name in self._seen else None for name in self._files.filenames()}

    def changed(self) -> list[str]:
        """Files that hold something else than when they were seen first, or are gone; new ones are seen now.

        Raises:
            CorruptWeightsError: a new one is damaged.
        """
        self.samples()
        return [filename for filename in self._seen if not self._is_as_seen(filename)]

    def _is_as_seen(self, filename: str) -> bool:
        stamp, sample = self._seen[filename]
        path = self._files.local(filename)
        if path is None:
            return False
        try:
            now = _stamp(path)
            if now != stamp and self._sample(filename, path) == sample:  # only touched, or copied again
                self._seen[filename] = now, sample
                return True
        except (CorruptWeightsError, OSError):
            return False
        return now == stamp

    def _sample(self, filename: str, path: Path) -> str:
        return _sample(path, self._files.places(filename))


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _sample(path: Path, places: Iterable[StoredPlace]) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for place in sorted(places):
            digest.update(f"{place.name}\0{place.num_bytes}\0".encode())
            for start, num_bytes in _spots(place):
                file.seek(start)
                digest.update(file.read(num_bytes))
    return digest.hexdigest()


def _spots(place: StoredPlace) -> Iterator[tuple[int, int]]:
    """(first byte, number of bytes), in the middle of equal parts of the place."""
    count = max(SPOTS, place.num_bytes // BYTES_PER_SPOT)
    if place.num_bytes <= count * SPOT_BYTES:
        yield place.start, place.num_bytes
        return
    for index in range(count):
        yield place.start + (2 * index + 1) * place.num_bytes // (2 * count) - SPOT_BYTES // 2, SPOT_BYTES
