"""`python -m swarmllm.gateway`: an OpenAI-compatible HTTP API, a chat page and a picture of the swarm."""

import asyncio
import contextlib
import errno
import gc
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from swarmllm.api import (
    ClientConfig,
    ConfigurationError,
    Parser,
    PeerUnreachableError,
    SwarmConfig,
    announced_imports,
    end_process,
    require_addresses,
    require_free_port,
    require_model_place,
    run_command,
    stop_event,
)
from swarmllm.gateway.settings import GatewayConfig, GatewayLimits, OfferedModels

if TYPE_CHECKING:
    import uvicorn

    from swarmllm.api import SwarmView
    from swarmllm.gateway.app import Gateway, Waiting
    from swarmllm.gateway.engine.model_choice import ModelChoice
    from swarmllm.gateway.machines import Agent

EXAMPLES = """examples:
  swarmllm gateway --model M --initial_peers ADDRESS
  curl http://127.0.0.1:8080/v1/chat/completions \\
       -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
  The chat page is http://127.0.0.1:8080/, the swarm is at /swarm there.
"""

LINGER_S = 3
"""Seconds for answers under way to tell that they are cut off, when the gateway stops."""

COMMON = (
    "model", "served_name", "initial_peers", "host", "port", "api_keys_file", "allowed_hosts", "picture_hosts",
    "requests_per_minute", "max_concurrent", "max_length", "dtype", "device", "identity_path", "local_blocks",
    "speculation",
)  # fmt: skip
"""Flags that `--help` shows."""


def build_parser() -> Parser:
    """Make a flag for each field of GatewayConfig."""
    description = "A web API and pages for models of a swarm."
    parser = Parser(prog="swarmllm gateway", description=description, epilog=EXAMPLES, common=COMMON)
    parser.add_settings(GatewayConfig, [OfferedModels, SwarmConfig], GatewayConfig, GatewayLimits, ClientConfig)
    return parser


