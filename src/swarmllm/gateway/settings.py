"""What the gateway can be told; `gateway/__main__` makes its flags from these fields."""

from dataclasses import dataclass
from pathlib import Path

from swarmllm.config import ClientConfig
from swarmllm.errors import ConfigurationError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ClientConfig):
    """One gateway: which model, for whom, and how much; and how it uses its servers."""

    model: str
    """Hub id or local directory; the same checkpoint as the servers'."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: str = "auto"
    """Of the gateway's own part of the model; auto = as stored."""
    served_name: str | None = None
    """The model's name in the API; None = as the swarm knows it."""
    fallback_to_local: str | None = None
    """Checkpoint with the same tokenizer that this machine runs alone when the swarm can't be repaired."""
    host: str = "127.0.0.1"
    """Address to listen on. Loopback by default: whoever can reach a gateway can use it."""
    port: int = 8080
    """TCP port to listen on; 0 = any free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which it may be asked besides localhost and, off loopback, numbers and the machine's own name: of the
    proxy in front of it, or what the network calls it. `*`: any, also one that a hostile page has made up."""
    cors_origins: tuple[str, ...] = ()
    """Origins (`https://…`, or `*`) of other web pages that may use the API; none by default."""
    api_keys_file: str | None = None
    """File with one API key per line; then /v1 and /ws need one of them. None = no keys."""
    requests_per_minute: int | None = None
    """Most requests of one key, or without keys of one address. None = no limit."""
    max_concurrent: int = 32
    """Requests that generate at a time, each on a thread. Assumed: what a client's one process can feed."""
    max_waiting: int = 64
    """Requests that may wait for their turn; beyond that the answer is 429."""
    max_length: int = 8192
    """Most tokens of a prompt and its answer together; the model may allow less."""
    default_max_tokens: int = 1024
    """Tokens of a chat's answer when the request doesn't say. Servers lease their caches for that many."""
    max_choices: int = 8
    """Largest `n`: answers to one prompt, computed as one batch."""
    max_body_bytes: int = 1 << 20
    """Largest request body."""
    max_connections: int = 512
    """Open at a time; beyond that, one on which nobody asks anything is closed. Half of the files that Linux lets a
    process open by default."""
    num_threads: int = 4
    """CPU threads for the gateway's own part of the model. Assumed: every request's thread has so many of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("allowed_hosts", "cors_origins"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not 0 <= self.port < 65536:
            raise ConfigurationError(f"port must be 0 to 65535, not {self.port}")
        positive = (
            "max_concurrent",
            "max_length",
            "default_max_tokens",
            "max_choices",
            "max_body_bytes",
            "max_connections",
            "num_threads",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_waiting < 0:
            raise ConfigurationError(f"max_waiting can't be negative, as {self.max_waiting} is")
        if self.requests_per_minute is not None and self.requests_per_minute < 1:
            raise ConfigurationError(f"requests_per_minute must be at least 1, not {self.requests_per_minute}")

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACK

    def api_keys(self) -> frozenset[str]:
        """The keys of the file; empty without one.

        Raises:
            ConfigurationError: it can't be read, or holds none.
        """
        if self.api_keys_file is None:
            return frozenset()
        try:
            lines = Path(self.api_keys_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"can't read --api_keys_file {self.api_keys_file}: {error}") from None
        keys = frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))
        if not keys:
            raise ConfigurationError(f"--api_keys_file {self.api_keys_file} holds no keys: write one per line")
        return keys
