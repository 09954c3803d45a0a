"""generation_config.json of strangers: each field of transformers' GenerationConfig holds as it says, or makes nothing
of the text and breaks nothing. For the gateway, and for the commands `generate` and `chat`."""

import copy
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from web_gateway import NAME, RunningGateway, running_gateway

from swarmllm import LocalSwarm
from swarmllm.client.text_generation import TEXT_FIELDS, TextConfig, take_over_preferences
from swarmllm.errors import ConfigurationError
from swarmllm.models.checkpoint.checkpoint import open_checkpoint

pytestmark = pytest.mark.rotates(6, whole_file=True)

PROMPT = "Once upon a time there was a little"
NUM_TOKENS = 10
OWN = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

TAKEN: dict[str, tuple[Any, Any]] = {
    "bos_token_id": (1, 5),
    "eos_token_id": (2, [2, 300]),
    "pad_token_id": (0, -1),
    "decoder_start_token_id": (1, 5),
    "forced_bos_token_id": (1, 5),
    "suppress_tokens": ([2, 300], list(range(40, 400))),
    "begin_suppress_tokens": ([2], list(range(40, 400))),
    "bad_words_ids": ([[300]], [[token] for token in range(40, 400)]),
    "sequence_bias": ([[[300], -5.0]], [[[token], -9.0] for token in range(40, 400)]),
    "encoder_repetition_penalty": (1.0, 0.5),
    "no_repeat_ngram_size": (2, 1),
    "encoder_no_repeat_ngram_size": (2, 1),
    "exponential_decay_length_penalty": ([2, 1.1], [1, 3.0]),
    "min_length": (1, 16),
    "min_new_tokens": (1, 8),
    "remove_invalid_values": (True, False),
    "renormalize_logits": (True, False),
    "repetition_penalty": (1.0, 1.7),
    "stop_strings": (["zzz"], "zzz"),
}
"""Fields that hold for a text of the likeliest tokens, as JSON has them."""
SAMPLING: dict[str, tuple[Any, Any]] = {
    "do_sample": (True, False),
    "temperature": (0.0, 0.7),
    "top_k": (1, 20),
    "top_p": (0.2, 0.9),
    "top_h": (0.3, 0.9),
    "min_p": (0.1, 0.9),
    "typical_p": (0.2, 0.9),
    "epsilon_cutoff": (0.01, 0.3),
    "eta_cutoff": (0.01, 0.3),
}
"""Fields that hold where tokens are drawn."""
OTHERS: dict[str, tuple[Any, Any]] = {
    "max_length": (3, 4096),
    "max_new_tokens": (1, 4096),
    "early_stopping": (True, "never"),
    "max_time": (0.0001, 5.0),
    "num_beams": (2, 4),
    "use_mtp": (True, False),
    "use_cache": (False, True),
    "cache_implementation": ("static", "quantized"),
    "cache_config": ({"backend": "quanto"}, {"nbits": 4}),
    "max_cache_len": (4, 400),
    "length_penalty": (0.5, 2.0),
    "forced_eos_token_id": (2, [2, 300]),
    "token_healing": (True, False),
    "guidance_scale": (1.5, 3.0),
    "watermarking_config": (
        {
            "greenlist_ratio": 0.25,
            "bias": 9.0,
            "hashing_key": 15485863,
            "seeding_scheme": "lefthash",
            "context_width": 1,
        },
        {"ngram_len": 5, "keys": [654, 400, 836, 123], "context_history_size": 1024, "skip_first_ngram_calls": True},
    ),
    "num_return_sequences": (2, 3),
    "output_attentions": (True, False),
    "output_hidden_states": (True, False),
    "output_scores": (True, False),
    "output_logits": (True, False),
    "return_dict_in_generate": (True, False),
    "is_assistant": (True, False),
    "num_assistant_tokens": (1, 50),
    "num_assistant_tokens_schedule": ("constant", "heuristic"),
    "assistant_confidence_threshold": (0.1, 0.9),
    "prompt_lookup_num_tokens": (5, 10),
    "max_matching_ngram_size": (1, 3),
    "assistant_early_exit": (2, 4),
    "assistant_lookbehind": (1, 5),
    "target_lookbehind": (1, 5),
    "assistant_ensemble_weight": (0.3, 0.7),
    "speculation_type": ("vanilla", "mtp"),
    "compile_config": ({"fullgraph": True}, {"mode": "default"}),
    "disable_compile": (True, False),
    "continuous_batching_config": ({}, None),
    "low_memory": (True, False),
    "penalty_alpha": (0.6, 0.1),
    "dola_layers": ("low", [2, 4]),
    "diversity_penalty": (0.5, 1.0),
    "num_beam_groups": (2, 4),
    "constraints": ([], None),
    "force_words_ids": ([[5]], [[5, 6]]),
    "prefill_chunk_size": (2, 8),
    "transformers_version": ("4.0.0", "9.0.0"),
}
"""Fields about the way in which a text is computed, which is the gateway's own, and about other texts than one."""


