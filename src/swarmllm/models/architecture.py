"""What a Hugging Face model is made of: its class for a task, its stack, its list of blocks.

Everything here works from names and signatures that all models of transformers share, so that no architecture needs
code of its own. Called by the rest of `models/`; knows no checkpoint and no network.
"""

import copy
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from swarmllm.data_structures import Span
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.refused_architectures import ENCODERS, REFUSED_ARCHITECTURES


class Task(Enum):
    """What a model's head is for; the value says it to users."""

    CAUSAL_LM = "causal language model"
    SEQ_TO_SEQ_LM = "encoder-decoder language model"
    SEQUENCE_CLASSIFICATION = "sequence classification model"
    TOKEN_CLASSIFICATION = "token classification model"
    QUESTION_ANSWERING = "question answering model"
    FEATURES = "model without a head"


TASK_TAGS = {
    Task.CAUSAL_LM: "text-generation",
    Task.SEQ_TO_SEQ_LM: "text2text-generation",
    Task.SEQUENCE_CLASSIFICATION: "text-classification",
    Task.TOKEN_CLASSIFICATION: "token-classification",
    Task.QUESTION_ANSWERING: "question-answering",
    Task.FEATURES: "feature-extraction",
}
"""What the hub calls them."""
_MAPPINGS = {
    Task.CAUSAL_LM: MODEL_FOR_CAUSAL_LM_MAPPING,
    Task.SEQ_TO_SEQ_LM: MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    Task.SEQUENCE_CLASSIFICATION: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    Task.TOKEN_CLASSIFICATION: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    Task.QUESTION_ANSWERING: MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    Task.FEATURES: MODEL_MAPPING,
}


@dataclass(frozen=True)
class BlockList:
    """Where the blocks of a model are: `getattr(owner, attribute) is blocks`."""

    owner: nn.Module
    attribute: str
    blocks: nn.ModuleList


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of the config that describes the decoder."""
    return config.get_text_config(decoder=True)


@dataclass(frozen=True)
class Stack:
    """A part of the model that loops over blocks: all of them, or those of the encoder, or of the decoder."""

    role: str
    """ "encoder", "decoder", or "" where there is but one."""
    span: Span
    """Its blocks, as they are numbered in the whole model: those of the encoder come first."""


_stacks: dict[str, tuple[Stack, ...]] = {}


def stacks(config: PreTrainedConfig) -> tuple[Stack, ...]:
    """The stacks of the model, whose blocks are numbered one stack after the other."""
    if not config.is_encoder_decoder:
        return (Stack("", Span(0, int(text_config(config).num_hidden_layers))),)
    key = config.to_json_string(use_diff=False)
    if key not in _stacks:
        check_supported(config)
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = blocks_class(config)(copy.deepcopy(config))
        counts = [len(_first_list(stack)) for stack in (model.get_encoder(), model.get_decoder())]
        _stacks[key] = (Stack("encoder", Span(0, counts[0])), Stack("decoder", Span(counts[0], sum(counts))))
    return _stacks[key]


def stack_of(config: PreTrainedConfig, span: Span) -> Stack:
    """The stack that has these blocks.

    Raises:
        UnsupportedModelError: they are in two.
    """
    for stack in stacks(config):
        if span in stack.span:
            return stack
    raise UnsupportedModelError(f"blocks {span} are in the encoder and in the decoder, which run one after the other")


def parts_of(config: PreTrainedConfig, span: Span) -> list[Span]:
    """The blocks of `span` in each of the stacks."""
    bounds = [(max(span.start, stack.span.start), min(span.end, stack.span.end)) for stack in stacks(config)]
    return [Span(start, end) for start, end in bounds if start < end]


def num_blocks(config: PreTrainedConfig) -> int:
    """Number of blocks of all stacks."""
    return stacks(config)[-1].span.end


def _first_list(stack: nn.Module) -> nn.ModuleList:
    """The shallowest list of like modules, the longest of several."""
    found = [
        (name.count("."), -len(part), part)
        for name, part in stack.named_modules()
        if isinstance(part, nn.ModuleList) and len({type(one) for one in part}) == 1
    ]
    if not found:
        raise UnsupportedModelError(f"{type(stack).__name__} has no list of blocks")
    return min(found, key=lambda one: one[:2])[2]


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse what is known not to give the numbers of the local model.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name = config.model_type
    if reason := REFUSED_ARCHITECTURES.get(name):
        raise UnsupportedModelError(f"{name} can't be split over servers: {reason}")
    if config.is_encoder_decoder:
        if type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
            raise UnsupportedModelError(f"{name} is no encoder-decoder that generates text from text in transformers")
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not is_encoder(config):
        raise UnsupportedModelError(f"{name} has no causal language model in transformers")


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether positions see later ones, so that there is no KV cache and nothing to generate."""
    return config.model_type in ENCODERS and not getattr(config, "is_decoder", False)


