"""The kernels of pages and of fused steps beside float64, by Triton's interpreter; in a process of its own each.

Where Triton isn't installed (it comes with torch for CUDA) these are skipped; `tests/gpu/test_paged.py` runs the same
kernels on a GPU.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["attention", "fused"])
def test_in_triton_s_interpreter(part: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "interpreted_kernels.py"), part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
