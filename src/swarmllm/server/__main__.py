"""`python -m swarmllm.server`: serve some blocks of a model to a swarm."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from swarmllm.command_line import Parser, add_initial_peers_flags, add_network_flags, run_command
from swarmllm.config import ServerConfig, parse_block_indices
from swarmllm.errors import ConfigurationError

FROM_STDIN = "-"
"""As --initial_peers: wait for a line with them on standard input. Whoever starts a whole swarm can start all servers
at once, and tells the others where the first one is while they are still importing."""

KERNELS_KEPT = "64"
"""Shapes of matrix products whose kernels oneDNN keeps, instead of 1024: every other number of tokens is another shape,
so they only pile up. Measured with all numbers from 1 to 16 by turns: at hidden 512, making them anew costs 2 % of the
time, with 32 of them 6 %; at hidden 2048 nothing."""

EXAMPLES = """examples:
  swarmllm server --model M --num_blocks 8 --new_swarm      # the first machine of a network
  swarmllm server --model M --num_blocks 8                  # the others there
  swarmllm server --model M --block_indices 8:16 --initial_peers /ip4/…/tcp/…/p2p/…
"""


def build_parser() -> Parser:
    """Flags named as the fields of ServerConfig, which give their defaults."""
    parser = Parser(prog="swarmllm server", description="Serve some blocks of a model.", epilog=EXAMPLES)
    add = parser.add_argument
    add("--model", required=True, help="hub id or local directory")
    add("--revision", help="branch, tag or commit on the hub")
    add("--num_blocks", type=int, metavar="N", help="serve N blocks, the ones that the swarm lacks most")
    add("--block_indices", type=_block_indices, metavar="A:B", help="serve exactly blocks [A, B)")
    add("--new_swarm", action="store_true", help="start a swarm of its own")
    add_initial_peers_flags(parser, "peers of the swarm to join")
    add("--quant_type", help="store weights as none, int8 or nf4; auto = int8")
    add("--dtype", "--torch_dtype", help="of weights and activations; auto = as stored")
    add("--device", help="torch device; auto = cuda if there is one")
    add("--adapters", nargs="+", metavar="ADAPTER", help="offer these: hub ids or directories, safetensors only")
    add("--public_name", help="shown by `swarmllm status`")
    network = parser.add_argument_group("network")
    add_network_flags(network)
    network.add_argument("--allowed_clients", nargs="+", metavar="PEER", help="peer ids that may use this server")
    network.add_argument(
        "--allowed_servers", nargs="+", metavar="PEER", help="peer ids of servers to count and pass on to"
    )
    network.add_argument("--metrics_port", type=int, metavar="PORT", help="where Prometheus can read metrics")
    network.add_argument("--metrics_host", metavar="HOST", help="address for that; default: 127.0.0.1")
    network.add_argument("--compression", help="of what is sent: none, int8; auto = int8 over slow links")
    network.add_argument("--update_period", type=float, metavar="S", help="seconds between announcements")
    network.add_argument("--balance_quality", type=float, metavar="Q", help="how readily to move, 0 (never) to 1")
    limits = parser.add_argument_group("resources")
    limits.add_argument("--num_threads", type=int, metavar="N", help="CPU threads for computing")
    limits.add_argument(
        "--nice", action="store_true", help="give way to other programs: slow down while they need the cores"
    )
    limits.add_argument("--attn_cache_tokens", type=int, metavar="N", help="KV cache budget in tokens")
    limits.add_argument("--prefix_cache_tokens", type=int, metavar="N", help="tokens of shared prompts; 0 = off")
    limits.add_argument("--max_batch_tokens", type=int, metavar="N", help="most tokens of one training batch")
    limits.add_argument("--max_batch_sessions", type=int, metavar="N", help="most sessions computed together; 1 = none")
    limits.add_argument("--throughput", type=_throughput, metavar="X", help="tokens/s to announce; auto = measure")
    limits.add_argument("--token", help="hub token")
    limits.add_argument("--cache_dir", metavar="DIR", help="where downloads go")
    return parser


def _block_indices(text: str) -> tuple[int, int]:
    try:
        return parse_block_indices(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _throughput(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"give a number of tokens per second or auto, not {text!r}") from None


def parse_config(argv: Sequence[str]) -> ServerConfig:
    """Flags, on top of `--config FILE` when given, on top of the defaults.

    Raises:
        ConfigurationError, SystemExit(2): they can't work.
    """
    return ServerConfig(**build_parser().parse_settings(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""

    async def run() -> None:
        config = parse_config(sys.argv[1:] if argv is None else argv)
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNELS_KEPT)
        from swarmllm.server.server import serve  # after the flags: --help needs no torch

        if config.initial_peers == (FROM_STDIN,):
            config = replace(config, initial_peers=tuple(sys.stdin.readline().split()))
        await serve(config)

    return run_command(run)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # everything has been closed; taking torch's modules apart would cost another second
