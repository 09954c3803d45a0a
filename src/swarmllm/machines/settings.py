"""Settings of a machine. `commands/up` makes its flags from these fields, so nothing heavy is imported here."""

import socket
from dataclasses import dataclass

from swarmllm.config import in_file, require_positive, take_types
from swarmllm.errors import ConfigurationError
from swarmllm.server.settings import memory_limit_bytes, require_device

NAME_CHARS = 64


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """This machine."""

    max_memory: str | None = None
    """Most memory to offer for blocks and KV caches: in GB, like 12, or a share, like 50%. None = 80 % of the free
    memory at the start."""
    nice: bool = False
    """Give way to the owner's other programs, as servers do."""
    device: tuple[str, ...] = ("auto",)
    """Torch devices; auto = all GPUs if there are any, else cpu."""
    public_name: str | None = None
    """Name of this machine for people; 64 characters at most. None = the host's name."""
    private: bool = False
    """Found a private swarm: machines join by an invite only. Without it, machines of the local network join by
    themselves, so everybody there can become a member."""
    upload_mbps: float | None = None
    """Most megabits a second of weights to send to other machines, for all of them together. None = no limit within
    the local network, 200 to machines elsewhere."""
    share_weights: bool = True
    """Give weights of models to the other machines of the swarm."""
    lan_discovery: bool = True
    """Look for the swarm on the local network, and announce it there."""
    host_maddrs: tuple[str, ...] = in_file(("/ip4/0.0.0.0/tcp/0",))
    """Multiaddresses to listen on for the other machines."""

    def __post_init__(self) -> None:
        take_types(self)
        require_positive(self, "upload_mbps")
        if self.max_memory is not None:
            memory_limit_bytes(self.max_memory)
        for name in self.device:
            if name != "auto":
                require_device(name)
        if not self.device or ("auto" in self.device and len(self.device) > 1):
            raise ConfigurationError("name each device, or leave --device out for all")
        if self.public_name is not None and not 0 < len(self.public_name) <= NAME_CHARS:
            raise ConfigurationError(f"public_name must have 1 to {NAME_CHARS} characters")

    @property
    def name(self) -> str:
        """Name for people."""
        return self.public_name or socket.gethostname()[:NAME_CHARS]
