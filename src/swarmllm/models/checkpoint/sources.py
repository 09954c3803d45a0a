"""The places of files of checkpoints and adapters: a directory, or the hub.

Errors of huggingface_hub become ours here. Called by `checkpoint`, `adapters` and all code that loads saved files.
"""

import errno
import json
import os
import re
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from swarmllm.config import require_directory_or_hub_id
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError
from swarmllm.files import user_path

HUB_ANSWERS_S = 3.0
"""Assumed: a hub that takes longer to accept a connection isn't there."""
HUB_READS_S = 30.0
"""Assumed: a hub that sends nothing for so long is stuck."""
NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors of the disk of this machine while files come from the hub."""
_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([0-9a-f]{40})(?:/|$)")


class Source:
    """The place of the files of a checkpoint or adapter."""

    name: str
    public_name: str
    commit: str | None = None
    is_local: bool
    folder: str = ""
    """The folder in a repository, with a slash at the end; for directories in the hub's cache."""

    def path(self, filename: str, *, required: bool) -> Path | None:
        raise NotImplementedError

    def size(self, filename: str) -> int | None:
        """Bytes of a local file, without opening it; None on the hub."""
        raise NotImplementedError

    def local(self, filename: str) -> Path | None:
        """The file if it is here; on the hub: if it has been downloaded by now."""
        raise NotImplementedError

    def filenames(self, suffix: str) -> list[str]:
        """All files with this suffix, also in folders of a repository; without a connection, the files that are here.

        Raises:
            ConfigurationError: the hub's answer can't be used.
        """
        raise NotImplementedError

    def file(self, filename: str) -> Path:
        """A local path of the file, downloaded if needed.

        Raises:
            BlockWeightsNotFoundError: the checkpoint lacks it.
        """
        path = self.path(filename, required=True)
        assert path is not None  # required=True raises instead
        return path


class _Directory(Source):
    is_local = True

    def __init__(self, directory: Path) -> None:
        self.name = str(directory)
        self._directory = directory
        snapshot = _SNAPSHOT.search(directory.absolute().as_posix())
        self.commit = snapshot[2] if snapshot else None
        self.public_name = snapshot[1].replace("--", "/") if snapshot else directory.absolute().name
        if snapshot and (folder := directory.absolute().as_posix()[snapshot.end() :]):
            self.folder = f"{folder}/"

    def path(self, filename: str, *, required: bool) -> Path | None:
        path = self._directory / filename
        if path.is_file():
            return path
        if required:
            raise BlockWeightsNotFoundError(f"{self._directory} lacks {filename}; copy it there or download it again")
        return None

    def size(self, filename: str) -> int | None:
        path = self._directory / filename
        return path.stat().st_size if path.is_file() else -1

    def local(self, filename: str) -> Path | None:
        return self.path(filename, required=False)

    def filenames(self, suffix: str) -> list[str]:
        return [path.name for path in self._directory.glob(f"*{suffix}") if path.is_file()]


class _Hub(Source):
    is_local = False

    def __init__(self, repo_id: str, revision: str | None, token: str | None, cache_dir: str | None) -> None:
        self.name = self.public_name = repo_id
        self._options: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
        self._known: dict[str, Path | None] = {}

    def path(self, filename: str, *, required: bool) -> Path | None:
        if filename not in self._known:
            self._known[filename] = self._download(filename)
        path = self._known[filename]
        if path is None and required:
            raise BlockWeightsNotFoundError(f"{self.name} on the hub lacks {filename}, or it can't be downloaded now")
        return path

    def size(self, filename: str) -> int | None:
        return None

    def local(self, filename: str) -> Path | None:
        path = self._known.get(filename)
        return path if path is not None and path.is_file() else None

    def filenames(self, suffix: str) -> list[str]:
        try:
            about = HfApi(token=self._options["token"]).model_info(self.name, revision=self._options["revision"])
            return [one.rfilename for one in about.siblings or () if one.rfilename.endswith(suffix)]
        except (HTTPError, OSError, ValueError) as error:  # of being offline, too
            here = self._snapshot()
            if here is None:
                raise ConfigurationError(f"the files of {self.name!r} can't be listed: {first_line(error)}") from error
            return [path.relative_to(here).as_posix() for path in here.rglob(f"*{suffix}")]

    def _snapshot(self) -> Path | None:
        """The directory of the files downloaded so far."""
        where = {"revision": self._options["revision"], "cache_dir": self._options["cache_dir"]}
        try:
            return Path(snapshot_download(self.name, local_files_only=True, **where))
        except (LocalEntryNotFoundError, ValueError):
            return None

    def _download(self, filename: str) -> Path | None:
        if not self._known and not is_offline_mode() and not _hub_is_there():
            self._options["local_files_only"] = True  # else the hub's library tries for half a minute, file by file
        try:
            path = Path(hf_hub_download(self.name, filename, **self._options))
        except RepositoryNotFoundError as error:
            raise ConfigurationError(
                f"{self.name!r} is neither a directory nor a model that you may read on the hub "
                "(a private or gated one needs --token)"
            ) from error
        except LocalEntryNotFoundError as error:
            offline = is_offline_mode() or "local_files_only" in self._options
            if offline and (self.commit or self._snapshot()):  # only downloaded files are there
                return None
            raise ConfigurationError(
                f"{self.name!r} is no directory, and the hub can't be reached to look for a model of that name"
            ) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, OSError, ValueError) as error:
            require_room(self.name, error, self._options["cache_dir"])
            raise ConfigurationError(f"{self.name!r} can't be read from the hub: {first_line(error)}") from error
        snapshot = _SNAPSHOT.search(path.parent.as_posix())
        self.commit = snapshot[2] if snapshot else None
        if self.commit:  # all further files from the very same commit, even if the branch moves meanwhile
            self._options["revision"] = self.commit
        return path


