"""Every field of OpenAI's and vLLM's requests is honoured or refused by name; what is honoured does what it says."""

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as completion_params
from openai.types import embedding_create_params as embedding_params
from openai.types.audio import transcription_create_params as transcription_params
from openai.types.audio import translation_create_params as translation_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from transformers import RepetitionPenaltyLogitsProcessor
from web_gateway import RunningGateway

from swarmllm.errors import ConfigurationError
from swarmllm.gateway.apis.anthropic import MessagesRequest
from swarmllm.gateway.apis.audio import TranscriptionRequest, TranslationRequest
from swarmllm.gateway.apis.chat_request import ChatRequest
from swarmllm.gateway.apis.embeddings import EmbeddingsRequest
from swarmllm.gateway.apis.ollama import OllamaChat, OllamaGenerate, Options
from swarmllm.gateway.apis.request_bodies import Body, CompletionRequest, refuse_unknown
from swarmllm.gateway.apis.responder import read_json
from swarmllm.gateway.apis.responses import ResponsesRequest
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.sampling import Constraint, NotYet, Sampler, SamplingOptions

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about a fox."}]
PROMPT = "Once upon a time"
# As of 2026-11: https://platform.openai.com/docs/api-reference, vLLM's protocol of its OpenAI server, and the request
# types of the packages anthropic 2.13 and ollama 0.6.3.
OF_BOTH = """frequency_penalty logit_bias logprobs max_tokens model n presence_penalty seed stop stream stream_options
temperature top_p user top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output
ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids
prompt_logprobs add_special_tokens response_format structured_outputs guided_json guided_regex guided_choice
guided_grammar structural_tag guided_decoding_backend guided_whitespace_pattern priority request_id logits_processors
return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs use_beam_search bad_words"""
OF_CHATS = """messages audio function_call functions max_completion_tokens metadata modalities parallel_tool_calls
prediction prompt_cache_key prompt_cache_retention reasoning_effort safety_identifier service_tier store tool_choice
tools top_logprobs verbosity web_search_options echo add_generation_prompt continue_final_message documents
chat_template chat_template_kwargs mm_processor_kwargs"""
OF_COMPLETIONS = "prompt best_of echo suffix"
OF_RESPONSES = """input model request_id mm_processor_kwargs priority skip_special_tokens top_k min_p repetition_penalty
seed stop ignore_eos min_tokens frequency_penalty presence_penalty logit_bias chat_template_kwargs vllm_xargs cache_salt
structured_outputs kv_transfer_params previous_input_messages enable_response_messages include_stop_str_in_output"""
OF_EMBEDDINGS = """input model encoding_format dimensions user truncate_prompt_tokens add_special_tokens priority
request_id cache_salt mm_processor_kwargs normalize embed_dtype endianness messages chat_template
chat_template_kwargs use_activation pooling_params add_generation_prompt continue_final_message"""
OF_SPEECH = """file model language prompt response_format timestamp_granularities temperature stream
stream_include_usage stream_continuous_usage_stats vllm_xargs to_language top_p top_k min_p seed frequency_penalty
repetition_penalty presence_penalty max_completion_tokens hotwords use_beam_search n length_penalty"""
OF_ANTHROPIC = """max_tokens messages model cache_control container diagnostics inference_geo metadata output_config
speed service_tier stop_sequences system thinking tool_choice tools user_profile_id workspace_id stream temperature
top_p top_k mcp_servers context_management"""
OF_OLLAMAS_CHATS = "model stream options format keep_alive messages tools think logprobs top_logprobs truncate shift"
OF_OLLAMAS_PROMPTS = "model stream options format keep_alive prompt suffix system template context raw images think"
OF_OLLAMAS_OPTIONS = """numa num_ctx num_batch num_gpu main_gpu low_vram logits_all vocab_only use_mmap use_mlock
embedding_only num_thread num_keep seed num_predict top_k top_p tfs_z typical_p repeat_last_n temperature repeat_penalty
min_p stop presence_penalty frequency_penalty mirostat mirostat_tau mirostat_eta penalize_newline"""
KINDS: dict[type[Body], tuple[str, Any]] = {  # the names listed above, and all that the client of openai can send
    ChatRequest: (OF_BOTH + " " + OF_CHATS, chat_params.CompletionCreateParamsBase),
    CompletionRequest: (
        OF_BOTH.replace("response_format ", "") + " " + OF_COMPLETIONS,
        completion_params.CompletionCreateParamsBase,
    ),
    ResponsesRequest: (OF_RESPONSES, response_params.ResponseCreateParamsBase),
    EmbeddingsRequest: (OF_EMBEDDINGS, embedding_params.EmbeddingCreateParams),
    TranscriptionRequest: (OF_SPEECH, transcription_params.TranscriptionCreateParamsStreaming),
    TranslationRequest: (OF_SPEECH, translation_params.TranslationCreateParams),
    MessagesRequest: (OF_ANTHROPIC, None),
    OllamaChat: (OF_OLLAMAS_CHATS, None),
    OllamaGenerate: (OF_OLLAMAS_PROMPTS, None),
    Options: (OF_OLLAMAS_OPTIONS, None),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_field_is_known_and_honoured_or_refused_by_name(kind: type[Body]) -> None:
    """A known field has checks of its own, or is listed as harmless with its harmless values."""
    names, params = KINDS[kind]
    names_of_client = params.__annotations__ if params is not None else ()
    assert {*names.split(), *names_of_client} <= {*kind.known_names()}
    for name in (name for name, values in kind.harmless.items() if values == ()):
        body = kind.model_construct(**{name: "anything"})
        with pytest.raises(ApiError, match=f"{name} is not supported here: leave it out") as refused:
            refuse_unknown(body, lenient=True)
        assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_token": 3}, "unknown field 'max_token': did you mean 'max_tokens'?"),
        ({"temprature": 0}, "did you mean 'temperature'?"),
        ({"zzzzqqqq": 1}, "unknown field 'zzzzqqqq': leave it out"),
        (
            {"stream": True, "stream_options": {"include_usag": True}},
            "unknown field 'stream_options.include_usag': did you mean",
        ),
        ({"messages": [{"role": "assistant", "contents": "x"}]}, "'messages[0].contents': did you mean 'content'?"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]}, "messages[0].content[0].txt"),
        ({"store": True}, "store can only be false here: leave it out"),
        ({"service_tier": "flex"}, 'service_tier can only be "auto" or "default" here'),
        ({"x" * 5000: 1}, "leave it out"),
        ({"output_format": {}}, "unknown field 'output_format': leave it out"),
    ],
)
def test_fields_that_are_refused(more: dict[str, Any], words: str) -> None:
    body = ChatRequest.model_validate({"messages": MESSAGES, **more})
    with pytest.raises(ApiError) as refused:
        refuse_unknown(body, lenient=False)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 200
    if "unknown" in str(refused.value):
        refuse_unknown(body, lenient=True)


