"""Speech over HTTP: the text is what transformers' own pipeline makes of the local model, in every format."""

import io
import json
import math
import re
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import numpy as np
import openai
import pytest
import torch
from audio_model import chirp, save_audio_model
from recordings import RATE, wav
from tests.numerics.tiny_speech_models import save_tiny_model
from tests.numerics.tiny_whisper import IDS
from transformers import (
    AutoFeatureExtractor,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    GenerationConfig,
    Wav2Vec2FeatureExtractor,
    pipeline,
)
from web_gateway import NAME, OPTIONS, RunningGateway, running_gateway, server_metrics, wait_until

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.gateway.apis import audio
from swarmllm.gateway.apis.audio import Audio
from swarmllm.gateway.apis.audio_files import IN_MEMORY_BYTES, read_sound, unpacked_bytes
from swarmllm.gateway.engine.vision import Room

pytestmark = pytest.mark.rotates(5, whole_file=True)

SPANS = [(0, 3), (3, 5), (5, 7)]
MODEL = "whisper"
SHORT, LONG = chirp(0.6), chirp(2.4, seed=2)
"""This model hears one second at a time."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_audio_model(tmp_path_factory.mktemp("whisper") / MODEL)


@pytest.fixture(scope="module")
def whisper_swarm(directory: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(str(directory), spans=SPANS, **OPTIONS) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def whisper(whisper_swarm: LocalSwarm, directory: Path) -> Iterator[RunningGateway]:
    """A gateway in front of three servers."""
    limits: dict[str, Any] = {"max_audio_bytes": 1 << 20, "max_audio_s": 20, "max_concurrent": 4, "max_waiting": 4}
    with running_gateway(whisper_swarm.initial_peers, model=(str(directory),), **limits) as gateway:
        gateway.wait_until_seen(len(SPANS))
        yield gateway


@pytest.fixture(scope="module")
def local(directory: Path) -> Any:
    return AutoModelForSpeechSeq2Seq.from_pretrained(directory)


@pytest.fixture(scope="module")
def transcribe(directory: Path, local: Any) -> Callable[..., dict[str, Any]]:
    """transformers' pipeline on the local model."""
    parts = {"feature_extractor": AutoFeatureExtractor, "tokenizer": AutoTokenizer}
    found = {name: kind.from_pretrained(directory) for name, kind in parts.items()}
    heard = pipeline("automatic-speech-recognition", model=local, **found)

    def of(samples: Any, *, times: bool = False, **options: Any) -> dict[str, Any]:
        more = {"return_timestamps": True} if times or len(samples) > RATE else {}
        kept = {"task": "transcribe", **options}
        return dict(heard({"raw": samples, "sampling_rate": RATE}, generate_kwargs=kept, **more))

    return of


def asked(gateway: RunningGateway, samples: Any, route: str = "transcriptions", **fields: Any) -> Any:
    file = samples if isinstance(samples, bytes) else wav(samples)
    return gateway.http.post(f"/v1/audio/{route}", files={"file": ("a.wav", file)}, data=fields)


def told(gateway: RunningGateway, samples: Any, **fields: Any) -> Any:
    response = asked(gateway, samples, **fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("samples", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"language": "de"}, {"language": "de"}),
        ({"language": "German", "model": MODEL}, {"language": "de"}),
        ({"prompt": "ABC abc"}, {"prompt_ids": "ABC abc"}),
    ],
    ids=["plain", "language", "name", "prompt"],
)
def test_the_text_is_the_pipelines(
    whisper: RunningGateway,
    transcribe: Callable[..., dict[str, Any]],
    directory: Path,
    samples: Any,
    fields: dict[str, str],
    options: dict[str, Any],
) -> None:
    if "prompt_ids" in options:
        ids = AutoTokenizer.from_pretrained(directory).get_prompt_ids(options["prompt_ids"], return_tensors="pt")
        options = {"prompt_ids": ids}
    answer = told(whisper, samples, **fields)
    assert answer["text"] == transcribe(samples, **options)["text"]
    assert answer["text"]
    assert answer["usage"] == {"type": "duration", "seconds": math.ceil(len(samples) / RATE)}


