"""`python -m swarmllm.server`: serve some blocks of a model to a swarm."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from swarmllm.command_line import (
    Parser,
    announced_imports,
    require_free_port,
    require_free_ports,
    run_command,
)
from swarmllm.config import FROM_STDIN, ModelConfig, PeerConfig, SwarmConfig, require_addresses, require_model_place
from swarmllm.process_end import end_process
from swarmllm.server.settings import BlocksConfig, ServerConfig, ServerLimits

KERNELS_KEPT = "64"
"""Number of shapes of matrix products whose kernels oneDNN keeps, instead of 1024. Every number of tokens is another
shape, so kernels only pile up. Measured with all numbers from 1 to 16 in turns: making kernels again costs 2 % of the
time at hidden 512 (6 % if 32 are kept), and nothing at hidden 2048."""

EXAMPLES = """examples:
  swarmllm server --model M --num_blocks 8 --new_swarm  # first of a network
  swarmllm server --model M --num_blocks 8              # the others there
  swarmllm server --model M --block_indices 8:16 --initial_peers ADDRESS
"""

COMMON = (
    "model", "num_blocks", "block_indices", "new_swarm", "initial_peers", "port", "announce_maddrs", "public_name",
    "identity_path", "device", "quant_type", "dtype", "max_memory", "nice", "attn_cache_tokens", "adapters",
    "allowed_clients", "metrics_port",
)  # fmt: skip
"""Flags that `--help` shows."""


def build_parser() -> Parser:
    """A flag for each field of ServerConfig."""
    parser = Parser(prog="swarmllm server", description="Serve some blocks of a model.", epilog=EXAMPLES, common=COMMON)
    classes = [ModelConfig, SwarmConfig, ServerConfig, BlocksConfig]
    parser.add_settings(ServerConfig, classes, PeerConfig, ServerLimits)
    return parser


def parse_config(argv: Sequence[str] | None) -> ServerConfig:
    """Read the flags, on top of `--config FILE` when given, on top of the defaults.

    Raises:
        ConfigurationError, SystemExit(2): they can't work.
    """
    config = ServerConfig(**build_parser().parse_settings(argv))
    require_model_place(config.model)
    require_addresses(config.initial_peers)
    require_free_ports(config.listen_maddrs)
    if config.direct_port:
        direct = [re.sub(r"/tcp/.*", f"/tcp/{config.direct_port}", maddr) for maddr in config.host_maddrs]
        require_free_ports(direct, "choose another --direct_port, or 0 for none")
    if config.metrics_port:
        place = f"can't serve metrics on {config.metrics_host} port {config.metrics_port}"
        require_free_port(config.metrics_host, config.metrics_port, place, "choose another --metrics_port")
    return config


def read_config() -> ServerConfig:
    """Read settings as JSON from the first line of standard input, where `devices` writes them for each device.

    They may come late, so imports are done before.

    Raises:
        SystemExit: the process that started this one has ended.
    """
    with announced_imports():
        import swarmllm.server.server  # noqa: F401
    if not (line := sys.stdin.readline()):
        sys.exit(1)
    settings = json.loads(line)
    if settings["block_indices"] is not None:
        settings["block_indices"] = tuple(settings["block_indices"])
    return ServerConfig(**settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    return run_server(partial(parse_config, argv))


def run_server(read_config: Callable[[], ServerConfig]) -> int:
    """Serve, with one process for each device if there are several; return the exit code."""

    async def run() -> None:
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNELS_KEPT)
        config = read_config()
        if config.initial_peers == (FROM_STDIN,):
            config = replace(config, initial_peers=tuple(sys.stdin.readline().split()))
        with announced_imports():  # after the flags: --help needs no torch
            from swarmllm.server.devices import all_devices, serve_devices

            devices = () if config.machine else all_devices(config)
            if len(devices) <= 1:
                from swarmllm.server.server import serve
        if len(devices) > 1:
            await serve_devices(config, devices)
        else:
            await serve(config)

    return run_command(run, serves=True)


if __name__ == "__main__":
    end_process(run_server(read_config) if sys.argv[1:] == [FROM_STDIN] else main())
