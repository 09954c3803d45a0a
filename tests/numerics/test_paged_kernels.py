"""The kernels of pages and of fused steps equal float64, in Triton's interpreter and a process of its own each.

`tests/gpu/test_paged.py` runs the same kernels on a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.lane("triton")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["attention", "fused"])
def test_in_triton_s_interpreter(part: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "interpreted_kernels.py"), part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