def test_each_option_changes_the_text(whisper: RunningGateway) -> None:
    """Otherwise equal texts would prove nothing."""
    sounds = [SHORT, *(chirp(0.6, seed=seed) for seed in range(3, 9))]
    asked_for: list[dict[str, Any]] = [{"language": "en"}, {"language": "de"}, {"prompt": "AB", "language": "en"}]
    asked_for.append({"route": "translations", "language": "en"})
    texts = [tuple(told(whisper, one, **fields)["text"] for one in sounds) for fields in asked_for]
    assert len({*texts}) == len(texts), texts
    assert any(len({*of_sounds}) > 1 for of_sounds in texts), texts


def test_translations(whisper: RunningGateway, transcribe: Callable[..., dict[str, Any]]) -> None:
    for samples in (SHORT, LONG):
        text = told(whisper, samples, route="translations")["text"]
        assert text == transcribe(samples, task="translate")["text"]
    verbose = told(whisper, SHORT, route="translations", response_format="verbose_json")
    assert (verbose["task"], verbose["language"]) == ("translate", "english")


def test_temperatures(whisper: RunningGateway, transcribe: Callable[..., dict[str, Any]]) -> None:
    """0: as Whisper's paper has it, with higher ones where what is written is improbable."""
    torch.manual_seed(3)
    drawn = told(whisper, LONG, temperature="0.7", language="de")["text"]
    torch.manual_seed(3)
    assert drawn == transcribe(LONG, temperature=0.7, language="de")["text"]
    thresholds: dict[str, Any] = {"logprob_threshold": -1.0, "compression_ratio_threshold": 1.35}
    temperatures = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    torch.manual_seed(4)
    likely = told(whisper, LONG, temperature="0", language="de", response_format="verbose_json")
    torch.manual_seed(4)
    expected = transcribe(
        LONG, temperature=temperatures, no_speech_threshold=0.6, language="de", times=True, **thresholds
    )
    assert likely["text"] == expected["text"]
    used = {one["temperature"] for one in likely["segments"]}
    assert used <= {*temperatures}
    assert used != {0.0}  # this model is never sure


@pytest.mark.parametrize("samples", [SHORT, LONG], ids=["short", "long"])
def test_verbose(whisper: RunningGateway, local: Any, directory: Path, samples: Any) -> None:
    """Segments with their times are those of `generate()`; what they are given besides follows from its scores."""
    answer = told(whisper, samples, response_format="verbose_json", language="de")
    assert answer["duration"] == len(samples) / RATE
    assert (answer["task"], answer["language"]) == ("transcribe", "german")
    extractor, tokenizer = AutoFeatureExtractor.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    is_long = len(samples) > RATE
    padding = {"truncation": False, "padding": "longest"} if is_long else {}
    given = extractor(samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **padding)
    options = {"language": "de", "task": "transcribe", "num_beams": 2, "return_timestamps": True}
    more = {"return_segments": True, "return_dict_in_generate": True, "output_scores": True}
    (expected,) = local.generate(**given, **options, **more)["segments"]
    assert len(expected) == len(answer["segments"]) >= (3 if is_long else 1)
    for number, (one, want) in enumerate(zip(answer["segments"], expected, strict=True)):
        assert one["id"] == number
        assert one["tokens"] == want["tokens"].tolist()
        assert (one["start"], one["end"]) == (round(float(want["start"]), 2), round(float(want["end"]), 2))
        assert one["text"] == tokenizer.decode(want["tokens"], skip_special_tokens=True)
        assert one["temperature"] == 0.0
        # Scores of beams are log probabilities of all that was written up to there.
        outputs = want["result"]
        whole = outputs["sequences"][-len(outputs["scores"]) :] if len(outputs["scores"]) else outputs["sequences"]
        logprobs = [
            float(scores.float().log_softmax(-1)[token])
            for scores, token in zip(outputs["scores"], whole, strict=False)
        ]
        assert one["avg_logprob"] == pytest.approx(sum(logprobs) / len(whole), abs=1e-3)
        piece = given["input_features"][:, :, one["seek"] :][:, :, :100]
        piece = torch.nn.functional.pad(piece, (0, 100 - piece.shape[-1]))
        with torch.no_grad():
            start = torch.tensor([[IDS["<|startoftranscript|>"]]])
            logits = local(input_features=piece, decoder_input_ids=start).logits[0, -1]
        assert one["no_speech_prob"] == pytest.approx(float(logits.softmax(-1)[IDS["<|nospeech|>"]]), abs=1e-5)
        assert one["seek"] <= 100 * one["start"] + 1
    assert "".join(one["text"] for one in answer["segments"]) == answer["text"]


