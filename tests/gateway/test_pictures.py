"""Pictures in chats: the answer is what the local model writes, whatever API asks; what is no picture is refused."""

import base64
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from vision_model import as_png, as_url, picture, said, save_vision_model
from web_gateway import OPTIONS, RunningGateway, running_gateway, wait_until

from swarmllm import LocalSwarm
from swarmllm.gateway.engine.vision import MAX_PICTURES, MAX_PIXELS, MAX_RATIO, PictureProcessor, Room, unpacked_bytes
from swarmllm.gateway.errors import ApiError

pytestmark = pytest.mark.rotates(3, whole_file=True)

TOKENS = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(scope="module")
def local(directory: Path) -> Any:
    return save_vision_model(directory)


@pytest.fixture(scope="module")
def vision(directory: Path, local: Any) -> Iterator[RunningGateway]:
    """Two servers, and a gateway in front of them."""
    with (
        LocalSwarm(str(directory), spans=[(0, 2), (2, 4)], **OPTIONS) as swarm,
        running_gateway(swarm.initial_peers, model=(str(directory),)) as gateway,
    ):
        yield gateway


@pytest.fixture(scope="module")
def written(directory: Path, local: Any) -> Callable[..., str]:
    """A function that describes pictures with the local model and its own processor."""
    processor = AutoProcessor.from_pretrained(directory)

    def write(text: str, *images: Image.Image) -> str:
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        given = processor(text=[prompt], images=list(images), return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            output = local.generate(**given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        return str(processor.tokenizer.decode(output[0, given["input_ids"].shape[1] :], skip_special_tokens=True))

    return write


def asked(gateway: RunningGateway, messages: Any, **more: Any) -> Any:
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}
    return gateway.http.post("/v1/chat/completions", json=body)


def test_answers_are_those_of_the_local_model(vision: RunningGateway, written: Callable[..., str]) -> None:
    red, blue = picture("red"), picture("blue", (200, 64))
    answers = []
    for images in ((red,), (blue,), (red, blue)):
        response = asked(vision, said("What is it?", *images))
        assert response.status_code == 200, response.text
        answers.append(response.json()["choices"][0]["message"]["content"])
        assert answers[-1] == written("What is it?", *images)
        assert response.json()["usage"]["prompt_tokens"] > 16 * len(images)
    assert len({*answers}) == 3  # pictures matter


def test_several_answers_and_text_alone(vision: RunningGateway, written: Callable[..., str]) -> None:
    red = picture("red")
    choices = asked(vision, said("Well?", red), n=2).json()["choices"]
    assert [one["message"]["content"] for one in choices] == [written("Well?", red)] * 2
    response = asked(vision, [{"role": "user", "content": "Once upon a time"}])
    assert response.status_code == 200


def test_streams(vision: RunningGateway, written: Callable[..., str]) -> None:
    chunks = vision.openai.chat.completions.create(
        model=vision.gateway.models.named(None).name,
        messages=said("What is it?", picture("green")),  # type: ignore[arg-type]
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == written("What is it?", picture("green"))


def test_other_apis(vision: RunningGateway, written: Callable[..., str]) -> None:
    red, name = picture("red"), vision.gateway.models.named(None).name
    data = base64.b64encode(as_png(red)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    body = {"model": name, "max_tokens": TOKENS, "temperature": 0, "messages": [{"role": "user", "content": blocks}]}
    answer = vision.http.post("/v1/messages", json=body).json()
    assert written("What is it?", red).startswith(answer["content"][0]["text"])
    said_so = {"role": "user", "content": "What is it?", "images": [data]}
    options = {"temperature": 0, "num_predict": TOKENS}
    body = {"model": name, "stream": False, "messages": [said_so], "options": options}
    answer = vision.http.post("/api/chat", json=body).json()
    assert written("What is it?", red).startswith(answer["message"]["content"])
    body = {"model": name, "stream": False, "prompt": "What is it?", "images": [data], "options": options}
    answer = vision.http.post("/api/generate", json=body).json()
    assert written("What is it?", red).startswith(answer["response"])
    parts = [{"type": "input_image", "image_url": as_url(red)}, {"type": "input_text", "text": "What is it?"}]
    body = {"model": name, "input": [{"role": "user", "content": parts}], "max_output_tokens": TOKENS, "temperature": 0}
    answer = vision.http.post("/v1/responses", json=body).json()
    assert written("What is it?", red).startswith(answer["output"][0]["content"][0]["text"])


@pytest.fixture
def memory(vision: RunningGateway) -> Iterator[Callable[[int], Room]]:
    """Has the gateway have so many bytes for pictures."""
    responder = vision.gateway.responder
    before = responder.memory

    def of(num_bytes: int) -> Room:
        responder.memory = Room(num_bytes, most=16)
        return responder.memory

    yield of
    responder.memory = before


def test_pictures_wait_for_memory(
    vision: RunningGateway, memory: Callable[[int], Room], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every API one request after the other is unpacked, if there is memory for one; and all of it comes back."""
    url, name = as_url(picture("red")), vision.gateway.models.named(None).name
    room = memory(unpacked_bytes([url]) + 1000)
    under_way: list[int] = []
    encode = PictureProcessor.encode

    def encoded(*given: Any) -> Any:
        under_way.append(room.size - room.left)
        return encode(*given)

    monkeypatch.setattr(PictureProcessor, "encode", encoded)
    messages = said("?", picture("red"))
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    block = {"role": "user", "content": [{"type": "image", "source": source}]}
    part = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "n": 3}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "stop_token_ids": [1 << 20]}),  # refused
        ("/tokenize", {"messages": messages}),
        ("/v1/messages", {"model": name, "max_tokens": 2, "messages": [block]}),
        ("/v1/messages/count_tokens", {"model": name, "messages": [block]}),
        ("/v1/responses", {"input": [part], "max_output_tokens": 2}),
        ("/api/generate", {"model": name, "stream": False, "prompt": "?", "images": [source["data"]]}),
        ("/v1/chat/completions", {"messages": said("<image>", picture("red"))}),  # refused by the processor
    ]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = threads.map(lambda one: vision.http.post(one[0], json=one[1]).status_code, asked)
        assert list(answers) == [200, 400, 200, 200, 200, 200, 200, 400]
    assert set(under_way) == {unpacked_bytes([url])}
    wait_until(lambda: room.left == room.size, "all memory came back")


def test_pictures_that_need_more_than_all_are_refused_before_they_are_unpacked(
    vision: RunningGateway, memory: Callable[[int], Room], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    Image.new("1", (5000, 5000)).save(file, "PNG")
    url = _url(file.getvalue())
    assert unpacked_bytes([url, as_url(picture("red"))]) > 5 * 25_000_000
    room = memory(1 << 27)
    monkeypatch.setattr(Image.Image, "load", None)
    refused = asked(vision, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    assert refused.status_code == 400
    assert "and this gateway has 128 for all: send smaller or fewer ones" in refused.json()["error"]["message"]
    assert room.left == room.size


def test_lack_of_memory_is_one_requests_own() -> None:
    class Processor:
        def __call__(self, **_: Any) -> None:
            raise MemoryError

    processor = PictureProcessor("some/model", None)
    processor.__dict__["_loaded"] = Processor()
    with pytest.raises(ApiError, match="need more memory than there is: send smaller or fewer ones") as refused:
        processor.encode("", [as_url(picture("red"))])
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "return_dict", "processor_kwargs", "images", "load_audio"]
)
def test_a_request_brings_no_template_of_its_own(vision: RunningGateway, name: str) -> None:
    """Nor anything else that steers the processor; neither with a picture nor without."""
    options = {name: "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"}
    for messages in (said("?", picture("red")), [{"role": "user", "content": "?"}]):
        body = {"messages": messages, "chat_template_kwargs": options}
        for path in ("/v1/chat/completions", "/tokenize"):
            response = vision.http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["message"]) == (
                400,
                f"chat_template_kwargs can't hold {name}: leave it out",
            )


CALL = {"id": "c1", "name": "look"}
TEXT = {"type": "text", "text": "Here."}


def test_pictures_that_tools_have_found(vision: RunningGateway) -> None:
    """As screenshots come: in each API they cost tokens, as in a message of the user."""
    url, name = as_url(picture("red")), vision.gateway.models.named(None).name
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}

    def tokens_of_messages(found: list[Any], **more: Any) -> int:
        result = {"type": "tool_result", "tool_use_id": "c1", "content": found, **more}
        called = {"role": "assistant", "content": [{"type": "tool_use", "input": {}, **CALL}]}
        told = [{"role": "user", "content": "Look."}, called, {"role": "user", "content": [result]}]
        body = {"model": name, "max_tokens": 1, "messages": told}
        return int(vision.http.post("/v1/messages", json=body).json()["usage"]["input_tokens"])

    def tokens_of_items(found: Any) -> int:
        call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c1", "output": found}
        body = {"model": name, "input": [{"role": "user", "content": "Look."}, call, output], "max_output_tokens": 1}
        return int(vision.http.post("/v1/responses", json=body).json()["usage"]["input_tokens"])

    image = {"type": "image", "source": source}
    for more in ({}, {"is_error": True}):
        assert tokens_of_messages([TEXT, image], **more) >= tokens_of_messages([TEXT], **more) + 16
    part = {"type": "input_image", "image_url": url}
    assert tokens_of_items([{"type": "input_text", "text": "Here."}, part]) >= tokens_of_items("Here.") + 16


def test_pictures_where_none_can_be(vision: RunningGateway) -> None:
    url = as_url(picture("red"))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}}
    body: dict[str, Any] = {"model": vision.gateway.models.named(None).name, "max_tokens": 1}
    asked = {**body, "system": [image], "messages": [{"role": "user", "content": "?"}]}
    refused = vision.http.post("/v1/messages", json=asked)
    assert (refused.status_code, "system has blocks of type text only" in refused.text) == (400, True)
    del body["max_tokens"]
    said_by = {"role": "assistant", "content": [{"type": "input_image", "image_url": url}]}
    refused = vision.http.post("/v1/responses", json={**body, "input": [said_by, {"role": "user", "content": "?"}]})
    assert (refused.status_code, "put pictures into a message of the user" in refused.text) == (400, True)
    message = refused.json()["error"]["message"]
    assert message.startswith("input.0: messages of the assistant")
    plain = {"role": "user", "content": [{"type": "image_url", "image_url": url}]}
    refused = vision.http.post("/v1/chat/completions", json={**body, "messages": [plain]})
    assert refused.json()["error"]["message"] == "messages.0.content.0.image_url: Input should be an object"


def _bomb() -> bytes:
    """A PNG that says it is larger than any memory."""
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _with_bad_exif() -> bytes:
    """A rotated JPEG with a text as its width: Pillow fails when it writes that again."""
    entries = ((0x0100, 2, 4, b"abc\0"), (0x0112, 3, 1, b"\0\6\0\0"))
    tags = struct.pack(">2sHIH", b"MM", 42, 8, len(entries)) + b"".join(struct.pack(">HHI4s", *one) for one in entries)
    file = io.BytesIO()
    picture("red").save(file, "JPEG", exif=b"Exif\0\0" + tags + bytes(4))
    return file.getvalue()


def _url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


BAD = {
    "https://example.org/cat.png": "must be a data URL",
    "data:text/html;base64,AAAA": "must be a data URL",
    "data:image/png;base64,@@@@": "not valid base64",
    _url(b"no picture at all"): "no picture in one of the formats PNG",
    _url(_bomb()): f"too large: {MAX_PIXELS} pixels at most",
    _url(as_png(picture("red"))[:-40]): "damaged",
    _url(_with_bad_exif()): "damaged",
    _url(
        as_png(picture("red", (8000, 1)))
    ): f"8000 x 1 is too narrow: its longer side may be {MAX_RATIO} times the other",
}


@pytest.mark.parametrize("url", BAD)
def test_files_that_are_no_picture_are_refused(vision: RunningGateway, url: str) -> None:
    response = asked(vision, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    assert response.status_code == 400
    assert BAD[url] in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "invalid_image"


def test_further_refusals(vision: RunningGateway, gateway: RunningGateway) -> None:
    tiny = picture("red", (8, 8))
    many = asked(vision, said("?", *[tiny] * (MAX_PICTURES + 1)))
    assert many.status_code == 400
    assert "are too many" in many.json()["error"]["message"]
    detail = [{"type": "image_url", "image_url": {"url": as_url(tiny), "detail": "high"}}]
    response = asked(vision, [{"role": "user", "content": detail}])
    assert response.status_code == 200
    assert response.headers["x-unused-fields"] == "messages[].content[].image_url.detail"
    response = asked(vision, said("<image>", tiny))  # a placeholder without a picture
    assert response.status_code == 400
    response = asked(gateway, said("?", tiny))
    assert response.status_code == 400
    assert "reads text only" in response.json()["error"]["message"]
