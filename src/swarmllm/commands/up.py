"""`swarmllm up`: this machine joins the swarm of its local network, or founds it, and serves what the swarm is told to.

It brings together the agent (`machines/agent`) and the gateway with the machines' page, in one process and event loop,
and prints the address of the page. `--install` makes a systemd user unit that does the same after each boot.
"""

import asyncio
import errno
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmllm.command_line import (
    Parser,
    announced_imports,
    first_error,
    is_in_file,
    require_free_port,
    require_free_ports,
    run_command,
    stop_event,
    unless_stopped,
)
from swarmllm.config import in_file, require_addresses, state_dir
from swarmllm.errors import ConfigurationError
from swarmllm.files import replace_file, user_path
from swarmllm.gateway.settings import allowed_host, require_host, require_origin
from swarmllm.invite import Invite, names_invite, read_invite
from swarmllm.machines.settings import MachineConfig
from swarmllm.machines.state import StateDirectory
from swarmllm.process_end import end_process, serves
from swarmllm.server.downloads import in_background

if TYPE_CHECKING:
    from swarmllm.gateway.settings import GatewayConfig
    from swarmllm.machines.agent import Agent

logger = logging.getLogger(__name__)

EXAMPLES = """examples:
  swarmllm up            # on each machine of a local network
  swarmllm up INVITE     # on a machine elsewhere; the page shows the line
  swarmllm up --install  # now, and after each boot
  swarmllm use MODEL     # on one of them: all serve this model together
"""
PORTS = range(8080, 8100)
"""Ports for the page; the first free one."""
REPAIR_S = 90.0
"""Seconds for which a text waits for missing blocks. Assumed: until then the machines have noticed that one has gone,
and have loaded its blocks."""
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
UNIT = "swarmllm.service"
PASSED_ON = ("SWARMLLM_STATE_DIR", "SWARMLLM_CACHE", "SWARMLLM_LOG_LEVEL", "HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE")
"""Variables that the unit gets as they are now."""


