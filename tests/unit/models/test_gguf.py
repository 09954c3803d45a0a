"""GGUF files: how they are named, and what is refused, each in one sentence."""

import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_writer import F32, Q8_0, write_gguf

from swarmllm.data_structures import Span
from swarmllm.errors import (
    BlockWeightsNotFoundError,
    ConfigurationError,
    CorruptWeightsError,
    SwarmError,
    UnsupportedModelError,
    WeightsMismatchError,
)
from swarmllm.models.checkpoint.checkpoint import load_tokenizer, open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.stored_files import only_gguf, split_place
from swarmllm.models.published_formats.gguf import read_header
from swarmllm.models.span.loading import load_block_span

HIDDEN, VOCABULARY = 32, 16
SETTINGS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": 2,
    "llama.feed_forward_length": HIDDEN,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a", "b"],
}


def tensors() -> dict[str, tuple[int, np.ndarray]]:
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    for block in range(2):
        for part in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{block}.{part}"] = (HIDDEN,)
        for part in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            shapes[f"blk.{block}.{part}"] = (HIDDEN, HIDDEN)
        for part in ("attn_k", "attn_v"):
            shapes[f"blk.{block}.{part}"] = (HIDDEN // 2, HIDDEN)
    randoms = np.random.default_rng(0)
    return {f"{name}.weight": (F32, randoms.standard_normal(shape, np.float32)) for name, shape in shapes.items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", SETTINGS, tensors())


def load(path: Path) -> None:
    load_block_span(open_checkpoint(str(path)), Span(0, 2), progress=False)


def test_a_file_a_directory_with_one_and_what_it_is_called(file: Path) -> None:
    by_file, by_directory = open_checkpoint(str(file)), open_checkpoint(str(file.parent))
    assert by_file.name == by_directory.name == str(file)
    assert by_file.public_name == "model.gguf"
    assert fingerprint(by_file) == fingerprint(by_directory)
    assert by_file.stored_dtype() == torch.float32
    assert not by_file.comes_packed
    load(file)


def test_another_name_is_the_same_model_and_other_weights_are_not(file: Path) -> None:
    before = fingerprint(open_checkpoint(str(file)))
    renamed = file.rename(file.with_name("renamed.gguf"))
    assert fingerprint(open_checkpoint(str(renamed))) == before
    changed = tensors()
    changed["token_embd.weight"][1][0] += 1
    assert fingerprint(open_checkpoint(str(write_gguf(file, SETTINGS, changed)))) != before
    changed = tensors()
    changed["blk.1.ffn_down.weight"][1][0] += 1
    assert fingerprint(open_checkpoint(str(write_gguf(file, SETTINGS, changed)))) != before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/model", ("owner/model", None, None)),
        ("owner/model:Q4_K_M", ("owner/model", None, "Q4_K_M")),
        ("./directory:Q4_K_M", ("./directory", None, "Q4_K_M")),
        ("owner/model/file.gguf", ("owner/model", "file.gguf", None)),
        ("owner/model/Q4/file-00001-of-00002.gguf", ("owner/model", "Q4/file-00001-of-00002.gguf", None)),
        ("/no/such/file.gguf", ("/no/such", "file.gguf", None)),
        ("./file.gguf", (".", "file.gguf", None)),
    ],
)
def test_names(name: str, expected: tuple[str, str | None, str | None]) -> None:
    assert split_place(name) == expected


def test_a_directory_whose_name_has_a_colon(file: Path) -> None:
    directory = file.parent.rename(file.parent.with_name("a:Q8_0"))
    assert open_checkpoint(str(directory)).name == f"{directory}/model.gguf"


