"""The names that a guest of this package may import: a gateway, a notebook, another project.

    from swarmllm.api import InferenceSession, open_model

A guest imports nothing else (`[tool.importlinter]` in `pyproject.toml` holds the gateway to it). What is listed here
keeps its name and its meaning; everything else may move. This file only lists names: a name's own module says what it
is. A module that needs torch or numpy is imported when one of its names is first used. The groups of `__all__`:

errors      every failure that a user can meet; `SwarmError` is above all of them
settings    the settings of a client, and the checks that they share
models      open a checkpoint's model and tokenizer; facts of its architecture; a local model that takes over
sessions    a session in the swarm, and a cache on it for `generate()`
tokens      logits processors of this project's own decoding methods
the swarm   servers, routes and their costs, connections
trainings   logs of runs that homes share
commands    flags from settings, signals, exit codes, files of users
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swarmllm.command_line import (
    Parser,
    announced_imports,
    docstrings,
    one_line,
    require_free_port,
    run_command,
    stop_event,
)
from swarmllm.config import (
    ClientConfig,
    ClientModelConfig,
    SwarmConfig,
    default_cache_dir,
    hub_token,
    in_file,
    require_addresses,
    require_model_place,
    require_positive,
    require_threads,
)
from swarmllm.decoding.options import MAX_BREAKER_CHARS, MAX_BREAKERS, DecodingOptions
from swarmllm.errors import (
    BlocksNotServedError,
    BlockWeightsNotFoundError,
    CacheFullError,
    ConfigurationError,
    CorruptActivationsError,
    CorruptWeightsError,
    GroupLostError,
    LocalProtocolError,
    MissingBlocksError,
    PeerError,
    PeerTimeoutError,
    PeerUnreachableError,
    RemoteProtocolError,
    RoutingError,
    ServerOutOfMemoryError,
    ServerOverloadedError,
    SessionClosedError,
    SessionLengthExceededError,
    SessionLostError,
    SessionTooLargeError,
    SwarmError,
    UnsupportedModelError,
    WeightsError,
    WeightsMismatchError,
)
from swarmllm.files import entries_of, read_text, user_path
from swarmllm.machine_memory import total_memory_bytes
from swarmllm.process_end import end_process
from swarmllm.version import __version__

if TYPE_CHECKING:
    from swarmllm.client.local_fallback import LocalFallback, SoFar
    from swarmllm.client.session.inference_session import InferenceSession
    from swarmllm.client.text_generation import (
        CHOICE_FIELDS,
        COLDEST,
        SCORE_FIELDS,
        SPEECH_FIELDS,
        TOKEN_FIELDS,
        open_model,
        preferred_stops,
    )
    from swarmllm.client.view.connection import Connection
    from swarmllm.client.view.swarm_view import SwarmView
    from swarmllm.data_structures import (
        RouteHop,
        ServerInfo,
        ServerState,
        Span,
        SwarmSnapshot,
        printable,
    )
    from swarmllm.decoding.methods import processors_before, processors_behind, tokens_with
    from swarmllm.models.architecture import (
        Task,
        cache_argument,
        decoder_stack,
        has_vision,
        max_positions,
        task_of,
        text_config,
    )
    from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
    from swarmllm.models.checkpoint.sources import require_room
    from swarmllm.models.shell.remote_cache import RemoteCache
    from swarmllm.swarm.block_map import state_name
    from swarmllm.swarm.route_costs import RouteCosts
    from swarmllm.swarm.routing import find_route, route_cost_ms
    from swarmllm.training.run_log import RunSummary, logs_in, run_summary

__all__ = [  # noqa: RUF022 - in groups
    # errors
    "BlockWeightsNotFoundError", "BlocksNotServedError", "CacheFullError", "ConfigurationError",
    "CorruptActivationsError", "CorruptWeightsError", "GroupLostError", "LocalProtocolError", "MissingBlocksError",
    "PeerError", "PeerTimeoutError", "PeerUnreachableError", "RemoteProtocolError", "RoutingError",
    "ServerOutOfMemoryError", "ServerOverloadedError", "SessionClosedError", "SessionLengthExceededError",
    "SessionLostError", "SessionTooLargeError", "SwarmError", "UnsupportedModelError", "WeightsError",
    "WeightsMismatchError",
    # settings
    "ClientConfig", "ClientModelConfig", "SwarmConfig", "default_cache_dir", "hub_token", "in_file",
    "require_addresses", "require_model_place", "require_positive", "require_threads", "MAX_BREAKERS",
    "MAX_BREAKER_CHARS", "DecodingOptions",
    # models
    "CHOICE_FIELDS", "COLDEST", "SCORE_FIELDS", "SPEECH_FIELDS", "TOKEN_FIELDS", "open_model", "preferred_stops",
    "LocalFallback", "SoFar", "Task", "cache_argument", "decoder_stack", "max_positions", "has_vision", "task_of",
    "text_config", "Checkpoint", "open_checkpoint", "require_room",
    # sessions
    "InferenceSession", "RemoteCache",
    # tokens
    "processors_before", "processors_behind", "tokens_with",
    # the swarm
    "Connection", "SwarmView", "RouteHop", "ServerInfo", "ServerState", "Span", "SwarmSnapshot", "state_name",
    "RouteCosts", "find_route", "route_cost_ms",
    # trainings
    "RunSummary", "logs_in", "run_summary",
    # commands
    "Parser", "announced_imports", "docstrings", "end_process", "one_line", "require_free_port", "run_command",
    "stop_event", "entries_of", "read_text", "user_path", "printable", "total_memory_bytes", "__version__",
]  # fmt: skip

_HOMES = {
    "CHOICE_FIELDS": "swarmllm.client.text_generation",
    "COLDEST": "swarmllm.client.text_generation",
    "SCORE_FIELDS": "swarmllm.client.text_generation",
    "SPEECH_FIELDS": "swarmllm.client.text_generation",
    "TOKEN_FIELDS": "swarmllm.client.text_generation",
    "open_model": "swarmllm.client.text_generation",
    "preferred_stops": "swarmllm.client.text_generation",
    "LocalFallback": "swarmllm.client.local_fallback",
    "SoFar": "swarmllm.client.local_fallback",
    "Task": "swarmllm.models.architecture",
    "cache_argument": "swarmllm.models.architecture",
    "decoder_stack": "swarmllm.models.architecture",
    "max_positions": "swarmllm.models.architecture",
    "has_vision": "swarmllm.models.architecture",
    "task_of": "swarmllm.models.architecture",
    "text_config": "swarmllm.models.architecture",
    "Checkpoint": "swarmllm.models.checkpoint.checkpoint",
    "open_checkpoint": "swarmllm.models.checkpoint.checkpoint",
    "require_room": "swarmllm.models.checkpoint.sources",
    "InferenceSession": "swarmllm.client.session.inference_session",
    "RemoteCache": "swarmllm.models.shell.remote_cache",
    "processors_before": "swarmllm.decoding.methods",
    "processors_behind": "swarmllm.decoding.methods",
    "tokens_with": "swarmllm.decoding.methods",
    "Connection": "swarmllm.client.view.connection",
    "SwarmView": "swarmllm.client.view.swarm_view",
    "RouteHop": "swarmllm.data_structures",
    "ServerInfo": "swarmllm.data_structures",
    "ServerState": "swarmllm.data_structures",
    "Span": "swarmllm.data_structures",
    "SwarmSnapshot": "swarmllm.data_structures",
    "printable": "swarmllm.data_structures",
    "state_name": "swarmllm.swarm.block_map",
    "RouteCosts": "swarmllm.swarm.route_costs",
    "find_route": "swarmllm.swarm.routing",
    "route_cost_ms": "swarmllm.swarm.routing",
    "RunSummary": "swarmllm.training.run_log",
    "logs_in": "swarmllm.training.run_log",
    "run_summary": "swarmllm.training.run_log",
}
"""The modules that are imported late, by name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
