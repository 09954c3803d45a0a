"""Settings of the gateway; `gateway/__main__` makes its flags from these fields."""

import re
from contextlib import suppress
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from swarmllm.api import (
    ClientConfig,
    ClientModelConfig,
    ConfigurationError,
    entries_of,
    in_file,
    read_text,
    require_positive,
    require_threads,
    user_path,
)

MAY_BE_0 = ("max_waiting", "max_stored_bytes")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"\*|[\w-]+(\.[\w-]+)*", re.ASCII)
_ORIGIN = re.compile(r"null|file://|[a-z][a-z0-9+.-]*://[a-z0-9._\-\[\]:]+")
"""As browsers write it: in small letters, names in other scripts as `xn--…`."""
_USUAL_PORTS = re.compile(r"http://.*:80|https://.*:443")
"""Browsers leave these out."""


@dataclass(frozen=True, kw_only=True)
class OfferedModels:
    """The models."""

    model: tuple[str, ...]
    """Hub id or local directory, as on the servers; several are offered side by side. `MODEL:ADAPTER` is a model with
    an adapter that its servers offer. Requests choose by name; without a name they get the first model."""
    served_name: tuple[str, ...] | None = None
    """Names of the models in the API, in the same order; None = their names in the swarm."""
    revision: str | None = None
    """Branch, tag or commit on the hub, if there is only one model."""
    dtype: str = field(default="auto", metadata={"alias": "torch_dtype"})
    """Type of weights and activations; auto = as in the checkpoint."""
    device: str = "cpu"
    """Torch device of the gateway's own part of each model, embeddings and head; auto = a GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class GatewayLimits:
    """Limits of a gateway."""

    max_concurrent: int = 32
    """Most requests that generate at the same time, each on a thread. Assumed: as many as one process can feed."""
    max_waiting: int = in_file(64)
    """Most requests that wait for their turn; others are answered with 429."""
    max_length: int | None = None
    """Most tokens of a prompt and its answer together. None = as many as the model has positions and servers have room
    for."""
    default_max_tokens: int = in_file(1024)
    """Tokens of a chat's answer if the request sets no limit. Servers lease their caches for that many."""
    max_choices: int = in_file(8)
    """Largest `n`: answers to one prompt, computed together."""
    max_body_bytes: int = in_file(1 << 20)
    """Largest request body."""
    max_audio_bytes: int = in_file(25 << 20)
    """Largest audio file in bytes, the same as OpenAI's. It is on the disk while it arrives and waits."""
    max_audio_s: int = in_file(1800)
    """Longest audio in seconds. Half an hour takes some 1.3 GB of memory while features are extracted."""
    max_input_bytes: int | None = in_file(None)
    """Memory for all unpacked pictures and audio, in bytes. Requests wait for it; a request that needs more than all of
    it is refused. None = a quarter of the machine's memory."""
    max_stored_bytes: int = in_file(1 << 26)
    """Memory for all kept responses of /v1/responses, in bytes; 0 = keep none."""
    max_connections: int = in_file(512)
    """Most open connections. Beyond that, an idle one is closed. The default is half of the files that Linux allows a
    process."""
    num_threads: int = 4
    """CPU threads for the gateway's own part of the model, for each request's thread. Assumed."""


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(OfferedModels, ClientConfig, GatewayLimits):
    """All settings of a gateway."""

    route_timeout_s: float = in_file(5.0)
    """Seconds to wait for servers of missing blocks. Then the answer is 503."""
    start_timeout_s: float = in_file(0.0)
    """Seconds that one try waits for a starting swarm. The gateway tries again until the swarm is complete, and says
    meanwhile which blocks are missing."""
    host: str = "127.0.0.1"
    """Address to listen on. The default is loopback, since anyone who reaches a gateway can use it."""
    port: int = 8080
    """TCP port to listen on; 0 = any free one."""
    api_keys_file: str | None = None
    """File with one API key per line. All APIs need a key then; pages, /health, /metrics and /api/swarm don't. None =
    no keys."""
    lenient: bool = in_file(False)
    """Ignore unknown fields of requests. Otherwise they are refused by name."""
    requests_per_minute: int | None = None
    """Most requests per minute for one key, or for one address if there are no keys. None = no limit."""
    cors_origins: tuple[str, ...] = in_file(())
    """Origins of other web pages that may use the API. Give them like `https://example.org`, or `*`. None by
    default."""
    allowed_hosts: tuple[str, ...] = ()
    """More host names of this gateway, such as a proxy's. Requests for other names are refused, except for localhost
    and, if the gateway listens beyond loopback, IP addresses and the machine's own name. `*` = any name, even one that
    a hostile page has made up."""
    picture_hosts: tuple[str, ...] = ()
    """Hosts from which pictures in chats are fetched. Give them like `example.org` or `10.0.0.5:8000`. `*` = any host
    with a public address, on ports 80 and 443. Without it, pictures come as data URLs only."""
    runs: str | None = in_file(None)
    """Directory with logs of common trainings, which /swarm shows to everybody. None = `runs`, if the gateway listens
    on loopback only and has no API keys; otherwise none, because logs name people's homes."""
    stop_on_stdin_eof: bool = field(default=False, metadata={"hidden": True})
    """Stop when standard input closes, so that it ends with the program that started it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_host(self.host)
        if not 0 <= self.port < 65536:
            raise ConfigurationError(f"port must be 0 to 65535, not {self.port}")
        for host in self.picture_hosts:
            host_and_port(host)
        for host in self.allowed_hosts:
            allowed_host(host)
        for origin in self.cors_origins:
            require_origin(origin)
        limits = (one.name for one in fields(GatewayLimits) if one.name not in MAY_BE_0)
        require_positive(self, "requests_per_minute", *limits)
        require_threads(self.num_threads)
        for name in MAY_BE_0:
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} can't be negative, as {getattr(self, name)} is")
        if self.served_name is not None and not all(name.strip() for name in self.served_name):
            raise ConfigurationError("a served_name is empty: give each model a name, or leave it out")
        if self.served_name is not None and len(self.served_name) != len(self.model):
            raise ConfigurationError(f"{len(self.served_name)} names were given for {len(self.model)} models")
        if len(self.model) > 1:
            for name in ("revision", "fallback_to_local", "fallback_after", "identity_path"):
                if getattr(self, name) is not None:
                    raise ConfigurationError(f"{name} is for one model only: run a gateway for each of them")

    def each_model(self) -> list[tuple[str | None, ClientModelConfig]]:
        """The chosen name of each model (None: its own), and the settings of its client."""
        found = []
        for place, model in enumerate(self.model):
            name, adapter = split_adapter(model)
            settings = self.client_settings() | ({} if adapter is None else {"active_adapter": adapter})
            config = ClientModelConfig(
                model=name, revision=self.revision, dtype=self.dtype, device=self.device, **settings
            )
            found.append((None if self.served_name is None else self.served_name[place], config))
        return found

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACK

    def runs_directory(self) -> Path | None:
        """The directory of common trainings; None: none are shown."""
        if self.runs is None and not (self.on_loopback and self.api_keys_file is None):
            return None
        return user_path(self.runs or "runs")

    def api_keys(self) -> frozenset[str]:
        """The API keys in the file; empty without a file.

        Raises:
            ConfigurationError: it can't be read, or holds none.
        """
        if self.api_keys_file is None:
            return frozenset()
        try:
            keys = frozenset(entries_of(read_text(self.api_keys_file)))
        except ConfigurationError as error:
            raise ConfigurationError(f"can't read --api_keys_file {error}") from None
        if not keys:
            raise ConfigurationError(f"--api_keys_file {self.api_keys_file} holds no keys: write one per line")
        return keys


def split_adapter(model: str) -> tuple[str, str | None]:
    """Split `MODEL:ADAPTER`. If a path of that whole name exists, it is a model."""
    name, colon, adapter = model.rpartition(":")
    return (name, adapter) if colon and name and not Path(model).exists() else (model, None)


def with_adapter(name: str, adapter: str | None) -> str:
    """The name in requests of a model with this adapter."""
    return name if adapter is None else f"{name}:{adapter}"


def host_and_port(
    text: str, setting: str = "picture_hosts", like: str = "example.org or 10.0.0.5:8000"
) -> tuple[str, int | None]:
    """A host of a setting in the form that hosts of URLs are compared with; port None: the usual ones.

    Raises:
        ConfigurationError: it is no host.
    """
    with suppress(ValueError):
        return str(ip_address(text)), None
    try:
        parts = urlsplit(f"//{text}")
        host, port = (parts.hostname or "").rstrip("."), parts.port
        name = host if ":" in host else host.encode("idna").decode()
    except ValueError:
        name, port = "", None
    is_host = ":" in name or _HOST.fullmatch(name) is not None
    if not is_host or parts.path or parts.query or parts.fragment or parts.username is not None:
        raise ConfigurationError(f"{text!r} is no host for {setting}: give it like {like}")
    return name, port


def allowed_host(text: str) -> str:
    """A host of `--allowed_hosts` in the form that names of requests are compared with.

    Raises:
        ConfigurationError: it is no host, or has a port.
    """
    name, port = host_and_port(text, "allowed_hosts", "chat.example.org")
    if port is not None:
        raise ConfigurationError(f"allowed_hosts are names without ports: give {name}, not {text!r}")
    return name


def require_host(text: str) -> None:
    """Raise ConfigurationError if this address to listen on is empty: it could mean all networks, or the default."""
    if not text.strip():
        raise ConfigurationError("host is empty: give an address of this machine, 0.0.0.0 for all, or leave it out")


def require_origin(text: str) -> None:
    """Raise ConfigurationError unless this is `*`, or an origin as browsers write it."""
    if text != "*" and (not _ORIGIN.fullmatch(text) or _USUAL_PORTS.fullmatch(text)):
        raise ConfigurationError(
            f"{text!r} is no origin for cors_origins: give it as browsers write it, like https://example.org, in small "
            "letters and without a path or the usual port, or give *"
        )