def _only_one(names: Sequence[str], kind: str | None) -> str | None:
    return only_gguf("owner/model", names, kind)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Q4_K_M", "M-Q4_K_M.gguf"),
        ("q4_k_m", "M-Q4_K_M.gguf"),
        ("Q8_0", "Q8_0/M-Q8_0-00001-of-00002.gguf"),
        ("Q4_K_XL", "M-UD-Q4_K_XL.gguf"),
        ("UD-Q4_K_XL", "M-UD-Q4_K_XL.gguf"),
        ("f16", None),
        ("Q4_K", None),
        ("Q", None),
    ],
)
def test_one_of_several_files_by_its_kind(kind: str, expected: str | None) -> None:
    parts = [f"Q8_0/M-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]
    names = ["M-Q4_K_M.gguf", "M-Q4_K_S.gguf", "M-UD-Q4_K_XL.gguf", *parts, "mmproj-f16.gguf", "README.md"]
    if expected is not None:
        assert _only_one(names, kind) == expected
        return
    with pytest.raises(
        ConfigurationError, match=rf"owner/model holds no GGUF files of {kind}: name one of them"
    ) as caught:
        _only_one(names, kind)
    assert "(M-Q4_K_M.gguf, M-Q4_K_S.gguf, M-UD-Q4_K_XL.gguf, Q8_0/M-Q8_0-00001-of-00002.gguf)" in str(caught.value)


def test_the_one_file_of_a_place() -> None:
    assert _only_one(["M-Q4_0.gguf", "mmproj-M.gguf", "imatrix.gguf"], None) == "M-Q4_0.gguf"
    assert _only_one(["README.md", "mmproj-M.gguf"], None) is None
    many = [f"M-{number:02}.gguf" for number in range(20)]
    with pytest.raises(ConfigurationError, match=r"holds 20 GGUF files: .*M-11\.gguf and 8 more\)$"):
        _only_one(many, None)
    with pytest.raises(ConfigurationError, match="holds no GGUF files, so none of Q4_0"):
        _only_one(["README.md"], "Q4_0")


def test_several_files(file: Path) -> None:
    file.with_name("other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ConfigurationError, match=r"holds 2 GGUF files: name one of them, such as .*/model\.gguf"):
        open_checkpoint(str(file.parent))
    assert open_checkpoint(f"{file.parent}:other").name == str(file.with_name("other.gguf"))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BlockWeightsNotFoundError, match=r"lacks no\.gguf"):
        open_checkpoint(str(tmp_path / "no.gguf"))


def test_a_file_in_parts(tmp_path: Path) -> None:
    every = tensors()
    first, second = (dict(list(every.items())[part]) for part in (slice(0, 5), slice(5, None)))
    settings = {**SETTINGS, "split.count": 2}
    name = write_gguf(tmp_path / "m-00001-of-00002.gguf", settings, first)
    rest = write_gguf(tmp_path / "m-00002-of-00002.gguf", {"general.architecture": "llama"}, second)
    load(name)
    load(tmp_path)
    with pytest.raises(ConfigurationError, match=r"name the first one, …-00001-of-00002\.gguf"):
        open_checkpoint(str(rest))
    renamed = name.rename(tmp_path / "m.gguf")
    with pytest.raises(CorruptWeightsError, match="name the first of them"):
        open_checkpoint(str(renamed))
    rest.unlink()
    renamed.rename(name)
    with pytest.raises(BlockWeightsNotFoundError, match="m-00002-of-00002"):
        open_checkpoint(str(name))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"general.architecture": "mamba"}, UnsupportedModelError, "doesn't read the architecture 'mamba'"),
        ({"llama.attention.sliding_window": 8}, UnsupportedModelError, "setting llama.attention.sliding_window"),
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedModelError, "the scaling 'longrope'"),
        ({"llama.rope.dimension_count": 8}, UnsupportedModelError, "rope.dimension_count than 16"),
        ({"llama.attention.head_count_kv": [1, 2]}, UnsupportedModelError, "several values of attention.head_count_kv"),
        ({"llama.block_count": 3}, CorruptWeightsError, "3 blocks, but has tensors of 2"),
        ({"llama.block_count": 1 << 30}, CorruptWeightsError, "blocks, but has tensors of 2"),
        ({"llama.block_count": 0}, CorruptWeightsError, "says that block_count is 0"),
        ({"llama.embedding_length": "many"}, CorruptWeightsError, "says that embedding_length is many"),
        ({"llama.context_length": None}, CorruptWeightsError, "lacks the setting llama.context_length"),
        ({"general.alignment": 3}, CorruptWeightsError, "an alignment of 3"),
        ({"general.architecture": None}, CorruptWeightsError, "general.architecture"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, changes: dict[str, Any], error: type[SwarmError], says: str) -> None:
    settings = {key: value for key, value in (SETTINGS | changes).items() if value is not None}
    with pytest.raises(error, match=says) as found:
        open_checkpoint(str(write_gguf(tmp_path / "model.gguf", settings, tensors())))
    assert "\n" not in str(found.value)


