"""Settings and findings of `swarmllm doctor`, and its first check: Python and the required packages.

It imports none of these packages, because they may be missing.
"""

import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from packaging.requirements import Requirement

from swarmllm.config import PeerConfig
from swarmllm.errors import ConfigurationError
from swarmllm.invite import Invite
from swarmllm.server.settings import BlocksConfig, ServerConfig
from swarmllm.version import __version__

MOST_GB = 1e6


class Verdict(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    BAD = "BAD"


@dataclass(frozen=True)
class Finding:
    """One line of the report. If it is not OK, it names the mend."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(BlocksConfig, PeerConfig):
    """The subject of the checks."""

    model: str = ""
    """Hub id or directory of a model: can it be served here, and how many of its blocks fit?"""
    memory: tuple[str, ...] = ()
    """Memory of each machine or card in GB, like 24 24 24: which bits fit? config.json is enough for this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory and not self.model:
            raise ConfigurationError("--memory asks which bits of a model fit: name it with --model")
        for text in self.memory:
            if not re.fullmatch(r"\d*\.?\d+", text) or not 0 < float(text) < MOST_GB:
                raise ConfigurationError(
                    f"memory must be in GB, one number for each machine, like 24 24 16, not {text!r}"
                )

    def _follow(self, invites: Sequence[Invite]) -> None:
        if not self.model:
            object.__setattr__(self, "model", next((one.model for one in invites if one.model is not None), ""))

    def server(self) -> ServerConfig:
        """Settings of a server with these flags.

        Raises:
            ConfigurationError: they can't work.
        """
        settings = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "memory"}
        settings["offload"] = self.offload or 0  # auto needs --num_blocks, which here are all
        return ServerConfig(**settings, new_swarm=not self.initial_peers)


def ok(text: str) -> Finding:
    return Finding(Verdict.OK, text)


def note(text: str) -> Finding:
    return Finding(Verdict.NOTE, text)


def bad(text: str) -> Finding:
    return Finding(Verdict.BAD, text)


def check_versions() -> Iterator[Finding]:
    """Check Python and every package that swarmllm requires."""
    if sys.platform != "linux":
        yield note(f"this is {platform.system()}: swarmllm has been tried on Linux only")
    wrong = list(wrong_versions(importlib.metadata.requires("swarmllm") or ()))
    yield from map(bad, wrong)
    if not wrong:
        python = platform.python_version()
        yield ok(f"swarmllm {__version__} on Python {python}; all packages are of versions that it was tested with")


def wrong_versions(
    requirements: Sequence[str], installed: Callable[[str], str] = importlib.metadata.version
) -> Iterator[str]:
    """A sentence for each requirement (without extras) that is missing or outside its range."""
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        mend = f'pip install "{requirement.name}{requirement.specifier}"'
        try:
            version = installed(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement.name} is not installed: {mend}"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} is {version}, which has not been tested: {mend}"
