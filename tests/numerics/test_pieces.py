"""Blocks and clients from directories with only the pieces that they need. Reading a missing piece is an error.

Over all architectures: the fingerprint of such a directory is that of the whole one, and all that is read from it is
the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published_checkpoints import ALL_KINDS, save_published
from safetensors.torch import load_file
from tests.numerics import tiny_encoder_decoders, tiny_models, tiny_speech_models, tiny_vision_models
from tests.numerics.architectures import ALL
from tests.numerics.test_gguf_files import DIRECTORY as GGUF_FILES
from tests.numerics.test_gguf_files import EXPECTED
from tests.selection import sampled
from torch import nn

from swarmllm.client.local_fallback import open_local_model
from swarmllm.data_structures import Span
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError
from swarmllm.machines.holdings import PartialModel, WholeModel
from swarmllm.models.architecture import blocks_class, parts_of
from swarmllm.models.checkpoint import pieces
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.manifest import SAMPLES
from swarmllm.models.checkpoint.pieces import describe
from swarmllm.models.checkpoint.skeleton import drop_blocks, load_pruned, prune_to_span, pruned
from swarmllm.models.span.loading import load_block_span

PIECE_BYTES = 512
NAMES = [f"{kind}:{name}" for kind, names in ALL.items() for name in names]
SAVE: dict[str, Callable[[str, Path], object]] = {
    "text": tiny_models.save_tiny,
    "vision": tiny_vision_models.save_tiny_model,
    "speech": tiny_speech_models.save_tiny_model,
    "encoder-decoder": tiny_encoder_decoders.save_tiny_model,
}


def taken(place: Path, store: Path, span: Span | None, *, client: bool = False) -> PartialModel:
    """A partial directory of the model, as a machine fills it."""
    whole = WholeModel(describe(place, piece_bytes=PIECE_BYTES))
    found = PartialModel(whole.manifest, store)

    def take(pieces: Any) -> None:
        for piece in np.flatnonzero(pieces & ~found.held).tolist():
            data = whole.read(piece)
            assert data is not None
            assert found.put(piece, data)

    take(whole.manifest.always_pieces())
    take(found.needed(span, client=client))
    return found


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(found: nn.Module, wanted: nn.Module) -> None:
    tensors = everything(wanted)
    assert everything(found).keys() == tensors.keys()
    for name, tensor in everything(found).items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=0, equal_nan=True)


def load(checkpoint: Checkpoint, span: Span | None) -> nn.Module:
    """Blocks with the rest of their stack, or all that is in no block."""
    prune = drop_blocks if span is None else prune_to_span(span)
    cls = pruned(blocks_class(checkpoint.config), prune)
    return load_pruned(cls, checkpoint, dtype=torch.float32, progress=False)


@pytest.mark.parametrize("name", sampled(NAMES, 48))
def test_blocks_and_clients_of_every_architecture(name: str, tmp_path: Path) -> None:
    kind, _, model = name.partition(":")
    directory = tmp_path / "model"
    SAVE[kind](model, directory)
    whole = open_checkpoint(str(directory))
    end = whole.num_blocks
    for span in (Span(0, 1), Span(end // 2, end), None):
        found = taken(directory, tmp_path / f"store {span}", span, client=span is None)
        partial = open_checkpoint(str(found.place))
        assert fingerprint(partial) == fingerprint(whole)
        assert partial.public_name == whole.public_name
        assert not found.held.all()
        for part in parts_of(whole.config, span) if span else [None]:
            assert_same(load(partial, part), load(whole, part))


def test_a_missing_piece_is_an_error_and_never_zeros(tmp_path: Path) -> None:
    tiny_models.save_tiny("llama", tmp_path / "model")
    found = taken(tmp_path / "model", tmp_path / "store", Span(1, 2))
    checkpoint = open_checkpoint(str(found.place))
    load(checkpoint, Span(1, 2))
    for span in (Span(0, 1), Span(1, 3), None):
        with pytest.raises(BlockWeightsNotFoundError, match="is not on this machine, which has only parts of model"):
            load(checkpoint, span)
    with pytest.raises(ConfigurationError, match="holds only parts of a model"):
        describe(found.place)
    with pytest.raises(ConfigurationError, match="holds only parts of one"):
        open_local_model(str(found.place), "a draft must be a model", torch.device("cpu"))


def test_more_pieces_may_come_while_a_checkpoint_is_open(tmp_path: Path) -> None:
    tiny_models.save_tiny("llama", tmp_path / "model")
    first = open_checkpoint(str(taken(tmp_path / "model", tmp_path / "store", Span(1, 2)).place))
    load(first, Span(1, 2))
    taken(tmp_path / "model", tmp_path / "store", Span(0, 1))
    assert_same(load(first, Span(0, 1)), load(open_checkpoint(str(tmp_path / "model")), Span(0, 1)))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_one_file_with_or_without_tied_embeddings(name: str, tmp_path: Path) -> None:
    local = tiny_models.save_tiny(name, tmp_path / "model", shard_size="1GB")
    assert local.config.tie_word_embeddings is (name == "gemma2")
    whole = open_checkpoint(str(tmp_path / "model"))
    for span in (Span(0, 2), None):
        found = taken(tmp_path / "model", tmp_path / f"store {span}", span, client=span is None)
        partial = open_checkpoint(str(found.place))
        assert fingerprint(partial) == fingerprint(whole)
        assert_same(load(partial, span), load(whole, span))


@pytest.mark.parametrize("kind", sampled([*ALL_KINDS, *EXPECTED], 8))
def test_published_formats(kind: str, tmp_path: Path) -> None:
    """Weights of several tensors each, and GGUF. Digests are of all bytes that were read."""
    place = GGUF_FILES / f"{kind}.gguf" if kind in EXPECTED else save_published(kind, tmp_path / "model")[0]
    whole = open_checkpoint(str(place))
    span = Span(whole.num_blocks - 1, whole.num_blocks)
    found = taken(place, tmp_path / "store", span)
    partial = open_checkpoint(str(found.place))
    assert fingerprint(partial) == fingerprint(whole)
    assert partial.public_name == whole.public_name
    assert not found.held.all()
    read = [load_block_span(one, span, dtype=torch.float32, progress=False).digests for one in (partial, whole)]
    assert read[0] == read[1]
    client = taken(place, tmp_path / "another store", None, client=True)
    assert fingerprint(open_checkpoint(str(client.place))) == fingerprint(whole)
    assert_same(load(open_checkpoint(str(client.place)), None), load(whole, None))


def test_pickles_are_shared_as_whole_files(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    tiny_models.save_tiny("llama", directory, shard_size="1GB")
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    whole = open_checkpoint(str(directory))
    found = taken(directory, tmp_path / "store", Span(1, 2))
    assert found.held.all()
    partial = open_checkpoint(str(found.place))
    assert fingerprint(partial) == fingerprint(whole)
    assert_same(load(partial, Span(1, 2)), load(whole, Span(1, 2)))


def test_files_that_are_shared(tmp_path: Path) -> None:
    """All small ones; weights of other formats, hidden files and directories stay."""
    directory = tmp_path / "model"
    tiny_models.save_tiny("llama", directory, shard_size="1GB")
    small = ("tokenizer.json", "chat_template.jinja", "README.md", "empty")
    for name in (*small[:-1], ".env", "pytorch_model.bin", "model.gguf", "model.onnx", "original/x"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(name)
    (directory / "empty").touch()
    shared = {file.name for file in describe(directory).manifest.files}
    assert shared == {*small, "config.json", "generation_config.json", "model.safetensors", SAMPLES}


def test_a_model_is_used_where_nothing_can_be_remembered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_models.save_tiny("llama", tmp_path / "model")
    (tmp_path / "known").touch()  # no directory can be made there
    first = describe(tmp_path / "model", cache_dir=tmp_path / "known")
    assert first == describe(tmp_path / "model")
    assert "will be read again at the next start" in caplog.text


def test_a_model_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.save_tiny("llama", tmp_path / "model")
    first = describe(tmp_path / "model", cache_dir=tmp_path / "known")
    monkeypatch.setattr(pieces, "_described", None)  # reads the files
    assert describe(tmp_path / "model", cache_dir=tmp_path / "known") == first
    assert pieces.remembered(tmp_path / "known") == [first]
    monkeypatch.undo()
    config = tmp_path / "model" / "generation_config.json"
    config.write_text(config.read_text() + "\n")
    assert pieces.remembered(tmp_path / "known") == []
    assert describe(tmp_path / "model", cache_dir=tmp_path / "known").manifest.digest != first.manifest.digest
