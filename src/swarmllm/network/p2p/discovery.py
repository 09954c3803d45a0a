"""Find peers on the same local network (LAN) by multicast DNS, so that nobody has to type addresses.

A server that began a swarm, or found it this way, announces one service `<peer id>._swarmllm._tcp.local.` per process,
with its addresses and the fingerprint of its checkpoint. It does so before it loads blocks, so that peers that start at
the same time find it. Servers and clients without addresses listen for a while and join peers with the same
fingerprint, so swarms of different models never mix. Servers, clients and commands use it. zeroconf is imported only
when needed.

A machine of `swarmllm up` announces its swarm of machines in the same way, marked as `machines`. Its fingerprint is the
swarm's id. Servers and clients skip such announcements: they look for a model.

Programs on a machine whose agent runs find its swarm by `find_swarm_here`, a file that the agent keeps.

Anyone on the network can announce anything. So all input is limited and checked, and is trusted no more than an address
that the user typed.
"""

import asyncio
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Self

from swarmllm.config import state_dir
from swarmllm.data_structures import printable
from swarmllm.errors import ConfigurationError, MissingBlocksError
from swarmllm.network.p2p.identity import is_peer_id

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

logger = logging.getLogger(__name__)

SERVICE = "_swarmllm._tcp.local."
LOOK_S = 3.0
"""Seconds to listen for the first peer. Answers come within 0.2 s, or 1.2 s if a packet was lost."""
LOOK_ON_S = 60.0
"""Seconds to go on listening if no swarm of the checkpoint is heard. Assumed: longer than a server that starts at the
same time takes to import and to read its checkpoint."""
GRACE_S = 0.3
"""Seconds to listen for more peers after the first answer."""
MAX_FOUND = 32
"""Most peers of one look. A few are enough to join."""
MAX_HEARD = 256
"""Most services to ask for details. The others of a noisy network are ignored."""
MAX_ADDRESSES = 4
"""Most addresses of one peer."""
MAX_NAME_CHARS = 256
HERE_FILE = "here.json"
"""File in the state directory, in which the agent of this machine tells the fields of `SwarmHere`."""
DIAL_TIMEOUT_S = 1.0
_TCP = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})/")


@dataclass(frozen=True)
class FoundPeer:
    """One peer of the local network, as it announces itself."""

    peer_id: str
    maddrs: tuple[str, ...]
    """Addresses to use as initial peers."""
    model: str
    fingerprint: str
    machines: bool = False
    """True if it belongs to a swarm of machines, whose id is the fingerprint."""


@dataclass(frozen=True)
class SwarmHere:
    """The swarm of machines that this machine is in, by `swarmllm up`."""

    name: str
    """For people."""
    swarm_name: str
    """Its name in the DHT."""
    initial_peers: tuple[str, ...]
    models: Mapping[str, str]
    """Names of the models that it should serve, by their fingerprints."""
    places: tuple[str, ...]
    """For each of these models the value of --model; "": the part of a client isn't on this machine yet."""

    @property
    def told(self) -> str:
        """Half a sentence for people."""
        served = ", ".join(sorted(self.models.values())) or "no model"
        return f"the swarm of this machine ({self.name}, by `swarmllm up`) serves {served}"


class LanAnnouncement:
    """Announces this peer on the local network, from `start()` until `end()`. Use it with `async with`.

    `addrs` are the peer's multiaddresses. If all of them are of this machine only, nothing is announced.
    """

    def __init__(
        self, peer_id: str, addrs: Sequence[str], *, model: str, fingerprint: str, machines: bool = False
    ) -> None:
        self._peer_id = peer_id
        self._properties: dict[str, str | bytes] = {"fingerprint": fingerprint, "model": model.encode()[:200]}
        if machines:
            self._properties["machines"] = "1"
        self._ips, self._port = lan_addresses(addrs)
        self._task: asyncio.Task[None] | None = None
        self._zeroconf: AsyncZeroconf | None = None

    def start(self, interfaces: Sequence[str] | None = None) -> None:
        """Begin, in the background. Harmless if called twice."""
        if self._task is None and self._ips:
            self._task = asyncio.get_running_loop().create_task(self._announce(interfaces), name="announce on the LAN")

    async def _announce(self, interfaces: Sequence[str] | None) -> None:
        zeroconf, asynchronous = _import_zeroconf()
        info = asynchronous.AsyncServiceInfo(
            SERVICE,
            f"{self._peer_id}.{SERVICE}",
            addresses=[socket.inet_aton(ip) for ip in self._ips],
            port=self._port,
            properties=self._properties,
            server=f"{self._peer_id}.local.",
        )
        try:
            self._zeroconf = asynchronous.AsyncZeroconf(
                interfaces=list(interfaces or self._ips), ip_version=zeroconf.IPVersion.V4Only
            )
            # The name is a peer id. Nobody else has it, so zeroconf needn't check for a second whether it is free.
            await (await self._zeroconf.async_register_service(info, cooperating_responders=True))
        except (OSError, zeroconf.Error) as error:
            logger.warning("this machine can't announce the swarm on the local network: %s", error)
            return
        logger.info("others on this network find the swarm without addresses (--no_lan_discovery turns that off)")

    async def announced(self) -> None:
        """Return when the announcement was sent, or failed."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def end(self) -> None:
        """Withdraw the announcement."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._zeroconf is not None:
            await self._zeroconf.async_close()
            self._zeroconf = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()


