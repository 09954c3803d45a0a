"""Pack the packages that `make gpu` needs besides this checkout, for a GPU machine without a network: `make
gpu-bundle`.

    build/gpu-bundle/site-3.12.tar.xz    packages for Linux on x86-64 and that version of Python
    build/gpu-bundle/_kernels.so         the kernels for CPUs, compiled here

Large packages of which any version works are left out: torch, numpy, scipy, tokenizers … (`NEEDED` in gpu.py lists
all). The versions are those of constraints.txt. Run it with the Python of .venv, for its pip.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUNDLE = ROOT / "build" / "gpu-bundle"
KERNELS = ROOT / "src/swarmllm/models/quantization/_kernels.so"
MOST_BYTES = 60 * 1000 * 1000

PACKED = [
    "annotated-types",
    "base58",
    "bitsandbytes",
    "blake3",
    "cffi",
    "ConfigArgParse",
    "cryptography",
    "hivemind",
    "ifaddr",
    "llguidance",
    "mmh3",
    "morphys",
    "netaddr",
    "peft",
    "prefetch_generator",
    "protobuf",
    "py-cid",
    "py-multibase",
    "py-multicodec",
    "py-multihash",
    "pycparser",
    "pydantic",
    "pydantic_core",
    "python-baseconv",
    "python-multipart",
    "starlette",
    "transformers",
    "typing-inspection",
    "uvicorn",
    "varint",
    "wsproto",
    "zeroconf",
    "pytest",
    "pytest-asyncio",
    "pytest-rerunfailures",
]
AS_SOURCE = ("prefetch_generator", "varint", "python-baseconv")
"""Packages without wheels. They are pure Python, so any version of Python can build them."""
LIBRARIES = ("libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so")
"""One of bitsandbytes' twenty libraries, for torch with CUDA 13.0."""


def pins() -> dict[str, str]:
    """Lines of constraints.txt by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {line.split("==")[0]: line for line in lines if "==" in line}


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def install(site: Path, wheels: Path, python: str) -> None:
    """Install the packages of `PACKED` for that version of Python into the folder `site`."""
    pinned = pins()
    pip("wheel", "--no-deps", "--wheel-dir", str(wheels), *(pinned[name] for name in AS_SOURCE))
    # glibc 2.5 to 2.39: pip accepts these names only as a wheel's own name spells them.
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    wanted = [option for platform in platforms for option in ("--platform", platform)]
    wanted += ["--python-version", python, "--implementation", "cp", "--only-binary", ":all:"]
    packages = [pinned[name] for name in PACKED]
    pip("install", "--no-deps", "--no-compile", "--find-links", str(wheels), "--target", str(site), *wanted, *packages)


def leave_out_what_is_not_run(site: Path) -> None:
    for library in (site / "bitsandbytes").glob("libbitsandbytes_*.so"):
        if library.name not in LIBRARIES:
            library.unlink()
    shutil.rmtree(site / "bin", ignore_errors=True)
    missing = [name for name in LIBRARIES if not (site / "bitsandbytes" / name).exists()]
    missing += [] if (site / "hivemind/hivemind_cli/p2pd").exists() else ["hivemind's p2pd"]
    if missing:
        sys.exit(f"make gpu-bundle: {', '.join(missing)} not found in what was installed")


def main() -> int:
    parser = argparse.ArgumentParser(description="Packs what make gpu needs besides this checkout.")
    parser.add_argument("--python", default="3.12", help="version on the other machine")
    arguments = parser.parse_args()
    if not KERNELS.exists():
        print("make gpu-bundle: without the kernels for CPUs, as swarmllm was installed without gcc", file=sys.stderr)
    shutil.rmtree(BUNDLE, ignore_errors=True)
    BUNDLE.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="swarmllm-gpu-bundle-") as directory:
        site, wheels = Path(directory) / "site", Path(directory) / "wheels"
        install(site, wheels, arguments.python)
        leave_out_what_is_not_run(site)
        with tarfile.open(BUNDLE / f"site-{arguments.python}.tar.xz", "w:xz") as archive:
            archive.add(site, arcname="site")
    if KERNELS.exists():
        shutil.copy(KERNELS, BUNDLE)
    size = sum(path.stat().st_size for path in BUNDLE.iterdir())
    print(f"{BUNDLE.relative_to(ROOT)}: {size / 1e6:.1f} MB, for Python {arguments.python} on x86-64")
    return 0 if size <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
