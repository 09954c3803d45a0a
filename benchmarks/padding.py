"""Padded batches, with padding computed and without, by how much of them is text (EnergonAI's figure 12).

    python benchmarks/padding.py [--repeats 5] [--shape 512x8]

Batches of 16 texts of up to 128 tokens through two servers of one thread each: forward, and forward and backward, by
one client, in turn as it is and with padding computed like text. Lengths are spread so that the stated share of the
batch is text; the longest is always 128. What counts is the ratio. Bytes are those of a forward, sent and received by
the client.
Writes results/padding.json.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from common import median, save_random_model, save_results, table
from torch import Tensor

from swarmllm import AutoDistributedModel, LocalSwarm
from swarmllm.network.wire.stream import traffic

ROWS, LENGTH = 16, 128
SHARES = (1.0, 0.75, 0.56, 0.4, 0.25)


def mask_of(share: float) -> Tensor:
    """Texts of which about that share is text, in no order of length."""
    spread = (torch.arange(ROWS) + 0.5) / ROWS
    lengths = (LENGTH * spread ** (1 / share - 1)).round().clamp(min=1).long()
    lengths[-1] = LENGTH
    lengths = lengths[torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))]
    return (torch.arange(LENGTH)[None] < lengths[:, None]).long()


@contextlib.contextmanager
def computing_padding(model: Any, is_computed: bool) -> Iterator[None]:
    """Within, padding is computed as if it were text, or not."""
    batches = model.remote_blocks.batches
    usual = batches.traits
    if is_computed:
        batches.traits = usual.model_copy(update={"skips_padding": ()})
    try:
        yield
    finally:
        batches.traits = usual


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def case(model: Any, share: float, repeats: int) -> dict[str, float]:
    mask = mask_of(share)
    hidden = torch.randn(ROWS, LENGTH, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    blocks = model.remote_blocks

    def forward() -> None:
        with torch.no_grad():
            blocks(hidden, attention_mask=mask)

    def both() -> None:
        blocks(hidden.clone().requires_grad_(), attention_mask=mask)[mask != 0].sum().backward()

    result = {"text": float(mask.float().mean())}
    for name, work in (("forward", forward), ("forward+backward", both)):
        runs: list[list[float]] = []
        for _ in range(repeats + 1):
            runs.append([])
            for is_computed in (True, False):
                with computing_padding(model, is_computed):
                    runs[-1].append(seconds(work))
        del runs[0]  # warm-up
        result[f"{name} padded s"] = median(padded for padded, _ in runs)
        result[f"{name} s"] = median(own for _, own in runs)
        result[f"{name} ratio"] = median(own / padded for padded, own in runs)
    moved = []
    for is_computed in (True, False):
        before = traffic.sent_bytes + traffic.received_bytes
        with computing_padding(model, is_computed):
            forward()
        moved.append(traffic.sent_bytes + traffic.received_bytes - before)
    return result | {"bytes ratio": moved[1] / moved[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures batches with and without their padding.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", default="512x8")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        path = save_random_model(args.shape, Path(directory))
        with (
            LocalSwarm(path, num_servers=2, quant_type="none", num_threads=1) as swarm,
            AutoDistributedModel.from_pretrained(str(path), initial_peers=swarm.initial_peers) as model,
        ):
            results = [case(model, share, args.repeats) for share in SHARES]
    print(table(list(results[0]), [list(row.values()) for row in results]), flush=True)
    print(f"\nwritten: {save_results('padding', results)}")


if __name__ == "__main__":
    main()
