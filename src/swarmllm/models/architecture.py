"""The structure of a Hugging Face model: its class for a task, its stacks, its list of blocks, the length of its texts.

Everything here works from names and signatures that all models of transformers share, so that no architecture needs
code of its own. Called by the rest of `models/`, and wherever texts are measured or limited; knows no checkpoint and
no network.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from swarmllm.data_structures import MAX_BLOCKS, Span
from swarmllm.errors import SwarmError, UnsupportedModelError

UNSEEN = "it generates no text step by step, and its blocks were not seen to give the numbers of the local model"
NO_TEXT = "it takes images, audio or video in place of text; a text model that is a part of it may work alone"
MULTIMODAL = "its text model is given more of images, audio or video than embeddings; its text model alone may be"
UNHEARD = "it takes audio by an encoder whose blocks were not seen to give the numbers of the local model"
UNREAD = "it is no encoder-decoder that generates text from text or sound in transformers"
_ATTENDS = "its text model attends to pictures in blocks of its own, which servers aren't given"
_LOOKS = "its text model takes pictures itself, besides embeddings"
_ASSISTANT = (
    "it drafts tokens for another model and reads that one's keys and values; run it locally as assistant_model"
)

ENCODERS = frozenset(
    {
        "bert",
        "camembert",
        "convbert",
        "data2vec-text",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "eurobert",
        "gte",
        "jina_embeddings_v3",
        "megatron-bert",
        "mobilebert",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "nystromformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "ultrabert",
        "xlm-roberta",
        "xlm-roberta-xl",
    }
)
"""Encoders whose blocks were seen to be exact (`tests/numerics/test_task_classes.py`): forward without a KV cache."""

WITH_AUDIO = frozenset({"moonshine", "speech_to_text", "whisper"})
"""Encoder-decoders with audio whose blocks were seen to be exact (`tests/numerics/test_architectures.py`). Nothing
happens between the blocks of their encoders."""

EXACT_WITH: dict[str, dict[str, object]] = {"bigbird_pegasus": {"attention_type": "original_full"}}
"""Settings of a config that make an architecture exact that is refused otherwise, as the sweep shows."""

REFUSED_ARCHITECTURES: dict[str, str] = {
    **dict.fromkeys(("bert-generation", "big_bird", "xlm", "xmod"), UNSEEN),
    **dict.fromkeys(
        (
            "blt",
            "dots3_note",
            "emu3",
            "fuyu",
            "moshi",
            "moss_transcribe_diarize",
            "musicgen",
            "musicgen_melody",
            "phi4_multimodal",
        ),
        MULTIMODAL,
    ),
    **dict.fromkeys(("blip", "evolla", "idefics", "mllama"), _ATTENDS),
    **dict.fromkeys(("git", "kosmos-2", "kosmos-2.5"), _LOOKS),
    "diffusion_gemma": "it writes many tokens at a time, over and over, without a causal KV cache",
    "pi0": "it writes movements of a robot, and no text",
    "shieldgemma2": "it says whether a picture may be shown, and writes no text",
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "hrm_text": "its blocks run several times in nested loops",
    **dict.fromkeys(
        ("inkling2", "inkling2_text"), "its blocks and its head read the outputs of several earlier blocks"
    ),
    "longcat_flash": "each of its blocks counts as two layers of the cache",
    "bigbird_pegasus": (
        "it changes its way of attention for good at the first short text, so servers would differ, unless "
        'attention_type is "original_full" in its config.json'
    ),
    "encoder-decoder": "it joins two models of any kinds, which name and number their blocks each for itself",
    "fsmt": "its stacks are no models of transformers with a config and masks of their own",
    "prophetnet": "its decoder's blocks run on the text and on its predictions side by side, as more positions",
    "pegasus_x": "its encoder hands global tokens from block to block besides the hidden states",
    "minimax": "its keys and values live in a cache class of its own",
    "cpmant": "its forward takes no embeddings and puts a learned prompt before the ids",
    "openai-gpt": "it keeps no keys and values, so it can't continue a session",
    "recurrent_gemma": "its recurrent states live inside its modules instead of a cache",
    "reformer": "its blocks are reversible and its states live in a cache class of its own",
    "rwkv": "its recurrent states live outside of transformers' caches",
    "unlimited_ocr": "its blocks attend to all that came first at once, so a text that comes in pieces is another",
    "xlnet": "it predicts in permuted order, without a causal KV cache",
    "zaya": "the router of each block reads the state of the router before",
    "xlstm": "its recurrent states live in a cache class of its own",
}

MOST_PADDING = 16
"""Most entries of a table of positions besides those of texts: 2 in OPT and RoBERTa. Assumed."""
_LENGTHS = (
    *("max_position_embeddings", "max_seq_len", "max_target_positions"),
    *("max_decoder_position_embeddings", "max_encoder_position_embeddings"),
)


class Task(Enum):
    """The task of a model's head; users see the value."""

    CAUSAL_LM = "causal language model"
    SEQ_TO_SEQ_LM = "encoder-decoder language model"
    SPEECH_SEQ_TO_SEQ = "model with audio"
    IMAGE_TEXT_TO_TEXT = "model with vision"
    SEQUENCE_CLASSIFICATION = "sequence classification model"
    TOKEN_CLASSIFICATION = "token classification model"
    QUESTION_ANSWERING = "question answering model"
    MASKED_LM = "masked language model"
    FEATURES = "model without a head"


