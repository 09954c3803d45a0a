"""An internet of network namespaces: public hosts, and homes behind routers that translate addresses (NAT).

Addresses look public, since libp2p judges by that; nothing leaves the namespaces. Needs root, ip and nft.
"""

import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress

ROUTER = """
table ip nat {
  chain out { type nat hook postrouting priority srcnat; oifname "wan" masquerade; }
  chain through {
    type filter hook forward priority 0; policy drop;
    iifname "lan" accept; ct state established,related accept;
  }
  chain to {
    type filter hook input priority 0; policy drop;
    iifname != "wan" accept; ct state established,related accept;
  }
}
"""
PREFIX = f"swarmllm-{os.getpid()}-"


def has_ipv6() -> bool:
    """True if this machine has an IPv6 of its own, as for loopback."""
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def missing(*commands: str) -> str:
    """The tool or right that this machine lacks; "" if nothing. `commands`: ip and nft if none is named."""
    commands = commands or ("ip", "nft")
    if not all(map(shutil.which, commands)):
        return f"needs the commands {' and '.join(commands)}"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    return "" if made.returncode == 0 else "network namespaces are not permitted here"


class Internet:
    """Hosts by name; `within` a host is how a command begins that runs there."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def __enter__(self) -> "Internet":
        self._add("net")
        self._ip("net", "link", "add", "bridge", "type", "bridge")
        self._ip("net", "link", "set", "bridge", "up")
        return self

    def add_public(self, name: str, number: int) -> str:
        """Its address."""
        address = f"45.{number}.1.1"
        self._add(name)
        self._connect(name, "wan", "net", f"{name}-port")
        self._ip("net", "link", "set", f"{name}-port", "master", "bridge")
        self._ip(name, "addr", "add", f"{address}/8", "dev", "wan")
        return address

    def add_home(self, name: str, number: int) -> None:
        """A host, and its router that lets nobody in."""
        router = f"{name}-nat"
        self.add_public(router, number)
        self._add(name)
        self._connect(name, "lan", router, "lan")
        self._ip(router, "addr", "add", f"192.168.{number}.1/24", "dev", "lan")
        self._ip(name, "addr", "add", f"192.168.{number}.2/24", "dev", "lan")
        self._ip(name, "route", "add", "default", "via", f"192.168.{number}.1")
        for command, text in ((("sysctl", "-qw", "net.ipv4.ip_forward=1"), ""), (("nft", "-f", "-"), ROUTER)):
            subprocess.run([*self.within(router), *command], input=text, text=True, check=True)

    def add_neighbour(self, name: str, number: int) -> str:
        """A host of a network without routers, where multicast reaches all. Returns its address."""
        address = f"10.77.0.{number}"
        self._add(name)
        self._connect(name, "lan", "net", f"{name}-port")
        self._ip("net", "link", "set", f"{name}-port", "master", "bridge")
        self._ip(name, "addr", "add", f"{address}/24", "dev", "lan")
        self._ip(name, "route", "add", "default", "via", "10.77.0.254")
        return address

    def kill(self, name: str) -> None:
        """Kill all processes of a host, as a power cut does."""
        found = subprocess.check_output(["ip", "netns", "pids", PREFIX + name], text=True)
        for pid in found.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def within(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", PREFIX + name]

    def bytes_sent(self, name: str) -> int:
        """By a public host, since it is there."""
        path = "/sys/class/net/wan/statistics/tx_bytes"
        return int(subprocess.check_output([*self.within(name), "cat", path]))

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", PREFIX + name], check=False)  # the others go all the same

    def _add(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", PREFIX + name], check=True)
        self._names.append(name)
        self._ip(name, "link", "set", "lo", "up")

    def _connect(self, name: str, interface: str, other: str, other_interface: str) -> None:
        self._ip(name, "link", "add", interface, "type", "veth", "peer", other_interface, "netns", PREFIX + other)
        self._ip(name, "link", "set", interface, "up")
        self._ip(other, "link", "set", other_interface, "up")

    def _ip(self, name: str, *arguments: str) -> None:
        subprocess.run(["ip", "-n", PREFIX + name, *arguments], check=True)
