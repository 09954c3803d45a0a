"""The files of the pages, read once and answered from memory. Part of `app`."""

import gzip
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from swarmllm.gateway.errors import ApiError

DIRECTORY = Path(__file__).with_name("pages")
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


class PageFiles:
    """Answers with the files in `pages/`, of the known kinds only."""

    def __init__(self) -> None:
        self._files = {
            path.relative_to(DIRECTORY).as_posix(): path.read_bytes()
            for path in DIRECTORY.rglob("*")
            if path.suffix in MEDIA_TYPES
        }
        self._compressed = {name: gzip.compress(data, mtime=0) for name, data in self._files.items()}
        self._etags = {
            name: f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"' for name, data in self._files.items()
        }

    async def chat(self, request: Request) -> Response:
        """`GET /`"""
        return self._answer(request, "chat.html")

    async def swarm(self, request: Request) -> Response:
        """`GET /swarm`"""
        return self._answer(request, "swarm.html")

    async def docs(self, request: Request) -> Response:
        """`GET /docs`"""
        return self._answer(request, "docs.html")

    async def file(self, request: Request) -> Response:
        """`GET /static/{name}`"""
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        if name not in self._files:
            raise ApiError(404, "there is no such file")
        headers = {"etag": self._etags[name], "cache-control": "no-cache", "vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == self._etags[name]:
            return Response(status_code=304, headers=headers)
        data = self._files[name]
        if "gzip" in request.headers.get("accept-encoding", ""):
            data, headers["content-encoding"] = self._compressed[name], "gzip"
        return Response(data, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)
