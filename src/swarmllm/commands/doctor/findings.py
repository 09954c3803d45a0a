"""What a check of `swarmllm doctor` is told, and what it says."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from swarmllm.config import PeerConfig
from swarmllm.errors import ConfigurationError
from swarmllm.invite import Invite
from swarmllm.server.settings import BlocksConfig, ServerConfig

MOST_GB = 1e6


class Verdict(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    BAD = "BAD"


@dataclass(frozen=True)
class Finding:
    """One line of the report; what is not OK names the mend."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(BlocksConfig, PeerConfig):
    """What to look at."""

    model: str = ""
    """Hub id or directory. Can it be served here, and how many of its blocks fit?"""
    memory: tuple[str, ...] = ()
    """Memory of each machine or card, in GB, like 24 24 24: which bits fit? config.json alone is enough to know."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory and not self.model:
            raise ConfigurationError("--memory asks which bits of a model fit: name it with --model")
        for text in self.memory:
            if not re.fullmatch(r"\d*\.?\d+", text) or not 0 < float(text) < MOST_GB:
                raise ConfigurationError(
                    f"memory must be in GB, a number for each machine, like 24 24 16, not {text!r}"
                )

    def _follow(self, invites: Sequence[Invite]) -> None:
        if not self.model:
            object.__setattr__(self, "model", next((one.model for one in invites if one.model is not None), ""))

    def server(self) -> ServerConfig:
        """What a server with these flags would be told.

        Raises:
            ConfigurationError: they can't work.
        """
        settings = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "memory"}
        settings["offload"] = self.offload or 0  # auto goes with --num_blocks, which here are all
        return ServerConfig(**settings, new_swarm=not self.initial_peers)


def ok(text: str) -> Finding:
    return Finding(Verdict.OK, text)


def note(text: str) -> Finding:
    return Finding(Verdict.NOTE, text)


def bad(text: str) -> Finding:
    return Finding(Verdict.BAD, text)
