"""What a check of `swarmllm doctor` is told, and what it says."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from swarmllm.config import PeerConfig
from swarmllm.invite import Invite
from swarmllm.server.settings import BlocksConfig, ServerConfig


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

    def _follow(self, invites: Sequence[Invite]) -> None:
        if not self.model:
            object.__setattr__(self, "model", next((one.model for one in invites if one.model is not None), ""))

    def server(self) -> ServerConfig:
        """What a server with these flags would be told.

        Raises:
            ConfigurationError: they can't work.
        """
        settings = {one.name: getattr(self, one.name) for one in fields(self)}
        settings["offload"] = self.offload or 0  # auto goes with --num_blocks, which here are all
        return ServerConfig(**settings, new_swarm=not self.initial_peers)


def ok(text: str) -> Finding:
    return Finding(Verdict.OK, text)


def note(text: str) -> Finding:
    return Finding(Verdict.NOTE, text)


def bad(text: str) -> Finding:
    return Finding(Verdict.BAD, text)