@pytest.fixture(scope="module")
def asking(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """A gateway whose model may be given other preferences."""
    with running_gateway(swarm.initial_peers) as gateway:
        yield gateway


def loaded(tmp_path: Path, fields: dict[str, Any]) -> GenerationConfig:
    """As a checkpoint's file has it.

    Raises:
        ConfigurationError: transformers itself can't read it.
    """
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "generation_config.json").write_text(json.dumps({**OWN, **fields}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about what it will not know for long
        found = open_checkpoint(str(tmp_path)).generation_config()
    assert found is not None
    return found


def prefer(gateway: RunningGateway, config: GenerationConfig) -> None:
    """Have the gateway open its model as if the checkpoint had that file."""
    model = gateway.gateway.models.first
    model.swarm.generation_config = config
    take_over_preferences(model.swarm, model.tokenizer, TEXT_FIELDS, name=NAME)
    model.take_preferences()


def answered(gateway: RunningGateway, **more: Any) -> list[tuple[str, str]]:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, **more}
    answer = gateway.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [(choice["text"], choice["finish_reason"]) for choice in answer.json()["choices"]]


def written(model: Any, tokenizer: Any, **more: Any) -> str:
    """As the commands call it."""
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    options = {**TextConfig(model=NAME, max_new_tokens=NUM_TOKENS).generation_options(), **more}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), tokenizer=tokenizer, **options)[0]
    return str(tokenizer.decode(output[ids.shape[1] :], skip_special_tokens=True))


def test_the_lists_here_are_complete() -> None:
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    # Those that only some versions know are custom fields to others.
    assert known <= {*TAKEN, *SAMPLING, *OTHERS}, "say what becomes of it"
    assert {*TAKEN, *SAMPLING} <= {*TEXT_FIELDS}
    assert not {*OTHERS} & {*TEXT_FIELDS}


@pytest.mark.parametrize("place", [0, 1])
def test_accepted_fields_give_the_text_of_transformers(
    asking: RunningGateway, local: Any, tokenizer: Any, tmp_path: Path, place: int
) -> None:
    swarm, text = asking.gateway.models.first.swarm, written(local, tokenizer)
    plain, differ = copy.deepcopy(local.generation_config), set()
    for name, values in TAKEN.items():
        config = loaded(tmp_path, {name: values[place]})
        local.generation_config = copy.deepcopy(config)
        if local.generation_config.pad_token_id == -1:
            local.generation_config.pad_token_id = 0
        expected = written(local, tokenizer)
        local.generation_config = copy.deepcopy(plain)
        prefer(asking, config)
        assert answered(asking)[0][0] == expected, name
        if expected != text:  # the commands, too
            differ.add(name)
            swarm.generation_config = config
            take_over_preferences(swarm, tokenizer, TEXT_FIELDS, name=NAME)
            assert written(swarm, tokenizer) == expected, name
    assert not place or len(differ) > 5  # so they do something


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_constraint_goes_before_fields_that_forbid_tokens(
    asking: RunningGateway, tmp_path: Path, temperature: float
) -> None:
    names = {"type": "array", "items": {"enum": ["Tom", "Lily"]}, "minItems": 3, "maxItems": 3}
    asked = {"guided_json": names, "max_tokens": 40, "temperature": temperature, "seed": 1}
    every = list(range(2, 2000))
    for name, value in {
        "no_repeat_ngram_size": 1,
        "encoder_no_repeat_ngram_size": 1,
        "min_length": 300,
        "min_new_tokens": 30,
        "bad_words_ids": [[token] for token in every],
        "suppress_tokens": every,
        "begin_suppress_tokens": every,
        "forced_bos_token_id": 5,
        "sequence_bias": [[[token], -math.inf] for token in every],
    }.items():
        prefer(asking, loaded(tmp_path, {name: value}))
        ((text, reason),) = answered(asking, **asked)
        assert reason == "stop", name
        assert {*json.loads(text)} <= {"Tom", "Lily"}, name