TASK_TAGS = {
    Task.CAUSAL_LM: "text-generation",
    Task.SEQ_TO_SEQ_LM: "text2text-generation",
    Task.SPEECH_SEQ_TO_SEQ: "automatic-speech-recognition",
    Task.IMAGE_TEXT_TO_TEXT: "image-text-to-text",
    Task.SEQUENCE_CLASSIFICATION: "text-classification",
    Task.TOKEN_CLASSIFICATION: "token-classification",
    Task.QUESTION_ANSWERING: "question-answering",
    Task.MASKED_LM: "fill-mask",
    Task.FEATURES: "feature-extraction",
}
"""The hub's names of tasks."""


_MAPPINGS = {
    Task.CAUSAL_LM: MODEL_FOR_CAUSAL_LM_MAPPING,
    Task.SEQ_TO_SEQ_LM: MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    Task.SPEECH_SEQ_TO_SEQ: MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    Task.IMAGE_TEXT_TO_TEXT: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    Task.SEQUENCE_CLASSIFICATION: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    Task.TOKEN_CLASSIFICATION: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    Task.QUESTION_ANSWERING: MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    Task.MASKED_LM: MODEL_FOR_MASKED_LM_MAPPING,
    Task.FEATURES: MODEL_MAPPING,
}


@dataclass(frozen=True)
class BlockList:
    """The place of a model's blocks: `getattr(owner, attribute) is blocks`."""

    owner: nn.Module
    attribute: str
    blocks: nn.ModuleList


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of the config that describes the decoder."""
    return config.get_text_config(decoder=True)


@dataclass(frozen=True)
class Stack:
    """A part of the model that loops over blocks: all of them, or those of the encoder or the decoder."""

    role: str
    """ "encoder", "decoder", or "" where there is but one."""
    span: Span
    """The numbers of its blocks in the whole model; the encoder's come first."""


@contextmanager
def as_config_says(path: str) -> Iterator[None]:
    """Within: transformers obeys a stranger's file; any error about the file becomes one sentence.

    Raises:
        UnsupportedModelError: transformers can't obey it.
    """
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:  # transformers checks few fields, so wrong ones fail anywhere in its code
        said = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"transformers can't do what the config of {path} says, so mend it or use another checkpoint: "
            f"{type(error).__name__}: {said[:250]}"
        ) from error


_stacks: dict[str, tuple[Stack, ...]] = {}


def stacks(config: PreTrainedConfig) -> tuple[Stack, ...]:
    """The stacks of the model, whose blocks are numbered one stack after the other.

    Raises:
        UnsupportedModelError: it can't be split, or its config describes no model.
    """
    if not config.is_encoder_decoder:
        with as_config_says(config.name_or_path):
            return (Stack("", Span(0, _plausible(text_config(config).num_hidden_layers))),)
    with as_config_says(config.name_or_path):
        key = config.to_json_string(use_diff=False)
    if key not in _stacks:
        check_supported(config)
        with as_config_says(config.name_or_path), torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = blocks_class(config)(copy.deepcopy(config))
            counts = [len(_first_list(stack)) for stack in (model.get_encoder(), model.get_decoder())]
        _plausible(sum(counts))
        _stacks[key] = (Stack("encoder", Span(0, counts[0])), Stack("decoder", Span(counts[0], sum(counts))))
    return _stacks[key]


