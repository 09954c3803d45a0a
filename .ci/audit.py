"""Tells which versions in constraints.txt have known vulnerabilities; run by `make audit` and in CI.

Exit code 0: none is known, or the service of advisories could not be asked (one line says so); 1: some are. Names and
versions of public packages are all that it sends, in one request. It takes a minute at most, whatever the network does.
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
"""Open source vulnerabilities: one request for all packages, and no account."""
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;#]+)")
TIMEOUT_S = 15.0
"""For a sign of life of the service."""
BUDGET_S = 50.0
"""For everything: looking up its name can't be interrupted, and it may send a byte a second."""
MAX_ANSWER_BYTES = 16 << 20


class Audit:
    """Asks the service, and keeps what is known so far for whoever waits no longer."""

    def __init__(self, service: str, packages: list[tuple[str, str]]) -> None:
        self._service = service.rstrip("/")
        self._packages = packages
        self.failure: str | None = f"no answer in {BUDGET_S:g} s"
        """Why nothing is known; None once something is."""
        self.advisories: dict[str, str] = {}
        """What the package is and which advisory, and what that says."""

    def run(self) -> None:
        """Ask which packages have advisories, then what these say."""
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
            {"package": {"name": name, "ecosystem": "PyPI"}, "version": version}  # its word for Python packages
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
    """Names and versions of constraints.txt."""
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
    """One line, whatever the service has written."""
    text = " ".join(text.split())
    print("audit: " + "".join(character if character.isprintable() else "?" for character in text), flush=True)


if __name__ == "__main__":
    code = main()
    os._exit(code)  # the thread may hang in a look-up of a name, which Python would wait for