def test_harmless_fields_change_nothing() -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": 1},
        "store": False,
        "service_tier": "auto",
        "tools": None,
        "audio": None,
    }
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    body = ChatRequest.model_validate({"messages": [*MESSAGES, answer], **harmless})
    refuse_unknown(body, lenient=False)


@given(st.dictionaries(st.text(max_size=20), st.none() | st.integers() | st.text(max_size=5), max_size=4))
def test_any_other_name_is_refused_in_one_sentence(fields: dict[str, Any]) -> None:
    fields = {name: value for name, value in fields.items() if name not in ChatRequest.known_names()}
    body = ChatRequest.model_validate({"messages": MESSAGES, **fields})
    if all(value is None for value in fields.values()):
        refuse_unknown(body, lenient=False)
    else:
        with pytest.raises(ApiError, match="unknown field"):
            refuse_unknown(body, lenient=False)


def test_only_near_names_are_hints() -> None:
    body = CompletionRequest.model_validate({"prompt": PROMPT, "response_format": {"type": "json_object"}})
    with pytest.raises(ApiError, match=r"^unknown field 'response_format': leave it out$"):
        refuse_unknown(body, lenient=False)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 3},
            "max_tokens is 5, but max_completion_tokens is 3: give one of them",
        ),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": True}, "max_tokens: give a number, not true or false"),
        ("/v1/completions", {"prompt": PROMPT, "temperature": False}, "temperature: give a number, not true or false"),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": True}, "logprobs: give a number, not true or false"),
        ("/v1/completions", {"prompt": PROMPT, "logit_bias": {"5": True}}, "give a number, not true or false"),
        ("/v1/completions", {"prompt": [True]}, "prompt.0: Input should be a valid string"),
        ("/v1/completions", {"prompt": [[1, True]]}, "prompt.0.1: Input should be a valid integer"),
        ("/detokenize", {"tokens": [True]}, "tokens.0: Input should be a valid integer"),
        ("/v1/completions", {"prompt": PROMPT, "echo": "yes"}, "echo: give true or false, without quotation marks"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "stream_options": {"include_usage": "false"}},
            "stream_options.include_usage: give true or false, without quotation marks",
        ),
        ("/api/chat", {"model": "embedded", "messages": MESSAGES, "options": {"seed": True}}, "give a number"),
        ("/api/chat", {"model": "embedded", "messages": MESSAGES, "think": "very"}, "'low', 'medium' or 'high'"),
        ("/v1/messages", {"model": "embedded", "messages": MESSAGES, "max_tokens": True}, "give a number"),
        ("/v1/responses", {"input": PROMPT, "store": "no"}, "store: give true or false, without quotation marks"),
    ],
)
def test_no_kind_of_value_is_taken_for_another(
    gateway: RunningGateway, path: str, body: dict[str, Any], words: str
) -> None:
    response = gateway.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert words in response.text.replace('\\"', '"')


