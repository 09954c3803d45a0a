"""Common trainings for `/api/runs`: sums and curves of the logs that homes of this machine have written.

The figures are those of `swarmllm runs`. Each home's are its own claims; the log of this machine's home says what was
measured here. Names come from other homes.
"""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swarmllm.api import ConfigurationError, RunSummary, logs_in, printable, run_summary
from swarmllm.gateway.routes import JSON, Routes, get

MAX_RUNS = 10
"""Most runs that are shown, the newest first."""
MAX_POINTS = 120
"""Most points of a curve. Assumed: a page has not many more pixels for each."""

Curve = Sequence[tuple[int, float]]


class TrainingRuns(Routes):
    """The runs in a directory. Logs are read again when they have changed."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        """Place of the logs; None: no runs are shown."""
        self._read: dict[Path, tuple[tuple[int, int], RunSummary]] = {}
        self._one_at_a_time = asyncio.Lock()

    @get("/api/runs", "Trainings that homes share, by the logs of this machine.", errors=(403,), needs_key=False)
    async def runs(self, request: Request) -> Response:
        async with self._one_at_a_time:
            shown = [] if self.directory is None else await asyncio.to_thread(self._look, self.directory)
        body = json.dumps({"runs": shown}).encode()
        etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        headers = {"etag": etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=JSON, headers=headers)

    def _look(self, directory: Path) -> list[dict[str, Any]]:
        """The newest runs. Of several homes of one run on this machine, the one whose log is newest tells it."""
        stamps = {}
        for path in logs_in(directory):
            found = path.stat()
            stamps[path] = found.st_mtime_ns, found.st_size
        newest = sorted(stamps, key=lambda path: stamps[path], reverse=True)[: 4 * MAX_RUNS]
        self._read = {path: kept for path, kept in self._read.items() if path in newest}
        runs: dict[str, dict[str, Any]] = {}
        for path in newest:
            if path not in self._read or self._read[path][0] != stamps[path]:
                try:
                    self._read[path] = stamps[path], run_summary(path)
                except ConfigurationError:  # it can't be read
                    continue
            summary = self._read[path][1]
            if summary.round is not None and len(runs) < MAX_RUNS:
                runs.setdefault(summary.run, shown_run(summary, directory))
        return list(runs.values())


def shown_run(run: RunSummary, directory: Path) -> dict[str, Any]:
    """A run as JSON for the page."""
    homes = [
        {
            **asdict(home),
            "peer_id": peer_id,
            "name": printable(home.name),
            "is_here": peer_id == run.by,
            "losses": thinned(home.losses),
            "own_losses": thinned(home.own_losses),
        }
        for peer_id, home in sorted(run.homes.items(), key=lambda one: (one[1].name, one[0]))
    ]
    place = Path(run.directory)
    name = place.relative_to(directory).as_posix() if place.is_relative_to(directory) else place.name
    return {**asdict(run), "directory": name, "homes": homes, "shared_losses": thinned(run.shared_losses)}


def thinned(curve: Curve) -> Curve:
    """At most `MAX_POINTS` of the points, with the first and the last one."""
    if len(curve) <= MAX_POINTS:
        return curve
    return [curve[place * (len(curve) - 1) // (MAX_POINTS - 1)] for place in range(MAX_POINTS)]
