"""Print the requirements of `make test-oldest`: every range of setup.cfg at its lower bound, and the pinned test tools.

The bounds are read from setup.cfg, so that the tests can't differ from the promise. Needs only the standard library,
because it runs before anything is installed.
"""

import re
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANGE = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?P<specifiers>.*)$")
LOWER_BOUND = re.compile(r">=\s*([^,;\s]+)")


def lower_bounds(requirements: str) -> list[str]:
    """Turn `"a>=1,<2"` into `["a==1"]`; one requirement per line.

    Raises:
        ValueError: a range has no lower bound, so nobody could test it.
    """
    pinned = []
    for line in filter(None, map(str.strip, requirements.splitlines())):
        bound = LOWER_BOUND.search(line)
        match = RANGE.match(line)
        if bound is None or match is None:
            raise ValueError(f"setup.cfg promises {line!r} without a lower bound")
        pinned.append(f"{match['name']}=={bound[1]}")
    return pinned


def pins(requirements: str, constraints: str) -> list[str]:
    """The pins of these requirements in constraints.txt."""
    by_name = {normalized(line.split("==")[0]): line for line in constraints.splitlines() if "==" in line}
    names = [RANGE.match(line.strip()) for line in requirements.splitlines() if line.strip()]
    return [by_name[normalized(match["name"])] for match in names if match]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    oldest = lower_bounds(setup["options"]["install_requires"])
    tools = pins(setup["options.extras_require"]["dev"], (ROOT / "constraints.txt").read_text())
    print("\n".join(oldest + tools))
    return 0


if __name__ == "__main__":
    sys.exit(main())