async def find_peers(
    enough: Callable[[FoundPeer], bool] = lambda _: True,
    *,
    timeout_s: float | None = None,
    interfaces: Sequence[str] | None = None,
) -> tuple[FoundPeer, ...]:
    """Find peers that announce themselves on the local network. Returns soon after the first that is `enough`."""
    zeroconf, asynchronous = _import_zeroconf()
    timeout_s = LOOK_S if timeout_s is None else timeout_s
    try:
        network = asynchronous.AsyncZeroconf(
            interfaces=list(interfaces) if interfaces else zeroconf.InterfaceChoice.All,
            ip_version=zeroconf.IPVersion.V4Only,
        )
    except OSError as error:
        logger.warning("this machine can't look for swarms on the local network: %s", error)
        return ()
    look = _Look(network, asynchronous.AsyncServiceInfo, enough, time.monotonic() + timeout_s)
    browser = asynchronous.AsyncServiceBrowser(network.zeroconf, SERVICE, handlers=[look.on_change])
    try:
        async with asyncio.timeout(timeout_s):
            await look.has_enough.wait()
        await asyncio.sleep(GRACE_S)
    except TimeoutError:
        pass
    finally:
        await look.end()
        await browser.async_cancel()
        await network.async_close()
    return tuple(look.found[peer_id] for peer_id in sorted(look.found))


_sought: set[str] = set()
"""Fingerprints of swarms whose search was logged. A gateway looks again until it finds one."""


class _Look:
    """One look at the local network. Asks each service that it hears for details."""

    def __init__(
        self,
        network: Any,
        info: Callable[[str, str], Any],
        enough: Callable[[FoundPeer], bool],
        deadline: float,
    ) -> None:
        self._network, self._info, self._enough, self._deadline = network, info, enough, deadline
        self._heard: set[str] = set()
        self._asking: set[asyncio.Task[None]] = set()
        self.found: dict[str, FoundPeer] = {}
        self.has_enough = asyncio.Event()

    def on_change(self, *, name: str, **_: Any) -> None:
        """Called by zeroconf with the name of a service."""
        if name not in self._heard and len(self._heard) < MAX_HEARD:
            self._heard.add(name)
            self._asking.add(asyncio.get_running_loop().create_task(self._ask(name)))

    async def _ask(self, name: str) -> None:
        info = self._info(SERVICE, name)
        left_s = max(self._deadline - time.monotonic(), 0.1)
        if not await info.async_request(self._network.zeroconf, left_s * 1000):
            return
        peer = _checked(info)
        if peer is not None and len(self.found) < MAX_FOUND:
            self.found[peer.peer_id] = peer
            if self._enough(peer):
                self.has_enough.set()

    async def end(self) -> None:
        """Stop asking."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)


async def find_swarm(
    model: str, fingerprint: str, *, look_on_s: float = LOOK_ON_S, interfaces: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Find initial peers of this checkpoint's swarm on the local network, also of one that begins meanwhile.

    Raises:
        MissingBlocksError: there is none. The message says what was found instead, and what to do.
    """
    if fingerprint not in _sought:
        logger.info("no initial peers were given: looking for a swarm of %s on the local network", model)
    _sought.add(fingerprint)
    for timeout_s, left_s in ((LOOK_S, look_on_s), (look_on_s, 0.0)):
        peers = await find_peers(
            lambda peer: peer.fingerprint == fingerprint, timeout_s=timeout_s, interfaces=interfaces
        )
        if ours := [peer for peer in peers if peer.fingerprint == fingerprint]:
            break
        served = {f"{peer.model} (fingerprint {peer.fingerprint[:12]})" for peer in peers if not peer.machines}
        others = ", ".join(sorted(served))
        missing = MissingBlocksError(
            f"no swarm of {model} (fingerprint {fingerprint[:12]}) was found on the local network"
            f"{f', only of {others}' if others else ''}{_machines_among(peers)}: name peers with --initial_peers "
            "(in Python: initial_peers=[…]), or start a swarm with --new_swarm"
        )
        if not left_s:
            raise missing
        logger.warning("%s; looking for %g s more, because one may be starting", missing, left_s)
    logger.info("found %d of its peers: %s", len(ours), ", ".join(peer.maddrs[0] for peer in ours))
    return initial_peers_of(ours)


