"""Which GGUF file a name means, and where it is.

    path/to/file.gguf                  owner/repository/file.gguf on the hub
    directory, owner/repository        the one that it holds, if there are no other weights
    directory:Q4_K_M, owner/repository:Q4_K_M      the one that is named so among several

Called by `checkpoint` and `tokenizer`.
"""

import re
from collections.abc import Sequence

from swarmllm.errors import ConfigurationError
from swarmllm.files import user_path
from swarmllm.models.checkpoint.sources import Source, find_source
from swarmllm.models.checkpoint.stored_files import CONFIG, LAYOUTS

SUFFIX = ".gguf"
PART = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$")
_KIND = re.compile(r"(.+):([\w.-]+)")
_NO_MODEL = re.compile(r"(.*/)?(mmproj|imatrix)[^/]*")
"""Files beside models: what looks at images, and what was measured for rounding (llama.cpp's tools call them so)."""
MOST_NAMED = 12
"""Files that a message names."""


def locate(
    name_or_path: str, *, revision: str | None = None, token: str | None = None, cache_dir: str | None = None
) -> tuple[Source, str | None]:
    """The directory or repository, and the GGUF file of it that is meant; None if it holds weights of transformers.

    Raises:
        ConfigurationError: there is no such place, or not one such file.
    """
    place, filename, kind = _split(name_or_path)
    source = find_source(place, revision=revision, token=token, cache_dir=cache_dir)
    if filename is None and (kind is not None or not _has_other_weights(source)):
        filename = _only_one(source, kind)
    return source, filename


def _split(name_or_path: str) -> tuple[str, str | None, str | None]:
    """(directory or repository, GGUF file in it, what is in such a file's name)."""
    path = user_path(name_or_path)
    if name_or_path.endswith(SUFFIX) and not path.is_dir():
        if path.is_file() or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") < 2:
            return str(path.parent), path.name, None
        owner, repository, filename = name_or_path.split("/", 2)
        return f"{owner}/{repository}", filename, None
    if not path.exists() and (named := _KIND.fullmatch(name_or_path)):
        return named[1], None, named[2]
    return name_or_path, None, None


def _has_other_weights(source: Source) -> bool:
    if source.is_local:
        return any(source.local(filename) is not None for filename, _ in LAYOUTS)
    return source.path(CONFIG, required=False) is not None and any(
        source.path(filename, required=False) is not None for filename, _ in LAYOUTS
    )


def _only_one(source: Source, kind: str | None) -> str | None:
    """Raises ConfigurationError unless there is one; without `kind`, there may also be none."""
    found = sorted(
        name
        for name in source.filenames(SUFFIX)
        if not _NO_MODEL.fullmatch(name) and (not (part := PART.search(name)) or part[1] == "00001")
    )
    wanted = found
    if kind is not None:
        in_name = re.compile(rf"(^|[./_-]){re.escape(kind.lower())}($|[./-])")
        wanted = [name for name in found if in_name.search(name.lower())]
    if len(wanted) == 1:
        return wanted[0]
    if not wanted and kind is None:
        return None
    several = wanted or found
    if not several:
        raise ConfigurationError(f"{source.name} holds no GGUF files, so none of {kind}")
    some = f"{len(wanted) or 'no'} GGUF files" + (f" of {kind}" if kind else "")
    raise ConfigurationError(
        f"{source.name} holds {some}: name one of them, such as {source.name}/{several[0]} ({_listed(several)})"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
