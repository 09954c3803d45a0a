"""`python -m swarmllm.gateway`: an OpenAI-compatible HTTP API, a chat page and a picture of the swarm for one model."""

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from swarmllm.command_line import Parser, add_client_flags, add_initial_peers_flags, run_command, stop_event
from swarmllm.errors import ConfigurationError, PeerUnreachableError
from swarmllm.gateway.settings import GatewayConfig

if TYPE_CHECKING:
    import uvicorn

    from swarmllm.gateway.app import Gateway
    from swarmllm.gateway.language_model import LanguageModel

EXAMPLES = """examples:
  swarmllm gateway --model M --initial_peers /ip4/…/tcp/…/p2p/…
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
  The chat page is at http://127.0.0.1:8080/, the swarm at http://127.0.0.1:8080/swarm.
"""

LINGER_S = 3
"""Seconds that answers under way may take to say that they are cut off, when the gateway is told to stop."""


def build_parser() -> Parser:
    """Flags named as the fields of GatewayConfig, which give their defaults."""
    parser = Parser(
        prog="swarmllm gateway", description="A web API and pages for one model of a swarm.", epilog=EXAMPLES
    )
    add = parser.add_argument
    add("--model", required=True, help="hub id or local directory")
    add("--revision", help="branch, tag or commit on the hub")
    add_initial_peers_flags(parser)
    add("--identity_path", metavar="FILE", help="key that is this gateway's peer id, for private swarms")
    add("--dtype", "--torch_dtype", help="of the gateway's own part; auto = as stored")
    add("--fallback_to_local", metavar="M", help="checkpoint to run here when the swarm can't be repaired")
    add("--served_name", metavar="NAME", help="the model's name in the API")
    web = parser.add_argument_group("web")
    web.add_argument("--host", help="address to listen on; default: 127.0.0.1")
    web.add_argument("--port", type=int, help="TCP port to listen on; default: 8080")
    web.add_argument("--api_keys_file", metavar="FILE", help="one API key per line; then the API needs one")
    web.add_argument("--requests_per_minute", type=int, metavar="N", help="of one key, or without keys of one address")
    web.add_argument("--cors_origins", nargs="+", metavar="ORIGIN", help="other web pages that may use the API")
    web.add_argument("--allowed_hosts", nargs="+", metavar="NAME", help="names besides this machine's, e.g. of a proxy")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max_concurrent", type=int, metavar="N", help="prompts that are answered at a time")
    limits.add_argument("--max_waiting", type=int, metavar="N", help="prompts that may wait for that")
    limits.add_argument("--max_length", type=int, metavar="N", help="tokens of a prompt and its answer together")
    limits.add_argument("--default_max_tokens", type=int, metavar="N", help="of a chat's answer, if it doesn't say")
    limits.add_argument("--max_choices", type=int, metavar="N", help="answers to one prompt (n)")
    limits.add_argument("--max_body_bytes", type=int, metavar="N", help="of a request")
    limits.add_argument("--max_connections", type=int, metavar="N", help="open at a time")
    limits.add_argument("--num_threads", type=int, metavar="N", help="CPU threads for the gateway's own part")
    add_client_flags(parser)
    add("--stop_on_stdin_eof", action="store_true", help=argparse.SUPPRESS)
    return parser


async def serve(config: GatewayConfig, *, stop_on_stdin_eof: bool = False) -> None:
    """Run a gateway until SIGINT or SIGTERM.

    Raises:
        SwarmError: it can't start.
    """
    from swarmllm.gateway.app import Gateway  # after the flags: --help needs no torch
    from swarmllm.gateway.language_model import LanguageModel

    stop = stop_event(stop_on_stdin_eof=stop_on_stdin_eof)
    config.api_keys()  # what is wrong with them, or with the port, is said before anything is loaded
    sockets = bound_sockets(config)
    try:
        model = await asyncio.to_thread(LanguageModel.open, config)
    except BaseException:
        close_all(sockets)
        raise
    try:
        gateway = Gateway(model, config)
        server = web_server(gateway)
        serving = asyncio.create_task(server.serve(sockets), name="serve HTTP")
        stopping = asyncio.create_task(stop.wait(), name="wait for a signal")
        lost = asyncio.create_task(_daemon_exited(model), name="watch p2pd")
        while not server.started and not serving.done():
            await asyncio.wait({serving}, timeout=0.02)
        if not serving.done():
            print(f"swarmllm: gateway of {model.name} at {address(server)}", flush=True)
            await asyncio.wait({serving, stopping, lost}, return_when=asyncio.FIRST_COMPLETED)
        has_lost = lost.done() and not stop.is_set()
        stopping.cancel()
        lost.cancel()
        server.should_exit = True
        await gateway.engine.close()
        await serving
        if has_lost:
            raise PeerUnreachableError(
                "the peer-to-peer daemon (p2pd) died, so this gateway can't reach the swarm: start it again"
            )
    finally:
        close_all(sockets)
        await asyncio.to_thread(model.close)


async def _daemon_exited(model: "LanguageModel") -> None:
    """Return when the client's p2pd has exited, which is known in the client's own event loop."""
    exited, loop, view = asyncio.Event(), asyncio.get_running_loop(), model.swarm.swarm

    async def watch() -> None:
        await view.daemon_exited()
        loop.call_soon_threadsafe(exited.set)

    view.loop.call_soon(watch())
    await exited.wait()


def bound_sockets(config: GatewayConfig) -> list[socket.socket]:
    """One for each address that the host's name stands for; nobody is accepted yet.

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
        raise ConfigurationError(
            f"can't listen on {config.host} port {config.port} ({error.strerror}): choose another --port or --host"
        ) from None
    return sockets


def close_all(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


def web_server(gateway: "Gateway") -> "uvicorn.Server":
    """A server that leaves signals and logging to others."""
    import uvicorn

    from swarmllm.gateway.connections import http_protocol

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
            http=http_protocol(config.max_connections),
            ws="wsproto",
            ws_max_size=config.max_body_bytes,
            lifespan="on",
            timeout_graceful_shutdown=LINGER_S,
        )
    )


def address(server: "uvicorn.Server") -> str:
    """Where it listens, as a URL."""
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""

    async def run() -> None:
        settings = build_parser().parse_settings(sys.argv[1:] if argv is None else argv)
        stop_on_stdin_eof = settings.pop("stop_on_stdin_eof", False)
        await serve(GatewayConfig(**settings), stop_on_stdin_eof=stop_on_stdin_eof)

    return run_command(run)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # everything has been closed; taking torch's modules apart would cost another second
