"""Manifests of checkpoints, and the pieces that blocks or a client need. Called by `machines/weights`.

    describe            a directory or GGUF file of this machine → its manifest, and the samples of its tensors
    describe_on_hub     a repository → its manifest without digests: the hub tells sizes, and this reads headers only
    needed_pieces       the pieces of a span and of a client, once configs and headers are here

A checkpoint in safetensors has its weights, and all other small files of its directory: config, tokenizer, chat
template, settings of generation. A pickle can only be read whole, so every machine needs all of it. Hidden files are
never shared.
"""

import base64
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from swarmllm.config import require_directory_or_hub_id
from swarmllm.data_structures import Span
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError, CorruptWeightsError
from swarmllm.files import existing_path, replaced
from swarmllm.models.architecture import blocks_class, parts_of
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint, spots
from swarmllm.models.checkpoint.fingerprint import SAMPLED_ROWS
from swarmllm.models.checkpoint.manifest import (
    MANIFEST,
    PIECE_BYTES,
    SAMPLES,
    Manifest,
    ManifestFile,
    Pieces,
    Range,
    pack_samples,
    partial_files,
)
from swarmllm.models.checkpoint.skeleton import (
    client_tensor_names,
    named_blocks,
    on_meta,
    parameters_of,
    tensors_of_span,
)
from swarmllm.models.checkpoint.sources import first_line, hub_range
from swarmllm.models.checkpoint.stored_files import (
    CONFIG,
    LAYOUTS,
    MTP_FILE,
    SUFFIX,
    only_gguf,
    parts_of_gguf,
    split_place,
)
from swarmllm.models.checkpoint.weight_files import read_index
from swarmllm.models.published_formats.gguf import ROPE_FACTORS, head_ranges

logger = logging.getLogger(__name__)

SMALL_FILE_BYTES = 64 << 20
"""Assumed: the largest tokenizers have 35 MB."""
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".tflite", ".npz")
"""Ends of files that are shared only if the checkpoint uses them."""
HASHING_THREADS = min(4, os.cpu_count() or 1)
"""Threads that read and hash pieces. Assumed: a core hashes about 1 GB/s, and disks read several."""

ReadRange = Callable[[str, int, int], bytes]
"""Reads (path in the repository, first byte, number of bytes)."""
Stamps = dict[str, tuple[int, int]]
"""Path → (bytes, time of the last change in ns)."""


@dataclass(frozen=True)
class SharedModel:
    """A model on this machine that others may take."""

    place: str
    """A value of --model."""
    manifest: Manifest
    directory: Path
    samples: bytes
    """Content of SAMPLES; empty if the manifest has no such file."""
    stamps: Stamps
    """State of the files when they were read."""

    def is_unchanged(self) -> bool:
        """True if the files look as they did when they were read."""
        return _stamps(map(Path, self.stamps)) == self.stamps


def manifest_of(place: str | Path, *, cache_dir: Path | None = None) -> Manifest:
    """The manifest of a model of this machine."""
    return describe(place, cache_dir=cache_dir).manifest


def describe(place: str | Path, *, cache_dir: Path | None = None, piece_bytes: int = PIECE_BYTES) -> SharedModel:
    """Read all bytes of a model of this machine; or none of them, if `cache_dir` remembers the same files.

    Raises:
        ConfigurationError: there is no such model, or only parts of it are here.
        WeightsError: files are missing or damaged.
    """
    place = str(place)
    if existing_path(place) is None:
        raise ConfigurationError(f"{place} isn't on this machine: name a directory or a GGUF file")
    checkpoint = open_checkpoint(place)
    directory, gguf = _opened_at(checkpoint, place)
    if partial_files(directory) is not None:
        raise ConfigurationError(f"{place} holds only parts of a model: name the whole model")
    weights = checkpoint.weight_files()
    names = weights if gguf else _all_files(directory, weights)
    known = None if cache_dir is None else cache_dir / hashlib.sha256(str(directory / gguf).encode()).hexdigest()[:32]
    stamps = _stamps(directory / name for name in names)
    if known is not None and (found := _remembered(known, place, directory, stamps, piece_bytes)) is not None:
        return found
    always = {name: _always(checkpoint, name) for name in weights}
    samples: list[tuple[int, int, bytes]] = []
    if checkpoint.revision is None:
        for name, ranges in _sampled(checkpoint, always).items():
            samples += _read(directory / name, names.index(name), ranges)
    files = [_described(directory / name, always.get(name), piece_bytes) for name in names]
    packed = pack_samples(samples)
    if packed:
        digests = _in_base64(_sha256(packed[at : at + piece_bytes]) for at in range(0, len(packed), piece_bytes))
        files.append(ManifestFile(name=SAMPLES, size=len(packed), digests=digests, always=((0, len(packed)),)))
    manifest = Manifest(
        name=checkpoint.public_name, piece_bytes=piece_bytes, files=tuple(files), gguf=gguf, **_origin(checkpoint, gguf)
    )
    if _stamps(directory / name for name in names) != stamps:
        raise CorruptWeightsError(f"files of {place} changed while they were read: try again when they are complete")
    found = SharedModel(place, manifest, directory, packed, stamps)
    if known is not None:
        try:
            _remember(known, found)
        except OSError as error:
            logger.warning("%s will be read again at the next start: %s", place, error)
    return found