def test_numbers_in_strings_and_equal_limits_are_taken(gateway: RunningGateway) -> None:
    found = gateway.post("/v1/completions", prompt=PROMPT, max_tokens="2", temperature="0", n=1.0)
    assert found["usage"]["completion_tokens"] == 2
    both = {"max_tokens": 2, "max_completion_tokens": 2}
    assert gateway.post("/v1/chat/completions", messages=MESSAGES, **both)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("/v1/completions", '{"prompt": "a", "prompt": "b"}', "'prompt'"),
        ("/v1/completions", '{"prompt": "a:b", "logit_bias": {"1": 2, "\\u0031": 3}}', "'1'"),
        ("/api/chat", '{"model": "embedded", "messages": [{"role": "user", "role": "user"}]}', "'role'"),
    ],
)
def test_a_field_given_twice_is_refused(gateway: RunningGateway, path: str, text: str, name: str) -> None:
    response = gateway.http.post(path, content=text)
    assert response.status_code == 400, response.text
    assert f"the JSON has {name} twice in one object: give it once" in response.text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(':"\\{[a', max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(':"\\a', max_size=3), inner, max_size=3),
    )
)
def test_json_without_repeated_fields_is_read(value: Any) -> None:
    assert read_json(json.dumps(value).encode()) == value


def test_over_http(gateway: RunningGateway) -> None:
    response = gateway.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokenz": 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("max_tokenz", "unknown_parameter")
    assert "did you mean 'max_tokens'?" in error["message"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "'system', 'developer', 'user', 'assistant' or 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "'input_audio' can't be read"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "if it is of type image_url"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice both constrain"),
        ({"guided_regex": "("}, "guided_regex: the regular expression can't be used"),
        ({"guided_grammar": "start"}, "guided_grammar: the grammar can't be used"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: the JSON schema can't be used"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos can't be used with guided_choice"),
        ({"min_tokens": 5, "max_tokens": 4}, "only 4 are to be written"),
        ({"stop_token_ids": [99_999_999]}, "the model has only"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs can't hold chat_template"),
    ],
)
def test_unusable_values(gateway: RunningGateway, more: dict[str, Any], words: str) -> None:
    response = gateway.http.post("/v1/chat/completions", json={"messages": MESSAGES, **more})
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]


