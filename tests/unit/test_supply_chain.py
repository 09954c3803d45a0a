"""Hashes of packages and vendored files, and the audit: only what was looked at is installed and shipped."""

import hashlib
import json
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from packaging.utils import canonicalize_name

ENTRY = re.compile(r"^(\S+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)
ROW = re.compile(r"^\| (\S+) \| .+ of npm's `\S+`.* \| (\d[\d.]*) \| .+ \| `([0-9a-f]{64})` \|$")
UNHASHED = {"torch", "uv"}
VULNERABLE = "jinja2"


# Hashes


def pins(text: str) -> dict[str, str]:
    lines = [line.split("==") for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in lines}


def hashed(path: Path) -> dict[str, str]:
    """Versions by name; fails if there is anything but hashed pins in the file."""
    text = path.read_text()
    assert re.fullmatch(r"#.*\n", ENTRY.sub("", text)), f"{path} has lines that pin nothing, or without hashes"
    return {canonicalize_name(entry[1]): entry[2] for entry in ENTRY.finditer(text)}


def test_every_pin_has_its_hashes(repo_root: Path) -> None:
    pinned = pins((repo_root / "constraints.txt").read_text())
    files = sorted((repo_root / "hashes").glob("*.txt"))
    for path in files:
        for name, version in hashed(path).items():
            assert pinned[name] == version, f"{path.name}: make hashes"
    missing = pinned.keys() - UNHASHED - {name for path in files for name in hashed(path)}
    assert not missing, f"no hashes for {missing}: make hashes"


def test_what_make_and_the_image_install_is_hashed(repo_root: Path) -> None:
    makefile, dockerfile = ((repo_root / name).read_text() for name in ("Makefile", "Dockerfile"))
    used = set(re.findall(r"-r hashes/(\w+)\.txt", makefile))
    assert used == {path.stem for path in (repo_root / "hashes").glob("*.txt")}
    assert set(re.findall(r"-r hashes/(\w+)\.txt", dockerfile)) == {"build", "base"}


def test_what_is_packed_for_machines_with_a_gpu_is_pinned(repo_root: Path) -> None:
    script = runpy.run_path(str(repo_root / ".ci/gpu_bundle.py"))
    assert set(script["PACKED"]) <= script["pins"]().keys()
    assert set(script["AS_SOURCE"]) <= set(script["PACKED"])


# Vendored files


def test_vendored_files_are_those_that_are_listed(repo_root: Path) -> None:
    vendor = repo_root / "src/swarmllm/gateway/pages/vendor"
    rows = [match for line in (vendor / "README.md").read_text().splitlines() if (match := ROW.match(line))]
    listed = {match[1]: match[3] for match in rows}
    found = {
        path.relative_to(vendor).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in vendor.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    assert found == listed


# Audit


class Advisories(BaseHTTPRequestHandler):
    """Says of one package that it is vulnerable, by the interface of the service that the audit asks."""

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        names = [query["package"]["name"].lower() for query in queries]
        self.answer({"results": [{"vulns": [{"id": "TEST-1"}]} if name == VULNERABLE else {} for name in names]})

    def do_GET(self) -> None:
        events = [{"introduced": "0"}, {"fixed": "99.1"}]
        ranges = [{"type": "ECOSYSTEM", "events": events}]
        self.answer({"id": "TEST-1", "summary": "escapes\x1b[31m its\nsandbox", "affected": [{"ranges": ranges}]})

    def answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Advisories) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def audit(repo_root: Path, constraints: Path, service: str) -> tuple[int, str]:
    command = [sys.executable, repo_root / ".ci/audit.py", "--constraints", constraints, "--service", service]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_an_audit_reports_what_is_known(repo_root: Path, tmp_path: Path, service: str) -> None:
    code, said = audit(repo_root, repo_root / "constraints.txt", service)
    version = pins((repo_root / "constraints.txt").read_text())[VULNERABLE]
    assert (code, said) == (1, f"audit: Jinja2 {version} has TEST-1 escapes?[31m its sandbox (mended in 99.1)\n")
    harmless = tmp_path / "constraints.txt"
    harmless.write_text("# none of them\nsix==1.17.0\n")
    assert audit(repo_root, harmless, service) == (
        0,
        "audit: no vulnerability is known of the 1 packages in constraints.txt\n",
    )


def test_an_audit_without_network_fails_nothing(repo_root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, said = audit(repo_root, repo_root / "constraints.txt", address)
    assert code == 0
    assert said.startswith("audit: advisories can't be asked for (")
    assert said.count("\n") == 1