CUE = r"(\d+)\n(\d\d:\d\d:\d\d{point}\d{{3}}) --> (\d\d:\d\d:\d\d{point}\d{{3}})\n(.+)\n\n"


def test_other_formats(whisper: RunningGateway) -> None:
    verbose = told(whisper, LONG, response_format="verbose_json", language="de")
    spoken = [one for one in verbose["segments"] if one["text"].strip()]
    assert len(spoken) > 1
    for form, point, begin in (("srt", ",", ""), ("vtt", r"\.", "WEBVTT\n\n")):
        response = asked(whisper, LONG, response_format=form, language="de")
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
        assert response.text.startswith(begin)
        cue = CUE.format(point=point)
        assert re.fullmatch(f"({cue})+", response.text[len(begin) :])
        cues = re.findall(cue, response.text)
        for number, ((name, start, end, text), one) in enumerate(zip(cues, spoken, strict=True), start=1):
            assert name == str(number)
            for shown, seconds in ((start, one["start"]), (end, one["end"])):
                hours, minutes, rest = shown.replace(",", ".").split(":")
                assert 3600 * int(hours) + 60 * int(minutes) + float(rest) == pytest.approx(seconds, abs=1e-3)
            assert text == " ".join(one["text"].split())
    plain = asked(whisper, LONG, response_format="text", language="de")
    assert plain.text == told(whisper, LONG, language="de")["text"] + "\n"
    assert plain.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # by that package, of its own models' names
def test_the_package_of_openai(whisper: RunningGateway, transcribe: Callable[..., dict[str, Any]]) -> None:
    """Its own types take the answers, its errors are raised."""
    client, file = whisper.openai.audio, ("a.wav", wav(LONG))
    expected = transcribe(LONG, language="de")["text"]
    assert client.transcriptions.create(file=file, model=MODEL, language="de").text == expected
    verbose = client.transcriptions.create(
        file=file, model=MODEL, language="de", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert verbose.language == "german"
    assert verbose.segments
    assert [one.id for one in verbose.segments] == [*range(len(verbose.segments))]
    assert client.transcriptions.create(file=file, model=MODEL, response_format="vtt").startswith("WEBVTT")
    events = list(client.transcriptions.create(file=file, model=MODEL, language="de", stream=True))
    assert "".join(one.delta for one in events[:-1]) == expected
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", expected)
    assert len(events) > 2  # piece by piece
    assert client.translations.create(file=file, model=MODEL).text == transcribe(LONG, task="translate")["text"]
    with pytest.raises(openai.BadRequestError) as raised:
        client.transcriptions.create(file=file, model=MODEL, language="xx")
    assert raised.value.param == "language"
    with pytest.raises(openai.NotFoundError):
        client.transcriptions.create(file=file, model="whisper-1")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"language": "xx"}, "language", "'xx' is no language of whisper: de, en"),
    ({"temperature": "1.5"}, "temperature", "less than or equal to 1"),
    ({"temperature": "warm"}, "temperature", "valid number"),
    ({"response_format": "diarized_json"}, "response_format", "'json', 'text', 'srt', 'verbose_json' or 'vtt'"),
    ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "needs response_format verbose_json"),
    (
        {"timestamp_granularities[]": ["segment", "word"], "response_format": "verbose_json"},
        "timestamp_granularities",
        "can only be segment here: times of words need attentions",
    ),
    ({"stream": "true", "response_format": "srt"}, "stream", "needs response_format json"),
    ({"stream": "perhaps"}, "stream", "valid boolean"),
    ({"include[]": "logprobs"}, "include", "is not supported here"),
    ({"chunking_strategy": "auto"}, "chunking_strategy", "is not supported here"),
    ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy", "is not supported here"),
    ({"known_speaker_names[]": ["me"]}, "known_speaker_names", "is not supported here"),
    ({"langauge": "en"}, "langauge", "did you mean 'language'?"),
    ({"prompt": "<|startoftranscript|>"}, "prompt", "can't hold special tokens"),
    ({"prompt": "A" * 32}, "prompt", "the prompt has 32 tokens, and whisper takes 31"),
    ({"prompt": "x" * 20_000}, "prompt", "at most 16384"),
    ({"model": ["a", "b"]}, "model", "valid string"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=lambda one: str(one)[:40])
