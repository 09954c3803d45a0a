"""Loading half of a model takes half of its memory, at the end and at the peak."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16
)
SHARD_BYTES = 60_000_000
OVERHEAD_BYTES = 40_000_000
"""Measured: about 27 MB, of any model: threads, kernels' workspaces, modules without weights."""
MEASURE = """
import json, sys, threading
from swarmllm.data_structures import Span
from swarmllm.models.checkpoint import open_checkpoint
from swarmllm.models.block_span import load_block_span
import torch

def memory(kind):
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))

tiny = sys.argv[2]
load_block_span(open_checkpoint(tiny), Span(0, 1), progress=False)  # imports and libraries are not what is measured
before, peak, done = memory("Pss:"), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, memory("Pss:"))

thread = threading.Thread(target=watch)
thread.start()
blocks = load_block_span(open_checkpoint(sys.argv[1]), Span(0, 4), dtype=getattr(torch, sys.argv[3]), progress=False)
done.set()
thread.join()
print(json.dumps({"peak": peak - before, "end": memory("Pss:") - before, "blocks": blocks.num_bytes}))
"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("memory")
    tiny = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(tiny).save_pretrained(root / "tiny")
    model = LlamaForCausalLM(CONFIG)
    model.save_pretrained(root / "large", max_shard_size=SHARD_BYTES)
    return root / "large", root / "tiny"


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_half_of_a_model(directories: tuple[Path, Path], dtype: str) -> None:
    large, tiny = directories
    whole = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert whole > 300_000_000
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(large), str(tiny), dtype], capture_output=True, text=True, check=True
    )
    used = json.loads(run.stdout)
    ratio = torch.tensor([], dtype=getattr(torch, dtype)).element_size() / 4
    assert used["blocks"] == pytest.approx(whole * ratio / 2, rel=0.1)
    assert used["end"] <= used["blocks"] + OVERHEAD_BYTES
    assert used["peak"] <= used["blocks"] + SHARD_BYTES + OVERHEAD_BYTES
