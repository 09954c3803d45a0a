"""Texts in the order in which they fit a query: by a model for it as transformers computes it, or by embeddings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_models import COMMON, KINDS, TEXTS, save
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification
from web_gateway import OPTIONS, RunningGateway, running_gateway

from swarmllm import LocalSwarm
from swarmllm.errors import ConfigurationError

pytestmark = pytest.mark.rotates(3, whole_file=True)

QUERY = "a bird and a dog"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A cross-encoder and a model that gives embeddings."""
    shelf = tmp_path_factory.mktemp("models")
    embedder = save(KINDS["bert"], shelf / "embedder")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = BertForSequenceClassification(BertConfig(**COMMON, num_labels=1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(shelf / "ranker")
    tokenizer = AutoTokenizer.from_pretrained(embedder)
    tokenizer.save_pretrained(shelf / "ranker")
    return shelf / "ranker", embedder


@pytest.fixture(scope="module")
def service(directories: tuple[Path, Path]) -> Iterator[RunningGateway]:
    ranker, embedder = directories
    with LocalSwarm(ranker, spans=[(0, 1), (1, 2)], **OPTIONS) as swarm:
        swarm.add_server((0, 2), model=embedder)
        with running_gateway(swarm.initial_peers, model=(str(embedder), str(ranker))) as gateway:
            yield gateway


def rank(service: RunningGateway, path: str = "/v1/rerank", **more: Any) -> Any:
    answer = service.http.post(path, json={"query": QUERY, "documents": TEXTS, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_scores_are_those_of_the_local_model(
    service: RunningGateway, directories: tuple[Path, Path], path: str
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(directories[0])
    tokenizer = AutoTokenizer.from_pretrained(directories[0])
    with torch.no_grad():
        pairs = [tokenizer(QUERY, text, return_tensors="pt") for text in TEXTS]
        expected = [float(model(**pair).logits[0, 0].sigmoid()) for pair in pairs]
    found = rank(service, path)
    assert found["model"] == "ranker", "the first that was made for it"
    assert [one["index"] for one in found["results"]] == sorted(range(len(TEXTS)), key=lambda i: -expected[i])
    for one in found["results"]:
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-5)
        assert one["document"] == {"text": TEXTS[one["index"]]}
    assert found["usage"]["total_tokens"] == sum(pair["input_ids"].shape[1] for pair in pairs)


def test_a_model_that_embeds_ranks_by_likeness(service: RunningGateway) -> None:
    vectors = service.openai.embeddings.create(model="embedder", input=[QUERY, *TEXTS]).data
    query, *texts = [torch.tensor(one.embedding) for one in vectors]
    found = rank(service, model="embedder", documents=[{"text": text} for text in TEXTS])
    for one in found["results"]:
        expected = torch.cosine_similarity(query, texts[one["index"]], dim=0)
        assert one["relevance_score"] == pytest.approx(float(expected), abs=1e-4)
    scores = [one["relevance_score"] for one in found["results"]]
    assert scores == sorted(scores, reverse=True)


def test_the_best_few_and_their_places_alone(service: RunningGateway) -> None:
    whole = rank(service)["results"]
    found = rank(service, top_n=2, return_documents=False)["results"]
    assert found == [{name: one[name] for name in ("index", "relevance_score")} for one in whole[:2]]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"documents": []}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"documents": ["a " * 300]}, "documents[0] has"),
        ({"rank_fields": ["x"]}, "rank_fields is not supported here"),
        ({"max_docs": 1}, "unknown field"),
        ({"model": "none"}, "not served here"),
    ],
)
def test_wrong_requests_are_refused(service: RunningGateway, more: dict[str, Any], words: str) -> None:
    answer = service.http.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS, **more})
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]["message"]


def test_a_text_model_ranks_nothing(gateway: RunningGateway, service: RunningGateway) -> None:
    answer = gateway.http.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_ranking")
    answer = service.http.post("/v1/completions", json={"prompt": "a", "model": "ranker"})
    assert "ranks texts and writes no text: ask /v1/rerank" in answer.json()["error"]["message"]


def test_a_classifier_of_many_classes_is_no_ranking(tmp_path: Path, directories: tuple[Path, Path]) -> None:
    model = BertForSequenceClassification(BertConfig(**COMMON, num_labels=3))
    model.save_pretrained(tmp_path / "classes")
    AutoTokenizer.from_pretrained(directories[0]).save_pretrained(tmp_path / "classes")
    with (
        LocalSwarm(tmp_path / "classes", spans=[(0, 2)], **OPTIONS) as swarm,
        pytest.raises(ConfigurationError, match="tells 3 classes of texts apart"),
        running_gateway(swarm.initial_peers, model=(str(tmp_path / "classes"),)),
    ):
        pass
