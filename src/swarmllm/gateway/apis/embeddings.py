"""OpenAI's `/v1/embeddings`, Ollama's `/api/embed` and `/api/embeddings`, and `/v1/rerank` of Jina, Cohere and vLLM.

`/v1/rerank` (also `/rerank`) sorts texts by how well they fit a query: by a ranking model, or by the cosine of
embeddings.
"""

import base64
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from swarmllm.gateway.apis.ollama import TAG, Options
from swarmllm.gateway.apis.request_bodies import ANYTHING, Body, Harmless, TokenId
from swarmllm.gateway.apis.responder import Dialect, LargeAnswer, cancelled_when_gone
from swarmllm.gateway.engine.embedding_model import EmbeddingModel, RankingModel
from swarmllm.gateway.engine.engine import Waiter
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.routes import JSON, post

MAX_INPUTS = 2048
"""Texts of one request, as OpenAI allows."""
ModelName = Annotated[str | None, Field(description="Left out: the first model that gives embeddings.")]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]


class EmbeddingsRequest(Body):
    """`POST /v1/embeddings`."""

    harmless: ClassVar[Harmless] = {
        "user": ANYTHING,
        "truncate_prompt_tokens": (),
        "add_special_tokens": (True,),
        "priority": (0,),
        "request_id": ANYTHING,
        "embed_dtype": ("float32",),
        "endianness": ("little",),
        **dict.fromkeys(("normalize", "use_activation", "messages", "chat_template", "chat_template_kwargs"), ()),
        **dict.fromkeys(("add_generation_prompt", "continue_final_message"), (False,)),
        **dict.fromkeys(("cache_salt", "mm_processor_kwargs", "pooling_params"), ()),
    }
    model: ModelName = None
    input: Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: of little-endian float32.")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Keep this many first numbers, brought to length 1."
    )


class EmbedOptions(Body):
    """Ollama's options: only one matters for embeddings."""

    harmless: ClassVar[Harmless] = dict.fromkeys(
        (name for name in Options.known_names() if name != "num_ctx"), ANYTHING
    )
    num_ctx: Annotated[int, Field(ge=1)] | None = None


class OllamaEmbed(Body):
    """`POST /api/embed`."""

    harmless: ClassVar[Harmless] = {"keep_alive": ANYTHING}
    model: ModelName = None
    input: Texts
    truncate: bool | None = Field(True, description="Embed the beginning of a text that is too long.")
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: EmbedOptions | None = None


class OllamaEmbeddings(Body):
    """`POST /api/embeddings`, the older one."""

    harmless: ClassVar[Harmless] = {"keep_alive": ANYTHING}
    model: ModelName = None
    prompt: str
    options: EmbedOptions | None = None