def _opened_at(checkpoint: Checkpoint, place: str) -> tuple[Path, str]:
    """The directory of the files, and the name of the GGUF file if the model is one."""
    path = Path(checkpoint.name)
    if path.suffix == SUFFIX and not path.is_dir():
        return path.parent.absolute(), path.name
    return path.absolute(), ""


def _origin(checkpoint: Checkpoint, gguf: str) -> dict[str, str]:
    if checkpoint.revision is None:
        return {}
    repository, folder = checkpoint.repository
    return {"commit": checkpoint.revision, "repository": repository, "folder": folder.rstrip("/")}


def _all_files(directory: Path, weights: Iterable[str]) -> list[str]:
    """Names of the files to share, in their order."""
    small = [
        path.name
        for path in directory.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(WEIGHTS)
        and path.stat().st_size <= SMALL_FILE_BYTES
    ]
    mtp = [MTP_FILE] if (directory / MTP_FILE).is_file() else []
    return sorted({*small, *mtp, *weights})


def _always(checkpoint: Checkpoint, filename: str) -> tuple[Range, ...]:
    """Ranges of a file of weights that every machine needs: the header; all of a pickle, and of a file without
    tensors."""
    places = checkpoint.places(filename)
    if filename.endswith(".bin") or not places:
        return ()
    ranges = [(0, min(place.start for place in places))]
    ranges += [(one.start, one.start + one.num_bytes) for one in places if one.name == ROPE_FACTORS and one.num_bytes]
    return tuple(ranges)


