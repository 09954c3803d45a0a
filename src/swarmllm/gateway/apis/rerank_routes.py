"""/v1/rerank and /rerank: texts in the order in which they fit a query, as Jina, Cohere and vLLM have it. In `app`.

By a model that was made for it, or by the likeness of embeddings.
"""

import secrets
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swarmllm.gateway.apis.embedding_routes import MAX_INPUTS, Wanted
from swarmllm.gateway.apis.responder import Responder, cancelled_when_gone
from swarmllm.gateway.engine.embedding_model import EmbeddingModel
from swarmllm.gateway.engine.engine import Waiter
from swarmllm.gateway.engine.ranking_model import RankingModel
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.requests.unknown_fields import ANYTHING, Body, Harmless


class Document(Body):
    """A text, as Cohere's clients give it."""

    text: str


class RerankRequest(Body):
    """`POST /v1/rerank`."""

    harmless: ClassVar[Harmless] = {
        **dict.fromkeys(("user", "request_id"), ANYTHING),
        **dict.fromkeys(("max_chunks_per_doc", "max_tokens_per_doc", "rank_fields", "instruction"), ()),
        **dict.fromkeys(("truncate_prompt_tokens", "mm_processor_kwargs", "cache_salt", "return_embeddings"), ()),
        "priority": (0,),
        "truncation": (False,),
    }
    model: str | None = Field(None, description="Left out: the first model that ranks, or gives embeddings.")
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="Only the best so many.")
    return_documents: bool | None = Field(None, description="false: their places alone.")

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class RerankRoutes:
    """The handler; made once per gateway."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    async def rerank(self, request: Request) -> Response:
        """`POST /v1/rerank` and `POST /rerank`"""
        body, _ = await self._responder.read(request, RerankRequest)
        model = self._responder.models.ranker(body.model)
        engine, waiter = self._responder.engine, Waiter(self._responder.engine)

        def compute() -> tuple[list[float], int]:
            scores, num_tokens = _scores(model, body.query, body.texts(), waiter.go_on)
            engine.count_prompt(num_tokens)
            return scores, num_tokens

        async with cancelled_when_gone(request.receive, waiter):
            scores, num_tokens = await engine.compute(compute)
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores[place]} for place in order]
        if body.return_documents is not False:
            texts = body.texts()
            results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        name = f"rerank-{secrets.token_hex(12)}"
        return JSONResponse({"id": name, "object": "rerank", "model": model.name, "usage": usage, "results": results})


def _scores(
    model: RankingModel | EmbeddingModel, query: str, texts: list[str], go_on: Callable[[], None]
) -> tuple[list[float], int]:
    """How well each text fits, and the number of tokens that were read.

    Raises:
        ApiError: a text is too long.
    """
    if isinstance(model, EmbeddingModel):
        rows = Wanted(model, [query, *texts], None).rows()
        vectors = model.embed(rows, None, go_on)
        vectors = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        return (vectors[1:] @ vectors[0]).tolist(), sum(map(len, rows))
    pairs = model.pairs(query, texts)
    lengths = [len(pair["input_ids"]) for pair in pairs]
    if max(lengths) > model.max_length:
        place = lengths.index(max(lengths))
        message = f"documents[{place}] has {lengths[place]} tokens with the query, and {model.name} takes"
        raise ApiError(400, f"{message} {model.max_length}", param="documents", code="context_length_exceeded")
    return model.scores(pairs, go_on), sum(lengths)