def _plausible(num_blocks: object) -> int:
    """Raise UnsupportedModelError unless it is a number of blocks."""
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or not 1 <= num_blocks <= MAX_BLOCKS:
        raise UnsupportedModelError(f"the config says {num_blocks!r} blocks, but a model has 1 to {MAX_BLOCKS}")
    return num_blocks


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
    """Refuse models that are known not to give the numbers of the local model.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name = config.model_type
    settings = EXACT_WITH.get(name)
    is_exact = settings is not None and all(getattr(config, key, None) == value for key, value in settings.items())
    if (reason := REFUSED_ARCHITECTURES.get(name)) and not is_exact:
        raise UnsupportedModelError(f"{name} can't be split over servers: {reason}")
    if config.is_encoder_decoder:
        if type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and not has_audio(config):
            reason = UNHEARD if type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING else UNREAD
            raise UnsupportedModelError(f"{name} can't be split over servers: {reason}")
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not is_encoder(config) and not has_vision(config):
        reason = NO_TEXT if _has_vision_or_audio(config) else UNSEEN
        raise UnsupportedModelError(f"{name} can't be split over servers: {reason}")


def _has_vision_or_audio(config: PreTrainedConfig) -> bool:
    """True if the model consists of several models, or isn't for text."""
    cls = MODEL_MAPPING.get(type(config), None)
    return bool(config.sub_configs) or getattr(cls, "main_input_name", "input_ids") != "input_ids"


def is_encoder(config: PreTrainedConfig) -> bool:
    """True if positions attend to later ones: there is no KV cache and nothing to generate."""
    return config.model_type in ENCODERS and not getattr(config, "is_decoder", False)


def has_audio(config: PreTrainedConfig) -> bool:
    """True if the model takes audio; its encoder makes the inputs of the encoder's blocks from it."""
    return config.is_encoder_decoder and config.model_type in WITH_AUDIO


def has_vision(config: PreTrainedConfig) -> bool:
    """True if the model takes pictures; its text model is a part of it."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder


def task_class(config: PreTrainedConfig, task: Task) -> type[PreTrainedModel]:
    """The Hugging Face class for `task` with this config.

    Raises:
        UnsupportedModelError: there is none, or it can't be split.
    """
    check_supported(config)
    mapping = _MAPPINGS[task]
    if has_audio(config) != (task == Task.SPEECH_SEQ_TO_SEQ) and (has_audio(config) or type(config) in mapping):
        name, text = config.model_type, "takes text, or audio by blocks that were not seen to be exact"
        kind, way = ("takes audio", "SpeechSeq2Seq") if has_audio(config) else (text, "Seq2SeqLM")
        raise UnsupportedModelError(f"{name} is a model that {kind}: use AutoDistributedModelFor{way}")
    if config.is_encoder_decoder and task in (Task.CAUSAL_LM, Task.TOKEN_CLASSIFICATION, Task.FEATURES):
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder-decoder; servers run both of its stacks: use "
            "AutoDistributedModelForSeq2SeqLM, AutoDistributedModel, or the class for a sequence's class or for answers"
        )
    if is_encoder(config) and task == Task.CAUSAL_LM:
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder, whose positions see later ones, so it can't generate step by step: "
            "use AutoDistributedModelForSequenceClassification or another class without generate()"
        )
    cls, whole = (all_of.get(type(config), None) for all_of in (mapping, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING))
    has_head = cls is not None and task not in (Task.CAUSAL_LM, Task.FEATURES)
    if has_vision(config) and cls is not whole and not has_head:
        raise UnsupportedModelError(
            f"{config.model_type} is a model with vision: use AutoDistributedModelForImageTextToText or "
            "AutoDistributedModel"
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
        return task_class(config, Task.SPEECH_SEQ_TO_SEQ if has_audio(config) else Task.SEQ_TO_SEQ_LM)
    if has_vision(config):
        return task_class(config, Task.IMAGE_TEXT_TO_TEXT)
    return task_class(config, Task.FEATURES if is_encoder(config) else Task.CAUSAL_LM)


def task_of(config: PreTrainedConfig) -> Task:
    """The task that the checkpoint was saved for: a causal language model, unless it says otherwise."""
    if has_vision(config) and not config.is_encoder_decoder:
        return Task.IMAGE_TEXT_TO_TEXT
    with as_config_says(config.name_or_path):
        name = (config.architectures or [""])[0]
    for task in (Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING, Task.MASKED_LM):
        mapping = _MAPPINGS[task]
        if type(config) in mapping and mapping[type(config)].__name__ == name:
            return task
    if config.is_encoder_decoder:
        return Task.SPEECH_SEQ_TO_SEQ if has_audio(config) else Task.SEQ_TO_SEQ_LM
    return Task.FEATURES if is_encoder(config) else Task.CAUSAL_LM


def stored_prefix(config: PreTrainedConfig) -> str:
    """The prefix of the stack's tensors in the class that the checkpoint was saved for."""
    cls = _MAPPINGS[task_of(config)].get(type(config), None)
    return str(getattr(cls, "base_model_prefix", ""))


