"""Settings of clients, and settings that several rooms share. Frozen and validated. Only this module reads the
environment.

`server/settings` and `gateway/settings` add their own. `command_line` makes the flags of all commands from the fields.
The docstring below a field is its help: `--help` shows the first sentence, `--help_all` the whole text.
"""

import math
import os
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from swarmllm.errors import ConfigurationError
from swarmllm.files import existing_path, has_home, user_cache_dir, user_path
from swarmllm.invite import (
    FILE_SUFFIX,
    PEER_ID_CHARS,
    PEER_ID_PREFIX,
    Invite,
    agreed_name,
    merge_allowed,
    peer_id_problem,
    require_peer_ids,
    unpack_invites,
)

BALANCE_QUALITY = 0.9
"""Measured in benchmarks/simulate. Petals' 0.75 moves even less, but leaves a swarm that lost servers at three quarters
of its possible speed. At 0.9 a server in a changing swarm still moves less than once an hour."""

COMPRESSIONS = ("auto", "none", "int8")
HEADS = ("none", "int8")
RENEWAL_PERIODS = 0.5
RECORD_PERIODS = 1.25
"""RENEWAL_PERIODS: time between two announcements, in update periods. RECORD_PERIODS: lifetime of an announcement. So a
crash shows within 1.25 periods, and a busy server that misses one announcement doesn't vanish."""


def in_file(default: Any) -> Any:
    """A field for tuning. It is set in Python or in the file of `--config`, and has no flag."""
    return field(default=default, metadata={"in_file": True})


