"""Common parts of the benchmarks: models with random weights, a stopwatch for generation, tables, results as JSON."""

import json
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

RESULTS = Path(__file__).parent / "results"

SHAPES = {
    # hidden size × blocks; the 2048 one has the shape of a 1B Llama without its large vocabulary
    "64x8": {"hidden": 64, "blocks": 8, "heads": 2, "kv_heads": 1, "intermediate": 128, "dtype": torch.float32},
    "512x8": {"hidden": 512, "blocks": 8, "heads": 8, "kv_heads": 4, "intermediate": 1408, "dtype": torch.float32},
    "512x12": {"hidden": 512, "blocks": 12, "heads": 8, "kv_heads": 4, "intermediate": 1408, "dtype": torch.float32},
    "2048x16": {
        "hidden": 2048,
        "blocks": 16,
        "heads": 32,
        "kv_heads": 8,
        "intermediate": 5632,
        "dtype": torch.bfloat16,
    },
    # blocks of a 7B Llama, for a GPU
    "4096x16": {
        "hidden": 4096,
        "blocks": 16,
        "heads": 32,
        "kv_heads": 32,
        "intermediate": 11008,
        "vocab": 32000,
        "dtype": torch.bfloat16,
    },
    "2048x4": {"hidden": 2048, "blocks": 4, "heads": 32, "kv_heads": 8, "intermediate": 5632, "dtype": torch.bfloat16},
    # as wide, with next to nothing to compute: for measuring the network
    "thin": {
        "hidden": 2048,
        "blocks": 4,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 32,
        "intermediate": 64,
        "dtype": torch.bfloat16,
    },
}


def save_random_model(shape: str, directory: Path, device: str = "cpu") -> Path:
    """A Llama of one of `SHAPES` with random weights, made on that device, as a checkpoint."""
    sizes = SHAPES[shape]
    path = directory / shape
    config = LlamaConfig(
        vocab_size=sizes.get("vocab", 4096),
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["blocks"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes.get("head_dim"),
        max_position_embeddings=8192,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(sizes["dtype"])
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(previous)
    model.save_pretrained(path)
    return path


@dataclass
class Stopwatch(BaseStreamer):
    """A streamer that notes the time of each token."""

    started_at: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    _prompt_seen: bool = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        pass

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.started_at

    @property
    def tokens_per_s(self) -> float:
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


PROMPTS = torch.Generator().manual_seed(0)


def timed_generation(model: Any, prompt_tokens: int, new_tokens: int) -> Stopwatch:
    """Greedy generation of exactly `new_tokens` after a random prompt, each time another one, because servers remember
    some."""
    ids = torch.randint(3, 4000, (1, prompt_tokens), generator=PROMPTS).to(model.device)
    watch = Stopwatch()
    least = {} if model.generation_config.eos_token_id is None else {"min_new_tokens": new_tokens}
    model.generate(ids, max_new_tokens=new_tokens, do_sample=False, streamer=watch, **least)
    return watch


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def save_results(name: str, results: object) -> Path:
    """Write `results/NAME.json` with date and machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    machine = {"cpu": _cpu_name(), "torch": torch.__version__, "date": datetime.now(UTC).isoformat(timespec="minutes")}
    path.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    return path


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
