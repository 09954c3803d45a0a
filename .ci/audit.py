"""Report versions in constraints.txt with known vulnerabilities. `make audit` and CI run it.

Exit code 0: none is known, or the advisory service could not be reached (one line says so); 1: some are. It sends names
and versions of public packages, in one request. It takes a minute at most, whatever the network does.
"""

import argparse
import json
import os
import re
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parent.parent
SERVICE = "https://api.osv.dev"
"""Open source vulnerabilities: one request for all packages, no account."""
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;#]+)")
TIMEOUT_S = 15.0
"""Seconds to wait for a sign of life of the service."""
BUDGET_S = 50.0
"""Seconds for everything. Name resolution can't be interrupted, and a server may send a byte a second."""
MAX_ANSWER_BYTES = 16 << 20


class Audit:
    """Asks the service, and keeps the results so far for callers that stop waiting."""

    def __init__(self, service: str, packages: list[tuple[str, str]]) -> None:
        self._service = service.rstrip("/")
        self._packages = packages
        self.failure: str | None = f"no answer in {BUDGET_S:g} s"
        """The reason why nothing is known; None once something is."""
        self.advisories: dict[str, str] = {}
        """(package and advisory) → its summary."""

    def run(self) -> None:
        """Ask for the advisories of all packages, then for their texts."""
        try:
            for (name, version), ids in self._found().items():
                self.advisories |= {f"{name} {version} has {one}": "" for one in ids}
            self.failure = None
            for line in self.advisories:
                self.advisories[line] = self._described(line.rpartition(" ")[2])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if self.failure is not None:
                self.failure = str(getattr(error, "reason", None) or error or type(error).__name__)

    def _found(self) -> dict[tuple[str, str], list[str]]:
        queries = [
            {"package": {"name": name, "ecosystem": "PyPI"}, "version": version}  # its name for Python packages
            for name, version in self._packages
        ]
        results = self._ask("/v1/querybatch", {"queries": queries})["results"]
        return {
            package: [str(vulnerability["id"]) for vulnerability in (result or {}).get("vulns", ())]
            for package, result in zip(self._packages, results, strict=True)
        }

    def _described(self, advisory: str) -> str:
        about = self._ask(f"/v1/vulns/{advisory}")
        spans = [span for affected in about.get("affected", ()) for span in affected.get("ranges", ())]
        events = [event for span in spans if span.get("type") == "ECOSYSTEM" for event in span.get("events", ())]
        mended = ", ".join(sorted({str(event["fixed"]) for event in events if "fixed" in event}))
        return f"{about.get('summary', '')}"[:200] + (f" (mended in {mended})" if mended else "")

    def _ask(self, path: str, question: object = None) -> dict[str, Any]:
        data = None if question is None else json.dumps(question).encode()
        request = Request(self._service + path, data=data, headers={"Content-Type": "application/json"})
        with urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.loads(response.read(MAX_ANSWER_BYTES))
        if not isinstance(answer, dict):
            raise ValueError("its answer is no object")
        return answer


def pins(text: str) -> list[tuple[str, str]]:
    """Names and versions in constraints.txt."""
    return [(match[1], match[2]) for line in text.splitlines() if (match := PIN.match(line))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--service", default=SERVICE, help="address of a service with OSV's interface")
    args = parser.parse_args()
    packages = pins(args.constraints.read_text())
    audit = Audit(args.service, packages)
    asking = Thread(target=audit.run, daemon=True)
    asking.start()
    asking.join(BUDGET_S)
    if audit.failure is not None:
        say(f"advisories can't be asked for ({audit.failure}): nothing is known, and nothing fails")
    elif not audit.advisories:
        say(f"no vulnerability is known of the {len(packages)} packages in constraints.txt")
    else:
        for line, text in list(audit.advisories.items()):
            say(f"{line} {text}")
    return 1 if audit.failure is None and audit.advisories else 0


def say(text: str) -> None:
    """Print one line, whatever the service has written."""
    text = " ".join(text.split())
    print("audit: " + "".join(character if character.isprintable() else "?" for character in text), flush=True)


if __name__ == "__main__":
    code = main()
    os._exit(code)  # the thread may hang in name resolution, and Python would wait for it