class Document(Body):
    """A text, in the form of Cohere's clients."""

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
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="Return this many best ones.")
    return_documents: bool | None = Field(None, description="false: return their places only.")

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class Embeddings(Dialect):
    """Handlers of embeddings and ranking."""

    @post("/v1/embeddings", "Embed texts.", EmbeddingsRequest, answer_types=(JSON,))
    async def embeddings(self, request: Request) -> Response:
        body, _ = await self._responder.read(request, EmbeddingsRequest)
        given: Any = body.input
        texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        in_base64 = body.encoding_format == "base64"

        def answer(vectors: Tensor, num_tokens: int) -> dict[str, Any]:
            data = [
                {"object": "embedding", "index": index, "embedding": _base64(one) if in_base64 else one.tolist()}
                for index, one in enumerate(vectors)
            ]
            usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
            return {"object": "list", "data": data, "model": model.name, "usage": usage}

        async with self._responder.models.using(self._responder.models.embedder, body.model) as model:
            return await self._answer(request, EmbeddingInputs(model, texts, body.dimensions), answer)

    @post("/api/embed", "Embed texts, as Ollama does.", OllamaEmbed, answer_types=(JSON,))
    async def embed(self, request: Request) -> Response:
        body, _ = await self._responder.read(request, OllamaEmbed)
        began_at = time.perf_counter()
        texts = [body.input] if isinstance(body.input, str) else body.input

        def answer(vectors: Tensor, num_tokens: int) -> dict[str, Any]:
            took_ns = round((time.perf_counter() - began_at) * 1e9)
            found = {"model": body.model or model.name, "embeddings": [one.tolist() for one in vectors]}
            return {**found, "total_duration": took_ns, "load_duration": 0, "prompt_eval_count": num_tokens}

        async with self._of_ollama(body.model) as model:
            length, cuts = _num_ctx(body.options, model), body.truncate is not False
            return await self._answer(
                request, EmbeddingInputs(model, texts, body.dimensions, length, cuts=cuts), answer
            )

    @post("/api/embeddings", "Embed a text, as Ollama did before.", OllamaEmbeddings, answer_types=(JSON,))
    async def one_embedding(self, request: Request) -> Response:
        body, _ = await self._responder.read(request, OllamaEmbeddings)
        async with self._of_ollama(body.model) as model:
            inputs = EmbeddingInputs(model, [body.prompt], None, _num_ctx(body.options, model), cuts=True)
            return await self._answer(request, inputs, lambda vectors, _: {"embedding": vectors[0].tolist()})

    def _of_ollama(self, name: str | None) -> AbstractAsyncContextManager[EmbeddingModel]:
        models = self._responder.models
        return models.using(models.embedder, name if name is None or name in models else name.removesuffix(TAG))

    async def _answer(self, request: Request, inputs: "EmbeddingInputs", answer: Any) -> Response:
        """Compute the embeddings in a worker thread; `answer` makes the JSON of the vectors and the number of
        tokens."""
        engine, waiter = self._responder.engine, Waiter(self._responder.engine)

        def compute() -> Response:
            rows = inputs.rows()
            num_tokens = sum(map(len, rows))
            vectors = inputs.model.embed(rows, inputs.dimensions, waiter.go_on)
            engine.count_prompt(num_tokens)
            return LargeAnswer(answer(vectors, num_tokens))

        async with cancelled_when_gone(request.receive, waiter):
            return await engine.compute(compute)

    @post("/v1/rerank", "Sort texts by how well they fit a query.", RerankRequest, answer_types=(JSON,))
    @post("/rerank", "The same.", RerankRequest, answer_types=(JSON,))
    async def rerank(self, request: Request) -> Response:
        body, _ = await self._responder.read(request, RerankRequest)
        models, engine, waiter = self._responder.models, self._responder.engine, Waiter(self._responder.engine)

        def compute() -> tuple[list[float], int]:
            scores, num_tokens = _scores(model, body.query, body.texts(), waiter.go_on)
            engine.count_prompt(num_tokens)
            return scores, num_tokens

        async with models.using(models.ranker, body.model) as model, cancelled_when_gone(request.receive, waiter):
            scores, num_tokens = await engine.compute(compute)
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores[place]} for place in order]
        if body.return_documents is not False:
            texts = body.texts()
            results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        name = f"rerank-{secrets.token_hex(12)}"
        return JSONResponse({"id": name, "object": "rerank", "model": model.name, "usage": usage, "results": results})


class EmbeddingInputs:
    """The texts of a request as token ids, checked."""

    def __init__(
        self,
        model: EmbeddingModel,
        texts: Sequence[str | list[int]],
        dimensions: int | None,
        length: int | None = None,
        *,
        cuts: bool = False,
    ) -> None:
        """`cuts`: a text longer than `length` (default: the model's limit) is cut to its beginning.

        Raises:
            ApiError: the model has fewer dimensions.
        """
        if (dimensions or 0) > model.size:
            message = f"the embeddings of {model.name} have {model.size} dimensions, not {dimensions}"
            raise ApiError(400, message, param="dimensions", code="invalid_value")
        self.model, self.dimensions = model, dimensions
        self._texts, self._cuts = texts, cuts
        self._length = model.max_length if length is None else length

    def rows(self) -> list[list[int]]:
        """Token ids of each text.

        Raises:
            ApiError: a text has no tokens, too many, or some that the model lacks.
        """
        return [self._checked(index, text) for index, text in enumerate(self._texts)]

    def _checked(self, index: int, text: str | list[int]) -> list[int]:
        model = self.model
        ids = model.encode(text) if isinstance(text, str) else text
        if self._cuts:
            ids = model.cut(ids, self._length)
        wrong, code = None, "invalid_value"
        if not ids:
            wrong = "is empty: give at least one token"
        elif len(ids) > self._length:
            wrong, code = f"has {len(ids)} tokens, and {model.name} takes {self._length}", "context_length_exceeded"
        elif max(ids) >= model.num_scores:
            wrong = f"has the token {max(ids)}, and the model only {model.num_scores}"
        if wrong is not None:
            raise ApiError(400, f"input[{index}] {wrong}", param="input", code=code)
        return ids


def _num_ctx(options: EmbedOptions | None, model: EmbeddingModel) -> int:
    """Most tokens of a text: Ollama's clients may set a lower limit."""
    longest = None if options is None else options.num_ctx
    return model.max_length if longest is None else min(longest, model.max_length)


def _base64(vector: Tensor) -> str:
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


def _scores(
    model: RankingModel | EmbeddingModel, query: str, texts: list[str], go_on: Callable[[], None]
) -> tuple[list[float], int]:
    """A score for each text, and the number of tokens that were read.

    Raises:
        ApiError: a text is too long.
    """
    if isinstance(model, EmbeddingModel):
        rows = EmbeddingInputs(model, [query, *texts], None).rows()
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
