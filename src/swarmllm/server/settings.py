"""Settings of a server. `server/__main__` makes its flags from these fields, and `swarmllm doctor` some of its
flags."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from swarmllm.config import (
    BALANCE_QUALITY,
    COMPRESSIONS,
    RECORD_PERIODS,
    ModelConfig,
    PeerConfig,
    default_cache_dir,
    hub_token,
    in_file,
    require_known,
    require_positive,
    require_threads,
)
from swarmllm.data_structures import MAX_TTL_S, ServerInfo, size_in_words
from swarmllm.errors import ConfigurationError
from swarmllm.invite import Invite, require_peer_ids

QUANT_TYPES = (
    "auto", "none", "int8", "q8_0", "q6_k", "q5_k", "q4_k", "nf4", "llm_int8", "int2", "int3", "q3.5", "int4", "int5",
    "int6",
)  # fmt: skip
"""Formats of weights, described in `models/quantization`; listed here because --help may import nothing heavy."""

ACTIVATIONS = ("auto", "none", "int8")
SEARCHED = ("q8_0", "q6_k", "q5_k", "q4_k")
"""Types whose search reads a calibration."""

DEVICE_KINDS = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that blocks can compute on; the last two have never been tried."""

MAX_TENSOR_PARALLEL = 16
"""Assumed: no machine has more devices that are worth sharing a block."""

REACHABILITIES = ("auto", "public", "private")


