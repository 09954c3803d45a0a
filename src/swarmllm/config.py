"""Settings that rooms share, and those of clients: frozen, validated, and the only place that reads the environment.

`server/settings` and `gateway/settings` add theirs. `command_line` makes the flags of all commands from the fields, and
their help from the docstrings below them: `--help` shows the first sentence of each, `--help_all` all of it, with the
unit and the reason for the default.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from swarmllm.errors import ConfigurationError
from swarmllm.files import has_home, user_cache_dir, user_path
from swarmllm.invite import Invite, agreed_name, merge_allowed, unpack_invites

BALANCE_QUALITY = 0.9
"""Measured in benchmarks/simulate: Petals' 0.75 moves even less, but leaves a swarm that lost some servers at three
quarters of what it could do; at 0.9 a server of a swarm in churn still moves less than once an hour."""

COMPRESSIONS = ("auto", "none", "int8")
RENEWAL_PERIODS = 0.5
RECORD_PERIODS = 1.25
"""Update periods between announcements, and until one expires: a crash shows within 1.25 periods, and one announcement
that was missed in a busy moment doesn't make a server vanish."""


def in_file(default: Any) -> Any:
    """A field that is set in Python or in the file of `--config`, and has no flag: for tuning."""
    return field(default=default, metadata={"in_file": True})


_INDICES = re.compile(r"^(\d+):(\d+)$")


def default_initial_peers() -> tuple[str, ...]:
    """`SWARMLLM_INITIAL_PEERS`: multiaddresses, or invites, separated by spaces or commas."""
    return tuple(os.environ.get("SWARMLLM_INITIAL_PEERS", "").replace(",", " ").split())


