"""Settings of clients and servers: frozen, validated, and the only place that reads the environment.

The command-line flags take their names and defaults from these fields; each field's docstring gives its unit and the
reason for its default.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarmllm.data_structures import MAX_TTL_S, ServerInfo
from swarmllm.errors import ConfigurationError
from swarmllm.invite import Invite, agreed_name, merge_allowed, unpack_invites

BALANCE_QUALITY = 0.9
"""Measured in benchmarks/simulate: Petals' 0.75 moves even less, but leaves a swarm that lost some servers at three
quarters of what it could do; at 0.9 a server of a swarm in churn still moves less than once an hour."""

QUANT_TYPES = ("auto", "none", "int8", "nf4")
"""`models/quantization` knows what they mean; here because nothing heavy may be imported for --help."""
COMPRESSIONS = ("auto", "none", "int8")
RENEWAL_PERIODS = 0.5
RECORD_PERIODS = 1.25
"""Update periods between announcements, and until one expires: a crash shows within 1.25 periods, and one announcement
that was missed in a busy moment doesn't make a server vanish."""

_INDICES = re.compile(r"^(\d+):(\d+)$")


def default_initial_peers() -> tuple[str, ...]:
    """`SWARMLLM_INITIAL_PEERS`: multiaddresses, or invites, separated by spaces or commas."""
    return tuple(os.environ.get("SWARMLLM_INITIAL_PEERS", "").replace(",", " ").split())


def default_cache_dir() -> str | None:
    """`SWARMLLM_CACHE`: where downloaded checkpoints go; None = the Hugging Face cache."""
    return os.environ.get("SWARMLLM_CACHE") or None


def default_log_level(default: str = "INFO") -> str:
    """`SWARMLLM_LOG_LEVEL`, a name of the logging module."""
    return os.environ.get("SWARMLLM_LOG_LEVEL", default).upper()


def hub_token() -> str | None:
    """`HF_TOKEN`; huggingface_hub finds a token that was stored by its login command itself."""
    return os.environ.get("HF_TOKEN") or None


