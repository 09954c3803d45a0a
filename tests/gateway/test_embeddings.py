"""Embeddings: those of a local model, through real servers, by OpenAI's client and others."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from embedding_models import KINDS, SIZE, TEXTS, Reference, save
from torch import Tensor
from web_gateway import OPTIONS, RunningGateway, local_swarm, running_gateway

from swarmllm import LocalSwarm, embedded_model_path

pytestmark = pytest.mark.rotates(6, whole_file=True)


@dataclass(frozen=True)
class Service:
    gateway: RunningGateway
    reference: Reference

    @property
    def name(self) -> str:
        return next(iter(self.gateway.gateway.models)).name


@pytest.fixture(scope="module", params=KINDS)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A gateway in front of two servers with a block each."""
    kind = KINDS[request.param]
    directory = save(kind, tmp_path_factory.mktemp("embedding") / request.param)
    with (
        LocalSwarm(str(directory), spans=[(0, 1), (1, 2)], **OPTIONS) as swarm,
        running_gateway(swarm.initial_peers, model=str(directory)) as gateway,
    ):
        yield Service(gateway, Reference(directory, kind))


def close(got: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-5)


def test_embeddings_for_openai_clients_equal_the_local_model(service: Service) -> None:
    openai, reference = service.gateway.openai, service.reference
    found = openai.embeddings.create(model=service.name, input=TEXTS)  # this client asks for base64
    assert [one.index for one in found.data] == [0, 1, 2]
    for one, text in zip(found.data, TEXTS, strict=True):
        close(one.embedding, reference.embed(text))
    num_tokens = sum(len(reference.ids(text)) for text in TEXTS)
    assert found.usage.prompt_tokens == found.usage.total_tokens == num_tokens
    alone = openai.embeddings.create(model=service.name, input=TEXTS[0], encoding_format="float")
    close(alone.data[0].embedding, reference.embed(TEXTS[0]))


def test_tokens_are_taken_as_they_are(service: Service) -> None:
    ids = [service.reference.ids(text) for text in TEXTS]
    for given in (ids, ids[0], [5, 6, 7]):
        found = service.gateway.openai.embeddings.create(model=service.name, input=given)
        expected = given if isinstance(given[0], list) else [given]
        for one, row in zip(found.data, expected, strict=True):
            close(one.embedding, service.reference.embed(row))


def test_fewer_dimensions_are_the_first_ones_at_length_1(service: Service) -> None:
    found = service.gateway.openai.embeddings.create(model=service.name, input=TEXTS, dimensions=7)
    for one, text in zip(found.data, TEXTS, strict=True):
        expected = service.reference.embed(text)[:7]
        close(one.embedding, expected / expected.norm())


def test_both_formats_say_the_same(service: Service) -> None:
    def ask(form: str) -> Any:
        body = {"input": TEXTS, "encoding_format": form}
        return service.gateway.http.post("/v1/embeddings", json=body).json()["data"]

    for floats, text in zip(ask("float"), ask("base64"), strict=True):
        raw = torch.frombuffer(bytearray(base64.b64decode(text["embedding"])), dtype=torch.float32)
        assert floats["embedding"] == raw.tolist()


def test_many_texts_of_all_lengths(service: Service) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 2000, (1 + 7 * number % 39,), generator=generator).tolist() for number in range(300)]
    found = service.gateway.openai.embeddings.create(model=service.name, input=rows)
    for number in range(0, 300, 23):
        close(found.data[number].embedding, service.reference.embed(rows[number]))


def test_ollama_has_the_same(service: Service) -> None:
    http, reference = service.gateway.http, service.reference
    found = http.post("/api/embed", json={"model": f"{service.name}:latest", "input": TEXTS}).json()
    for vector, text in zip(found["embeddings"], TEXTS, strict=True):
        close(vector, reference.embed(text))
    assert found["prompt_eval_count"] == sum(len(reference.ids(text)) for text in TEXTS)
    older = http.post("/api/embeddings", json={"model": service.name, "prompt": TEXTS[0]}).json()
    close(older["embedding"], reference.embed(TEXTS[0]))
    fewer = http.post("/api/embed", json={"model": service.name, "input": TEXTS[0], "dimensions": 5}).json()
    assert len(fewer["embeddings"][0]) == 5
    assert http.post("/api/show", json={"model": service.name}).json()["capabilities"] == ["embedding"]