@dataclass(frozen=True, kw_only=True)
class UpConfig(MachineConfig):
    """The page of this machine, and its start at boot."""

    host: str | None = None
    """Address on which the page listens. None = all networks of this machine if the swarm is open, else this machine
    only. Everybody who reaches the page may chat; only its whole address, with the key, gives commands."""
    port: int | None = None
    """TCP port of the page; None = 8080, or the next free one."""
    allowed_hosts: tuple[str, ...] = in_file(())
    """More host names of the page, such as the router's name for this machine. IP addresses and the machine's own name
    need none. As of the gateway."""
    cors_origins: tuple[str, ...] = in_file(())
    """Origins of other web pages that may use the API. As of the gateway."""
    install: bool = False
    """Start now and after each boot, by systemd (a user unit)."""
    uninstall: bool = False
    """Stop, and start no more at boot. Models and keys stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for host in self.allowed_hosts:
            allowed_host(host)
        for origin in self.cors_origins:
            require_origin(origin)
        if self.host is not None:
            require_host(self.host)
        if self.port is not None and not 0 <= self.port < 65536:
            raise ConfigurationError(f"port must be 0 to 65535, not {self.port}")
        if self.install and self.uninstall:
            raise ConfigurationError("give --install or --uninstall, not both")


def build_parser() -> Parser:
    """A flag for each field of UpConfig, and the invite."""
    description = "Offer this machine to a swarm that plans itself; `swarmllm use` commands."
    parser = Parser(prog="swarmllm up", description=description, epilog=EXAMPLES)
    parser.usage = "swarmllm up [OPTIONS] [INVITE]"
    parser.add_argument("invite", nargs="?", help="invite of a swarm, or the file that holds it")
    parser.add_settings(UpConfig, [UpConfig, MachineConfig])
    return parser


def parse_up(argv: Sequence[str] | None) -> tuple[UpConfig, Invite | None]:
    """The settings, and the invite if one is given.

    Raises:
        ConfigurationError, SystemExit(2): they can't work.
    """
    settings = build_parser().parse_settings(argv)
    word = settings.pop("invite", None)
    if word is None and len(devices := settings.get("device", ())) > 1 and names_invite(devices[-1]):
        *settings["device"], word = devices  # --device takes all words that follow
    if word is not None and not names_invite(word):
        raise ConfigurationError(
            f"{word[:40]!r} is no invite and no file that holds one: an invite begins with swarm: and is shown on the "
            "page of a machine"
        )
    invite = None if word is None else read_invite(word)
    config = UpConfig(**settings)
    if invite is not None:
        require_addresses(invite.initial_peers)
        if config.private or config.uninstall:
            raise ConfigurationError("leave the invite out: it is for joining a swarm that exists")
    return config, invite


async def serve(config: UpConfig, invite: Invite | None) -> None:
    """Run this machine until SIGINT or SIGTERM.

    Raises:
        SwarmError: it can't start, or its peer-to-peer daemon died.
    """
    with StateDirectory(state_dir()).locked() as state:
        require_free_ports(config.host_maddrs, "choose another port in host_maddrs")
        if config.port:
            host = config.host or LOOPBACK
            require_free_port(host, config.port, f"can't listen on {host} port {config.port}", "choose another --port")
        with announced_imports():  # after the flags: --help needs no torch
            import swarmllm.gateway.app  # noqa: F401 - the page
            from swarmllm.machines.agent import Agent

        stop = stop_event()
        await unless_stopped(stop, in_background(partial(require_possible, config)))
        if stop.is_set():
            return
        machine = MachineConfig(**{one.name: getattr(config, one.name) for one in fields(MachineConfig)})
        agent = await unless_stopped(stop, Agent.start(machine, state, invite=invite))
        if agent is None:
            return
        try:
            await _serve_page(config, agent, state, stop)
        finally:
            await agent.close()


async def _serve_page(config: UpConfig, agent: "Agent", state: StateDirectory, stop: asyncio.Event) -> None:
    from swarmllm.gateway.__main__ import served_machines

    key = state.read("page.json", {}).get("key")
    key = key if isinstance(key, str) and key else secrets.token_urlsafe(16)
    gateway, sockets = _page_of(config, agent)
    async with served_machines(gateway, agent, key, sockets) as address:
        port = address.rstrip("/").rpartition(":")[2]
        agent.page = "" if gateway.on_loopback else f"http://{_reachable_host(agent, gateway.host)}:{port}/"
        here = gateway.host if gateway.host not in (EVERYWHERE, "::") else LOOPBACK
        state.write("page.json", {"url": f"http://{here}:{port}/", "key": key}, secret=True)
        number = agent.swarm.swarm_id[-8:]  # machines that joined by an invite know no name
        swarm = f"{agent.swarm.name} ({number})" if agent.swarm.name else number
        print(f"swarmllm: {agent.config.name} is a machine of the swarm {swarm}", flush=True)
        print(f"swarmllm: open {agent.page or address}#key={key}", flush=True)
        if not agent.wanted:
            print("swarmllm: choose a model there, or by `swarmllm use MODEL`", flush=True)
        try:
            await unless_stopped(stop, agent.run())
        except BaseExceptionGroup as group:
            raise first_error(group) from None


def _page_of(config: UpConfig, agent: "Agent") -> "tuple[GatewayConfig, list[socket.socket]]":
    """The settings of the gateway, and its sockets, which are bound.

    Raises:
        ConfigurationError: it can't listen there.
    """
    is_shared = agent.swarm.is_open and not _is_on_loopback(agent)
    return _bound_page(config, config.host or (EVERYWHERE if is_shared else LOOPBACK))


def _bound_page(
    config: UpConfig, host: str, ports: Sequence[int] = PORTS
) -> "tuple[GatewayConfig, list[socket.socket]]":
    """`_page_of` at this address, on the first free port if the user names none."""
    from swarmllm.gateway.__main__ import bound_sockets
    from swarmllm.gateway.settings import GatewayConfig

    ports = ports if config.port is None else (config.port,)
    for port in ports:
        gateway = GatewayConfig(
            model=(),
            host=host,
            port=port,
            allowed_hosts=config.allowed_hosts,
            cors_origins=config.cors_origins,
            route_timeout_s=REPAIR_S,
        )
        try:
            return gateway, bound_sockets(gateway)
        except ConfigurationError as error:
            is_taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if not is_taken or port == ports[-1]:
                raise
    raise AssertionError("no ports")


def require_possible(config: UpConfig) -> None:
    """Check what needs torch or the network, before the machine joins a swarm. It may wait for a name server.

    Raises:
        ConfigurationError: a device, its memory or the page's address can't be had.
    """
    from swarmllm.gateway.__main__ import close_all
    from swarmllm.machines.offers import require_offer

    require_offer(config)
    _, sockets = _bound_page(config, config.host or LOOPBACK)
    close_all(sockets)


def _is_on_loopback(agent: "Agent") -> bool:
    return all(maddr.startswith(("/ip4/127.", "/ip6/::1/")) for maddr in agent.config.host_maddrs)


def _reachable_host(agent: "Agent", host: str) -> str:
    """The address by which other machines of the network reach the page."""
    from swarmllm.network.p2p.discovery import lan_addresses

    if host not in (EVERYWHERE, "::"):
        return f"[{host}]" if ":" in host else host
    ips, _ = lan_addresses(agent.peer.addrs)
    return ips[0] if ips else LOOPBACK


# --- systemd


def unit_path() -> Path:
    """The file of the user unit."""
    return user_path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "systemd" / "user" / UNIT


def settings_path() -> Path:
    """The file of the unit's settings that have no flag."""
    return state_dir() / "up.toml"


