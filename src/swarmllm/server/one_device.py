"""`python -m swarmllm.server.one_device`: one of the servers that `devices` starts. Standard input has its settings."""

import json
import sys

from swarmllm.server.__main__ import end_process, run_server
from swarmllm.server.settings import ServerConfig


def read_config() -> ServerConfig:
    """The settings in the first line of standard input, as JSON."""
    settings = json.loads(sys.stdin.readline())
    if settings["block_indices"] is not None:
        settings["block_indices"] = tuple(settings["block_indices"])
    return ServerConfig(**settings)


if __name__ == "__main__":
    end_process(run_server(read_config))