@pytest.mark.parametrize("place", [0, 1])
def test_sampling_fields_hold_unless_the_request_has_its_own(
    asking: RunningGateway, tmp_path: Path, place: int
) -> None:
    prefer(asking, loaded(tmp_path, {}))
    plain = answered(asking)
    for name, values in SAMPLING.items():
        prefer(asking, loaded(tmp_path, {"do_sample": True, name: values[place]}))
        assert answered(asking) == plain, name
        preferred = asking.gateway.models.first.preferred_sampling()
        if name not in ("do_sample", "temperature"):
            assert preferred == {name: values[place]}
        assert answered(asking, temperature=None, seed=1), name


@pytest.mark.parametrize("place", [0, 1])
def test_all_other_fields_change_nothing(asking: RunningGateway, tokenizer: Any, tmp_path: Path, place: int) -> None:
    prefer(asking, loaded(tmp_path, {}))
    plain, two = answered(asking), answered(asking, n=2)
    together: dict[str, Any] = {}
    refused = set()
    for name, values in OTHERS.items():
        try:
            loaded(tmp_path, {name: values[place], **({"do_sample": True} if "return" in name else {})})
        except ConfigurationError:
            refused.add(name)
        else:
            together[name] = values[place]
    assert refused <= {"compile_config", "watermarking_config", "continuous_batching_config", "cache_implementation"}
    every = GenerationConfig(**OWN)
    for name, value in together.items():  # some exclude each other, and none may matter
        setattr(every, name, value)
    prefer(asking, every)
    assert answered(asking) == plain
    assert answered(asking, n=2) == two
    swarm = asking.gateway.models.first.swarm
    swarm.generation_config = every
    take_over_preferences(swarm, tokenizer, TEXT_FIELDS, name=NAME)
    assert [written(swarm, tokenizer)] == [text for text, _ in plain]


def test_a_stop_text_of_the_checkpoint_ends_answers(asking: RunningGateway, tmp_path: Path) -> None:
    prefer(asking, loaded(tmp_path, {}))
    ((text, _),) = answered(asking)
    stop = text.split()[2]
    prefer(asking, loaded(tmp_path, {"stop_strings": [stop]}))
    assert answered(asking) == [(text[: text.index(stop)], "stop")]


@pytest.mark.parametrize(
    "fields",
    [
        {"eos_token_id": "</s>"},
        {"repetition_penalty": -1.0},
        {"top_p": -0.5, "do_sample": True},
        {"temperature": -1.0, "do_sample": True},
        {"no_repeat_ngram_size": "two"},
        {"sequence_bias": [[[99_999_999], 1.0]]},
        {"suppress_tokens": ["x"]},
        {"stop_strings": 5},
        {"early_stopping": "sometimes"},
        {"max_new_tokens": 0},
        {"cache_implementation": "of my own"},
        {"fsd_alpha": 7.0},
    ],
    ids=str,
)
def test_unusable_values_are_refused_at_the_start(
    asking: RunningGateway, tmp_path: Path, fields: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=r"can't be used: .*correct the file or delete it"):
        prefer(asking, loaded(tmp_path, fields))


def test_ignored_fields_are_logged_once(
    asking: RunningGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefer(asking, loaded(tmp_path, {"num_beams": 4, "max_time": 0.1, "use_cache": False, "top_k": 50}))
    (message,) = [record.getMessage() for record in caplog.records if "generation_config.json" in record.getMessage()]
    assert message.endswith("asks for max_time, num_beams, which is not done here")