def ask(gateway: RunningGateway, **more: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, **more}
    response = gateway.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"guided_choice": ["the “fox”\n", "a\\b", 'he said "no"']}, r'the “fox”\n|a\\b|he said "no"'),
        ({"guided_regex": r"[A-Z]{3}-[0-9]{4}"}, r"[A-Z]{3}-[0-9]{4}"),
        ({"guided_grammar": 'start: "x" ("y" | "z")~3'}, "x[yz]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "(ab){2,3}"}}, "(ab){2,3}"),
    ],
)
def test_constraints(gateway: RunningGateway, more: dict[str, Any], pattern: str) -> None:
    for temperature in (0, 1):
        choice = ask(gateway, **more, temperature=temperature, seed=3, max_tokens=60)["choices"][0]
        assert re.fullmatch(pattern, choice["text"]), choice
        assert choice["finish_reason"] == "stop"


def test_json_by_either_name(gateway: RunningGateway) -> None:
    schema = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
    schema["additionalProperties"] = False  # type: ignore[assignment]
    for more in (
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
    ):
        text = ask(gateway, **more, max_tokens=60)["choices"][0]["text"]
        assert json.loads(text)["legs"] in (2, 4)


def test_the_end_of_text(gateway: RunningGateway, tokenizer: Any) -> None:
    """It ends an answer, or comes later, or never; other tokens may end one, too."""
    prompt = "Tell me a story."
    asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 400, "temperature": 0.2, "seed": 1}

    def chat(**more: Any) -> tuple[int, str]:
        answer = gateway.http.post("/v1/chat/completions", json={**asked, **more}).json()
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    count, reason = chat()
    assert reason == "stop"
    assert count < 400
    longer, _ = chat(min_tokens=count + 20)
    assert longer >= count + 20
    assert chat(ignore_eos=True, max_tokens=count + 20) == (count + 20, "length")
    first = ask(gateway, max_tokens=8)["choices"][0]["text"]
    ids = tokenizer(PROMPT + first).input_ids[len(tokenizer(PROMPT).input_ids) :]
    ended = ask(gateway, max_tokens=8, stop_token_ids=[ids[3]])
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == ids.index(ids[3]) + 1


def test_a_repetition_penalty_is_transformers(gateway: RunningGateway, local: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    expected = local.generate(ids, max_new_tokens=24, do_sample=False, repetition_penalty=1.3)[0, ids.shape[1] :]
    text = ask(gateway, repetition_penalty=1.3)["choices"][0]["text"]
    assert text == tokenizer.decode(expected, skip_special_tokens=True)
    assert text != ask(gateway)["choices"][0]["text"]


@given(
    vocabulary=st.integers(4, 40),
    rows=st.integers(1, 3),
    length=st.integers(1, 6),
    penalty=st.floats(0.5, 2),
    least=st.integers(0, 8),
)
def test_sampler(vocabulary: int, rows: int, length: int, penalty: float, least: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary * rows + length)
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    scores = torch.randn(rows, vocabulary, generator=generator)
    sampler = Sampler(SamplingOptions(seed=0, temperature=0, repetition_penalty=penalty), rows, (), NotYet([1], least))
    expected = scores.clone() if penalty == 1 else RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    if length < least:
        expected[:, 1] = -torch.inf
    assert sampler(ids, scores.clone()).argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_a_constraint_of_nonsense_is_refused_by_its_field(tokenizer: Any) -> None:
    from swarmllm.gateway.sampling import Grammars

    grammars = Grammars(tokenizer, len(tokenizer))
    with pytest.raises(ConfigurationError, match="guided_json: the JSON schema can't be used"):
        grammars.matcher(Constraint.json("guided_json", "[1"))
