"""Compute the memory of models from their published configs, with the code of `swarmllm doctor`.

`python .ci/model_memory.py` writes the tables of docs/real-model.md. A test compares them. The configs are those of
`swarmllm models`, in src/swarmllm/machines/known_models.json.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from swarmllm.machines.catalogue import known_checkpoint, known_models
from swarmllm.models.checkpoint.skeleton import block_bytes
from swarmllm.models.quantization import resolve_quantization
from swarmllm.server.device.device import COUNTED_TOKENS, FREE_SHARE, cache_bytes_per_token, num_blocks_that_fit

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "real-model.md"
QUANT_TYPES = ("none", "int8", "int4")
GUIDE, MACHINES_GB = "Qwen3-32B", (12, 16, 24)


@dataclass(frozen=True)
class Needs:
    """The memory that one model needs, in bytes."""

    name: str
    by_quant_type: dict[str, list[int]]
    """Bytes of each block."""
    cache: int
    """Bytes of one block's cache, for the tokens that a server counts with."""
    ends: int
    """Bytes of embeddings and head, which clients hold, in bfloat16."""

    def fit(self, quant_type: str, gigabytes: float) -> int:
        """Blocks that a server takes by default on a device with so much free memory."""
        usable = int(gigabytes * 1e9 * FREE_SHARE)
        return num_blocks_that_fit(self.by_quant_type[quant_type], self.cache, usable)


def needs(name: str) -> Needs:
    """The memory that this model of the hub needs."""
    with known_checkpoint(name) as checkpoint:
        config = checkpoint.config
        by_quant_type = {one: block_bytes(checkpoint, torch.bfloat16, resolve_quantization(one)) for one in QUANT_TYPES}
    cache = COUNTED_TOKENS * cache_bytes_per_token(config, torch.bfloat16)
    ends = config.vocab_size * config.hidden_size * 2 * (1 if config.tie_word_embeddings else 2)
    return Needs(name.partition("/")[2], by_quant_type, cache, ends)


def table_of_models(models: list[Needs]) -> list[str]:
    """One line per model, the smallest first."""
    names = (
        "model",
        "blocks",
        "all blocks, bfloat16",
        "int8 (default)",
        "int4",
        "one block, int8",
        "its cache, 8192 tokens",
    )
    lines = [f"| {' | '.join(names)} | client |", "|---" * (len(names) + 1) + "|"]
    for one in sorted(models, key=lambda one: sum(one.by_quant_type["none"])):
        totals = " | ".join(f"{sum(one.by_quant_type[name]) / 1e9:.1f} GB" for name in QUANT_TYPES)
        block = f"{max(one.by_quant_type['int8']) / 1e6:.0f} MB | {one.cache / 1e6:.0f} MB"
        count = len(one.by_quant_type["int8"])
        lines.append(f"| {one.name} | {count} | {totals} | {block} | {one.ends / 1e9:.1f} GB |")
    return lines


def table_of_machines(model: Needs) -> list[str]:
    """A table of machines and the blocks of the guide's model that fit there."""
    lines = ["| free memory | " + " | ".join(QUANT_TYPES) + " |", "|---|---|---|---|"]
    fits = {name: [model.fit(name, gigabytes) for gigabytes in MACHINES_GB] for name in QUANT_TYPES}
    for place, gigabytes in enumerate(MACHINES_GB):
        lines.append(f"| {gigabytes} GB | " + " | ".join(f"{fits[name][place]} blocks" for name in QUANT_TYPES) + " |")
    total = len(model.by_quant_type["none"])
    lines.append(f"| together, of {total} | " + " | ".join(f"{sum(fits[name])} blocks" for name in QUANT_TYPES) + " |")
    return lines


def filled(text: str) -> str:
    """The document with current tables."""
    models = [needs(name) for name in known_models()]
    guide = next(one for one in models if one.name == GUIDE)
    for name, lines in (("machines", table_of_machines(guide)), ("models", table_of_models(models))):
        body = "\n".join([f"<!-- {name} -->", "", *lines, "", f"<!-- end of {name} -->"])
        text = re.sub(rf"<!-- {name} -->.*?<!-- end of {name} -->", lambda _, body=body: body, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    written = DOCUMENT.read_text()
    new = filled(written)
    DOCUMENT.write_text(new)
    sys.exit(new != written)
