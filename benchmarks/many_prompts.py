"""Sixteen prompts of mixed length through two servers: one by one, `generate_many`, and as one padded batch.

    python benchmarks/many_prompts.py [--shape 512x8] [--repeats 5]

Prints seconds for all and ratios to one by one in the same round (the ways alternate, medians count). Writes
results/many_prompts.json.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from common import median, save_random_model, save_results, table
from torch import Tensor

from swarmllm import AutoDistributedModel, LocalSwarm

LENGTHS = [8, 200, 16, 64, 120, 8, 32, 16, 300, 24, 48, 8, 96, 16, 64, 40]
NEW_TOKENS = [16, 48, 32, 24, 64, 16, 48, 32, 24, 64, 16, 48, 32, 24, 64, 32]
"""Texts end at different times, as in reality; here by their number."""


def ways(model: Any, prompts: list[Tensor]) -> dict[str, Callable[[], object]]:
    """The compared ways. A batch can't end its rows one by one; it ends with the longest."""
    longest = max(map(len, prompts))
    padded = torch.stack([torch.nn.functional.pad(ids, (longest - len(ids), 0)) for ids in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - len(ids) for ids in prompts]).long()

    def one_by_one() -> None:
        for ids, new_tokens in zip(prompts, NEW_TOKENS, strict=True):
            model.generate(ids[None], max_new_tokens=new_tokens, do_sample=False)

    def submitted() -> None:
        futures = [
            model.submit(ids, max_new_tokens=new_tokens, do_sample=False)
            for ids, new_tokens in zip(prompts, NEW_TOKENS, strict=True)
        ]
        for future in futures:
            future.result()

    def batch() -> None:
        model.generate(padded, attention_mask=mask, max_new_tokens=max(NEW_TOKENS), do_sample=False)

    return {"one by one": one_by_one, "many at once": submitted, "one batch": batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="512x8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quant_type", default="int8")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    prompts = [torch.randint(3, 4000, (length,)) for length in LENGTHS]
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = save_random_model(args.shape, Path(directory))
        options = {"quant_type": args.quant_type, "num_threads": 1}
        with (
            LocalSwarm(path, num_servers=2, **options) as swarm,
            AutoDistributedModel.from_pretrained(str(path), initial_peers=swarm.initial_peers) as model,
        ):
            for name, way in ways(model, prompts).items():
                way()
                seconds[name] = []
            for _ in range(args.repeats):
                for name, way in ways(model, prompts).items():
                    began_at = time.perf_counter()
                    way()
                    seconds[name].append(time.perf_counter() - began_at)
    alone = seconds["one by one"]
    result = {
        name: {
            "seconds": median(values),
            "times as fast": median([first / value for first, value in zip(alone, values, strict=True)]),
        }
        for name, values in seconds.items()
    }
    print(table(["", "seconds", "times as fast"], [[name, *row.values()] for name, row in result.items()]))
    print(f"written to {save_results('many_prompts', {'shape': args.shape, **result})}")


if __name__ == "__main__":
    main()
