"""A wheel brings the compiled kernels to machines without a compiler, whatever their Python."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = "swarmllm/models/quantization/_kernels.so"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler here")
def test_kernels_from_a_wheel(tmp_path: Path) -> None:
    source, python = tmp_path / "source", tmp_path / "venv/bin/python"
    source.mkdir()
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([sys.executable, *pip, "wheel", *options, "-w", tmp_path / "dist", source], check=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    packages = Path(sysconfig.get_paths(vars={"base": str(tmp_path / "venv")})["purelib"])
    subprocess.run([sys.executable, *pip, "install", *options, "--target", packages, wheel], check=True)
    assert (packages / BUILT).is_file()
    # What it depends on is there already; but not this package, and nothing to compile with.
    (packages / "below.pth").write_text(sysconfig.get_path("purelib"))
    looking = "from swarmllm.models.quantization import kernels; print(kernels.__file__, bool(kernels.library()))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": "/nowhere"}
    found = subprocess.run(
        [python, "-c", looking], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [str(packages / "swarmllm/models/quantization/kernels.py"), "True"]
