"""Calibration: the inputs that are noted are those of the local model, and weights are rounded better with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.numerics.tiny_models import save_tiny
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from swarmllm.client.view.servers import BY_QUANT_TYPE
from swarmllm.commands.calibrate import MOST_BYTES, Calibrate, _shell, calibrate, read_text, text_rows
from swarmllm.data_structures import Span
from swarmllm.demo.local_swarm import embedded_heldout_texts, embedded_model_path
from swarmllm.errors import ConfigurationError
from swarmllm.models.block_slots import ForwardStopped
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.calibration import read_calibration, write_calibration
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import FULL_PRECISION, Quantization, loading
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span

IDS = torch.arange(3, 63).view(3, 20)


def noted_by_hooks(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Mean squares of the inputs of each linear module of the blocks, from the local model."""
    squares: dict[str, Tensor] = {}

    def note(name: str, inputs: Tensor) -> None:
        squares[name] = inputs.flatten(0, -2).square().mean(0)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and ".lm_head" not in f".{name}":
            module.register_forward_pre_hook(lambda _, args, name=f"{name}.weight": note(name, args[0]))
    with torch.no_grad():
        model(ids, use_cache=False)
    return squares


@torch.no_grad()
def calibrated(path: Path | str, ids: Tensor) -> dict[str, Tensor]:
    runner, shell = _shell(open_checkpoint(str(path)))
    with pytest.raises(ForwardStopped):
        shell(input_ids=ids, use_cache=False)
    return runner.squares


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_noted_inputs_are_those_of_the_local_model(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of GPT-2 are stored transposed."""
    monkeypatch.setattr(loading, "SMALLEST", 0)
    local = save_tiny(model_type, tmp_path)
    found, expected = calibrated(tmp_path, IDS), noted_by_hooks(local.float(), IDS)
    assert found.keys() == expected.keys()
    for name, squares in expected.items():
        torch.testing.assert_close(found[name], squares, rtol=1e-4, atol=1e-7)


def test_each_expert_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SMALLEST", 0)
    save_tiny("mixtral", tmp_path)
    found = calibrated(tmp_path, IDS)
    experts = found["model.layers.2.mlp.experts.gate_up_proj"]
    assert experts.shape == (4, 64)
    assert all(not torch.equal(one, experts[0]) for one in experts[1:])
    quantization = Quantization("q8_0", smallest=0, calibration=found)
    load_block_span(open_checkpoint(str(tmp_path)), Span(2, 3), quantization=quantization, progress=False)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    for calibration in ({}, {"model.layers.0.self_attn.q_proj.weight": torch.ones(63)}):
        quantization = Quantization("q8_0", smallest=0, calibration=calibration)
        with pytest.raises(ConfigurationError, match=r"of another model: it has no inputs of model\.layers\.0"):
            load_block_span(open_checkpoint(str(tmp_path)), Span(0, 1), quantization=quantization, progress=False)


def test_rows_begin_as_texts_do() -> None:
    class Words:
        bos_token_id = 1

        def __init__(self, *, begins: bool) -> None:
            self._begin = [1] if begins else []

        def __call__(self, text: str) -> Any:
            ids = [*self._begin, *map(int, text.split())]
            return type("Encoding", (), {"input_ids": ids})

    text = " ".join(map(str, range(2, 1200)))
    for begin in ([1], []):
        rows = text_rows(Words(begins=bool(begin)), text)
        assert rows == [[*begin, *range(2, 514)], [*begin, *range(514, 1026)]]
    assert text_rows(Words(begins=True), "5 6 7") == [[1, 5, 6, 7]]
    with pytest.raises(ConfigurationError, match="the text is empty"):
        text_rows(Words(begins=True), "")


def test_the_command_writes_what_servers_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And it is better to have it: the embedded model's outputs are closer, within the limit of spot checks."""
    text, output, texts = tmp_path / "text.txt", tmp_path / "c.safetensors", embedded_heldout_texts()
    text.write_text("\n\n".join(texts[:8]))
    calibrate(Calibrate(model=embedded_model_path(), text=str(text), output=str(output)))
    assert "is a calibration of" in capsys.readouterr().out
    with safe_open(output, "pt") as file:
        assert int(file.metadata()["num_tokens"]) > 300
    checkpoint = open_checkpoint(embedded_model_path())
    calibration = read_calibration(output)

    def read(quantization: Quantization) -> BlockSpan:
        return load_block_span(checkpoint, Span(0, 8), dtype=torch.float32, quantization=quantization, progress=False)

    embed = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).model.embed_tokens
    hidden = embed(torch.arange(3, 303)[None]).detach()
    inputs = BlockInputs(hidden_states=hidden, batch_size=1, seq_len=hidden.shape[1])
    spans = [read(FULL_PRECISION), read(Quantization("q4_k")), read(Quantization("q4_k", calibration=calibration))]
    full, plain, better = (blocks.forward(inputs)[0] for blocks in spans)
    errors = [(found - full).norm(dim=-1) / full.norm(dim=-1) for found in (plain, better)]
    assert errors[1].mean() < errors[0].mean()
    assert errors[1].max() < BY_QUANT_TYPE["q4_k"]
    assert len({blocks.digests for blocks in spans}) == 1


@pytest.mark.parametrize(
    ("output", "says"), [("missing/c.safetensors", "missing is missing or not yours"), (".", "is a directory: name a")]
)
def test_a_file_that_cannot_be_written_is_told_before_the_model_is_read(output: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=says):
        calibrate(Calibrate(model="/no/such/model", text="no-text", output=str(tmp_path / output)))


def test_the_beginning_of_a_text_is_read(tmp_path: Path) -> None:
    """Notepad's files, too."""
    path = tmp_path / "text"
    path.write_bytes("\ufeffa\r\nb".encode("utf-16-le"))
    assert read_text(path) == "a\nb"
    path.write_text("ab" * MOST_BYTES)
    assert len(read_text(path)) == MOST_BYTES
    path.write_bytes(b"\x7fELF\x02\x00")
    with pytest.raises(ConfigurationError, match="is no text: give some pages in UTF-8"):
        read_text(path)


@pytest.mark.parametrize("squares", [torch.tensor([1.0, -1.0]), torch.tensor([torch.nan]), torch.ones(2).int()])
def test_files_with_other_numbers_are_refused(squares: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    write_calibration(path, {"a": squares}, {})
    assert torch.equal(load_file(path)["a"], squares) or squares.isnan().any()
    with pytest.raises(ConfigurationError, match="is no calibration"):
        read_calibration(path)


@pytest.mark.parametrize("content", [b"", b"some text"])
def test_files_of_other_kinds_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(content)
    for one in (path, tmp_path / "missing"):
        with pytest.raises(ConfigurationError, match=r"can't be read.*make one with swarmllm calibrate"):
            read_calibration(one)
