"""Run large language models together: each server holds some blocks, every client sees one transformers model.

    from swarmllm import AutoDistributedModel
    model = AutoDistributedModel.from_pretrained(name, initial_peers=[...])
    model.generate(...)

The public names are imported when they are first used, so that `import swarmllm` is fast. `docs/architecture.md`
follows a token through the files. Each entry may import the entries below it:

__main__         `swarmllm X`
commands/        commands without a room of their own
gateway/         an HTTP API and web pages
demo/            a whole swarm on this machine
api              names that guests may import: the gateway, notebooks, other projects
machines/        machines that serve models together, and share weights
training/        one adapter, trained by several homes together
client/          a model without its blocks
server/          some blocks
command_line     common parts of all commands
speculation/     guessing tokens ahead
decoding/        methods of choosing tokens
models/          models, split into the client's part and blocks
network/         everything between processes
swarm/           pure decisions
config           settings
invite           one word that says how to join a swarm
data_structures  plain values that all rooms share, such as a server's announcement
files            reading users' text, writing files safely, temporary directories
machine_memory   main memory that this process may use; freed memory, given back
errors           every error that a user can meet
process_end      the end of processes that serve until they are stopped
version          the version of this package
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swarmllm.version import __version__

if TYPE_CHECKING:
    from swarmllm.client.distributed_model import (
        AutoDistributedModel,
        AutoDistributedModelForCausalLM,
        AutoDistributedModelForFeatureExtraction,
        AutoDistributedModelForImageTextToText,
        AutoDistributedModelForMaskedLM,
        AutoDistributedModelForQuestionAnswering,
        AutoDistributedModelForSeq2SeqLM,
        AutoDistributedModelForSequenceClassification,
        AutoDistributedModelForSpeechSeq2Seq,
        AutoDistributedModelForTokenClassification,
        DistributedModel,
        DistributedModelForCausalLM,
    )
    from swarmllm.config import ClientConfig
    from swarmllm.demo.local_swarm import LocalSwarm, demo_model_path, embedded_model_path
    from swarmllm.errors import SwarmError
    from swarmllm.models.checkpoint.checkpoint import load_tokenizer

__all__ = [
    "AutoDistributedModel",
    "AutoDistributedModelForCausalLM",
    "AutoDistributedModelForFeatureExtraction",
    "AutoDistributedModelForImageTextToText",
    "AutoDistributedModelForMaskedLM",
    "AutoDistributedModelForQuestionAnswering",
    "AutoDistributedModelForSeq2SeqLM",
    "AutoDistributedModelForSequenceClassification",
    "AutoDistributedModelForSpeechSeq2Seq",
    "AutoDistributedModelForTokenClassification",
    "ClientConfig",
    "DistributedModel",
    "DistributedModelForCausalLM",
    "LocalSwarm",
    "SwarmError",
    "__version__",
    "demo_model_path",
    "embedded_model_path",
    "load_tokenizer",
]

_HOMES = {
    "AutoDistributedModel": "swarmllm.client.distributed_model",
    "AutoDistributedModelForCausalLM": "swarmllm.client.distributed_model",
    "AutoDistributedModelForFeatureExtraction": "swarmllm.client.distributed_model",
    "AutoDistributedModelForImageTextToText": "swarmllm.client.distributed_model",
    "AutoDistributedModelForMaskedLM": "swarmllm.client.distributed_model",
    "AutoDistributedModelForQuestionAnswering": "swarmllm.client.distributed_model",
    "AutoDistributedModelForSeq2SeqLM": "swarmllm.client.distributed_model",
    "AutoDistributedModelForSequenceClassification": "swarmllm.client.distributed_model",
    "AutoDistributedModelForSpeechSeq2Seq": "swarmllm.client.distributed_model",
    "AutoDistributedModelForTokenClassification": "swarmllm.client.distributed_model",
    "ClientConfig": "swarmllm.config",
    "DistributedModel": "swarmllm.client.distributed_model",
    "DistributedModelForCausalLM": "swarmllm.client.distributed_model",
    "LocalSwarm": "swarmllm.demo.local_swarm",
    "SwarmError": "swarmllm.errors",
    "demo_model_path": "swarmllm.demo.local_swarm",
    "embedded_model_path": "swarmllm.demo.local_swarm",
    "load_tokenizer": "swarmllm.models.checkpoint.checkpoint",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
