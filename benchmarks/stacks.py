"""Decode steps of eight clients of an encoder-decoder, together and one by one, on the decoder's blocks of one server.

Blocks of the sizes of T5-base and BART-base with random weights, called directly: no network, no swarm. Each client has
its own encoder outputs, of different lengths. Runs alternate, so that other load meets all of them. Prints medians of
the thread's processor time and of the quotients of neighbouring runs.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel, T5Config, T5ForConditionalGeneration

from swarmllm.models.architecture import stacks
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import resolve_quantization
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.trials import random_inputs

TEXTS = (5, 12, 20, 33, 40, 52, 64, 80)
"""Positions that each client has written."""
SOURCES = (20, 200, 64, 120, 33, 90, 150, 48)
"""Positions of each client's encoder outputs."""


def models(num_blocks: int) -> Iterator[tuple[str, PreTrainedModel]]:
    """The model, with one unused block in the encoder."""
    t5 = T5Config(
        d_model=768, d_kv=64, num_heads=12, d_ff=3072, num_layers=1, num_decoder_layers=num_blocks, vocab_size=128
    )
    yield "T5-base", T5ForConditionalGeneration(t5)
    bart = BartConfig(d_model=768, encoder_layers=1, decoder_layers=num_blocks, vocab_size=128)
    yield "BART-base", BartForConditionalGeneration(bart)


def calls_of(blocks: BlockSpan) -> list[SessionCall]:
    """The next token of each client."""
    calls = []
    for text, source in zip(TEXTS, SOURCES, strict=True):
        cache = blocks.new_cache()
        hidden = torch.randn(1, source, blocks.source_dim).to(blocks.dtype)
        blocks.forward(replace(random_inputs(blocks, text), encoder_hidden_states=hidden), cache=cache)
        calls.append(SessionCall(random_inputs(blocks, 1), blocks.span, cache))
    return calls


def step_ms(packer: Packer, calls: list[SessionCall], way: Packing) -> float:
    """Processor time of one step of all clients."""
    began = time.thread_time()
    for outcome in packer.run_calls(calls, way):
        if isinstance(outcome, Exception):
            raise outcome
    took = time.thread_time() - began
    for call, text in zip(calls, TEXTS, strict=True):
        call.cache.rollback(text)
    return 1e3 * took


def compare(blocks: BlockSpan, rounds: int) -> str:
    """A row of the table."""
    packer, calls = Packer(blocks, right_ways(blocks)), calls_of(blocks)
    times: dict[Packing, list[float]] = {way: [] for way in packer.ways}
    for _ in range(rounds):
        for way in packer.ways:
            times[way].append(step_ms(packer, calls, way))
    usual = times[Packing.ONE_BY_ONE]
    gains = {
        way: statistics.median(one / other for one, other in zip(usual, found, strict=True))
        for way, found in times.items()
    }
    return " | ".join(f"{statistics.median(times[way]):.1f} ms ({gains[way]:.2f})" for way in packer.ways)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| 8 clients, {args.blocks} blocks | in one row | left-padded | one by one |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for name, model in models(args.blocks):
            for dtype, quant_type in (("float32", "none"), ("bfloat16", "int8")):
                path = Path(directory) / f"{name}-{dtype}"
                model.to(getattr(torch, dtype)).save_pretrained(path)
                checkpoint = open_checkpoint(str(path))
                span = stacks(checkpoint.config)[-1].span
                quantization = resolve_quantization(quant_type)
                blocks = load_block_span(checkpoint, span, quantization=quantization, progress=False)
                print(f"| {name}, {dtype}, {quant_type} | {compare(blocks, args.rounds)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
