"""Write `hashes/`: the SHA-256 of every file that pip may install, per section of setup.cfg. Run by `make hashes`, with
uv.

    hashes/build.txt    packages that build this one
    hashes/base.txt     packages that it needs
    hashes/dev.txt …    additional packages of each extra

The versions are those of constraints.txt. The hashes come from the index, for the files of all platforms, so any file
of a package may be installed. Without hashes, pip installs torch, because each of its builds (CPU, CUDA, ROCm) comes
from another place, and packages that constraints.txt doesn't name: the NVIDIA libraries of a CUDA build, and additional
packages of other Python versions.
"""

import platform
import re
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HASHES = ROOT / "hashes"
UNHASHED = {"torch", "uv"}
"""Many builds have torch; uv is only for this script."""
HEADER = "# Written by `make hashes`: {}. To be installed with --require-hashes --no-deps.\n"
ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==[^\s\\]+(?: \\\n    --hash=sha256:[0-9a-f]{64})+$", re.MULTILINE)


def compiled(requirements: str, *options: str) -> str:
    """Compile these requirements with uv."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", platform.python_version(), "--python-platform", "linux", *options]
    return subprocess.run(command, input=requirements, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout


def needed(requirements: str) -> set[str]:
    """Names of all packages that these requirements need."""
    lines = compiled(requirements, "--constraints", "constraints.txt").splitlines()
    return {line.split("==")[0] for line in lines if "==" in line}


def main() -> int:
    entries = {entry["name"]: entry[0] for entry in ENTRY.finditer(compiled_pins())}
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    build = "\n".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    base = setup["options"]["install_requires"]
    done = needed(build)
    layers = {"build": ("what builds the package", done), "base": ("what the package needs", needed(base) - done)}
    done = done | layers["base"][1]
    extras = dict(setup["options.extras_require"])
    for extra in ("dev", *(name for name in extras if name not in ("dev", "hashes"))):
        names = needed(f"{base}\n{extras[extra]}") - done
        layers[extra] = (f"what the extra [{extra}] needs besides", names)
        if extra == "dev":
            done = done | names  # the others are installed on top of it
    HASHES.mkdir(exist_ok=True)
    for name, (what, names) in layers.items():
        listed = [entries[one] for one in sorted(names & entries.keys() - UNHASHED)]
        (HASHES / f"{name}.txt").write_text(HEADER.format(what) + "".join(f"{entry}\n" for entry in listed))
    unused = entries.keys() - UNHASHED - {name for _, names in layers.values() for name in names}
    if unused:
        print(f"constraints.txt names what nothing needs: {', '.join(sorted(unused))}", file=sys.stderr)
    return 0


def compiled_pins() -> str:
    """The pins of constraints.txt with their hashes."""
    return compiled((ROOT / "constraints.txt").read_text(), "--no-deps", "--generate-hashes")


if __name__ == "__main__":
    sys.exit(main())