async def find_swarm_here() -> SwarmHere | None:
    """The swarm of the agent that runs on this machine; None: none does."""
    try:
        found = json.loads((state_dir() / HERE_FILE).read_text(encoding="utf-8"))
        here = SwarmHere(
            printable(str(found["name"])),
            str(found["swarm_name"]),
            tuple(map(str, found["initial_peers"])),
            {str(fingerprint): printable(str(name)) for fingerprint, name in found["models"].items()},
            tuple(map(str, found.get("places", ()))),  # agents of earlier versions don't tell
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    # An agent that was killed has left its file.
    answers = await asyncio.gather(*map(_takes_connections, here.initial_peers[:MAX_ADDRESSES]))
    return here if any(answers) else None


async def _takes_connections(maddr: str) -> bool:
    match = _TCP.match(maddr)
    if match is None:
        return False
    with suppress(OSError, OverflowError, TimeoutError):
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(match[1], int(match[2]))
        writer.transport.abort()
        return True
    return False


async def find_machines(
    enough: Callable[[FoundPeer], bool] = lambda _: True,
    *,
    timeout_s: float | None = None,
    interfaces: Sequence[str] | None = None,
) -> tuple[FoundPeer, ...]:
    """Find members of swarms of machines on the local network. Returns soon after the first that is `enough`."""
    found = await find_peers(lambda peer: peer.machines and enough(peer), timeout_s=timeout_s, interfaces=interfaces)
    return tuple(peer for peer in found if peer.machines)


async def find_any_swarm(*, interfaces: Sequence[str] | None = None) -> tuple[str, ...]:
    """Find initial peers of the one swarm on the local network, whatever it serves.

    Raises:
        MissingBlocksError: there is none.
        ConfigurationError: there are several, which must not be mixed.
    """
    logger.info("no initial peers were given: looking for a swarm on the local network")
    found = await find_peers(lambda peer: not peer.machines, interfaces=interfaces)
    peers = [peer for peer in found if not peer.machines]
    if not peers:
        raise MissingBlocksError(
            f"no swarm was found on the local network{_machines_among(found)}: name peers with --initial_peers "
            "(or SWARMLLM_INITIAL_PEERS)"
        )
    if len({peer.fingerprint for peer in peers}) > 1:
        served = "; ".join(f"{peer.model} at {peer.maddrs[0]}" for peer in peers)
        raise ConfigurationError(f"there are several swarms on the local network: choose by --initial_peers ({served})")
    return initial_peers_of(peers)


def _machines_among(found: Sequence[FoundPeer]) -> str:
    """Half a sentence about swarms of machines, whose models only members use."""
    names = sorted({peer.model for peer in found if peer.machines})
    return f", but {', '.join(names)}, which `swarmllm up` joins" if names else ""


def initial_peers_of(peers: Sequence[FoundPeer]) -> tuple[str, ...]:
    """All addresses of these peers. Only dialling shows which of their networks this machine shares."""
    return tuple(maddr for peer in peers for maddr in peer.maddrs)


def lan_addresses(addrs: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """The IPv4 addresses that other machines may reach, and their port (0: there are none)."""
    found: dict[int, list[str]] = {}
    for addr in addrs:
        match addr.split("/"):
            case ["", "ip4", ip, "tcp", port, *_] if port.isdecimal():
                try:
                    parsed = ip_address(ip)
                except ValueError:
                    continue
                if not (parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast):
                    found.setdefault(int(port), []).append(ip)
    if not found:
        return (), 0
    first_port, ips = next(iter(found.items()))
    return tuple(dict.fromkeys(ips))[:MAX_ADDRESSES], first_port


def _checked(info: Any) -> FoundPeer | None:
    """The peer in an announcement, if it makes sense."""
    peer_id = str(info.name).partition(".")[0]
    properties = info.properties
    try:
        fingerprint = (properties.get(b"fingerprint") or b"").decode()
        model = (properties.get(b"model") or b"").decode(errors="replace")
    except UnicodeDecodeError:
        return None
    ips = [ip for ip in info.parsed_addresses()[:MAX_ADDRESSES] if ":" not in ip]
    if not is_peer_id(peer_id) or not info.port or not ips:
        return None
    if not 8 <= len(fingerprint) <= 128 or not fingerprint.isalnum():
        return None
    model = printable(model[:MAX_NAME_CHARS])
    maddrs = tuple(f"/ip4/{ip}/tcp/{info.port}/p2p/{peer_id}" for ip in ips)
    return FoundPeer(peer_id, maddrs, model, fingerprint, b"machines" in properties)


def _import_zeroconf() -> tuple[Any, Any]:
    """Import the package and its asynchronous module. Takes 0.1 s, so it is done only when needed."""
    import zeroconf
    from zeroconf import asyncio as asynchronous

    logging.getLogger("zeroconf").setLevel(logging.ERROR)  # it warns of each malformed packet of others
    return zeroconf, asynchronous
