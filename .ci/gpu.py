"""Run tests and benchmarks on a GPU in at most ten minutes, without a network: `make gpu`, or `python3 .ci/gpu.py`.

Needs torch with CUDA. Everything else comes from build/gpu-bundle (`make gpu-bundle`), unpacked into a temporary
folder. Each job has a time limit, and a failed job doesn't stop the others. Written to `--out`:

    summary.txt     the last printed text: how each job ended, and its tables
    results.json    the same, with all figures
    JOB.log         the output of that job

`--device cpu` runs everything on a tiny model, which tests the scripts and measures nothing.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUNDLE = ROOT / "build" / "gpu-bundle"
PACKAGE = ROOT / "src" / "swarmllm"
KERNELS = PACKAGE / "models/quantization/_kernels.so"
RESULTS = ROOT / "benchmarks" / "results"
NEEDED = [
    "torch",
    "numpy",
    "scipy",
    "accelerate",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
    "msgpack",
    "uvloop",
    "psutil",
    "PIL",
    "prometheus_client",
    "sortedcontainers",
    "packaging",
    "yaml",
    "jinja2",
    "tqdm",
    "regex",
    "anyio",
    "h11",
    "idna",
    "hypothesis",
    "pytest",
    "pytest_timeout",
    "pytest_asyncio",
    "xdist",
    "transformers",
    "hivemind",
    "bitsandbytes",
    "peft",
    "pydantic",
    "cryptography",
    "zeroconf",
    "llguidance",
    "starlette",
    "uvicorn",
]
"""Required modules. Some are in the bundle, the others on the machine."""
DEVICE = (
    "import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else '', sep='|')"
)


@dataclass(frozen=True)
class Part:
    name: str
    command: tuple[str, ...]
    limit_s: float
    tiny: tuple[str, ...] = ()
    """Options with which it runs on a CPU in seconds; tests are only collected."""


# pytest-benchmark, where a machine has it, warns of xdist, and our settings make warnings errors. With -v, the log
# names what failed also if the time was up.
TESTS = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark", "--lane", "gpu", "tests/gpu")
PARTS = (
    Part("tests", (*TESTS, "-n", "14"), 170, ("--collect-only",)),
    Part("gpu_prompts", ("benchmarks/gpu_prompts.py",), 60, ("--device", "cpu")),
    Part("gpu_step", ("benchmarks/gpu_step.py",), 150, ("--device", "cpu")),
    Part("gpu_serving", ("benchmarks/gpu_serving.py", "--limit_s", "160"), 210, ("--device", "cpu")),
)
"""All limits together are below ten minutes. A benchmark has the name of its results."""


@contextlib.contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Environment of the jobs: this checkout's package, the bundle, and no network."""
    with tempfile.TemporaryDirectory(prefix="swarmllm-gpu-") as directory:
        bundle = BUNDLE / f"site-{sys.version_info.major}.{sys.version_info.minor}.tar.xz"
        if bundle.exists():
            with tarfile.open(bundle) as archive:
                archive.extractall(directory, filter="tar")
            if not KERNELS.exists() and (BUNDLE / KERNELS.name).exists():
                shutil.copy(BUNDLE / KERNELS.name, KERNELS)
        paths = [str(PACKAGE.parent), f"{directory}/site", os.environ.get("PYTHONPATH", "")]
        yield os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "SWARMLLM_CACHE": f"{directory}/cache",
        }


def missing(variables: dict[str, str]) -> list[str]:
    code = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
    return output(["-c", code, *NEEDED], variables).split()


def output(arguments: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=variables, capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.stdout.strip()


def run(part: Part, tiny: bool, variables: dict[str, str], out: Path) -> dict[str, Any]:
    """Run a job; return how it ended, its seconds, and its results."""
    log, measured = out / f"{part.name}.log", RESULTS / f"{part.name}.json"
    measured.unlink(missing_ok=True)
    command = [sys.executable, *part.command, *(part.tiny if tiny else ())]
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=variables, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(part.limit_s)
            ended = "ok" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its servers see the end of their standard input
            process.wait()
            ended = f"stopped after {part.limit_s:.0f} s"
    lines = log.read_text(errors="replace").splitlines()
    results = json.loads(measured.read_text()) if measured.exists() else None
    printed = [line for line in lines if line.startswith("|")]
    return {
        "ended": ended,
        "seconds": round(time.monotonic() - started, 1),
        "last line": next((line for line in reversed(lines) if line.strip()), ""),
        "tables": printed or _table_of(results),  # a job that was stopped has printed none
        "results": results,
    }


def _table_of(results: dict[str, Any] | None) -> list[str]:
    found = results["results"] if results else {}
    return found["table"].splitlines() if "table" in found else []


def summary(device: str, parts: dict[str, dict[str, Any]]) -> str:
    lines = [f"{device}, {datetime.now(UTC):%Y-%m-%d}"]
    for found in parts.values():
        lines += ["", *found["tables"]] if found["tables"] else []
    lines += ["", "| part | ended | seconds | last line |", "|---|---|---|---|"]
    lines += [f"| {name} | {p['ended']} | {p['seconds']} | {p['last line'][:100]} |" for name, p in parts.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and benchmarks on a GPU, in ten minutes at most.")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny version, to try the scripts"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-results", help="folder for what is written")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], default=[p.name for p in PARTS])
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, dict[str, Any]] = {}
    with environment() as variables:
        if absent := missing(variables):
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            print(
                f"make gpu: Python {version} doesn't find {', '.join(absent)}; make gpu-bundle packs them",
                file=sys.stderr,
            )
            return 1
        torch, _, card = output(["-c", DEVICE], variables).partition("|")
        if arguments.device == "cuda" and not card:
            print("make gpu: no CUDA here; make gpu GPU_DEVICE=cpu tries the scripts on a tiny model", file=sys.stderr)
            return 1
        device = f"{card or 'no GPU'}, torch {torch}"
        if arguments.device == "cpu":  # threads that wait for each other are very slow on a busy machine
            variables["OMP_NUM_THREADS"] = "1"
        for part in PARTS:
            if part.name in arguments.parts:
                print(f"make gpu: {part.name}, {part.limit_s:.0f} s at most", flush=True)
                parts[part.name] = run(part, arguments.device == "cpu", variables, out)
                # Write after each job, so that results survive the loss of the machine.
                (out / "summary.txt").write_text(summary(device, parts) + "\n")
                (out / "results.json").write_text(json.dumps({"device": device, "parts": parts}, indent=1))
    print(summary(device, parts))
    print(f"written to {out}")
    return 0 if all(part["ended"] == "ok" for part in parts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