def test_tensors_that_are_refused(tmp_path: Path) -> None:
    def opened(changed: dict[str, tuple[int, np.ndarray]]) -> None:
        open_checkpoint(str(write_gguf(tmp_path / "model.gguf", SETTINGS, tensors() | changed)))

    numbers = np.zeros((HIDDEN, HIDDEN), np.float32)
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.attn_sinks\.weight', which swarmllm doesn't know"):
        opened({"blk.0.attn_sinks.weight": (F32, numbers)})
    with pytest.raises(UnsupportedModelError, match=r"GGUF's type 39, which swarmllm can't read: use a file .* Q4_0"):
        opened({"blk.0.attn_q.weight": (39, numbers)})
    with pytest.raises(UnsupportedModelError, match="factors of frequencies that aren't those of Llama"):
        opened({"rope_freqs.weight": (F32, np.linspace(1, 2, 8, dtype=np.float32))})
    with pytest.raises(CorruptWeightsError, match="2 blocks, but has tensors of 3"):
        opened({"blk.7.attn_q.weight": (F32, numbers)})
    path = write_gguf(tmp_path / "model.gguf", SETTINGS, tensors())
    path.write_bytes(_with_kind(path.read_bytes(), b"blk.0.attn_norm.weight", 12))
    with pytest.raises(CorruptWeightsError, match="no whole blocks"):
        read_header(path)
    path = write_gguf(tmp_path / "model.gguf", SETTINGS, tensors())
    path.write_bytes(_with_kind(path.read_bytes(), b"output_norm.weight", Q8_0))
    with pytest.raises(CorruptWeightsError, match="no whole blocks"):
        open_checkpoint(str(path))


def _with_kind(data: bytes, name: bytes, kind: int) -> bytes:
    """The file with another kind of a vector."""
    at = data.index(name) + len(name) + 4 + 8
    return data[:at] + struct.pack("<I", kind) + data[at + 4 :]


def test_counts_and_offsets_beyond_the_file(file: Path) -> None:
    data = file.read_bytes()
    for at, number in ((8, 1 << 40), (16, 1 << 60)):  # of tensors, of settings
        file.write_bytes(data[:at] + struct.pack("<Q", number) + data[at + 8 :])
        with pytest.raises(CorruptWeightsError, match="more than 1048576 tensors or settings"):
            read_header(file)
    name = b"output_norm.weight"
    after = data.index(name) + len(name)
    for at, number, says in (
        (after + 4, 1 << 50, "outside the file"),
        (after + 4, 0, "has the shape"),
        (after + 16, 1 << 62, "outside the file"),
        (after + 16, 7, "between its places"),
    ):
        file.write_bytes(data[:at] + struct.pack("<Q", number) + data[at + 8 :])
        with pytest.raises(CorruptWeightsError, match=says):
            read_header(file)


@pytest.mark.parametrize(("name", "shape"), [("attn_k", (16, 64)), ("attn_v", (32, 32)), ("ffn_down", (32, 64))])
def test_packed_tensors_of_another_shape_than_the_config_says(
    name: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    """A kernel would read inputs beyond their end."""
    rows, columns = shape
    blocks = np.zeros((rows, columns // 32 * 34), np.uint8)
    path = write_gguf(tmp_path / "model.gguf", SETTINGS, {**tensors(), f"blk.1.{name}.weight": (Q8_0, blocks)})
    with pytest.raises(WeightsMismatchError, match="don't fit its config"):
        load(path)


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGML" + bytes(40), b"GGUF" + bytes(40), b"PK\3\4" + bytes(100)])
def test_what_is_no_gguf(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CorruptWeightsError, match=r"is no GGUF file, or damaged or incomplete .*download it again$"):
        open_checkpoint(str(path))


def test_every_truncated_file_is_refused(file: Path) -> None:
    data = file.read_bytes()
    for length in (*range(24, 1200, 37), len(data) // 2, len(data) - 4 * HIDDEN * HIDDEN):
        file.write_bytes(data[:length])
        with pytest.raises(CorruptWeightsError):
            open_checkpoint(str(file))


def test_damaged_headers_open_or_are_refused_in_one_sentence(file: Path) -> None:
    data, choose = file.read_bytes(), random.Random(0)
    end = data.index(b"blk.1.attn_v.weight")
    sentences = []
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(choose.randint(1, 3)):
            damaged[choose.randrange(4, end)] = choose.choice((0, 1, 7, 127, 255, choose.randrange(256)))
        file.write_bytes(damaged)
        try:
            open_checkpoint(str(file))
        except SwarmError as error:
            sentences.append(str(error))
    assert len(sentences) > 50
    assert not any("\n" in sentence for sentence in sentences)


def test_a_file_without_a_tokenizer(file: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no tokenizer that transformers can load"):
        load_tokenizer(str(file))