def _hub_is_there() -> bool:
    """True if something answers at the hub's address; behind a proxy this can't be told."""
    place = urlsplit(constants.ENDPOINT)
    if place.hostname is None or any(getproxies().get(name) for name in (place.scheme, "all")):
        return True
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        connection = HTTPConnection(place.hostname, port, timeout=HUB_ANSWERS_S)
        connection.connect()
        connection.close()
    except OSError:
        return False
    return True


def hub_range(
    repo_id: str, commit: str, path: str, start: int, num_bytes: int, *, token: str | None = None
) -> Iterator[bytes]:
    """Bytes [start, start + num_bytes) of a file of the hub, as they come.

    Raises:
        ConfigurationError: the hub can't be reached, has no such file, or refuses it.
    """
    if num_bytes == 0:
        return
    headers = build_hf_headers(token=token) | {
        "Range": f"bytes={start}-{start + num_bytes - 1}",
        "Accept-Encoding": "identity",
    }
    left = num_bytes
    try:
        url = hf_hub_url(repo_id, path, revision=commit)
        with http_stream_backoff("GET", url, headers=headers, timeout=HUB_READS_S, max_retries=1) as answer:
            hf_raise_for_status(answer)
            skipped = start if answer.status_code == HTTPStatus.OK else 0  # by a server that knows no ranges
            for chunk in answer.iter_bytes():
                wanted = chunk[min(skipped, len(chunk)) :][:left]
                skipped -= min(skipped, len(chunk))
                left -= len(wanted)
                yield wanted
                if not left:
                    return
    except (HTTPError, OSError, ValueError) as error:
        raise ConfigurationError(f"{repo_id}/{path} can't be read from the hub: {first_line(error)}") from error
    raise ConfigurationError(f"the hub sends only {num_bytes - left} of {num_bytes} bytes of {repo_id}/{path}")


MAX_JSON_BYTES = 64 << 20
"""Assumed: the largest index of weights that is published has 9 MB."""
MAX_JSON_DEPTH = 32
"""Assumed: configs of models made of models have 6 levels. Python's own tools fail at some hundreds."""


def read_json(path: Path) -> Any:
    """The content of a checkpoint's JSON file, read as transformers does: UTF-8 without a byte order mark.

    Raises:
        ConfigurationError: it is anything else, or nested deeper than any such file.
    """
    try:
        if (num_bytes := path.stat().st_size) > MAX_JSON_BYTES:
            raise ConfigurationError(f"{path} has {num_bytes} bytes, so it is no file that describes a model")
        found = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8: save it as UTF-8 without a byte order mark") from None
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigurationError(f"{path} is not valid JSON: {first_line(error)}") from None
    level = [found]
    for _ in range(MAX_JSON_DEPTH):
        level = [one for one in level if isinstance(one, (dict, list))]
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    if level:
        raise ConfigurationError(f"{path} is nested deeper than {MAX_JSON_DEPTH} levels, so it describes no model")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The same of a file that must hold an object.

    Raises:
        ConfigurationError: it holds anything else.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} must hold a JSON object, {{…}}, not a {type(found).__name__}")
    return found


def find_source(name_or_path: str, *, revision: str | None, token: str | None, cache_dir: str | None) -> Source:
    """A directory, or else a repository of the hub.

    Raises:
        ConfigurationError: it looks like a directory, but there is none.
    """
    directory = user_path(name_or_path)
    if directory.is_dir():
        return _Directory(directory)
    require_directory_or_hub_id(name_or_path)
    return _Hub(name_or_path, revision, token, cache_dir)


def require_room(name: str, error: BaseException, cache_dir: str | None) -> None:
    """Say so if a download failed because this machine can't write it. The error may be the cause of others.

    Raises:
        ConfigurationError: it names the directory.
    """
    directory = cache_dir or constants.HF_HUB_CACHE
    cause: BaseException | None = error
    while cause is not None and not (
        isinstance(cause, OSError) and cause.errno in NOT_WRITTEN and _may_be_within(cause.filename, directory)
    ):
        cause = cause.__cause__
    if isinstance(cause, OSError):
        raise ConfigurationError(
            f"files of {name} can't be written to {directory} ({cause.strerror}): make room there, or name another "
            "directory by SWARMLLM_CACHE"
        ) from error


def _may_be_within(filename: Any, directory: str) -> bool:
    """False if an error is about a file elsewhere, like that of the hub's token. None: it doesn't say which."""
    if filename is None:
        return True
    file, top = (Path(os.path.realpath(one)) for one in (str(filename), directory))
    return file.is_relative_to(top) or top.is_relative_to(file)


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