def _sampled(checkpoint: Checkpoint, always: dict[str, tuple[Range, ...]]) -> dict[str, list[Range]]:
    """Ranges of each file that `fingerprint` reads. Weights of the client that it reads whole are added to `always`."""
    places = {name: checkpoint.places(name) for name, ranges in always.items() if ranges}
    found = {
        name: [(start, start + size) for one in of_file for start, size in spots(one)]
        for name, of_file in places.items()
    }
    place_of = {(name, one.name): one for name, of_file in places.items() for one in of_file}
    names = client_tensor_names(checkpoint)
    for weight, lazy in checkpoint.tensors(names).items():
        stored = [
            (filename, place_of[filename, name])
            for filename, name in checkpoint.stored_as(weight)
            if filename in places
        ]
        shape = lazy.get_shape() if len(stored) == 1 else []
        for filename, one in stored:
            if shape and one.num_bytes:
                found[filename].append((one.start, one.start + one.num_bytes // shape[0] * min(shape[0], SAMPLED_ROWS)))
            elif one.num_bytes:
                always[filename] += ((one.start, one.start + one.num_bytes),)
    return found


def _read(path: Path, index: int, ranges: Iterable[Range]) -> Iterator[tuple[int, int, bytes]]:
    """These bytes of a file, ranges that overlap or touch as one."""
    joined: list[list[int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        elif start < end:
            joined.append([start, end])
    with path.open("rb", buffering=0) as file:
        for start, end in joined:
            file.seek(start)
            yield index, start, file.read(end - start)


def _described(path: Path, always: tuple[Range, ...] | None, piece_bytes: int) -> ManifestFile:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(HASHING_THREADS) as threads:
        read = partial(os.pread, file.fileno(), piece_bytes)
        digests = _in_base64(threads.map(lambda start: _sha256(read(start)), range(0, size, piece_bytes)))
    return ManifestFile(name=path.name, size=size, digests=digests, always=always or (((0, size),) if size else ()))


def _sha256(piece: bytes) -> bytes:
    return hashlib.sha256(piece).digest()


def _in_base64(digests: Iterable[bytes]) -> str:
    return base64.b64encode(b"".join(digests)).decode()


def _stamps(paths: Iterable[Path]) -> Stamps:
    found = {}
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            continue
        found[str(path)] = stat.st_size, stat.st_mtime_ns
    return found


def _remembered(known: Path, place: str, directory: Path, stamps: Stamps, piece_bytes: int) -> SharedModel | None:
    """The result of an earlier call, if the files haven't changed since."""
    try:
        about = json.loads((known / "about.json").read_text())
        data, samples = (known / MANIFEST).read_bytes(), (known / SAMPLES).read_bytes()
        manifest = Manifest.from_bytes(data, about["digest"])
        is_same = {path: tuple(stamp) for path, stamp in about["stamps"].items()} == stamps
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CorruptWeightsError):
        return None
    if not is_same or manifest.piece_bytes != piece_bytes:
        return None
    return SharedModel(place, manifest, directory, samples, stamps)


def remembered(cache_dir: Path) -> list[SharedModel]:
    """Models that `describe` has read in earlier times, and whose files haven't changed since; reads none of them."""
    found = []
    for known in sorted(cache_dir.glob("*/about.json"), key=lambda path: path.stat().st_mtime):
        try:
            about = json.loads(known.read_text())
            place, directory, piece_bytes = str(about["place"]), Path(about["directory"]), int(about["piece_bytes"])
            stamps = _stamps(map(Path, about["stamps"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if (model := _remembered(known.parent, place, directory, stamps, piece_bytes)) is not None:
            found.append(model)
    return found


def _remember(known: Path, model: SharedModel) -> None:
    known.mkdir(parents=True, exist_ok=True)
    about = {
        "place": model.place,
        "directory": str(model.directory),
        "digest": model.manifest.digest,
        "piece_bytes": model.manifest.piece_bytes,
        "stamps": model.stamps,
    }
    for name, data in (
        (MANIFEST, model.manifest.as_bytes()),
        (SAMPLES, model.samples),
        ("about.json", json.dumps(about).encode()),
    ):
        with replaced(known / name, durable=False) as beside:
            beside.write_bytes(data)


# --- the hub


class HubFile(NamedTuple):
    """The hub's word about one file."""

    size: int
    sha256: str = ""
    """Empty for files that git itself stores."""
    blob_id: str = ""
    """git's SHA-1 of all others; empty: not known."""

    def is_at(self, path: Path) -> bool:
        """True if this is the content of a file here, or the hub has told no digest.

        Raises:
            OSError: it can't be read.
        """
        expected = self.sha256 or self.blob_id
        if not expected:
            return True
        found = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                found.update(data)
        return found.hexdigest() == expected


def files_on_hub(repo_id: str, revision: str | None, token: str | None) -> tuple[str | None, dict[str, HubFile]]:
    """The commit, and the hub's word about each of its files.

    Raises:
        ConfigurationError: the hub has no such commit, or can't be reached.
    """
    try:
        about = HfApi(token=token).model_info(repo_id, revision=revision, files_metadata=True)
    except (HfHubHTTPError, ValueError) as error:
        raise ConfigurationError(f"{repo_id!r} can't be found on the hub: {first_line(error)}") from error
    except (HTTPError, OSError) as error:
        raise ConfigurationError(
            f"{repo_id!r} isn't on this machine, and the hub can't be reached to look there: {first_line(error)}"
        ) from error
    return about.sha, {
        one.rfilename: HubFile(one.size, one.lfs.sha256) if one.lfs else HubFile(one.size, blob_id=one.blob_id or "")
        for one in about.siblings or ()
        if one.size is not None
    }


def describe_on_hub(
    place: str, *, revision: str | None = None, token: str | None = None, piece_bytes: int = PIECE_BYTES
) -> Manifest:
    """The manifest of a model of the hub, of the present commit; reads its list of files, and headers of weights.

    Raises:
        ConfigurationError: there is no such model, or the hub can't be reached.
        WeightsError: files are missing or damaged.
    """
    repo_id, gguf, kind = split_place(place)
    require_directory_or_hub_id(repo_id)
    commit, about = files_on_hub(repo_id, revision, token)
    sizes = {path: file.size for path, file in about.items()}
    if gguf is None and (kind or CONFIG not in sizes or not any(name in sizes for name, _ in LAYOUTS)):
        gguf = only_gguf(repo_id, sizes, kind)
    if commit is None or (gguf is None and CONFIG not in sizes):
        raise ConfigurationError(f"{repo_id!r} on the hub is no model of transformers, and has no GGUF file")

    def read(path: str, start: int, num_bytes: int) -> bytes:
        return b"".join(hub_range(repo_id, commit, path, start, num_bytes, token=token))

    folder, _, gguf = (gguf or "").rpartition("/")
    weights = parts_of_gguf(gguf) if gguf else _weights_on_hub(repo_id, sizes, read)
    names = weights if gguf else sorted({*weights, *filter(partial(_is_small_on_hub, sizes), sizes)})
    files = []
    for name in names:
        path = f"{folder}/{name}" if folder else name
        if path not in sizes:
            raise CorruptWeightsError(f"{repo_id} on the hub lacks {path}")
        size = sizes[path]
        always = _head_on_hub(path, size, read) if name in weights else ((0, size),) if size else ()
        files.append(ManifestFile(name=name, size=size, sha256=about[path].sha256, always=always))
    return Manifest(
        name=f"{repo_id}/{gguf}" if gguf else repo_id,
        piece_bytes=piece_bytes,
        files=tuple(files),
        gguf=gguf,
        repository=repo_id,
        commit=commit,
        folder=folder,
    )


def cached_on_hub(manifest: Manifest, hub_cache: Path, cache_dir: Path) -> SharedModel | None:
    """The same model in the hub's cache, if all files that it runs with are there.

    The commit tells that they are the same. If the manifest has digests, they are compared: `cache_dir` as in
    `describe`.
    """
    directory = hub_cache / manifest.directory
    place = str(directory / manifest.gguf)
    stamps = _stamps(directory / file.name for file in manifest.files)
    for file in manifest.files:
        size, _ = stamps.get(str(directory / file.name), (None, 0))
        if size != file.size and not (size is None and _is_for_people(file.name)):
            return None
    if not manifest.commit:
        return None
    if any(file.digests for file in manifest.files):
        found = describe(place, cache_dir=cache_dir, piece_bytes=manifest.piece_bytes)
        if not {*found.manifest.files} <= {*manifest.files}:
            return None
    return SharedModel(place, manifest, directory, b"", stamps)


def _is_for_people(name: str) -> bool:
    """True of files that transformers doesn't download with a model."""
    return name.endswith((".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf")) or name.startswith(
        ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
    )


def _is_small_on_hub(sizes: dict[str, int], name: str) -> bool:
    is_hidden = name.startswith(".")
    return "/" not in name and not is_hidden and not name.endswith(WEIGHTS) and sizes[name] <= SMALL_FILE_BYTES


def _weights_on_hub(repo_id: str, sizes: dict[str, int], read: ReadRange) -> list[str]:
    """Names of the files that `ConfigAndWeights` would read."""
    config = json.loads(read(CONFIG, 0, sizes[CONFIG]))
    named = config.get("transformers_weights") if isinstance(config, dict) else None
    layouts = LAYOUTS if named is None else ((str(named), str(named).endswith(".index.json")),)
    filename, is_index = next(((name, is_index) for name, is_index in layouts if name in sizes), (None, False))
    if filename is None:
        raise BlockWeightsNotFoundError(f"{repo_id} on the hub has no weights in safetensors, pickles or GGUF")
    mtp = [MTP_FILE] if MTP_FILE in sizes else []
    if not is_index:
        return [filename, *mtp]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, filename)
        path.write_bytes(read(filename, 0, sizes[filename]))
        return [*sorted(set(read_index(path).values())), *mtp]


def _head_on_hub(path: str, size: int, read: ReadRange) -> tuple[Range, ...]:
    """As `_always`, of a file of the hub."""
    if path.endswith(".safetensors") and size > 8:
        return ((0, min(size, 8 + int.from_bytes(read(path, 0, 8), "little"))),)
    num_bytes = 1 << 20
    while path.endswith(SUFFIX) and num_bytes < 2 * size:
        if (found := head_ranges(read(path, 0, min(num_bytes, size)))) is not None:
            return tuple((start, end) for start, end in found if start < end <= size)
        num_bytes *= 4
    return ((0, size),) if size else ()


# --- choosing pieces


def needed_pieces(checkpoint: Checkpoint, manifest: Manifest, span: Span | None, *, client: bool) -> Pieces:
    """The pieces that blocks of a span, or a client, read of an open checkpoint, and pieces that every machine needs.

    A server may also read the rest of its stack, such as a norm after the last block (`load_block_span`). A client
    gets all that is in no block: embeddings, heads, towers for pictures and sound, heads that guess tokens.
    """
    weight_map = checkpoint.weight_map()
    names = (
        {name for part in parts_of(checkpoint.config, span) for name in tensors_of_span(checkpoint, part)}
        if span
        else set()
    )
    if client:
        model = on_meta(blocks_class(checkpoint.config), checkpoint.config)
        prefixes = tuple(f"{prefix}." for prefix, _ in named_blocks(model))
        parameters = parameters_of(model, weight_map)
        names |= {name for name in weight_map if not parameters.get(name, "").startswith(prefixes)}
    if checkpoint.comes_packed:  # `skeleton` looks at biases that the architecture lacks
        names |= {name.removesuffix("weight") + "bias" for name in names if name.endswith(".weight")} & {*weight_map}
    wanted: dict[str, set[str]] = {}
    for name in names:
        for filename, stored in checkpoint.stored_as(name):
            wanted.setdefault(filename, set()).add(stored)
    ranges = [
        (filename, place.start, place.start + place.num_bytes)
        for filename, stored in wanted.items()
        if not filename.endswith(".bin")  # every machine has all of it
        for place in checkpoint.places(filename)
        if place.name in stored
    ]
    if client and any(file.name == MTP_FILE for file in manifest.files):
        ranges.append((MTP_FILE, 0, manifest.file(MTP_FILE).size))
    return manifest.pieces_of(ranges) | manifest.always_pieces()