def test_long_texts_are_refused_or_cut_on_request(service: Service) -> None:
    http = service.gateway.http
    model = next(iter(service.gateway.gateway.models))
    assert model.max_length == (40 if service.reference.lower else 64)
    long = "Tom " * 90
    refused = http.post("/v1/embeddings", json={"input": ["Tom", long]})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert f"input[1] has {len(service.reference.ids(long))} tokens" in refused.json()["error"]["message"]
    assert http.post("/api/embed", json={"model": model.name, "input": long, "truncate": False}).status_code == 400
    for options, length in (({}, model.max_length), ({"num_ctx": 12, "temperature": 0.5}, 12)):
        cut = http.post("/api/embed", json={"model": model.name, "input": long, "options": options}).json()
        text = service.reference.prompt + long
        ids = service.reference.tokenizer(
            text.lower() if service.reference.lower else text, truncation=True, max_length=length
        ).input_ids
        close(cut["embeddings"][0], service.reference.embed(ids))


REFUSED = [
    ({"input": "Tom", "dimensions": SIZE + 1}, "dimensions"),
    ({"input": "Tom", "dimensions": 0}, "dimensions"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": [5000]}, "input"),
    ({"input": ["Tom"] * 2049}, "input"),
    ({"input": "Tom", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "Tom", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"input": "Tom", "dimension": 5}, "dimension"),
    ({}, "input"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_fields_are_honoured_or_refused_by_name(service: Service, body: dict[str, Any], param: str) -> None:
    response = service.gateway.http.post("/v1/embeddings", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert service.gateway.http.post("/v1/embeddings", json={"input": "Tom", "user": "me"}).status_code == 200


def test_a_model_that_embeds_does_not_write(service: Service) -> None:
    client = service.gateway.openai
    for ask in (
        lambda: client.completions.create(model=service.name, prompt="Tom"),
        lambda: client.chat.completions.create(model=service.name, messages=[{"role": "user", "content": "Tom"}]),
        lambda: client.responses.create(model=service.name, input="Tom"),
    ):
        with pytest.raises(openai.BadRequestError, match="gives embeddings and writes no text: ask /v1/embeddings"):
            ask()
    (listed,) = client.models.list().data
    assert listed.model_extra == {"max_model_len": listed.max_model_len, "chat": False, "vision": False} | {  # type: ignore[attr-defined]
        "embeddings": True,
        "dimensions": SIZE,
    }
    counted = service.gateway.http.post("/tokenize", json={"prompt": "Tom"}).json()
    assert counted["tokens"] == service.reference.ids("Tom")


def test_a_text_model_names_the_right_address(gateway: RunningGateway) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"writes text and gives no embeddings: ask .*, or start the gateway with"
    ):
        gateway.openai.embeddings.create(model="embedded", input="Tom")
    answer = gateway.http.post("/api/embed", json={"model": "embedded", "input": "Tom"})
    assert answer.status_code == 400
    assert "gives no embeddings" in answer.json()["error"]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalSwarm, Path]]:
    """Servers of a model of each kind."""
    directory = save(KINDS["bert"], tmp_path_factory.mktemp("mixed") / "pooled")
    with local_swarm((0, 8)) as swarm:
        swarm.add_server((0, 2), model=str(directory))
        yield swarm, directory


def test_both_kinds_side_by_side(mixed: tuple[LocalSwarm, Path]) -> None:
    swarm, directory = mixed
    with running_gateway(swarm.initial_peers, model=(embedded_model_path(), str(directory))) as both:
        found = both.openai.embeddings.create(model="pooled", input=TEXTS)
        close(found.data[0].embedding, Reference(directory, KINDS["bert"]).embed(TEXTS[0]))
        unnamed = both.http.post("/v1/embeddings", json={"input": TEXTS[0]}).json()
        assert unnamed["model"] == "pooled"
        assert both.http.post("/v1/completions", json={"prompt": "Tom", "max_tokens": 2}).json()["model"] == "embedded"
        with pytest.raises(openai.BadRequestError, match=r"gives no embeddings: ask .*, or name one that does: pooled"):
            both.openai.embeddings.create(model="embedded", input="Tom")
        assert both.http.get("/health").json()["status"] == "ok"


def test_a_server_may_die(tmp_path: Path) -> None:
    kind = KINDS["modernbert"]
    directory = save(kind, tmp_path / "checkpoint")
    reference = Reference(directory, kind)
    with (
        LocalSwarm(str(directory), spans=[(0, 1), (1, 2), (0, 1), (1, 2)], **OPTIONS) as swarm,
        running_gateway(swarm.initial_peers, model=str(directory)) as gateway,
    ):
        gateway.wait_until_seen(4)
        for dead in (1, 2, None):
            found = gateway.http.post("/v1/embeddings", json={"input": TEXTS}).json()
            for one, text in zip(found["data"], TEXTS, strict=True):
                close(one["embedding"], reference.embed(text))
            if dead is not None:
                swarm.servers[dead].kill()