def parse_block_indices(text: str) -> tuple[int, int]:
    """`"4:12"` → (4, 12), half-open.

    Raises:
        ConfigurationError: it is anything else.
    """
    match = _INDICES.match(text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigurationError(f"block_indices must be START:END with START < END, like 0:4, not {text!r}")
    return int(match[1]), int(match[2])


def _require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value > 0:
            raise ConfigurationError(f"{name} must be greater than 0, not {value!r}")


def _require_announceable(**settings: tuple[str, Any]) -> None:
    """Raises ConfigurationError unless peers would take a record with these: field of ServerInfo = (setting, value)."""
    of_others = {"peer_id": "1" * 52, "start": 0, "end": 1}
    try:
        ServerInfo.model_validate({**of_others, **{field: value for field, (_, value) in settings.items()}})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, value = settings[str(first["loc"][0])] if first["loc"] else settings["end"]
        shown = f"{value[:20]}…" if isinstance(value, str) else repr(value)
        reason = first["msg"][:1].lower() + first["msg"][1:]
        if (most := first.get("ctx", {}).get("max_length")) is not None:
            reason = f"it may have at most {most} {'characters' if isinstance(first['input'], str) else 'entries'}"
        raise ConfigurationError(f"{name} {shown} can't be announced: {reason}") from None


def _require_known(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigurationError(f"{name} {value!r} is not known; use one of {', '.join(known)}")


def _freeze(owner: object, name: str, values: Iterable[str] | str | None) -> None:
    if isinstance(values, str):
        values = (values,)
    object.__setattr__(owner, name, None if values is None else tuple(str(value) for value in values))


def _unpack_initial_peers(owner: object, peers: Iterable[str] | str) -> tuple[Invite, ...]:
    addresses, invites = unpack_invites((peers,) if isinstance(peers, str) else map(str, peers))
    object.__setattr__(owner, "initial_peers", addresses)
    return invites


def _name_swarm(owner: "ClientConfig | PeerConfig", invites: Sequence[Invite]) -> None:
    if owner.swarm_name is None:
        object.__setattr__(owner, "swarm_name", agreed_name(invites))
    if owner.swarm_name is not None and not owner.swarm_name:
        raise ConfigurationError("swarm_name can't be empty")


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """How a client finds and uses servers."""

    initial_peers: tuple[str, ...] = field(default_factory=default_initial_peers)
    """Multiaddresses (`/ip4/…/tcp/…/p2p/…`) of any peers of the swarm, or an invite; three or more survive the loss of
    some. None at all = look for the swarm on the local network."""
    lan_discovery: bool = True
    """Whether to look on the local network if there are no initial peers."""
    swarm_name: str | None = field(default=None, repr=False)
    """Name of a private swarm, whose servers are found under keys of their own; an invite brings it. None = the public
    swarm of the model."""
    allowed_servers: tuple[str, ...] | None = None
    """Peer ids to use exclusively; None = any."""
    blocked_servers: tuple[str, ...] = ()
    """Peer ids never to use."""
    identity_path: str | None = None
    """File of the Ed25519 key that is this client's peer id, for servers with --allowed_clients; created if missing.
    None = a new id each time."""
    connect_timeout_s: float = 5.0
    """Seconds to dial one peer. A dead one fails in milliseconds, a frozen one only by this timeout."""
    step_timeout_s: float = 300.0
    """Seconds that one step may compute while its servers answer pings: slow is not dead."""
    route_timeout_s: float = 20.0
    """Seconds to wait for somebody to serve missing blocks before MissingBlocksError; also those whose only servers are
    announced, but fail."""
    max_retries: int = 8
    """Attempts to repair one step or batch, as long as other servers are left, before the last error is raised."""
    ban_s: float = 15.0
    """Seconds that a peer is avoided after its first fault; doubles with each further one, at most 16-fold."""
    update_period_s: float = 30.0
    """Seconds after which a look into the DHT is stale."""
    ping_period_s: float = 10.0
    """Seconds between rounds of pings (of at most 8 servers) while the client is in use."""
    min_gain_to_move: float = 0.25
    """A running session moves to a route that is faster by this share, if what is left to generate is worth the
    move; 1 = never. Lower values make sessions follow every change of load."""
    max_parallel_routes: int = 4
    """Routes over which a forward or backward batch is split, in proportion to their throughput."""
    prefill_chunk_tokens: int = 128
    """Tokens (batch × seq) of one prefill step: a long prompt flows through the servers as a pipeline of these.
    Measured in benchmarks/inference.py: shorter chunks fill the pipeline better, longer ones multiply better."""
    max_batch_tokens: int = 1024
    """Most tokens of one micro-batch in forward and backward; servers announce their own cap as well."""
    push: bool = True
    """Let servers pass hidden states and gradients on to each other; False relays everything through the client."""
    speculation: str = "auto"
    """Guess the next tokens and check several at once, without changing what is generated: "ngram" guesses from the
    text so far; a hub id or directory names a small model of the same family that guesses; "auto" is "ngram" over links
    that are slow enough (20 ms a round trip); "off" never. Each stops by itself where it would not pay; see
    docs/speculation.md."""
    active_adapter: str | None = None
    """Name of an adapter that servers offer (`--adapters`): a hub id, or a directory's own name. Only servers that have
    it are used, all with the same version of it."""
    compression: str = "auto"
    """How hidden states and gradients travel: "none" exactly; "int8" as 8 bits a value, half the bytes of bfloat16;
    "auto" so where it pays, that is in messages of 256 KiB or more over links that carry less than 150 Mbit/s, and what
    servers send as their own `--compression` says. With `verify_fraction`, "auto" is "none"."""
    verify_fraction: float = 0.0
    """Share of steps and batches that are run again on other servers and compared, 0 to 1; see client/spot_checks.
    Batches are relayed then, whatever `push` says: a server could show this client something else than it passes on.
    Why it is off by default, docs/security.md says with figures."""
    verify_tolerance: float = 0.15
    """Largest relative error of the hidden states of one position that such a comparison forgives. With
    `verify_fraction`, servers that may differ by more without lying are not used. The default is what weights in 8 bits
    need; 0.5 would let servers with nf4 in, and 0.1 bfloat16, 0.001 float32 only."""
    max_message_bytes: int = 256 << 20
    """Largest message that is accepted from a server."""

    def __post_init__(self) -> None:
        invites = _unpack_initial_peers(self, self.initial_peers)
        for name in ("allowed_servers", "blocked_servers"):
            _freeze(self, name, getattr(self, name))
        if self.allowed_servers is None:
            object.__setattr__(self, "allowed_servers", merge_allowed(invite.allowed_servers for invite in invites))
        _name_swarm(self, invites)
        _require_positive(
            self,
            "connect_timeout_s",
            "step_timeout_s",
            "route_timeout_s",
            "update_period_s",
            "ping_period_s",
            "max_parallel_routes",
            "prefill_chunk_tokens",
            "max_batch_tokens",
            "max_message_bytes",
        )
        if not self.speculation:
            raise ConfigurationError('speculation must be "auto", "off", "ngram" or a draft model')
        if not 0 <= self.verify_fraction <= 1:
            raise ConfigurationError(f"verify_fraction must be 0 to 1, not {self.verify_fraction}")
        if not 0 < self.verify_tolerance < 1:
            raise ConfigurationError(f"verify_tolerance must be above 0 and below 1, not {self.verify_tolerance}")
        _require_known("compression", self.compression, COMPRESSIONS)
        if self.verify_fraction and self.compression == "auto":
            object.__setattr__(self, "compression", "none")  # what is compared closely must not have been rounded
        if not 0 <= self.min_gain_to_move <= 1:
            raise ConfigurationError(f"min_gain_to_move must be 0 to 1, not {self.min_gain_to_move}")
        if self.max_retries < 0 or self.ban_s < 0:
            raise ConfigurationError("max_retries and ban_s can't be negative")

    def client_settings(self) -> dict[str, Any]:
        """What a client is told, by the fields' names: for those who know more than that."""
        return {one.name: getattr(self, one.name) for one in fields(ClientConfig)}


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """How a peer that others can reach joins the network; all that a bootstrap peer has to know."""

    initial_peers: tuple[str, ...] = field(default_factory=default_initial_peers)
    """Multiaddresses of any peers of the swarm to join, or an invite."""
    lan_discovery: bool = True
    """Whether to look for the swarm on the local network if there are no initial peers, and to announce it there if it
    was begun by --new_swarm or found so."""
    swarm_name: str | None = field(default=None, repr=False)
    """Name of a private swarm, whose servers are announced and found under keys of their own; an invite brings it."""
    identity_path: str | None = None
    """File of the Ed25519 key that is this peer's id; created if missing. None = a new id at each start."""
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddresses to listen on."""
    announce_maddrs: tuple[str, ...] | None = None
    """Multiaddresses to announce instead, e.g. behind a port forwarding."""
    port: int | None = None
    """TCP port to listen on; replaces the port in the default `host_maddrs`."""
    stop_on_stdin_eof: bool = False
    """Stop when standard input closes: ties a peer to the program that started it."""

    def __post_init__(self) -> None:
        invites = _unpack_initial_peers(self, self.initial_peers)
        self._follow(invites)
        _name_swarm(self, invites)
        for name in ("host_maddrs", "announce_maddrs"):
            _freeze(self, name, getattr(self, name))
        if self.port is not None and not 0 <= self.port < 65536:
            raise ConfigurationError(f"port must be 0 to 65535, not {self.port}")
        if self.identity_path is not None and Path(self.identity_path).is_dir():
            raise ConfigurationError(f"identity_path {self.identity_path} is a directory; name a file")

    def _follow(self, invites: Sequence[Invite]) -> None:
        """Take what invites say besides addresses."""

    @property
    def loopback_only(self) -> bool:
        """Whether only this machine can reach the peer, so that a local network is none of its business."""
        return all(maddr.startswith(("/ip4/127.", "/ip6/::1/")) for maddr in self.host_maddrs)

    @property
    def listen_maddrs(self) -> tuple[str, ...]:
        """`host_maddrs` with `port` in place of port 0."""
        if self.port is None:
            return self.host_maddrs
        return tuple(re.sub(r"/tcp/0$", f"/tcp/{self.port}", maddr) for maddr in self.host_maddrs)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(PeerConfig):
    """What one server serves and how."""

    model: str
    """Hub id or local directory."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    num_blocks: int | None = None
    """How many blocks to serve; the server picks the ones that the swarm lacks most. None = as many as fit."""
    block_indices: tuple[int, int] | None = None
    """Serve exactly blocks [START, END)."""
    new_swarm: bool = False
    """Start a new swarm instead of joining one."""
    device: str = "auto"
    """Torch device; auto = cuda if there is one, else cpu."""
    dtype: str = "auto"
    """Of weights and activations; auto = as stored in the checkpoint."""
    quant_type: str = "auto"
    """How weights are stored: none (in `dtype`), int8, nf4; auto = int8, which halves the memory and, by the figures of
    docs/benchmarks.md, costs next to nothing else."""
    throughput: float | None = None
    """Tokens per second to announce; None = measure."""
    attn_cache_tokens: int = 65536
    """KV cache budget in tokens through the whole span. Assumed: some dozens of chats of 2048 tokens."""
    prefix_cache_tokens: int = 8192
    """Tokens of prompts whose pages are kept for clients that begin with the same text, besides `attn_cache_tokens`;
    0 = none. Assumed: some dozens of system prompts. docs/security.md says what others could learn from it."""
    max_batch_tokens: int = 8192
    """Most tokens of one forward or backward request."""
    max_batch_sessions: int = 64
    """Most sessions whose steps are computed together in one forward; 1 = one after the other. Assumed: beyond it
    batches gain little, and each step waits for all."""
    adapters: tuple[str, ...] = ()
    """Adapters of peft to offer to clients: hub ids, directories, or directories of such directories. Directories are
    looked at again every `update_period`, and what is new in them is offered then."""
    compression: str = "auto"
    """How hidden states and gradients leave this server for clients that leave it to the servers: none (exactly), int8
    (8 bits a value), auto = int8 in messages of 256 KiB or more over links that carry less than 150 Mbit/s."""
    public_name: str = ""
    """Shown by `status`; 64 characters at most."""
    metrics_port: int | None = None
    """TCP port at which Prometheus can read this server's metrics; 0 = any free one, None = nowhere."""
    metrics_host: str = "127.0.0.1"
    """Address to listen on for that."""
    update_period: float = 30.0
    """Seconds between two looks at whether other blocks need this server more. It announces itself twice as often; a
    server that crashed is forgotten after 1.25 of these periods, so 720 is the most."""
    balance_quality: float = BALANCE_QUALITY
    """Move to other blocks when the swarm's bottleneck is worse than this share of what it would be then; 0 = never."""
    token: str | None = field(default_factory=hub_token, repr=False)
    """Hub token."""
    num_threads: int | None = None
    """CPU threads for computing; None = torch's default."""
    nice: bool = False
    """Give way to the owner's other programs: run at a low priority, compute less the more cores they
    keep busy, and tell the swarm, so that its clients go elsewhere."""
    allowed_clients: tuple[str, ...] | None = None
    """Peer ids that may use this server; None = any."""
    allowed_servers: tuple[str, ...] | None = None
    """Peer ids of the servers that this one counts when it chooses its blocks, and passes hidden states on to; None =
    any."""
    cache_dir: str | None = field(default_factory=default_cache_dir)
    """Where downloads go."""

    def _follow(self, invites: Sequence[Invite]) -> None:
        """A private swarm's servers serve those whom the invite names, and know no servers but those that it names."""
        for name in ("allowed_clients", "allowed_servers"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, merge_allowed(getattr(invite, name) for invite in invites))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("allowed_clients", "allowed_servers", "adapters"):
            _freeze(self, name, getattr(self, name))
        _require_positive(
            self,
            "num_blocks",
            "throughput",
            "attn_cache_tokens",
            "max_batch_tokens",
            "max_batch_sessions",
            "update_period",
            "num_threads",
        )
        start, end = self.block_indices or (0, self.num_blocks or 1)
        if self.block_indices is not None and not 0 <= start < end:
            raise ConfigurationError(f"block_indices must be START:END with START < END, like 0:4, not {start}:{end}")
        if not self.update_period <= MAX_TTL_S / RECORD_PERIODS:
            raise ConfigurationError(
                f"update_period must be at most {MAX_TTL_S / RECORD_PERIODS:g} s, not {self.update_period:g}: "
                "records must not outlive their servers for long"
            )
        _require_announceable(
            addrs=("announce_maddrs", self.announce_maddrs or ()),
            start=("block_indices", start),
            end=("num_blocks" if self.block_indices is None else "block_indices", end),
            throughput=("throughput", self.throughput or 0.0),
            cache_tokens_left=("attn_cache_tokens", self.attn_cache_tokens),
            max_batch_tokens=("max_batch_tokens", self.max_batch_tokens),
            public_name=("public_name", self.public_name),
        )
        if self.prefix_cache_tokens < 0:
            raise ConfigurationError(f"prefix_cache_tokens must be 0 (off) or more, not {self.prefix_cache_tokens}")
        if self.num_blocks is not None and self.block_indices is not None:
            raise ConfigurationError("give --num_blocks or --block_indices, not both")
        if not 0 <= self.balance_quality <= 1:
            raise ConfigurationError(f"balance_quality must be 0 to 1, not {self.balance_quality}")
        if self.new_swarm and self.initial_peers:
            raise ConfigurationError("give --new_swarm or --initial_peers, not both")
        if not self.new_swarm and not self.initial_peers and (self.loopback_only or not self.lan_discovery):
            raise ConfigurationError(
                "name peers of the swarm to join with --initial_peers (or SWARMLLM_INITIAL_PEERS), "
                "or start one with --new_swarm"
            )
        _require_known("quant_type", self.quant_type, QUANT_TYPES)
        _require_known("compression", self.compression, COMPRESSIONS)