def test_fields_are_honoured_or_refused_by_name(
    whisper: RunningGateway, fields: dict[str, Any], param: str, words: str
) -> None:
    response = asked(whisper, SHORT, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_harmless_fields_change_nothing(whisper: RunningGateway) -> None:
    """Forms send what nobody has filled in, too."""
    empty = dict.fromkeys(("language", "prompt", "temperature", "model", "stream"), "")
    granular = {"response_format": "verbose_json", "timestamp_granularities": "segment"}
    assert told(whisper, SHORT, **empty)["text"] == told(whisper, SHORT)["text"]
    assert told(whisper, SHORT, **granular) == told(whisper, SHORT, response_format="verbose_json")


def test_files_and_forms_that_are_refused(whisper: RunningGateway) -> None:
    http, route = whisper.http, "/v1/audio/transcriptions"

    def error(status: int, **given: Any) -> dict[str, Any]:
        response = http.post(route, **given)
        assert response.status_code == status, response.text
        found: dict[str, Any] = response.json()["error"]
        return found

    assert error(400, data={"model": MODEL}, files={"other": b"x"})["param"] == "file"
    assert "multipart/form-data" in error(400, data={"model": MODEL})["message"]
    assert "multipart/form-data" in error(400, json={"file": "x"})["message"]
    assert "multipart/form-data" in error(400, content=b"hello", headers={"content-type": "text/plain"})["message"]
    form = {"content-type": "multipart/form-data; boundary=b"}
    assert "ends too early" in error(400, content=b"--b\r\nContent-Disp", headers=form)["message"]
    nameless = b'--b\r\nContent-Disposition: form-data; name=""\r\n\r\nx\r\n--b--\r\n'
    assert "with a name" in error(400, content=nameless, headers=form)["message"]
    assert "the file is empty" in error(400, files={"file": ("a.wav", b"")})["message"]
    no_sound = error(400, files={"file": ("a.txt", b"Once upon a time", "text/plain")})["message"]
    assert "wav" in no_sound.lower(), "with ffmpeg or without"
    assert "damaged" in error(400, files={"file": ("a.wav", wav(SHORT)[:40])})["message"]
    assert "two fields file" in error(400, files=[("file", b"1"), ("file", b"2")])["message"]
    assert "at most 64 fields" in error(400, files={"file": b"x"}, data={f"f{i}": "" for i in range(80)})["message"]
    long = error(400, files={"file": wav(chirp(20.5))})
    assert (long["code"], long["param"]) == ("audio_too_long", "file")
    assert "raise max_audio_s" in long["message"]
    assert error(413, files={"file": bytes((1 << 20) + 1)})["param"] == "file"
    chunks = (b"--b\r\nContent-Disposition: form-data; name=file\r\n\r\n", *[bytes(1 << 16)] * 20)
    assert error(413, content=iter(chunks), headers=form)["code"] == "body_too_large"
    assert error(413, files={"file": b"x"}, data={"prompt": "x" * 70_000})["code"] == "body_too_large"
    assert http.get(route).status_code == 405
    wait_until(lambda: whisper.gateway.engine.num_under_way == 0, "all ended")
    assert told(whisper, SHORT)["text"]


def test_its_place_among_others(whisper: RunningGateway, gateway: RunningGateway) -> None:
    (listed,) = whisper.http.get("/v1/models").json()["data"]
    assert (listed["id"], listed["audio"], listed["translates"], listed["chat"]) == (MODEL, True, True, False)
    assert listed["max_model_len"] == 64
    for ask in (
        lambda: whisper.openai.completions.create(model=MODEL, prompt="Tom"),
        lambda: whisper.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Tom"}]),
        lambda: whisper.openai.embeddings.create(model=MODEL, input="Tom"),
    ):
        with pytest.raises(openai.BadRequestError, match=r"writes down sound .* ask /v1/audio/transcriptions"):
            ask()
    words = "embedded writes text and takes no sound: ask /v1/chat/completions, or start the gateway with --model of"
    response = asked(gateway, SHORT)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_audio")
    assert words in response.json()["error"]["message"]
    shown = whisper.http.post("/api/show", json={"model": MODEL}).json()
    assert shown["capabilities"] == []
    assert whisper.http.get("/health").json()["status"] == "ok"
    page = whisper.swarm()
    assert page["num_blocks"] == 7
    assert page["encoder_blocks"] == 4


@contextmanager
def upload_under_way(gateway: RunningGateway, sent: bytes, length: int) -> Iterator[socket.socket]:
    """A form of `length` bytes; only the bytes `sent` have come."""
    url = urlsplit(gateway.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {length}\r\n"
        connection.sendall(head.encode() + b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + sent)
        yield connection


def form_of(file: bytes, **fields: str) -> bytes:
    found = b"--b\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n" + file
    for name, value in fields.items():
        found += f"\r\n--b\r\nContent-Disposition: form-data; name={name}\r\n\r\n{value}".encode()
    return found + b"\r\n--b--\r\n"


def test_uploads_that_never_end_take_places_and_give_them_back(whisper: RunningGateway) -> None:
    """A file that is under way lies on the disk, and only so many are."""
    routes = whisper.gateway.dialects[Audio]
    half = form_of(bytes(IN_MEMORY_BYTES * 4))[: IN_MEMORY_BYTES * 3]
    with upload_under_way(whisper, half, 1 << 20) as first:
        wait_until(lambda: routes.num_files == 1, "the upload began")
        assert told(whisper, SHORT)["text"]  # others are answered
        routes.num_files += 7
        try:
            response = asked(whisper, SHORT)
        finally:
            routes.num_files -= 7
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        first.close()
        wait_until(lambda: routes.num_files == 0, "its place was given back")


@pytest.mark.parametrize("stream", ["false", "true"])
def test_hanging_up_frees_everything(whisper: RunningGateway, whisper_swarm: LocalSwarm, stream: str) -> None:
    engine, routes = whisper.gateway.engine, whisper.gateway.dialects[Audio]
    data = form_of(wav(chirp(19.0)), stream=stream)
    with upload_under_way(whisper, data, len(data)):
        wait_until(lambda: engine.num_under_way == 1, "it was begun")
        wait_until(lambda: any(_sessions(server) for server in whisper_swarm.servers), "a session was opened")
    wait_until(lambda: engine.num_under_way == 0 and routes.num_files == 0, "it was given up")
    for server in whisper_swarm.servers:
        wait_until(lambda server=server: _sessions(server) == 0, "the session was freed")


def _sessions(server: Any) -> float:
    return server_metrics(server)["swarmllm_server_sessions"]


def test_many_at_once(whisper: RunningGateway, transcribe: Callable[..., dict[str, Any]]) -> None:
    """Each gets the text of its own file."""
    files = [chirp(0.3 + 0.4 * number, seed=number) for number in range(5)]
    expected = [transcribe(one, language="de")["text"] for one in files]
    with ThreadPoolExecutor(5) as threads:
        found = list(threads.map(lambda one: told(whisper, one, language="de")["text"], files))
    assert found == expected


def test_tokens_are_counted(whisper: RunningGateway) -> None:
    before = whisper.figure("swarmllm_gateway_tokens_total")
    count = sum(len(one["tokens"]) for one in told(whisper, LONG, response_format="verbose_json")["segments"])
    assert whisper.figure("swarmllm_gateway_tokens_total") == before + count


def test_an_error_in_the_stream_is_its_last_event(whisper: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway goes away in mid-text."""
    engine = whisper.gateway.engine
    request = whisper.http.build_request(
        "POST", "/v1/audio/transcriptions", files={"file": wav(chirp(19.0))}, data={"stream": "true"}
    )
    response = whisper.http.send(request, stream=True)
    lines = (line for line in response.iter_lines() if line.startswith("data: "))
    assert json.loads(next(lines)[6:])["type"] == "transcript.text.delta"
    monkeypatch.setattr(engine, "_closing", True)
    *_, last, done = lines
    response.close()
    assert json.loads(last[6:])["error"]["code"] == "shutting_down"
    assert done == "data: [DONE]"
    monkeypatch.undo()
    wait_until(lambda: engine.num_under_way == 0, "it ended")


def test_before_a_stream_begins_errors_have_their_status(whisper: RunningGateway) -> None:
    response = asked(whisper, b"RIFF", stream="true")
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


@pytest.fixture
def doubled(directory: Path) -> Iterator[tuple[LocalSwarm, RunningGateway]]:
    with (
        LocalSwarm(str(directory), spans=SPANS * 2, **OPTIONS) as swarm,
        running_gateway(swarm.initial_peers, model=(str(directory),)) as gateway,
    ):
        gateway.wait_until_seen(len(swarm.servers))
        yield swarm, gateway


def test_servers_die_in_mid_text(
    doubled: tuple[LocalSwarm, RunningGateway], transcribe: Callable[..., dict[str, Any]]
) -> None:
    """One of the decoder's after the first piece, one of the encoder's afterwards: the text stays the same."""
    swarm, gateway = doubled
    samples = chirp(4.0, seed=5)
    expected = transcribe(samples, language="de")["text"]
    client = gateway.openai.audio.transcriptions
    found, victims = "", [swarm.servers[2], swarm.servers[3]]
    for event in client.create(file=wav(samples), model=MODEL, language="de", stream=True):
        if event.type == "transcript.text.delta":
            found += event.delta
            if victims:
                victims.pop().kill()
    assert found == expected
    assert not victims
    assert gateway.http.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize("kind", ["moonshine", pytest.param("speech_to_text", marks=pytest.mark.slow)])
def test_models_that_know_no_times(kind: str, tmp_path: Path) -> None:
    """The text alone; what only a Whisper knows is refused by name."""
    path = save_tiny_model(kind, tmp_path / kind)
    GenerationConfig.from_pretrained(path, max_length=30).save_pretrained(path)
    AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(path)
    if kind == "moonshine":
        Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(path)
    else:
        from transformers import Speech2TextFeatureExtractor

        Speech2TextFeatureExtractor(feature_size=8, num_mel_bins=8).save_pretrained(path)
    parts = {"feature_extractor": AutoFeatureExtractor, "tokenizer": AutoTokenizer}
    found = {name: kind.from_pretrained(path) for name, kind in parts.items()}
    model = AutoModelForSpeechSeq2Seq.from_pretrained(path)
    expected = pipeline("automatic-speech-recognition", model=model, **found)({"raw": SHORT, "sampling_rate": RATE})
    with (
        LocalSwarm(str(path), spans=[(0, 4), (4, 7)], **OPTIONS) as swarm,
        running_gateway(swarm.initial_peers, model=(str(path),)) as gateway,
    ):
        assert told(gateway, SHORT)["text"] == expected["text"]
        assert told(gateway, SHORT, temperature="0")["text"] == expected["text"]
        for fields, param in (
            ({"response_format": "srt"}, "response_format"),
            ({"language": "en"}, "language"),
            ({"prompt": "x"}, "prompt"),
            ({"route": "translations"}, "model"),
        ):
            response = asked(gateway, SHORT, **fields)  # type: ignore[arg-type]
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        events = asked(gateway, SHORT, stream="true").text.split("\n\n")
        assert json.loads(events[0][6:]) == {"type": "transcript.text.delta", "delta": expected["text"]}


def test_speech_beside_text(directory: Path) -> None:
    """A gateway of both: each request finds the one that can."""
    with LocalSwarm(str(directory), spans=[(0, 7)], **OPTIONS) as swarm:
        swarm.add_server((0, 8), model=embedded_model_path())
        with running_gateway(swarm.initial_peers, model=(embedded_model_path(), str(directory))) as both:
            assert told(both, SHORT)["text"]
            assert both.http.post("/v1/completions", json={"prompt": "Tom", "max_tokens": 2}).json()["model"] == NAME
            response = asked(both, SHORT, model=NAME)
            assert "or name one that does: whisper" in response.json()["error"]["message"]
            assert both.http.get("/health").json()["status"] == "ok"


def test_other_rates_and_channels(whisper: RunningGateway, transcribe: Callable[..., dict[str, Any]]) -> None:
    stereo = np.stack([SHORT, SHORT], axis=1)
    expected = transcribe(SHORT, language="de")["text"]
    assert told(whisper, wav(stereo), language="de")["text"] == expected
    assert told(whisper, wav(SHORT, bits=24), language="de")["text"] == expected
    assert told(whisper, wav(SHORT, bits=32, kind=3), language="de")["text"] == expected
    assert told(whisper, wav(chirp(0.6, rate=8000), rate=8000), language="de")["text"]


def test_sounds_wait_for_memory(whisper: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other is unpacked, if there is memory for one; what needs more than all is refused."""
    responder = whisper.gateway.responder
    data = wav(SHORT)
    needed = unpacked_bytes(io.BytesIO(data), RATE, 20)
    room = Room(needed * 3 // 2, most=16)
    monkeypatch.setattr(responder, "memory", room)
    under_way: list[int] = []

    def read(*given: Any) -> Any:
        under_way.append(room.size - room.left)
        return read_sound(*given)

    monkeypatch.setattr(audio, "read_sound", read)

    def heard(data: bytes) -> httpx.Response:
        return whisper.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", data)})

    with ThreadPoolExecutor(3) as threads:
        assert [answer.status_code for answer in threads.map(heard, [data] * 3)] == [200] * 3
    assert len(under_way) == 3
    assert max(under_way) < 2 * needed
    for longer in (wav(LONG), b"ID3\x04 an mp3"):
        refused = heard(longer).json()["error"]
        assert "send it in parts, as WAV, or raise max_input_bytes" in refused["message"]
    wait_until(lambda: room.left == room.size, "all memory came back")


def test_a_wav_that_says_two_things_is_refused(whisper: RunningGateway) -> None:
    """The first description makes it short, and the second one counts."""
    data = wav(LONG)
    short = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 2, 192_000, 768_000, 4, 16)
    refused = whisper.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", data[:12] + short + data[12:])})
    assert refused.status_code == 400
    assert "it contradicts itself about its samples" in refused.text