def settings_text(config: UpConfig) -> str:
    """Its contents."""
    given = {one.name: getattr(config, one.name) for one in fields(config) if is_in_file(one)}
    usual = {one.name: one.default for one in fields(config)}
    return "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in given.items() if value != usual[name]
    )


def unit_text(config: UpConfig) -> str:
    """The unit that runs `swarmllm up` with these settings."""
    flags = [
        word
        for one in fields(config)
        if not is_in_file(one)
        for word in _as_flags(one.name, one.default, getattr(config, one.name))
    ]
    if settings_text(config):
        flags += ["--config", str(settings_path())]
    line = " ".join(map(_quoted, [sys.executable, "-m", "swarmllm", "up", *flags]))
    variables = "".join(
        f"Environment={_quoted(f'{name}={os.environ[name]}')}\n" for name in PASSED_ON if os.environ.get(name)
    )
    return f"""[Unit]
Description=swarmllm: this machine in a swarm that runs large language models
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={line}
{variables}Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2
TimeoutStopSec=30

[Install]
WantedBy=default.target
"""


def _as_flags(name: str, default: Any, value: Any) -> list[str]:
    if value == default or name in ("install", "uninstall"):
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    return [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]


def _quoted(word: str) -> str:
    """A word of a unit file, in which % and $ mean themselves."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    if "\n" in word:
        raise ConfigurationError(f"{word.partition('=')[0]} has several lines, which a unit can't hold")
    return f'"{escaped}"'


async def enter(config: UpConfig, invite: Invite | None) -> None:
    """Note the swarm of an invite in the state directory, so that the unit needn't hold it.

    Raises:
        ConfigurationError: it is of no use, this machine can't found a private swarm, or an agent runs already. The
            unit itself may run, and is started again, except with an invite.
    """
    from swarmllm.machines.membership import find_membership, note_membership

    state = StateDirectory(state_dir())
    with nullcontext() if invite is None and unit_path().exists() else state.locked():
        found = await find_membership(state, _nobody, invite=invite, private=config.private, name="")
        if invite is not None:
            note_membership(state, found)


def install(config: UpConfig) -> None:
    """Write the unit, start it, and let it start at boot.

    Raises:
        ConfigurationError: systemd refuses, or the unit can't be written.
    """
    path = unit_path()
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, unit_text(config))
        path.chmod(0o600)  # it may hold a token
        if text := settings_text(config):
            replace_file(settings_path(), text)
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written: {error.strerror}") from None
    try:
        _systemctl("daemon-reload")
        _systemctl("enable", UNIT)
        _systemctl("restart", UNIT)
    except ConfigurationError:
        if is_new:
            _remove_unit()
        raise
    if shutil.which("loginctl") is None or subprocess.run(["loginctl", "enable-linger"], check=False).returncode:
        logger.warning("it starts when you log in, not at boot: `loginctl enable-linger` was refused")
    print("swarmllm: installed and started; `swarmllm use` shows the page's address", flush=True)


def uninstall() -> None:
    """Stop the unit, and remove it. Where systemd can't be asked, its files are removed all the same.

    Raises:
        ConfigurationError: nothing is installed, or systemd refuses.
    """
    path = unit_path()
    if not path.exists():
        raise ConfigurationError(f"nothing is installed: there is no {path}")
    try:
        _require_systemd()
    except ConfigurationError:
        _remove_unit()
        logger.warning("systemd can't be asked to stop it here: end `swarmllm up` yourself if it runs")
    else:
        _systemctl("disable", "--now", UNIT)
        _remove_unit()
        _systemctl("daemon-reload")
    print("swarmllm: uninstalled; models and keys stay in the state directory", flush=True)


def _remove_unit() -> None:
    """Remove the file, and the link that starts it at boot."""
    unit_path().unlink(missing_ok=True)
    (unit_path().parent / "default.target.wants" / UNIT).unlink(missing_ok=True)


async def _nobody() -> None:
    return None


def _require_systemd() -> None:
    """Raise ConfigurationError unless this user's systemd takes orders."""
    if shutil.which("systemctl") is None:
        raise ConfigurationError(
            "this machine has no systemd: let its own service manager start `swarmllm up` in place of --install"
        )
    try:
        _systemctl("show-environment")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"this user has no session of systemd here ({error}): log in as this user, not by su or sudo, or let "
            "another service manager start `swarmllm up` in place of --install"
        ) from None


def _systemctl(*words: str) -> None:
    done = subprocess.run(["systemctl", "--user", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigurationError(f"`systemctl --user {' '.join(words)}` failed: {reason}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    async def run() -> None:
        config, invite = parse_up(argv)
        if config.uninstall:
            uninstall()
        elif config.install:
            _require_systemd()
            with announced_imports():
                require_possible(replace(config, port=0))  # an installed unit may have the port now
            await enter(config, invite)
            install(config)
        else:
            await serve(config, invite)

    return run_command(run, serves=serves(["up", *(sys.argv[1:] if argv is None else argv)]))


if __name__ == "__main__":
    end_process(main())
