"""The routes of the hub that huggingface_hub's client takes to share and find repositories, on 127.0.0.1."""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import huggingface_hub
import pytest
import transformers
import yaml


@dataclass
class Repository:
    files: dict[str, bytes] = field(default_factory=dict)
    commit: str = "0" * 40

    @property
    def tags(self) -> list[str]:
        """As the hub makes them from the card's head."""
        card = self.files.get("README.md", b"").decode()
        head = yaml.safe_load(card.split("---")[1]) if card.startswith("---") else {}
        bases = [f"base_model:{head['base_model']}"] if head.get("base_model") else []
        return [*(head.get("tags") or []), *bases, *filter(None, [head.get("pipeline_tag")])]


class HubStub:
    """A hub on this machine, with repositories by name."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.repositories: dict[str, Repository] = {}
        self.sent: Counter[str] = Counter()
        """Bytes of each file that went out."""
        self.spoil: Callable[[str, bytes], bytes] = lambda _, data: data
        """Changes what is sent of a file."""

    def answer(
        self, method: str, path: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, JSON or bytes, headers)."""
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": "me", "orgs": []}, {}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            status = 409 if name in self.repositories else 200
            self.repositories.setdefault(name, Repository())
            return status, {"url": f"{self.address}/{name}", "name": name, "id": name}, {}
        if path == "/api/models":
            wanted = [tag for value in query.get("filter", []) for tag in value.split(",")]
            found = [name for name, repo in self.repositories.items() if set(wanted) <= set(repo.tags)]
            return 200, [self._about(name) for name in found], {}
        for pattern, action in (
            (r"/api/models/([^/]+/[^/]+)/preupload/.+", self._preupload),
            (r"/api/models/([^/]+/[^/]+)/commit/.+", self._commit),
            (r"/api/models/([^/]+/[^/]+)(?:/revision/.+)?", self._info),
            (r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self._file),
        ):
            if match := re.fullmatch(pattern, path):
                if match[1] not in self.repositories:
                    return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
                return action(body, *match.groups())
        return 404, {"error": f"no route {method} {path}"}, {}

    def _about(self, name: str) -> dict[str, Any]:
        repo = self.repositories[name]
        names = [
            {
                "rfilename": file,
                "size": len(data),
                **(
                    {"lfs": _lfs(data)}
                    if file.endswith((".safetensors", ".gguf", ".bin"))
                    else {"blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
                ),
            }
            for file, data in repo.files.items()
        ]
        about = {"id": name, "modelId": name, "sha": repo.commit, "tags": repo.tags, "siblings": names}
        return {**about, "private": False, "downloads": 7, "likes": 0}

    def _info(self, _: bytes, name: str) -> tuple[int, Any, dict[str, str]]:
        return 200, self._about(name), {}

    def _preupload(self, body: bytes, _: str) -> tuple[int, Any, dict[str, str]]:
        files = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
        ]
        return 200, {"files": files}, {}

    def _commit(self, body: bytes, name: str) -> tuple[int, Any, dict[str, str]]:
        repo = self.repositories[name]
        for line in map(json.loads, body.decode().splitlines()):
            if line["key"] == "file":
                repo.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        repo.commit = hashlib.sha1(body).hexdigest()
        address = f"{self.address}/{name}/commit/{repo.commit}"
        return 200, {"commitUrl": address, "commitOid": repo.commit, "hookOutput": "", "pullRequestUrl": None}, {}

    def _file(self, _: bytes, name: str, file: str) -> tuple[int, Any, dict[str, str]]:
        repo = self.repositories[name]
        if file not in repo.files:
            return 404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit}
        content = repo.files[file]
        return 200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": repo.commit}


def _lfs(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}


def use_hub(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub in this process, and in those that it starts, use this one."""
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    constants = {"ENDPOINT": hub.address, "HF_HUB_OFFLINE": False, "HUGGINGFACE_CO_URL_TEMPLATE": template}
    for name, value in constants.items():  # read from the environment once, long ago
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.address)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # or it would keep another test's hub
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")


@contextmanager
def running_hub() -> Iterator[HubStub]:
    """A hub that nobody else sees."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            url = urlparse(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, content, headers = stub.answer(self.command, unquote(url.path), parse_qs(url.query), body)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            if isinstance(content, bytes):
                if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
                    status, data = 206, data[int(wanted[1]) : int(wanted[2]) + 1]
                name = url.path.rpartition("/")[2]
                data = stub.spoil(name, data)
                if self.command == "GET":
                    stub.sent[name] += len(data)
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(data)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_POST = do_HEAD = answer  # noqa: N815 - the names that http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub = HubStub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