def task_class(config: PreTrainedConfig, task: Task) -> type[PreTrainedModel]:
    """The Hugging Face class for `task` with this config.

    Raises:
        UnsupportedModelError: there is none, or it can't be split.
    """
    check_supported(config)
    mapping = _MAPPINGS[task]
    if config.is_encoder_decoder and task != Task.SEQ_TO_SEQ_LM:
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder-decoder: use AutoDistributedModelForSeq2SeqLM or AutoDistributedModel"
        )
    if is_encoder(config) and task == Task.CAUSAL_LM:
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder, whose positions see later ones, so it can't generate step by step: "
            "use AutoDistributedModelForSequenceClassification or another class without generate()"
        )
    if type(config) not in mapping:
        raise UnsupportedModelError(f"transformers has no {task.value} for {config.model_type}")
    found: type[PreTrainedModel] = mapping[type(config)]
    return found


def blocks_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that blocks are taken from, whatever the task.

    Raises:
        UnsupportedModelError: it can't be split.
    """
    if config.is_encoder_decoder:
        return task_class(config, Task.SEQ_TO_SEQ_LM)
    return task_class(config, Task.FEATURES if is_encoder(config) else Task.CAUSAL_LM)


def task_of(config: PreTrainedConfig) -> Task:
    """What the checkpoint was saved for: a causal language model, unless it says otherwise."""
    if config.is_encoder_decoder:
        return Task.SEQ_TO_SEQ_LM
    name = (config.architectures or [""])[0]
    for task in (Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING):
        mapping = _MAPPINGS[task]
        if type(config) in mapping and mapping[type(config)].__name__ == name:
            return task
    return Task.FEATURES if is_encoder(config) else Task.CAUSAL_LM


def decoder_stack(model: PreTrainedModel) -> PreTrainedModel:
    """The module whose forward runs the blocks, from embeddings to the final norm."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "config") else model.base_model


def stack_module(model: PreTrainedModel, stack: Stack) -> PreTrainedModel:
    """The module of that stack."""
    encoder: PreTrainedModel
    if stack.role == "encoder":
        encoder = model.get_encoder()
        return encoder
    return decoder_stack(model)


def hosted_stack(model: PreTrainedModel) -> Stack:
    """The stack that the model has been cut down to, or the one that generates."""
    found: Stack = model.__dict__.get("swarm_stack") or stacks(model.config)[-1]
    return found


def find_blocks(model: PreTrainedModel, stack: Stack | None = None) -> BlockList:
    """The shallowest list of as many modules as the stack (default: the hosted one) has blocks.

    Raises:
        UnsupportedModelError: there is no such list.
    """
    stack = stack or hosted_stack(model)
    root: nn.Module = stack_module(model, stack) if stack.role else model
    wanted = len(stack.span)
    found = [
        (name, module)
        for name, module in root.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted
    ]
    if not found:
        raise UnsupportedModelError(f"{type(root).__name__} has no list of {wanted} blocks")
    name, blocks = min(found, key=lambda item: item[0].count("."))
    owner_name, _, attribute = name.rpartition(".")
    return BlockList(root.get_submodule(owner_name), attribute, blocks)


def cache_argument(stack: nn.Module) -> str:
    """How the stack's forward names its cache: mamba-like models differ."""
    parameters = inspect.signature(stack.forward).parameters
    return "cache_params" if "cache_params" in parameters else "past_key_values"


def length_of_equal_rotation(config: PreTrainedConfig) -> float:
    """Positions up to which a rotary embedding rotates each position alike, whatever else is in the batch.

    Two kinds look at the largest position of a batch and choose their frequencies by it (Phi-3 128k, dynamic NTK).
    """

    def limits(settings: object) -> Iterable[float]:
        if isinstance(settings, dict):
            if settings.get("rope_type", settings.get("type")) in ("dynamic", "longrope"):
                original = settings.get("original_max_position_embeddings")
                yield original or getattr(config, "original_max_position_embeddings", None) or length
            for value in settings.values():
                yield from limits(value)

    length: float = getattr(config, "max_position_embeddings", 0)
    found = (getattr(config, name, None) for name in ("rope_parameters", "rope_scaling"))
    return min((limit for settings in found for limit in limits(settings)), default=float("inf"))