async def serve(config: GatewayConfig) -> None:
    """Run a gateway until SIGINT or SIGTERM.

    Raises:
        SwarmError: it can't start.
    """
    with announced_imports():  # after the flags: --help needs no torch
        from swarmllm.gateway.app import Gateway, Waiting

    stop = stop_event(stop_on_stdin_eof=config.stop_on_stdin_eof)
    config.api_keys()  # say early what is wrong with keys or port, before models are loaded
    waiting = Waiting(config)
    sockets = bound_sockets(config)
    server = web_server(waiting)
    serving = asyncio.create_task(server.serve(sockets), name="serve HTTP")
    opening = asyncio.create_task(waiting.models(), name="join the swarm")
    stopping = asyncio.create_task(stop.wait(), name="wait for a signal")
    models: ModelChoice | None = None
    try:
        await asyncio.wait({serving, opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        models = await _given_up(opening) if stopping.done() else await opening
        if models is not None and not stopping.done():
            models.start()
            freeze_objects()
            gateway = Gateway(models, config)
            async with gateway.watching():
                waiting.go_on(gateway.app)
                await _serve_until(stopping, gateway, server, serving)
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving
        close_all(sockets)
        if models is not None:
            await asyncio.to_thread(models.close)


@contextlib.asynccontextmanager
async def served_machines(
    config: GatewayConfig, agent: "Agent", page_key: str, sockets: list[socket.socket]
) -> AsyncIterator[str]:
    """Within the block, a gateway without models of its own offers those of the agent's swarm, and the machines' page.

    Gives the gateway's address. `sockets` are those of `bound_sockets`; the end of the block closes them.

    Raises:
        ConfigurationError: the web server can't start.
    """
    from swarmllm.gateway.app import Gateway
    from swarmllm.gateway.engine.model_choice import ModelChoice
    from swarmllm.gateway.machines import MachinesPages

    freeze_objects()
    gateway = Gateway(ModelChoice.open(config), config, MachinesPages(agent, page_key, config))
    server = web_server(gateway)
    serving = asyncio.create_task(server.serve(sockets), name="serve HTTP")
    try:
        await _started(server, serving)
        if serving.done():
            raise ConfigurationError("the web server did not start; the log says why")
        yield address(server)
    finally:
        server.should_exit = True
        await gateway.engine.close()
        await serving
        close_all(sockets)
        await asyncio.to_thread(gateway.models.close)


def freeze_objects() -> None:
    """Keep the garbage collector from scanning torch's objects, which stay. It would hold up the event loop for some
    tenths of a second."""
    gc.collect()
    gc.freeze()


async def _started(server: "uvicorn.Server", serving: "asyncio.Task[None]") -> None:
    """Return when the server answers, or has ended."""
    while not server.started and not serving.done():
        await asyncio.wait({serving}, timeout=0.02)


async def _given_up(opening: "asyncio.Task[ModelChoice]") -> "ModelChoice | None":
    """Wait for a try that is under way, to close the models that it opens after all."""
    opening.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        return await opening
    return None


async def _serve_until(
    stopping: "asyncio.Task[bool]", gateway: "Gateway", server: "uvicorn.Server", serving: "asyncio.Task[None]"
) -> None:
    lost = asyncio.create_task(_daemon_exited(gateway.models), name="watch p2pd")
    await _started(server, serving)
    if not serving.done():
        print(
            f"swarmllm: gateway of {', '.join(model.name for model in gateway.models)} at {address(server)}", flush=True
        )
        await asyncio.wait({serving, stopping, lost}, return_when=asyncio.FIRST_COMPLETED)
    has_lost = lost.done() and not stopping.done()
    lost.cancel()
    server.should_exit = True
    await gateway.engine.close()
    await serving
    if has_lost:
        raise PeerUnreachableError(
            "the peer-to-peer daemon (p2pd) died, so this gateway can't reach the swarm: start it again"
        )


async def _daemon_exited(models: "ModelChoice") -> None:
    """Return when the p2pd of some client has exited. Its own event loop notices that."""
    exited, loop = asyncio.Event(), asyncio.get_running_loop()

    async def watch(view: "SwarmView") -> None:
        await view.daemon_exited()
        loop.call_soon_threadsafe(exited.set)

    for model in models:
        view: SwarmView = model.swarm.swarm
        view.loop.call_soon(watch(view))
    await exited.wait()


def bound_sockets(config: GatewayConfig) -> list[socket.socket]:
    """Bind one socket for each address of the host's name. They don't accept connections yet.

    Raises:
        ConfigurationError: the address is not one of this machine, or the port is taken.
    """
    sockets = []
    try:
        for family, _, _, _, where in socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM):
            sockets.append(one := socket.socket(family))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(where)
    except OSError as error:
        close_all(sockets)
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigurationError(
                f"can't listen on {config.host} ({error.strerror}): choose another --host, an address or name of this "
                "machine"
            ) from error
        raise ConfigurationError(
            f"can't listen on {config.host} port {config.port} ({error.strerror}): choose another --port or --host"
        ) from error
    return sockets


def close_all(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


def web_server(gateway: "Gateway | Waiting") -> "uvicorn.Server":
    """A server that leaves signals and logging alone."""
    import uvicorn

    from swarmllm.gateway.guard import http_protocol

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = gateway.config
    return Server(
        uvicorn.Config(
            gateway.app,
            host=config.host,
            port=config.port,
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            http=http_protocol(config.max_connections),  # type: ignore[arg-type]
            ws="wsproto",
            ws_per_message_deflate=False,  # a few kilobytes could unpack to gigabytes before they are counted
            ws_max_size=config.max_body_bytes,
            lifespan="on",
            timeout_graceful_shutdown=LINGER_S,
        )
    )


def address(server: "uvicorn.Server") -> str:
    """The URL that the server listens on."""
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""

    async def run() -> None:
        config = GatewayConfig(**build_parser().parse_settings(argv))
        for model in config.model:
            require_model_place(model)
        require_addresses(config.initial_peers)
        place = f"can't listen on {config.host} port {config.port}"
        require_free_port(config.host, config.port, place, "choose another --port or --host")
        await serve(config)

    return run_command(run, serves=True)


if __name__ == "__main__":
    end_process(main())
