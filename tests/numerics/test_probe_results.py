"""Results of probes are read from disk only where the same would be found again."""

import json
from pathlib import Path

import pytest
import torch
from tests.numerics.tiny_models import save_tiny
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from swarmllm.data_structures import Span
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import FULL_PRECISION, Quantization
from swarmllm.models.span import loading, probe_results
from swarmllm.models.span.block_span import BlockSpan

FIRST_TWO = Span(0, 2)
FOUND = ("traits", "cache_sizes")


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[BlockSpan]:
    """The spans that were looked at."""
    seen: list[BlockSpan] = []
    probe = loading.probe
    monkeypatch.setattr(loading, "probe", lambda span: (seen.append(span), probe(span)))
    return seen


def saved(model_type: str, directory: Path) -> tuple[Path, Path]:
    """A checkpoint, and where results are going to be."""
    save_tiny(model_type, directory / "model")
    return directory / "model", directory / "kept"


def load(
    model: Path,
    kept: Path | None,
    span: Span = FIRST_TWO,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = FULL_PRECISION,
) -> BlockSpan:
    checkpoint = open_checkpoint(str(model))
    return loading.load_block_span(
        checkpoint, span, dtype=dtype, quantization=quantization, progress=False, probes_dir=kept
    )


@pytest.mark.parametrize("model_type", ["llama", "mamba", "gemma3_text", "bloom"])
def test_the_second_time(model_type: str, tmp_path: Path, probed: list[BlockSpan]) -> None:
    model, kept = saved(model_type, tmp_path)
    first, again, alone = load(model, kept), load(model, kept), load(model, None)
    assert probed == [first, alone]
    for found in FOUND:
        assert getattr(again, found) == getattr(alone, found), found
    assert again.slots.block_output == alone.slots.block_output


def test_anything_else_is_looked_at_anew(
    tmp_path: Path, probed: list[BlockSpan], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kept = saved("llama", tmp_path)
    load(model, kept)
    load(model, kept, Span(1, 3))
    load(model, kept, dtype=torch.bfloat16)
    load(model, kept, quantization=Quantization("int8", smallest=1))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    load(model, kept)
    monkeypatch.setattr(probe_results, "_device", lambda _: ["another processor"])
    load(model, kept)
    monkeypatch.setattr(probe_results, "_code", lambda: ["another version"])
    load(model, kept)
    assert len(probed) == len(list(kept.iterdir())) == 7
    load(model, kept)
    assert len(probed) == 7


def test_what_can_not_be_read_or_written_is_no_failure(tmp_path: Path, probed: list[BlockSpan]) -> None:
    model, kept = saved("llama", tmp_path)
    load(model, kept)
    (file,) = kept.iterdir()
    for damage in (b"", b"{}", file.read_bytes()[:-9], file.read_bytes().replace(b"batch_axis", b"batch_axes")):
        file.write_bytes(damage)
        load(model, kept)
        load(model, kept)  # written anew
    assert len(probed) == 5
    load(model, file)  # which is no directory
    assert len(probed) == 6


def test_a_part_that_probes_have_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missed each time, whatever is known of the blocks with it."""
    probe, tries = loading.probe, []

    def needs_the_norm(span: BlockSpan) -> None:
        tries.append(span)
        if not isinstance(span.stack.norm, LlamaRMSNorm):
            raise UnsupportedModelError("called a part that had been left out")
        probe(span)

    monkeypatch.setattr(loading, "probe", needs_the_norm)
    model, kept = saved("llama", tmp_path)
    for count in (2, 3):  # the second time only the norm is missed
        assert isinstance(load(model, kept).stack.norm, LlamaRMSNorm)
        assert len(tries) == count


def test_a_refusal_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: BlockSpan) -> None:
        raise UnsupportedModelError("no")

    monkeypatch.setattr(loading, "probe", refuse)
    model, kept = saved("llama", tmp_path)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError):
            load(model, kept)
    assert not kept.exists()
