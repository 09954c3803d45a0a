"""Every Triton kernel compiles for GPUs of two generations; in a process of its own, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.lane("triton")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kernel_compiles(capability: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(HERE.parents[1]), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(HERE / "compiled_kernels.py"), capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=890)
    assert done.returncode == 0, done.stdout + done.stderr
