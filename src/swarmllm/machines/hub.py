"""The hub: bytes of models that no machine has, and checks of those that other machines gave. Calls block.

What a machine can ask the hub for itself it doesn't believe others. Of a model with a commit, the hub tells the size of
each file and a digest of the whole, in one small answer:

    the manifest            its files and sizes are the hub's (`refuse_other`)
    files that are whole    have the hub's digest (`wrong_pieces`)
    parts of files          of the pieces that each machine gave, some are read from the hub again and compared

So a machine that gives wrong pieces of a large file is found out if it spoils many of them; one that spoils a single
piece of a file that nobody has whole may get away. Without the hub, members believe each other.
"""

import hashlib
import logging
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from swarmllm.errors import ConfigurationError, CorruptWeightsError
from swarmllm.machines.holdings import PartialModel
from swarmllm.models.checkpoint.manifest import SAMPLES, Manifest, Pieces
from swarmllm.models.checkpoint.pieces import HubFile, files_on_hub
from swarmllm.models.checkpoint.sources import hub_range

logger = logging.getLogger(__name__)

CHECKED_SHARE = 1 / 64
"""Share of the pieces that a machine gave which are read from the hub again. Assumed: 64 spoilt pieces are found with
63 %, for 1.6 % more bytes from the hub."""
LEAST_CHECKED = 4
"""Nothing is read again of fewer pieces: it would be a large part of a small model."""

Files = Mapping[str, HubFile]
"""The hub's word about the files of a model, by their names in the manifest."""


@dataclass(frozen=True)
class Hub:
    """The hub of huggingface_hub's settings (HF_ENDPOINT)."""

    token: str | None = None

    def read(self, manifest: Manifest, path: str, start: int, num_bytes: int) -> Iterator[bytes]:
        """Bytes of a file of the model's commit, piece by piece, from the first byte of a piece on.

        Raises:
            ConfigurationError: they can't be had.
        """
        size, piece = manifest.piece_bytes, bytearray()
        place = f"{manifest.folder}/{path}" if manifest.folder else path
        for chunk in hub_range(manifest.repository, manifest.commit, place, start, num_bytes, token=self.token):
            piece += chunk
            while len(piece) >= size:
                yield bytes(piece[:size])
                del piece[:size]
        if piece:
            yield bytes(piece)

    def files(self, manifest: Manifest) -> Files:
        """The hub's word about all files of the model's commit.

        Raises:
            ConfigurationError: the hub can't be asked, or has no such commit.
        """
        _, found = files_on_hub(manifest.repository, manifest.commit, self.token)
        before = f"{manifest.folder}/" if manifest.folder else ""
        return {path.removeprefix(before): file for path, file in found.items() if path.startswith(before)}


def wrong_pieces(hub: Hub | None, model: PartialModel, files: Files, given: Mapping[int, str]) -> Pieces:
    """Pieces of files that aren't the hub's, and all that the givers of such pieces gave. `given`: piece → its giver.

    Raises:
        OSError: files can't be read.
    """
    wrong = model.wrong_files(files)
    by_giver: dict[str, list[int]] = {}
    for piece, giver in given.items():
        if hub is not None and not wrong[piece] and not model.is_right(piece):
            by_giver.setdefault(giver, []).append(piece)
    for pieces in by_giver.values():
        count = math.ceil(len(pieces) * CHECKED_SHARE) if len(pieces) >= LEAST_CHECKED else 0
        try:
            if not all(_is_right(hub, model, piece) for piece in random.sample(pieces, count)):
                wrong[pieces[0]] = True
        except ConfigurationError as error:
            logger.warning("pieces of other machines can't be compared with the hub's: %s", error)
            break
    suspects = {giver for piece, giver in given.items() if wrong[piece]}
    wrong[[piece for piece, giver in given.items() if giver in suspects]] = True
    return wrong


def _is_right(hub: Hub | None, model: PartialModel, piece: int) -> bool:
    assert hub is not None
    _, file, start, num_bytes = model.manifest.place(piece)
    data = b"".join(hub.read(model.manifest, file.name, start, num_bytes))
    return hashlib.sha256(data).digest() == model.digest_of(piece)


def refuse_other(manifest: Manifest, files: Files) -> None:
    """Refuse a manifest that isn't of the hub's files.

    Raises:
        CorruptWeightsError: it isn't.
    """
    for one in manifest.files:
        if one.name == SAMPLES:
            continue
        known = files.get(one.name)
        if known is None or known.size != one.size or (one.sha256 and known.sha256 not in ("", one.sha256)):
            raise CorruptWeightsError(
                f"the list of files of {manifest.name} isn't the hub's ({one.name} is another): the machine that chose "
                "the model lies, or its files are damaged"
            )


def words_of(manifest: Manifest) -> Files:
    """The same as far as the manifest knows it, where the hub can't be asked."""
    return {one.name: HubFile(one.size, one.sha256) for one in manifest.files}


def liars(before: Mapping[int, tuple[str, bytes]], model: PartialModel) -> set[str]:
    """The givers of pieces that came from the hub with other bytes. `before`: piece → (giver, SHA-256)."""
    return {giver for piece, (giver, digest) in before.items() if model.digest_of(piece) not in (None, digest)}