def decoder_stack(model: PreTrainedModel) -> PreTrainedModel:
    """The module whose forward runs the blocks, from embeddings to the final norm."""
    decoder = model.get_decoder()
    if decoder is not model and hasattr(decoder, "config") and decoder.get_output_embeddings() is not None:
        return decoder_stack(decoder)  # of some models that see, the text model comes with its head
    return decoder if hasattr(decoder, "config") else model.base_model


def stack_module(model: PreTrainedModel, stack: Stack) -> PreTrainedModel:
    """The module of that stack."""
    encoder: PreTrainedModel
    if stack.role == "encoder":
        encoder = model.get_encoder()
        return encoder
    return decoder_stack(model)


def stack_root(model: PreTrainedModel, stack: Stack) -> nn.Module:
    """The module in which the blocks of that stack are looked for, so that a tower's are not taken for them."""
    root: nn.Module = stack_module(model, stack) if stack.role or has_vision(model.config) else model
    return root


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
    root = stack_root(model, stack)
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
    """The name of the cache in the stack's forward: mamba-like models differ."""
    parameters = inspect.signature(stack.forward).parameters
    return "cache_params" if "cache_params" in parameters else "past_key_values"


def max_positions(stack: PreTrainedModel) -> int | None:
    """Positions that the stack was made for; some have a learned embedding for each, and none for more."""
    found = _length_of(stack)
    for part in stack.modules():  # RoBERTa and its kin begin to count behind the position of padding
        if found and hasattr(part, "position_embeddings") and getattr(part, "padding_idx", None) is not None:
            return found - int(part.padding_idx) - 1
    return found


def _length_of(stack: PreTrainedModel) -> int | None:
    """Positions of a text, by any of the names that configs have for them: the first name for which the stack has a
    table."""
    config = text_config(stack.config)
    stated = (getattr(config, name, None) for name in _LENGTHS)
    found = [length for length in stated if isinstance(length, int) and length > 0]
    parts = stack.named_modules() if len(found) > 1 else ()
    tables = [len(part.weight) for name, part in parts if isinstance(part, nn.Embedding) and "pos" in name]
    of_tables = (length for length in found if any(_is_table(rows, length) for rows in tables))
    return next(of_tables, found[0] if found else None)


def _is_table(rows: int, length: int) -> bool:
    return length <= rows <= length + MOST_PADDING


def table_positions(stack: PreTrainedModel) -> range | None:
    """The `position_ids` for which the stack's tables have an entry; None if it looks up nothing by them."""
    length = _length_of(stack) or 0
    ranges: list[range] = []
    for name, part in stack.named_modules() if length else ():
        tables = [part.weight] if isinstance(part, nn.Embedding) else []
        # Sines and cosines of all positions, as GPT-J and XGLM keep them.
        tables += [b for key, b in part.named_buffers(name, recurse=False) if b.ndim == 2 and "pos" in key]
        offset = int(getattr(part, "offset", 0))  # OPT and its kin add it to each position
        rows = [len(table) for table in tables if _is_table(len(table), length)]
        ranges += [range(-offset, number - offset) for number in rows]
    return range(max(r.start for r in ranges), min(r.stop for r in ranges)) if ranges else None