_HUB_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)([^/\s]+/[^/\s?#]+)", re.I
)
_INDICES = re.compile(r"^(\d+):(\d+)$")


def default_initial_peers() -> tuple[str, ...]:
    """Read `SWARMLLM_INITIAL_PEERS`: multiaddresses or invites, separated by spaces or commas."""
    return tuple(os.environ.get("SWARMLLM_INITIAL_PEERS", "").replace(",", " ").split())


def default_cache_dir() -> str | None:
    """Read `SWARMLLM_CACHE`, the directory for downloaded checkpoints. None = the Hugging Face cache."""
    if chosen := os.environ.get("SWARMLLM_CACHE"):
        return chosen
    if has_home() or any(os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")):
        return None
    return str(user_cache_dir() / "huggingface")  # else downloads would go to a directory called ~


def own_cache_dir() -> Path:
    """The directory for files that aren't downloaded: `SWARMLLM_CACHE`, or one in the user's cache."""
    chosen = default_cache_dir()
    return user_cache_dir() / "swarmllm" if chosen is None else user_path(chosen)


def address_book_path() -> Path:
    """The file with addresses of peers that were met before."""
    return own_cache_dir() / "swarmllm_peers.json"


def state_dir() -> Path:
    """Read `SWARMLLM_STATE_DIR`, the directory of this machine's keys, commands and weights (`swarmllm up`)."""
    if chosen := os.environ.get("SWARMLLM_STATE_DIR"):
        return user_path(chosen)
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return user_path(data) / "swarmllm" / "machine"


def default_log_level(default: str = "INFO") -> str:
    """Read `SWARMLLM_LOG_LEVEL`, a name of the logging module."""
    return (os.environ.get("SWARMLLM_LOG_LEVEL") or default).upper()


def hub_token() -> str | None:
    """Read `HF_TOKEN`. huggingface_hub itself finds a token that its login command stored."""
    return os.environ.get("HF_TOKEN") or None


def parse_block_indices(text: str) -> tuple[int, int]:
    """Parse `"4:12"` into (4, 12), half-open.

    Raises:
        ConfigurationError: the text is anything else.
    """
    match = _INDICES.match(text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigurationError(f"block_indices must be START:END with 0 <= START < END, like 0:4, not {text!r}")
    return int(match[1]), int(match[2])


def parse_block_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Parse `"30:32,0:2"` into ((0, 2), (30, 32)): half-open, sorted. An empty text gives no ranges.

    Raises:
        ConfigurationError: the text is anything else, or ranges overlap.
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


def require_model_name(model: str) -> None:
    """Raise ConfigurationError if it is empty, or the address of a web page."""
    if not model.strip():
        raise ConfigurationError("name a model: a hub id like org/name, a directory, or a GGUF file")
    if (page := _HUB_PAGE.match(model)) is not None:
        raise ConfigurationError(f"{model!r} is the address of a page: give the hub id, {page[1]}")
    if "://" in model:
        raise ConfigurationError(f"{model!r} is an address: give a hub id like org/name, a directory, or a GGUF file")


def require_directory_or_hub_id(name_or_path: str) -> None:
    """Raise ConfigurationError if the name is a file's, or looks like a directory that doesn't exist."""
    require_model_name(name_or_path)
    there = existing_path(name_or_path)
    looks_like_a_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if there is not None and there.is_dir():
        return
    if there is not None:
        raise ConfigurationError(
            f"{name_or_path!r} is no directory: give the model's directory, a file that ends with .gguf, or a hub id"
        )
    if looks_like_a_path:
        raise ConfigurationError(f"the directory {name_or_path!r} does not exist")


def require_model_place(model: str) -> None:
    """Raise ConfigurationError if the name looks like a directory that doesn't exist. For commands.

    Opening the model finds this, too, but only after torch was imported, which takes seconds.
    """
    require_model_name(model)
    if model.endswith(".gguf"):  # perhaps one of several files
        return
    place, colon, kind = model.rpartition(":")
    names_a_kind = colon and "/" not in kind and existing_path(model) is None  # of a GGUF file
    require_directory_or_hub_id(place if names_a_kind else model)


FROM_STDIN = "-"
"""Value of --initial_peers: read a line with addresses from standard input. A program can start all servers of a swarm
at once, and send the first one's address to the others while they are still importing."""


def is_of_machines(swarm_name: str | None) -> bool:
    """True if this is the name of a swarm of machines (`swarmllm up`), the peer id of the swarm's key."""
    return swarm_name is not None and len(swarm_name) == PEER_ID_CHARS and swarm_name.startswith(PEER_ID_PREFIX)


def require_address(initial_peer: str) -> None:
    """Raise ConfigurationError unless this can be a multiaddress with a peer id."""
    addr, found, peer_id = initial_peer.partition("/p2p/")
    if not found or not addr.startswith("/"):
        file = existing_path(initial_peer)
        end = "" if file is None else f", or an invite in a file whose name ends in {FILE_SUFFIX}"
        raise ConfigurationError(
            f"the initial peer {initial_peer!r} must look like /ip4/1.2.3.4/tcp/31337/p2p/12D3Koo...{end}"
        )
    if (problem := peer_id_problem(peer_id)) is not None:
        raise ConfigurationError(
            f"the initial peer {initial_peer!r} is not a whole address: what follows /p2p/ {problem}; "
            "copy it again from the line `join with --initial_peers`"
        )


def require_addresses(initial_peers: Sequence[str]) -> None:
    """Raise ConfigurationError unless all of them can be multiaddresses. For commands: the real parser is slow to
    import."""
    for address in initial_peers:
        if address != FROM_STDIN:
            require_address(address)


def require_positive(owner: object, *names: str) -> None:
    """Raise ConfigurationError unless these settings are None or above 0."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value > 0:
            least = "at least 1" if isinstance(value, int) else "greater than 0"
            raise ConfigurationError(f"{name} must be {least}, not {value!r}")


THREADS_PER_CORE = 4
"""Most threads for each core of the machine. Assumed: more threads than cores only cost time, but containers and
hyper-threads can hide some cores."""


def require_threads(num_threads: int | None) -> None:
    """Raise ConfigurationError if these are far more threads than the machine has cores: torch crashes if it can't
    start so many."""
    num_cores = os.cpu_count() or 1
    if (num_threads or 0) > THREADS_PER_CORE * num_cores:
        raise ConfigurationError(
            f"num_threads must be at most {THREADS_PER_CORE * num_cores} here, {THREADS_PER_CORE} for each of the "
            f"{num_cores} cores of this machine, not {num_threads}: more threads than cores don't compute faster"
        )


_IN_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple[str, ...]: "a list of texts",
    tuple[int, int]: "two whole numbers",
}
"""The types of settings."""


def take_types(owner: Any) -> None:
    """Bring each field of a settings object into its declared type.

    Paths, numbers and torch's types and devices become texts, lists tuples, one text a list of one, and numpy's numbers
    Python's.

    Raises:
        ConfigurationError: a value can't have the type of its field.
    """
    for name, (kind, is_optional) in _kinds_of_fields(owner.__class__).items():
        value = getattr(owner, name)
        if value is None and is_optional:
            continue
        try:
            object.__setattr__(owner, name, _as_kind(kind, value))
        except TypeError:
            wanted = _IN_WORDS[kind] + (" or None" if is_optional else "")
            raise ConfigurationError(f"{name} must be {wanted}, not {reprlib.repr(value)}") from None


@cache
def _kinds_of_fields(owner: type) -> dict[str, tuple[Any, bool]]:
    """The type of each field without `| None`, and True if it may be None."""
    kinds: dict[str, tuple[Any, bool]] = {}
    hints = get_type_hints(owner)
    for one in fields(owner):
        hint = hints[one.name]
        of_union = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        (kind,) = (kind for kind in of_union if kind is not NoneType)
        kinds[one.name] = (kind, NoneType in of_union)
    return kinds


def _as_kind(kind: Any, value: Any) -> Any:
    """Return the value as this type of `_IN_WORDS`.

    Raises:
        TypeError: it isn't one.
    """
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "numpy" and not getattr(value, "ndim", 1):
        value = value.item()
    means_text = isinstance(value, Real) or type(value).__module__ == "torch"  # 12 (GB), torch.bfloat16, a torch.device
    if kind is str and means_text and not isinstance(value, bool):
        return str(value)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    if isinstance(value, bool):  # Python takes it for a number
        raise TypeError
    if kind in (int, float) and isinstance(value, Integral):
        return int(value)
    if kind is float and isinstance(value, Real) and not math.isnan(value):
        return float(value)
    if kind == tuple[str, ...]:
        values = (value,) if isinstance(value, (str, os.PathLike)) else value
        if isinstance(values, Iterable) and not isinstance(values, (bytes, dict)):
            return tuple(_as_entry(one) for one in values)
    if kind == tuple[int, int] and isinstance(value, Sequence) and len(value) == 2:
        return tuple(_as_kind(int, one) for one in value)
    raise TypeError


def _as_entry(value: Any) -> str:
    """One entry of a list as text. Objects with a text of their own, like multiaddresses, may be in it too.

    Raises:
        TypeError: it can't be one.
    """
    if value is None or isinstance(value, (Real, bytes, dict, list, tuple)):
        raise TypeError
    return str(value)


def require_known(name: str, value: str, known: Sequence[str]) -> None:
    """Raise ConfigurationError unless the value is in `known`."""
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
    """Type of weights and activations. auto = the checkpoint's."""


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """The swarm."""

    initial_peers: tuple[str, ...] = field(default_factory=default_initial_peers)
    """Multiaddresses of any peers of the swarm, or an invite. They look like `/ip4/…/tcp/…/p2p/…`. Name three or more,
    so that the swarm is found when some are gone."""
    lan_discovery: bool = True
    """Look for the swarm on the local network. Happens only without initial peers. Servers also announce the swarm
    there, if they started it with --new_swarm or found it there."""
    swarm_name: str | None = field(default=None, repr=False, metadata={"flag": False})
    """Name of a private swarm. It decides under which keys servers are announced and found. Only an invite sets it,
    because others can read command lines. None = the public swarm of the model."""
    identity_path: str | None = None
    """File with the Ed25519 key that gives this peer its id; created if missing. Servers with --allowed_clients know a
    client by this id. None = a new id at each start."""

    def __post_init__(self) -> None:
        take_types(self)
        addresses, invites = unpack_invites(self.initial_peers)
        object.__setattr__(self, "initial_peers", addresses)
        self._follow(invites)
        if self.swarm_name is None:
            object.__setattr__(self, "swarm_name", agreed_name(invites))
        if self.swarm_name is not None and not self.swarm_name:
            raise ConfigurationError("swarm_name can't be empty")
        if self.identity_path is not None and (found := existing_path(self.identity_path)) and found.is_dir():
            raise ConfigurationError(f"identity_path {self.identity_path} is a directory; name a file")

    def _follow(self, invites: Sequence[Invite]) -> None:
        """Take over the settings in invites other than addresses and the swarm's name."""

    def _follow_lists(self, invites: Sequence[Invite], *names: str) -> None:
        for name in names:
            if getattr(self, name) is None:
                object.__setattr__(self, name, merge_allowed(getattr(invite, name) for invite in invites))


@dataclass(frozen=True, kw_only=True)
class ClientConfig(SwarmConfig):
    """How a client uses servers."""

    contributor_identity: str | None = in_file(None)
    """Identity file of a server of yours that serves this model. Busy servers serve the clients of such servers first.
    All clients of one such server together have the share of one client."""
    allowed_servers: tuple[str, ...] | None = None
    """Peer ids of the only servers to use; None = any."""
    blocked_servers: tuple[str, ...] = in_file(())
    """Peer ids of servers never to use."""
    connect_timeout_s: float = in_file(5.0)
    """Timeout for dialling one peer, in seconds. A dead peer fails in milliseconds. A frozen one fails at this timeout,
    or after about a second if others serve its blocks."""
    step_timeout_s: float = in_file(300.0)
    """Longest time for one step, in seconds, while its servers answer pings. A slow server is not a dead one."""
    route_timeout_s: float = in_file(20.0)
    """Seconds to wait until each block has a server that works. Then a MissingBlocksError is raised."""
    start_timeout_s: float = in_file(600.0)
    """Seconds to wait for a swarm that is still starting. At most a minute of it is for finding one on the local
    network, the rest for blocks that servers announce as loading. Assumed: a disk reads 300 GB in this time."""
    max_retries: int = in_file(8)
    """Attempts to repair one step or forward before the last error is raised."""
    ban_s: float = in_file(15.0)
    """Seconds to avoid a peer after its first fault. Doubles with each further fault, at most 16-fold."""
    update_period_s: float = in_file(30.0)
    """Seconds until the list of servers from the DHT is read again."""
    ping_period_s: float = in_file(10.0)
    """Seconds between rounds of pings, of at most 8 servers, while the client is in use."""
    min_gain_to_move: float = in_file(0.25)
    """Share by which another route must be faster for a session to move to it; 1 = never. The time saved on the rest of
    the text must also be longer than the move takes. With low values, sessions follow every change of load."""
    max_parallel_routes: int = in_file(4)
    """Most routes over which one forward or backward is split. The routes may share servers."""
    prefill_chunk_tokens: int = in_file(128)
    """Most tokens (batch × seq) of one prefill step. A prompt passes through the servers as a pipeline of such steps.
    Several servers get at least two steps each, as long as a step has 64 tokens, and those of 256 KiB stay as large,
    because no smaller ones are compressed over slow connections. Measured in benchmarks/inference.py: shorter steps
    fill the pipeline better, longer ones compute faster. GPUs that need more tokens get longer steps, up to
    `max_batch_tokens`."""
    max_batch_tokens: int = in_file(1024)
    """Most tokens of one micro-batch in forward and backward, and of a longer prefill step. Servers announce a limit of
    their own as well."""
    compute_padding: bool = in_file(False)
    """Compute padding in forwards, as local models do. Needed only if you use the outputs of padding, for example in an
    average. It costs time. Generated texts are the same; see docs/training.md."""
    push: bool = in_file(True)
    """Servers send hidden states and gradients to each other directly. If false, the client relays everything."""
    speculation: str = "auto"
    """Guess the next tokens and check several at once: auto, off, ngram, mtp, or a small model. Speculation never
    changes the text. "ngram" guesses from the text so far, "mtp" with the checkpoint's head for multi-token
    prediction. A hub id or directory names a small model of the same family. "auto" uses "ngram" if a round trip
    takes 20 ms or more, and "mtp" as well if the checkpoint has a small head. Each stops by itself where it doesn't
    pay."""
    local_blocks: str | None = None
    """Blocks that run on this machine, like 0:2 or 0:2,30:32. With the first blocks here, no server sees embeddings;
    see docs/client.md. None = all blocks run on servers."""
    activation_noise: float = in_file(0.0)
    """Noise added to hidden states that leave this machine, relative to their size; 0 = none. It costs quality and
    hides little, see docs/security.md."""
    fallback_to_local: str | None = None
    """Model that continues a text on this machine if the swarm can't be repaired. Hub id or directory, with the same
    tokenizer. It can be a smaller model of the family."""
    fallback_after: int | None = in_file(None)
    """Number of repairs of one text after which the local model takes over. None = no limit."""
    active_adapter: str | None = None
    """Name of an adapter that servers offer, as `swarmllm status` shows it. It is a hub id, or the name of a directory.
    Only servers that offer it are used, all with the same version."""
    compression: str = "auto"
    """Encoding of hidden states and gradients: auto, none or int8. "none" is exact. "int8" takes 8 bits a value, half
    the bytes of bfloat16. "auto" uses int8 where it pays: for messages of 256 KiB or more over connections slower
    than 150 Mbit/s, and leaves the direction from servers to their own `--compression`. With `verify_fraction`,
    "auto" means "none"."""
    head: str = in_file("none")
    """Rounding of the head's weights for writing text: none or int8. "none" rounds nothing: a head that the checkpoint
    stores in few bits is multiplied by as it is stored. "int8" reads half the memory of bfloat16 for each token, which
    pays for large vocabularies, and may change a token in rare places. Both copies take memory in addition: as much as
    the file's, or half of bfloat16's. Training uses the exact weights."""
    verify_fraction: float = in_file(0.0)
    """Share of steps and forwards to recompute on other servers, 0 to 1, to find servers that lie. Forwards are relayed
    then, even if `push` is true: otherwise a server could show this client one result and pass on another.
    docs/security.md says why it is off by default."""
    verify_tolerance: float = in_file(0.15)
    """Largest relative error of a position's hidden states in a check of `verify_fraction`. Servers are not used if
    their format of weights alone can cause a larger error. The default allows weights in 8 bits; 0.5 also allows nf4
    and int4, 0.1 only bfloat16, 0.001 only float32."""
    max_message_bytes: int = in_file(256 << 20)
    """Largest message to accept from a server, in bytes."""

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
        require_peer_ids(self, "allowed_servers", "blocked_servers")
        if not self.speculation:
            raise ConfigurationError('speculation must be "auto", "off", "ngram", "mtp" or a draft model')
        parse_block_ranges(self.local_blocks or "")
        if self.fallback_after is not None and self.fallback_to_local is None:
            raise ConfigurationError("fallback_after needs fallback_to_local, the model that continues the text")
        if self.active_adapter == "":
            raise ConfigurationError("active_adapter is empty: name one that servers offer, or leave it out")
        if not 0 <= self.activation_noise < float("inf"):
            raise ConfigurationError(f"activation_noise must be 0 or more, not {self.activation_noise}")
        if not 0 <= self.verify_fraction <= 1:
            raise ConfigurationError(f"verify_fraction must be 0 to 1, not {self.verify_fraction}")
        if not 0 < self.verify_tolerance < 1:
            raise ConfigurationError(f"verify_tolerance must be above 0 and below 1, not {self.verify_tolerance}")
        require_known("compression", self.compression, COMPRESSIONS)
        require_known("head", self.head, HEADS)
        if self.verify_fraction and self.compression == "auto":
            # checks compare closely, so nothing may be rounded on the way
            object.__setattr__(self, "compression", "none")
        if not 0 <= self.min_gain_to_move <= 1:
            raise ConfigurationError(f"min_gain_to_move must be 0 to 1, not {self.min_gain_to_move}")
        if self.max_retries < 0 or self.ban_s < 0 or self.start_timeout_s < 0:
            raise ConfigurationError("max_retries, ban_s and start_timeout_s can't be negative")

    def _follow(self, invites: Sequence[Invite]) -> None:
        self._follow_lists(invites, "allowed_servers")

    def client_settings(self) -> dict[str, Any]:
        """The settings of a client alone, for configs that hold more than these."""
        return {one.name: getattr(self, one.name) for one in fields(ClientConfig)}


@dataclass(frozen=True, kw_only=True)
class ClientModelConfig(ModelConfig, ClientConfig):
    """A model, and how a client uses its servers."""

    device: str = "cpu"
    """Torch device of the client's part (embeddings, final norm, head); auto = a GPU if there is one. A GPU helps with
    large models: the head of a 70B model reads 2.1 GB for each token."""


@dataclass(frozen=True, kw_only=True)
class PeerConfig(SwarmConfig):
    """How others reach this peer."""

    port: int | None = None
    """TCP port to listen on; None = any free one. It replaces port 0 in `host_maddrs`."""
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddresses to listen on."""
    announce_maddrs: tuple[str, ...] | None = None
    """Multiaddresses to announce instead, for example those of a port forwarding."""
    relay: bool = True
    """Relay bytes between peers that can't reach each other. This peer relays only to servers that have asked it to.
    The bytes are encrypted from end to end."""
    relay_mbps: float = in_file(100.0)
    """Most megabits a second to relay, for all peers together. Assumed: a home or a small machine can spare as much."""
    stop_on_stdin_eof: bool = field(default=False, metadata={"hidden": True})
    """Stop when standard input closes: ties a peer to the program that started it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port is not None and not 0 <= self.port < 65536:
            raise ConfigurationError(f"port must be 0 to 65535, not {self.port}")
        if self.port is not None and not any(maddr.endswith(f"/tcp/{self.port}") for maddr in self.listen_maddrs):
            raise ConfigurationError(
                f"port {self.port} is in no address of host_maddrs ({' '.join(self.host_maddrs)}): leave port out, or "
                "end an address in /tcp/0"
            )
        require_positive(self, "relay_mbps")

    @property
    def loopback_only(self) -> bool:
        """True if only this machine can reach the peer. Then it doesn't use the local network either."""
        return all(maddr.startswith(("/ip4/127.", "/ip6/::1/")) for maddr in self.host_maddrs)

    @property
    def listen_maddrs(self) -> tuple[str, ...]:
        """`host_maddrs` with `port` in place of port 0."""
        if self.port is None:
            return self.host_maddrs
        return tuple(re.sub(r"/tcp/0$", f"/tcp/{self.port}", maddr) for maddr in self.host_maddrs)
