"""Manifests that peers send, marks of pieces that outlive kills, and samples for places that don't exist."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmllm.errors import BlockWeightsNotFoundError, CorruptWeightsError
from swarmllm.models.checkpoint.manifest import (
    MARKS,
    SAMPLES,
    SYNCED,
    Manifest,
    ManifestFile,
    Marks,
    pack_samples,
    unpack_samples,
)

COMMIT = {"commit": "c" * 40, "repository": "owner/model"}


def manifest(*sizes: int, **about: Any) -> Manifest:
    """Files a, b, … of a commit, in pieces of 100 bytes."""
    files = tuple(ManifestFile(name=chr(ord("a") + number), size=size) for number, size in enumerate(sizes))
    return Manifest(**{"name": "model", "piece_bytes": 100, "files": files, **COMMIT, **about})


def fields(**changes: Any) -> dict[str, Any]:
    file = {"name": "a", "size": 150, "digests": "A" * 86 + "==", "always": [[0, 10]]}
    return {"name": "model", "piece_bytes": 100, "files": [file], **changes}


def read(found: dict[str, Any]) -> Manifest:
    data = json.dumps(found, sort_keys=True, separators=(",", ":")).encode()
    return Manifest.from_bytes(data, hashlib.sha256(data).hexdigest())


def with_file(**changes: Any) -> dict[str, Any]:
    return fields(files=[fields()["files"][0] | changes])


def test_comes_back_with_the_same_digest() -> None:
    found = read(fields())
    assert found.as_bytes() == json.dumps(fields(), sort_keys=True, separators=(",", ":")).encode()
    assert Manifest.from_bytes(found.as_bytes(), found.digest) == found
    with pytest.raises(CorruptWeightsError, match="another manifest"):
        Manifest.from_bytes(found.as_bytes() + b" ", found.digest)


@pytest.mark.parametrize(
    "hostile",
    [
        *(
            with_file(name=name)
            for name in ("../a", "/etc/passwd", "a/b", "..", ".", "", ".bashrc", "a\0b", "a\nb", "x" * 201)
        ),
        *(with_file(name=name) for name in (".swarmllm-manifest", "a\u202eb", "a\\b")),
        *(with_file(size=size) for size in (-1, 1 << 60, 1 << 44, 99, 1.5, "150")),
        *(with_file(always=[[start, end]]) for start, end in ((0, 151), (10, 10), (-1, 5), (20, 10))),
        *(with_file(digests=digests) for digests in ("", "A" * 43 + "=", "not base64!", "A" * 172 + "==")),
        with_file(sha256="x" * 64),
        *(fields(piece_bytes=size) for size in (0, -1, 1, 1 << 30)),
        *(fields(name=name) for name in ("..", "../../x", "a/b", ".ssh", "x" * 201)),
        fields(files=[]),
        fields(files=fields()["files"] * 2),
        fields(files=[fields()["files"][0] | {"name": str(number)} for number in range(4097)]),
        fields(gguf="../b.gguf"),
        fields(commit="c" * 40),
        fields(repository="owner/model"),
        *(
            fields(**COMMIT | {"repository": name})
            for name in ("owner/..", "../model", "owner", "o/m/x", "https://x/y", "o/m\n")
        ),
        *(fields(**COMMIT, folder=folder) for folder in ("..", "a/../b", "/a", "a//b", "a/")),
        fields(folder="a"),
        fields(commit="x" * 40, repository="owner/model"),
    ],
)
def test_hostile_claims_are_refused(hostile: dict[str, Any]) -> None:
    with pytest.raises(CorruptWeightsError, match="a manifest is not"):
        read(hostile)


def test_other_spellings_are_refused() -> None:
    for data in (
        json.dumps(fields()),
        "[" * 100_000,
        "{}",
        "null",
        json.dumps(fields(unknown=1), sort_keys=True, separators=(",", ":")),
    ):
        with pytest.raises(CorruptWeightsError, match="a manifest is not"):
            Manifest.from_bytes(data.encode(), hashlib.sha256(data.encode()).hexdigest())


def test_the_directory_is_one_below_the_store() -> None:
    assert manifest(1).directory == Path("models--owner--model", "snapshots", "c" * 40)
    assert manifest(1, folder="Q4/x").directory == Path("models--owner--model", "snapshots", "c" * 40, "Q4", "x")
    assert read(fields()).directory == Path("model")
    assert read(fields(gguf="a")).directory == Path("model")


def test_pieces_and_their_places() -> None:
    found = manifest(250, 0, 100, 30)
    assert found.num_pieces == 5
    places = [(place.file.name, place.start, place.num_bytes) for place in map(found.place, range(5))]
    assert places == [("a", 0, 100), ("a", 100, 100), ("a", 200, 50), ("c", 0, 100), ("d", 0, 30)]
    wanted = found.pieces_of([("a", 199, 201), ("d", 0, 1), ("c", 50, 50)])
    assert np.flatnonzero(wanted).tolist() == [1, 2, 4]
    assert found.num_bytes(wanted) == 180
    assert found.num_bytes(~found.none()) == 380
    for name, end in (("a", 251), ("e", 1)):
        with pytest.raises(BlockWeightsNotFoundError):
            found.pieces_of([(name, 0, end)])


def test_marks_of_a_process_that_was_killed(tmp_path: Path) -> None:
    found = manifest(1000)
    marks = Marks(tmp_path, found)
    marks.add(3, b"3" * 32)
    marks.synced(marks.state)
    marks.add(5, b"5" * 32)
    with (tmp_path / MARKS).open("ab") as file:
        file.write(b"half a mark")
    again = Marks(tmp_path, found)
    assert np.flatnonzero(again.held).tolist() == [3, 5]
    assert again.unsure == [5]
    again.add(7, b"7" * 32)
    assert Marks(tmp_path, found).unsure == [5, 7]
    assert Marks(tmp_path, found).digests == {3: b"3" * 32, 5: b"5" * 32, 7: b"7" * 32}
    again.remove([3, 7])
    assert np.flatnonzero(Marks(tmp_path, found).held).tolist() == [5]
    assert Marks(tmp_path, found).unsure == [5]
    (tmp_path / SYNCED).write_text("nonsense")
    assert Marks(tmp_path, found).unsure == [5]


def test_marks_of_pieces_that_no_manifest_has_count_for_nothing(tmp_path: Path) -> None:
    Marks(tmp_path, manifest(10_000)).add(99, b"9" * 32)
    assert not Marks(tmp_path, manifest(1000)).held.any()


def test_samples() -> None:
    file = ManifestFile(name=SAMPLES, size=1)
    found = Manifest(name="model", files=(*manifest(250, 100).files, file), **COMMIT)
    ranges = [(0, 10, b"abc"), (1, 99, b"x"), (0, 250, b"")]
    packed = pack_samples(ranges)
    assert list(unpack_samples(found, packed)) == ranges
    for hostile in (
        packed[:-1],
        pack_samples([(2, 0, b"x")]),
        pack_samples([(0, 249, b"xy")]),
        pack_samples([(1, 1 << 63, b"x")]),
        packed[:20],
    ):
        with pytest.raises(CorruptWeightsError, match="the samples of model"):
            list(unpack_samples(found, hostile))