@dataclass(frozen=True, kw_only=True)
class BlocksConfig(ModelConfig):
    """Settings of blocks: format, devices, memory."""

    quant_type: str = "auto"
    """Format of weights in memory: none, int8 (= auto), q8_0, q6_k, q5_k, q4_k …; "none" keeps them in `dtype`. int8
    takes half the memory of bfloat16. q8_0 is the closest to "none", with 8.5 bits a weight. q6_k (6.6 bits), q5_k
    (5.5) and q4_k (4.5) are llama.cpp's formats, with scales found by search. If the length of a row is not a multiple
    of 256, another format replaces them, as in llama.cpp: q8_0 for q6_k, 6 bits for q5_k, 5.5 for q4_k. nf4, q3.5 and
    int2 to int6 round without a search, and change small models much (docs/benchmarks.md). llm_int8 has the weights of
    int8, and rounds their inputs, too. Weights that the checkpoint stores in few bits stay as they are."""
    activations: str = "none"
    """Rounding of the inputs of quantized weights in sessions: auto, none or int8. "none" multiplies them as they are.
    "int8" rounds them to 8 bits, token by token in groups of 32, on CPUs. Prompts and several sessions are computed up
    to twice as fast then; docs/hosting-rare.md says what it costs. "auto" = on processors with VNNI, for
    weights that gain by it. Forwards without a session, which trainings use, never round."""
    device: tuple[str, ...] = ("auto",)
    """Torch devices; auto = all GPUs if there are any, else cpu. Each of several devices gets a server process of its
    own, with an equal share of the blocks. `num_blocks` and `block_indices` count for all devices together, all other
    settings for each of them. Each process takes the next port."""
    tensor_parallel: int = 1
    """Number of devices that compute each block together, each in a process of its own. A device has some attention
    heads with their KV cache, some features of each MLP, and parts of the other matrices; or parts of all matrices
    only, where the blocks don't allow more. `--device` names that many devices for each server, or cpu once. Use it for
    blocks that one device can't hold, or reads too slowly."""
    offload: int | None = 0
    """Number of blocks that are in the device's memory only while they compute. Before that, they are in host memory if
    the device is a GPU, on disk if it is a CPU. auto = as many of the requested blocks as don't fit. Steps then wait
    for copies: this is better for long prompts and training than for generating text."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of a server: threads, memory, sessions, and the size of requests."""

    num_threads: int | None = None
    """CPU threads for computing; None = torch's default."""
    nice: bool = False
    """Give way to the owner's other programs. Run at a low priority, compute less the more cores they keep busy, and
    tell the swarm, so that clients use other servers."""
    throughput: float | None = None
    """Tokens per second to announce; auto = measure."""
    attn_cache_tokens: int = 65536
    """KV cache budget in tokens through the whole span, as far as memory allows. Assumed: some dozens of chats of 2048
    tokens."""
    max_memory: str | None = None
    """Most memory for blocks and KV caches: in GB, like 12, or a share of the device's memory, like 50%. None = 80 % of
    the free memory at the start. A GB is 10^9 bytes, as everywhere here; 12GiB are 12 · 2^30 bytes."""
    prefix_cache_tokens: int = 8192
    """Tokens of prompts whose results are kept for sessions with the same prefix; 0 = off. They come on top of
    `attn_cache_tokens`. Assumed: some dozens of system prompts. docs/security.md describes what other clients could
    learn from it."""
    max_sessions: int | None = None
    """Most sessions of all clients together; None = as many as the KV cache holds."""
    idle_unload: float | None = None
    """Seconds without use after which blocks leave the memory. An open session counts as use. The next request waits
    until the blocks are loaded again. None = they stay."""
    max_batch_tokens: int = 8192
    """Most tokens of one forward or backward request."""
    max_batch_sessions: int = in_file(64)
    """Most sessions whose steps are computed together; 1 = one after the other. Assumed: larger batches gain little,
    and each step waits for all."""
    compression: str = "auto"
    """Default compression of hidden states and gradients: auto, none or int8. Clients may choose another. none = exact;
    int8 = 8 bits a value; auto = int8 in messages of 256 KiB or more over connections slower than 150 Mbit/s."""
    token: str | None = field(default_factory=hub_token, repr=False)
    """Hub token."""
    cache_dir: str | None = field(default_factory=default_cache_dir, metadata={"in_file": True})
    """Directory for downloads. SWARMLLM_CACHE sets it for all commands."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(BlocksConfig, PeerConfig, ServerLimits):
    """Settings of a server: its blocks, its swarm, and its clients."""

    num_blocks: int | None = None
    """Number of blocks to serve; auto (or without it) = as many as fit. The server takes blocks that the swarm lacks
    most."""
    block_indices: tuple[int, int] | None = None
    """Serve exactly blocks [START, END)."""
    device_map: tuple[str, ...] = ()
    """Number of blocks for each device: cuda:0=12 cpu=4. It replaces `device` and `num_blocks`. With `block_indices`,
    the devices share those blocks in this order. Each device has a server process of its own."""
    calibration: str | None = None
    """File that `swarmllm calibrate` has written for this model. The search of q8_0, q6_k, q5_k and q4_k then lets an
    error count more if the inputs of that weight are large. None = all errors count alike."""
    machine: str = field(default="", metadata={"flag": False})
    """Name of the servers that were started together, for several devices of one machine."""
    peers_beside: bool = field(default=False, metadata={"flag": False})
    """True if the initial peers are the other servers of this machine, and the owner has named none."""
    new_swarm: bool = False
    """Start a new swarm instead of joining one."""
    adapters: tuple[str, ...] = ()
    """Adapters of peft to offer: hub ids or directories. Safetensors only. A directory may hold several adapters; it is
    read again every `update_period`, and new ones are offered then."""
    reachability: str = "auto"
    """How other peers reach this server: auto, public or private. auto = ask some of them; private = they can't dial
    it, so they reach it through relays. `--announce_maddrs` means public."""
    direct_port: int | None = None
    """TCP port on which other peers send hidden states without passing libp2p's daemons, which is faster. auto = any
    free one, and none with `announce_maddrs`, because others couldn't reach it; 0 = none. Peers that can't reach it use
    the daemons."""
    public_name: str | None = None
    """Name for `status` and web pages; 64 characters at most. None = the host's name and the end of the peer id. Give
    an empty text to announce no name."""
    allowed_clients: tuple[str, ...] | None = None
    """Peer ids of clients that may use this server; None = any."""
    priority_clients: tuple[str, ...] = ()
    """Peer ids of clients that come first when the server is busy or full. Other clients then have a tenth of the time.
    Clients that serve this model themselves come first as well (`contributor_identity` of clients)."""
    allowed_servers: tuple[str, ...] | None = None
    """Peer ids of the other servers to work with; None = any. This server passes hidden states on to them alone, and
    counts only their blocks when it chooses its own."""
    balance_quality: float = BALANCE_QUALITY
    """Readiness to move to other blocks, 0 (never) to 1. The server moves if the swarm's slowest blocks are slower now
    than this share of their speed after the move."""
    update_period: float = 30.0
    """Seconds between two looks at the swarm; 720 at most. The server announces itself twice as often. After a crash,
    the swarm forgets it within 1.25 of these periods."""
    metrics_port: int | None = None
    """TCP port for Prometheus metrics; 0 = any free one. None = no metrics."""
    metrics_host: str = "127.0.0.1"
    """Address to listen on for metrics."""

    @property
    def blocks_by_device(self) -> list[tuple[str, int]]:
        """The devices of `device_map`, each with its number of blocks.

        Raises:
            ConfigurationError: it can't be read.
        """
        entries = [entry.rpartition("=") for entry in self.device_map]
        if not all(name and count.isdecimal() and int(count) > 0 for name, _, count in entries):
            raise ConfigurationError(
                f"device_map must be devices with their numbers of blocks, like cuda:0=12 cpu=4, not "
                f"{' '.join(self.device_map)}"
            )
        return [(name, int(count)) for name, _, count in entries]

    @property
    def total_blocks(self) -> int | None:
        """Number of blocks that the settings ask for; None if as many as fit."""
        if self.block_indices is not None:
            return self.block_indices[1] - self.block_indices[0]
        return self.num_blocks or sum(count for _, count in self.blocks_by_device) or None

    @property
    def announces_on_lan(self) -> bool:
        """True if this server also announces the swarm on the local network: it began it, or found it there."""
        return self.lan_discovery and not self.swarm_name and (not self.initial_peers or self.peers_beside)

    def _follow(self, invites: Sequence[Invite]) -> None:
        """Take clients and servers from invites to private swarms: only the listed ones are served and known."""
        self._follow_lists(invites, "allowed_clients", "allowed_servers")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(
            self,
            "num_blocks",
            "throughput",
            "attn_cache_tokens",
            "max_sessions",
            "idle_unload",
            "max_batch_tokens",
            "max_batch_sessions",
            "update_period",
            "num_threads",
            "tensor_parallel",
        )
        if self.prefix_cache_tokens < 0:
            raise ConfigurationError(f"prefix_cache_tokens must be 0 (off) or more, not {self.prefix_cache_tokens}")
        if not 0 <= self.balance_quality <= 1:
            raise ConfigurationError(f"balance_quality must be 0 to 1, not {self.balance_quality}")
        self._require_ports()
        require_peer_ids(self, "allowed_clients", "priority_clients", "allowed_servers")
        require_threads(self.num_threads)
        if self.max_memory is not None:
            memory_limit_bytes(self.max_memory)
        require_known("quant_type", self.quant_type, QUANT_TYPES)
        require_known("activations", self.activations, ACTIVATIONS)
        if self.calibration is not None and self.quant_type not in SEARCHED:
            raise ConfigurationError(
                f"--calibration is for weights that are rounded by a search: give --quant_type {', '.join(SEARCHED)}, "
                f"or leave --calibration out (quant_type is {self.quant_type})"
            )
        require_known("compression", self.compression, COMPRESSIONS)
        require_known("reachability", self.reachability, REACHABILITIES)
        if self.reachability == "private" and self.announce_maddrs:
            raise ConfigurationError("give --announce_maddrs, or --reachability private, which means there are none")
        if self.reachability == "private" and self.new_swarm:
            raise ConfigurationError(
                "no peer could join a swarm whose first server is private: join a swarm, or leave --reachability out"
            )
        self._require_devices()
        self._require_device_map()
        self._require_tensor_parallel()
        self._require_offload()
        self._require_blocks_and_record()
        self._require_swarm()

    def _require_ports(self) -> None:
        """Raise ConfigurationError if a port can't be one, or an address has none."""
        for name in ("direct_port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 1 << 16:
                raise ConfigurationError(f"{name} must be 0 to 65535, not {port}")
        if self.metrics_host != ServerConfig.metrics_host and self.metrics_port is None:
            raise ConfigurationError(
                f"metrics_host {self.metrics_host} needs metrics_port: without it, the server has no metrics"
            )
        for (name, host, port), (other, of_other, same) in itertools.combinations(self._listeners(), 2):
            if port == same and name != other and _overlap(host, of_other):
                raise ConfigurationError(f"{name} and {other} are both {port}: choose another {other}")

    def _listeners(self) -> Iterator[tuple[str, str, int]]:
        """(setting, address, port) of everything that listens at a port with a fixed number."""
        for maddr in self.listen_maddrs:
            if place := re.match(r"/ip[46]/([^/]+)/tcp/(\d+)", maddr):
                if int(place[2]):
                    yield "port", place[1], int(place[2])
                if self.direct_port:
                    yield "direct_port", place[1], self.direct_port
        if self.metrics_port:
            host = "127.0.0.1" if self.metrics_host == "localhost" else self.metrics_host
            yield "metrics_port", host, self.metrics_port

    def _require_device_map(self) -> None:
        """Raise ConfigurationError if another setting names devices too, or disagrees about the number of blocks."""
        if not self.device_map:
            return
        shares = self.blocks_by_device
        num_blocks = sum(count for _, count in shares)
        if len(shares) == 1:
            raise ConfigurationError(
                f"device_map is for several devices: give --device {shares[0][0]} --num_blocks {num_blocks}"
            )
        if self.device != ("auto",) or self.num_blocks is not None:
            raise ConfigurationError("device_map names devices and their blocks: leave --device and --num_blocks out")
        if self.tensor_parallel > 1:
            raise ConfigurationError("give --device_map or --tensor_parallel, not both")
        start, end = self.block_indices or (0, num_blocks)
        if end - start != num_blocks:
            raise ConfigurationError(f"device_map has {num_blocks} blocks, and block_indices {end - start}")

    def _require_devices(self) -> None:
        """Raise ConfigurationError unless these are names of devices."""
        if not self.device:
            raise ConfigurationError("name a device, or leave --device out")
        names = [name for name, _ in self.blocks_by_device] or self.device
        if "auto" in names and (len(names) > 1 or self.device_map):
            raise ConfigurationError("auto is for all devices, not one of several: name each, or leave --device out")
        for name in names:
            if name != "auto":
                require_device(name)

    def _require_tensor_parallel(self) -> None:
        """Raise ConfigurationError unless this many devices can share blocks."""
        if self.tensor_parallel > MAX_TENSOR_PARALLEL:
            raise ConfigurationError(
                f"tensor_parallel must be 1 to {MAX_TENSOR_PARALLEL}, not {self.tensor_parallel}: that many processes "
                "would be started"
            )
        if self.tensor_parallel > 1 and self.activations == "int8":
            raise ConfigurationError("blocks of several devices don't round their inputs: leave --activations out")
        if self.tensor_parallel > 1 and self.offload != 0:
            raise ConfigurationError(
                "give --offload or --tensor_parallel, not both: shared blocks can't be offloaded yet"
            )
        if self.tensor_parallel > 1 and len({name.partition(":")[0] for name in self.device}) > 1:
            raise ConfigurationError("devices that share blocks must be of one kind: name CPUs or GPUs, not both")

    def _require_offload(self) -> None:
        """Raise ConfigurationError unless this many blocks can be offloaded."""
        if self.offload is not None and (self.offload < 0 or self.offload == 1):
            raise ConfigurationError(
                f"offload must be 0 (none), auto, or at least 2, not {self.offload}: one of them is always in memory"
            )
        num_blocks = self.total_blocks or 0
        if (self.offload or 0) > num_blocks > 0:
            raise ConfigurationError(f"of {num_blocks} blocks, {self.offload} can't be offloaded")
        if self.offload is None and num_blocks == 0:
            raise ConfigurationError("--offload auto needs --num_blocks or --block_indices")

    def _require_blocks_and_record(self) -> None:
        """Raise ConfigurationError unless such blocks can exist, and peers would take a record of them."""
        if self.num_blocks is not None and self.block_indices is not None:
            raise ConfigurationError("give --num_blocks or --block_indices, not both")
        start, end = self.block_indices or (0, self.num_blocks or 1)
        if self.block_indices is not None and not 0 <= start < end:
            raise ConfigurationError(
                f"block_indices must be START:END with 0 <= START < END, like 0:4, not {start}:{end}"
            )
        _require_announceable(
            addrs=("announce_maddrs", self.announce_maddrs or ()),
            start=("block_indices", start),
            end=("num_blocks" if self.block_indices is None else "block_indices", end),
            throughput=("throughput", self.throughput or 0.0),
            cache_tokens_left=("attn_cache_tokens", self.attn_cache_tokens),
            max_batch_tokens=("max_batch_tokens", self.max_batch_tokens),
            public_name=("public_name", self.public_name or ""),
        )

    def _require_swarm(self) -> None:
        """Raise ConfigurationError unless the settings name a swarm to join or start, and announcements are frequent
        enough."""
        if not self.update_period <= MAX_TTL_S / RECORD_PERIODS:
            raise ConfigurationError(
                f"update_period must be at most {MAX_TTL_S / RECORD_PERIODS:g} s, not {self.update_period:g}: "
                "records must not outlive their servers for long"
            )
        if self.new_swarm and self.initial_peers:
            raise ConfigurationError("give --new_swarm or --initial_peers, not both")
        if not self.new_swarm and not self.initial_peers and (self.loopback_only or not self.lan_discovery):
            raise ConfigurationError(
                "name peers of the swarm to join with --initial_peers (or SWARMLLM_INITIAL_PEERS), "
                "or start one with --new_swarm"
            )


def require_device(name: str) -> None:
    """Raise ConfigurationError unless it is the name of a device that blocks can compute on."""
    kind, colon, index = name.partition(":")
    if kind not in DEVICE_KINDS or (colon and not index.isdecimal()) or (kind == "cpu" and index not in ("", "0")):
        raise ConfigurationError(f"device {name!r} can't be used: name one of {', '.join(DEVICE_KINDS)}, like cuda:1")


def _overlap(first: str, second: str) -> bool:
    """True if one port can't be used at both addresses: `0.0.0.0` is all of IPv4, `::` may be all of both kinds."""
    all_of_ipv4 = "0.0.0.0" in (first, second) and ":" not in first + second
    return first == second or "::" in (first, second) or all_of_ipv4


def memory_limit_bytes(text: str, total_bytes: int = 1 << 62) -> int:
    """Return the bytes of `max_memory` on a device with this much memory. The default: whatever it has.

    Raises:
        ConfigurationError: it can't be read, or is more than that.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) *(%|GB|GiB)?", str(text).strip())
    units = {"%": total_bytes / 100, "GiB": 1 << 30}
    limit = 0.0 if found is None else float(found[1]) * units.get(found[2], 1e9)
    if not limit > 0:
        raise ConfigurationError(
            f"max_memory must be in GB, like 12, or a share of the device's memory, like 50%, not {text!r}"
        )
    if limit > total_bytes:
        most = "100%" if str(text).strip().endswith("%") else f"the {size_in_words(total_bytes)} that the device has"
        raise ConfigurationError(f"max_memory {text!r} is more than {most}")
    return int(limit)


def _require_announceable(**settings: tuple[str, Any]) -> None:
    """Raise ConfigurationError unless peers would take a record with these values: field of ServerInfo = (setting,
    value)."""
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