def default_cache_dir() -> str | None:
    """`SWARMLLM_CACHE`: where downloaded checkpoints go; None = the Hugging Face cache."""
    if chosen := os.environ.get("SWARMLLM_CACHE"):
        return chosen
    if has_home() or any(os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")):
        return None
    return str(user_cache_dir() / "huggingface")  # else it would be a directory called ~


def own_cache_dir() -> Path:
    """Where goes what isn't downloaded: the cache, or the user's if it is the Hugging Face cache."""
    chosen = default_cache_dir()
    return user_cache_dir() / "swarmllm" if chosen is None else user_path(chosen)


def address_book_path() -> Path:
    """Where peers that were met are kept."""
    return own_cache_dir() / "swarmllm_peers.json"


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


def parse_block_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """`"30:32,0:2"` → ((0, 2), (30, 32)), half-open, in order; of nothing nothing.

    Raises:
        ConfigurationError: it is anything else, or they overlap.
    """
    matches = [_INDICES.match(part.strip()) for part in text.split(",")] if text else []
    ranges = sorted((int(match[1]), int(match[2])) for match in matches if match is not None)
    ends = [0, *(end for _, end in ranges)]
    if None in matches or any(not before <= start < end for before, (start, end) in zip(ends, ranges, strict=False)):
        raise ConfigurationError(
            "local_blocks must be ranges START:END with START < END that don't overlap, like 0:2 or 0:2,30:32, "
            f"not {text!r}"
        )
    return tuple(ranges)


def require_directory_or_hub_id(name_or_path: str) -> None:
    """Raises ConfigurationError if it looks like a directory, but there is none."""
    directory = user_path(name_or_path)
    looks_like_a_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if not directory.is_dir() and (looks_like_a_path or directory.exists()):
        raise ConfigurationError(f"the directory {name_or_path!r} does not exist")


def require_model_place(model: str) -> None:
    """Raises ConfigurationError if it looks like a directory, but there is none.

    For commands: importing torch, to open it, would take seconds.
    """
    if model.endswith(".gguf"):  # which may be a part of one
        return
    place, colon, kind = model.rpartition(":")
    names_a_kind = colon and "/" not in kind and not user_path(model).exists()  # of a GGUF file
    require_directory_or_hub_id(place if names_a_kind else model)


FROM_STDIN = "-"
"""Value of --initial_peers: wait for a line with them on standard input. Whoever starts a whole swarm can start all
servers at once, and tells the others where the first one is while they are still importing."""


PEER_ID_PREFIX, PEER_ID_CHARS = "12D3KooW", 52
"""Of the peer ids of all Ed25519 keys."""
_NOT_BASE58 = re.compile(r"[^1-9A-HJ-NP-Za-km-z]")


def require_address(initial_peer: str) -> None:
    """Raises ConfigurationError if it can't be a multiaddress with a peer id."""
    addr, found, peer_id = initial_peer.partition("/p2p/")
    if not found or not addr.startswith("/"):
        raise ConfigurationError(
            f"the initial peer {initial_peer!r} must look like /ip4/1.2.3.4/tcp/31337/p2p/12D3Koo..."
        )
    if odd := _NOT_BASE58.search(peer_id):
        problem = f"holds {odd[0]!r}, which is in no peer id"
    elif len(peer_id) != PEER_ID_CHARS:
        problem = f"has {len(peer_id)} characters instead of {PEER_ID_CHARS}"
    elif not peer_id.startswith(PEER_ID_PREFIX):
        problem = f"doesn't begin with {PEER_ID_PREFIX}"
    else:
        return
    raise ConfigurationError(
        f"the initial peer {initial_peer!r} is not a whole address: what follows /p2p/ {problem}; "
        "copy it again from the line `join with --initial_peers`"
    )


def require_addresses(initial_peers: Sequence[str]) -> None:
    """Raises ConfigurationError if one of them can't be a multiaddress. For commands: what parses them imports much."""
    for address in initial_peers:
        if address != FROM_STDIN:
            require_address(address)


def require_positive(owner: object, *names: str) -> None:
    """Raises ConfigurationError unless these settings are None or above 0."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value > 0:
            least = "at least 1" if isinstance(value, int) else "greater than 0"
            raise ConfigurationError(f"{name} must be {least}, not {value!r}")


def require_known(name: str, value: str, known: Sequence[str]) -> None:
    """Raises ConfigurationError unless `known` holds this setting."""
    if value not in known:
        raise ConfigurationError(f"{name} {value!r} is not known; use one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model."""

    model: str
    """Hub id or local directory. All servers and clients of a swarm need the same checkpoint."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: str = field(default="auto", metadata={"alias": "torch_dtype"})
    """Type of weights and activations; auto = as in the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """The swarm."""

    initial_peers: tuple[str, ...] = field(default_factory=default_initial_peers)
    """Multiaddresses of any peers of the swarm, or an invite. They look like `/ip4/…/tcp/…/p2p/…`; three or more
    survive the loss of some."""
    lan_discovery: bool = True
    """Look for the swarm on the local network. Only if there are no initial peers; and servers announce the swarm there
    if it was begun by --new_swarm, or found so."""
    swarm_name: str | None = field(default=None, repr=False, metadata={"flag": False})
    """Name of a private swarm, whose servers are announced and found under keys of their own. Only an invite brings it,
    since others can read command lines. None = the public swarm of the model."""
    identity_path: str | None = None
    """File of the key that is this peer's id; created if missing. Servers with --allowed_clients know clients by it, an
    Ed25519 key. None = a new id at each start."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and "tuple[str" in str(one.type):  # a list, or a single one, is as good
                values = (value,) if isinstance(value, str) else value
                object.__setattr__(self, one.name, tuple(map(str, values)))
        addresses, invites = unpack_invites(self.initial_peers)
        object.__setattr__(self, "initial_peers", addresses)
        self._follow(invites)
        if self.swarm_name is None:
            object.__setattr__(self, "swarm_name", agreed_name(invites))
        if self.swarm_name is not None and not self.swarm_name:
            raise ConfigurationError("swarm_name can't be empty")
        if self.identity_path is not None and Path(self.identity_path).is_dir():
            raise ConfigurationError(f"identity_path {self.identity_path} is a directory; name a file")

    def _follow(self, invites: Sequence[Invite]) -> None:
        """Take what invites say besides addresses and the name of the swarm."""

    def _follow_lists(self, invites: Sequence[Invite], *names: str) -> None:
        for name in names:
            if getattr(self, name) is None:
                object.__setattr__(self, name, merge_allowed(getattr(invite, name) for invite in invites))


@dataclass(frozen=True, kw_only=True)
class ClientConfig(SwarmConfig):
    """How a client uses servers."""

    contributor_identity: str | None = None
    """Identity file of a server of yours that serves this model. Other servers that are short of time or room serve
    those first who serve as well; all clients of one server share a turn."""
    allowed_servers: tuple[str, ...] | None = None
    """Peer ids of the only servers to use; None = any."""
    blocked_servers: tuple[str, ...] = ()
    """Peer ids of servers never to use."""
    connect_timeout_s: float = in_file(5.0)
    """Seconds to dial one peer. A dead one fails in milliseconds, a frozen one by this timeout, or after about a second
    where others serve its blocks."""
    step_timeout_s: float = in_file(300.0)
    """Seconds that one step may compute while its servers answer pings: slow is not dead."""
    route_timeout_s: float = in_file(20.0)
    """Seconds to wait for somebody to serve missing blocks. Then comes a MissingBlocksError; also for blocks whose only
    servers are announced, but fail."""
    start_timeout_s: float = in_file(600.0)
    """Seconds to wait for a swarm that is just starting: at most a minute for one on the local network, the rest for
    blocks that servers announce they load. Assumed: a disk reads 300 GB in the meantime."""
    max_retries: int = in_file(8)
    """Attempts to repair one step or batch, as long as other servers are left, before the last error is raised."""
    ban_s: float = in_file(15.0)
    """Seconds that a peer is avoided after its first fault; doubles with each further one, at most 16-fold."""
    update_period_s: float = in_file(30.0)
    """Seconds after which a look into the DHT is stale."""
    ping_period_s: float = in_file(10.0)
    """Seconds between rounds of pings (of at most 8 servers) while the client is in use."""
    min_gain_to_move: float = in_file(0.25)
    """Share by which a route must be faster for a running session to move to it; 1 = never. What is left to generate
    must be worth the move. Lower values make sessions follow every change of load."""
    max_parallel_routes: int = in_file(4)
    """Routes over which a forward or backward batch is split, so that their servers together do most. They may share
    servers."""
    prefill_chunk_tokens: int = in_file(128)
    """Tokens (batch × seq) of one prefill step. A long prompt flows through the servers as a pipeline of these.
    Measured in benchmarks/inference.py: shorter chunks fill the pipeline better, longer ones multiply better. On GPUs
    that need more to be busy, steps are longer, up to `max_batch_tokens`."""
    max_batch_tokens: int = in_file(1024)
    """Most tokens of one micro-batch in forward and backward, for which servers announce their own cap as well, and of
    a prefill step that is longer than `prefill_chunk_tokens`."""
    compute_padding: bool = in_file(False)
    """Compute what attention_mask hides in batches, as local models do. It costs time, and matters only to those who
    look at outputs of padding: a loss or an average that takes it in. Texts are the same; see docs/training.md."""
    push: bool = in_file(True)
    """Let servers pass hidden states and gradients on to each other. If not, the client relays everything."""
    speculation: str = "auto"
    """Guess the next tokens, and check several at once: auto, off, ngram, mtp, or a small model that guesses. What is
    generated stays the same. "ngram" guesses from the text so far, "mtp" by the checkpoint's head for multi-token
    prediction; a hub id or directory names a small model of the family. "auto" is "ngram" over links with round trips
    of 20 ms, and "mtp" beside it if there is a small head. Each stops by itself where it would not pay."""
    local_blocks: str | None = None
    """Blocks that run on this machine, like 0:2 or 0:2,30:32. With the first ones here, no server sees embeddings; see
    docs/client.md. None = all run on servers."""
    activation_noise: float = in_file(0.0)
    """Noise on hidden states that leave this machine, as a share of their size. It costs quality and hides little, see
    docs/security.md. 0 = none."""
    fallback_to_local: str | None = None
    """Model that goes on with a text, on this machine, when the swarm can't be repaired: a hub id or directory, with
    the same tokenizer. It can be a smaller one of the family."""
    fallback_after: int | None = in_file(None)
    """Repairs of one text after which the local model goes on all the same. None = however many are needed."""
    active_adapter: str | None = None
    """Name of an adapter that servers offer; see `swarmllm status`. It is a hub id, or a directory's own name. Only
    servers that have it are used, all with the same version of it."""
    compression: str = "auto"
    """How hidden states and gradients travel: auto, none or int8. "none" is exactly; "int8" is 8 bits a value, half the
    bytes of bfloat16; "auto" is "int8" where it pays, in messages of 256 KiB or more over links that carry less than
    150 Mbit/s, and what servers send as their own `--compression` says. With `verify_fraction`, "auto" is "none"."""
    verify_fraction: float = in_file(0.0)
    """Share of steps and batches that other servers compute again, to find liars; 0 to 1. See batches/spot_checks.
    Batches are relayed then, whatever `push` says: a server could show this client something else than it passes on.
    Why it is off by default, docs/security.md says with figures."""
    verify_tolerance: float = in_file(0.15)
    """Relative error of a position's hidden states that this forgives; 0.5 lets servers with nf4 or int4 in. With
    `verify_fraction`, servers that may differ by more without lying are not used. The default is what weights in 8 bits
    need; 0.1 would let bfloat16 in, and 0.001 float32 only."""
    max_message_bytes: int = in_file(256 << 20)
    """Largest message that is accepted from a server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(
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
            "fallback_after",
        )
        if not self.speculation:
            raise ConfigurationError('speculation must be "auto", "off", "ngram", "mtp" or a draft model')
        parse_block_ranges(self.local_blocks or "")
        if self.fallback_after is not None and self.fallback_to_local is None:
            raise ConfigurationError("fallback_after goes with fallback_to_local, the model that goes on")
        if self.active_adapter == "":
            raise ConfigurationError("active_adapter is empty: name one that servers offer, or leave it out")
        if not 0 <= self.activation_noise < float("inf"):
            raise ConfigurationError(f"activation_noise must be 0 or more, not {self.activation_noise}")
        if not 0 <= self.verify_fraction <= 1:
            raise ConfigurationError(f"verify_fraction must be 0 to 1, not {self.verify_fraction}")
        if not 0 < self.verify_tolerance < 1:
            raise ConfigurationError(f"verify_tolerance must be above 0 and below 1, not {self.verify_tolerance}")
        require_known("compression", self.compression, COMPRESSIONS)
        if self.verify_fraction and self.compression == "auto":
            object.__setattr__(self, "compression", "none")  # what is compared closely must not have been rounded
        if not 0 <= self.min_gain_to_move <= 1:
            raise ConfigurationError(f"min_gain_to_move must be 0 to 1, not {self.min_gain_to_move}")
        if self.max_retries < 0 or self.ban_s < 0 or self.start_timeout_s < 0:
            raise ConfigurationError("max_retries, ban_s and start_timeout_s can't be negative")

    def _follow(self, invites: Sequence[Invite]) -> None:
        self._follow_lists(invites, "allowed_servers")

    def client_settings(self) -> dict[str, Any]:
        """What a client is told, by the fields' names: for those who know more than that."""
        return {one.name: getattr(self, one.name) for one in fields(ClientConfig)}


@dataclass(frozen=True, kw_only=True)
class ClientModelConfig(ModelConfig, ClientConfig):
    """A model, and how a client uses its servers."""

    device: str = "cpu"
    """Torch device of the client's own part: embeddings, final norm and head; auto = a GPU if there is one. It pays for
    large models: the head of a 70B model reads 2.1 GB for each token."""


@dataclass(frozen=True, kw_only=True)
class PeerConfig(SwarmConfig):
    """How others reach this peer."""

    port: int | None = None
    """TCP port to listen on. It replaces port 0 in `host_maddrs`; None = any free one."""
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddresses to listen on."""
    announce_maddrs: tuple[str, ...] | None = None
    """Multiaddresses to announce instead, as of a port forwarding."""
    relay: bool = True
    """Pass bytes on between peers that can't reach each other. Only to servers that have asked for it; what passes is
    encrypted from end to end."""
    relay_mbps: float = 100.0
    """Megabits a second that may pass through so, all together. Assumed: what a home or a small machine can spare."""
    stop_on_stdin_eof: bool = field(default=False, metadata={"hidden": True})
    """Stop when standard input closes: ties a peer to the program that started it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port is not None and not 0 <= self.port < 65536:
            raise ConfigurationError(f"port must be 0 to 65535, not {self.port}")
        require_positive(self, "relay_mbps")

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
