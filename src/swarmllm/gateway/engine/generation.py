"""One prompt and its answers: one session in the swarm, tokens as they come, cancelled from anywhere.

A worker thread of `engine` runs it. The answers to one prompt (`n`) are rows of one session. If the swarm can't be
repaired, a local model goes on from the last token, if there is one. A `Trace` measures where the time of a request
goes, hop by hop: for `X-Swarm-Trace`, the route line of the chat page, and the metrics.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from swarmllm.api import (
    InferenceSession,
    PeerError,
    RemoteCache,
    RouteHop,
    RoutingError,
    SessionClosedError,
    SoFar,
    Span,
    SwarmError,
    one_line,
    tokens_with,
)
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.engine.vision import picture_rows
from swarmllm.gateway.metrics import GatewayMetrics
from swarmllm.gateway.output_parsing import Reader
from swarmllm.gateway.sampling import (
    Constraint,
    GrammarMatcher,
    NotYet,
    Sampler,
    SamplingOptions,
    TokenLogprob,
    token_logprob,
)
from swarmllm.gateway.text import (
    CallPiece,
    Ended,
    Event,
    PromptScores,
    Spelling,
    StopFinder,
    SwarmEvent,
    TextPiece,
    TextRow,
)

logger = logging.getLogger(__name__)

SCORED_TOKENS = 128
"""Positions of a prompt that are scored at a time. It limits the memory of their logits."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How to answer one prompt."""

    sampling: SamplingOptions
    max_tokens: int
    n: int = 1
    """Number of answers."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer. Thoughts and calls of tools are not searched for them."""
    new_reader: Callable[[], Reader | None] = lambda: None
    """Makes the reader that splits one answer into thoughts, text and calls; None: all is text."""
    constraint: Constraint | None = None
    """A form that the answers must have."""
    min_tokens: int = 0
    """Before this many tokens, only a stop text ends an answer."""
    stop_token_ids: tuple[int, ...] = ()
    """They end an answer, as the model's own end-of-text tokens do."""
    kept_tokens: frozenset[int] = frozenset()
    """Special tokens that belong to the text."""
    ignore_eos: bool = False
    """The model's own end-of-text tokens end nothing."""
    score_prompt: bool = False
    """Also give the log probabilities of the prompt's own tokens."""


@dataclass(frozen=True)
class _Cancelled:
    because: Exception | None


class Generation:
    """Answers one prompt. `emit` takes the events, in any thread; the last one is `Ended`."""

    def __init__(
        self,
        model: LanguageModel,
        metrics: GatewayMetrics,
        prompt_ids: list[int],
        options: GenerationOptions,
        emit: Callable[[Event], None],
        *,
        first_index: int = 0,
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._prompt_ids = prompt_ids
        self._options = options
        self._emit = emit
        self._first_index = first_index
        self._cancelled: _Cancelled | None = None
        self._session: InferenceSession | None = None
        self._failed: set[str] = set()
        """Peers that were reported as failed since the last route was found."""
        self.route: list[RouteHop] = []
        """The route in use."""
        self._trace = Trace(metrics)
        self._writer: _Writer | None = None
        self.num_echoed_chars = 0
        """Characters of the prompt, if it is scored and therefore part of the answer."""

    def cancel(self, because: Exception | None = None) -> None:
        """Stop, and close the session at once, whatever step is running. `because` is the error that the reader gets;
        None: no reader is left. Call it at any time, more than once if need be."""
        if self._cancelled is None or self._cancelled.because is None:
            self._cancelled = _Cancelled(because)
        session = self._session
        if session is not None:
            session.close()

    def run(self) -> None:
        """Answer the prompt. Call it once, in a worker thread. It never raises: errors are in `Ended`."""
        self._trace = Trace(self._metrics)
        error: Exception | None = None
        try:
            if not self._cancelled:
                self._answer()
        except SwarmError as failure:
            if not self._cancelled:
                logger.warning("a request was not answered: %s (%s)", one_line(failure), failure.code)
            error = failure
        except Exception as failure:  # last resort of a thread: the client gets an error 500
            logger.exception("answering a request failed")
            error = failure
        if self._cancelled:
            self._metrics.cancelled.inc()
            error = self._cancelled.because
        if self._trace.tokens_per_s is not None:
            self._metrics.speed.tokens_per_s.observe(self._trace.tokens_per_s)
        num_tokens = self._writer.num_tokens if self._writer is not None else 0
        self._emit(
            Ended(
                first_index=self._first_index,
                prompt_tokens=len(self._prompt_ids),
                completion_tokens=num_tokens,
                trace=self._trace.as_json(),
                error=error,
                cancelled=self._cancelled is not None,
            )
        )

    # ------------------------------------------------------------------ in the worker thread

    def _answer(self) -> None:
        options = self._options
        self._metrics.prompt_tokens.inc(len(self._prompt_ids))
        matchers: list[GrammarMatcher] = []
        if options.constraint is not None:
            matchers = [self._model.grammars().matcher(options.constraint) for _ in range(options.n)]
        not_yet = NotYet(sorted(self.ends), len(self._prompt_ids) + options.min_tokens)
        sampler = Sampler(
            options.sampling,
            options.n,
            matchers,
            not_yet if options.min_tokens else None,
            start=len(self._prompt_ids),
            breakers=self._breakers(),
        )
        ids = torch.tensor([self._prompt_ids], device=self._model.swarm.device).repeat(options.n, 1)
        self._writer = writer = _Writer(self, sampler, ids)
        try:
            self._answer_in_swarm(writer)
        except (PeerError, RoutingError) as error:
            if self._cancelled:
                return
            local = self._model.local
            self._tell("pipeline_aborted", error=one_line(error), code=error.code, fallback_to_local=local is not None)
            if local is None:
                raise
            logger.warning("the swarm can't be repaired (%s): the local model goes on", error)
            self._metrics.swarm.fallbacks.inc()
            self._session = None
            if options.score_prompt and not writer.num_tokens:
                self._score_prompt(local.model, {"use_cache": False}, ids, len(self._prompt_ids))
            self._generate(local.model, writer, {})

    def _breakers(self) -> frozenset[int]:
        decoding = self._options.sampling.decoding
        if not decoding.is_on("dry_multiplier"):
            return frozenset()
        return tokens_with(decoding.resolved()["dry_sequence_breakers"], self._model.tokenizer)

    def _answer_in_swarm(self, writer: "_Writer") -> None:
        model, options = self._model.swarm, self._options
        # One token more than is ever sent: a session is never full when the last token has been chosen.
        length = len(self._prompt_ids) + options.max_tokens + 1
        with_session = model.inference_session(max_length=length, batch_size=options.n)
        self._session = with_session
        try:
            if self._cancelled:
                return
            with_session.watch(on_failure=self.on_failure, on_route=self.on_route)
            cache = {self._model.cache_name: RemoteCache(model.config, with_session, options.n)}
            if options.score_prompt:
                self._score_prompt(model, {**cache, "use_cache": True}, writer.ids, SCORED_TOKENS)
            self._generate(model, writer, cache)
        except SessionClosedError:
            if not self._cancelled:
                raise
        finally:
            with_session.close()

    def _generate(self, model: Any, writer: "_Writer", cache: dict[str, Any]) -> None:
        left = self._options.max_tokens - writer.num_steps
        if left < 1:
            return
        session, local = self._session, self._model.local
        limits = [] if session is None or local is None else [SoFar(writer.ids, session, local.after)]
        model.generate(
            writer.ids,
            attention_mask=torch.ones_like(writer.ids),
            generation_config=GenerationConfig(
                do_sample=False,
                num_beams=1,
                max_new_tokens=left,
                eos_token_id=sorted(self.ends) or None,
                pad_token_id=self._model.pad_id,
                **self._model.preferred_scores(
                    has_ends=bool(self.ends), is_constrained=self._options.constraint is not None
                ),
            ),
            logits_processor=[writer.sampler],
            stopping_criteria=[writer, *limits],
            **cache,
            **{name: rows.to(model.device) for name, rows in picture_rows(self._prompt_ids, self._options.n).items()},
        )

    @torch.no_grad()
    def _score_prompt(self, model: Any, cache: dict[str, Any], ids: Tensor, chunk_tokens: int) -> None:
        """Score the prompt: all but its last token go through the model here. `generate()` then goes on from the
        cache."""
        num_top = self._options.sampling.top_logprobs or 0
        prompt, found = self._prompt_ids, []
        for start in range(0, len(prompt) - 1, chunk_tokens):
            end = min(start + chunk_tokens, len(prompt) - 1)
            logits = model(ids[:, start:end], **cache).logits[0]
            found += [token_logprob(row, prompt[start + i + 1], num_top) for i, row in enumerate(logits)]
        row, scores = _Row(TextRow(self._model.tokenizer, ()), StopFinder(()), None, self._model.spelling), []
        for logprob in (TokenLogprob(prompt[0], float("nan"), ()), *found):  # the first token follows nothing
            scores.append(row.spelled(logprob))
            row.text.add(logprob.token_id)
        row.text.end()
        self.num_echoed_chars = row.text.offset
        for index in range(self._first_index, self._first_index + self._options.n):
            self._emit(PromptScores(index, tuple(scores)))

    # ------------------------------------------------------------------ what the writer and the session tell

    def stopped(self) -> bool:
        """End after the token under way."""
        return self._cancelled is not None

    def on_step(self, pieces: list[TextPiece]) -> None:
        """Emit the next token of each row."""
        session = self._session
        self._trace.on_step(session.timings if session is not None else (), len(pieces))
        for piece in pieces:
            self._emit(piece)

    def new_row(self) -> "_Row":
        options = self._options
        text = TextRow(self._model.tokenizer, self._prompt_ids, options.kept_tokens)
        stops = StopFinder((*options.stop, *self._model.preferred_stops))
        return _Row(text, stops, options.new_reader(), self._model.spelling, options.kept_tokens)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        own = frozenset() if self._options.ignore_eos else self._model.eos_ids
        return own | frozenset(self._options.stop_token_ids)

    @property
    def options(self) -> GenerationOptions:
        return self._options

    @property
    def prompt_ids(self) -> list[int]:
        return self._prompt_ids

    @property
    def first_index(self) -> int:
        return self._first_index

    def on_place(self, place: int) -> None:
        """The place in the queue has changed; 0: it runs now."""
        self._tell("queue", place=place)

    def on_failure(self, error: SwarmError) -> None:
        """Called in the client's event loop, as is `on_route`. Each server is reported once until another route is
        found."""
        peer_id = error.peer_id if isinstance(error, PeerError) else None
        if (failed := peer_id or error.code) in self._failed:
            return
        self._failed.add(failed)
        self._tell("shard_status", status="degraded", peer_id=peer_id, code=error.code, error=one_line(error))

    def on_route(self, route: list[RouteHop], seconds: float) -> None:
        before, self.route = self.route, route
        self._failed.clear()
        repaired = self._trace.on_route(route, seconds)
        details = {"route": describe_route(route), "ms": round(1000 * seconds, 1)}
        if not repaired:
            self._tell("route", **details)
            return
        old = {(hop.server.peer_id, hop.span) for hop in before}
        new = {(hop.server.peer_id, hop.span) for hop in route}
        self._tell(
            "shard_failover",
            lost=describe_route([hop for hop in before if (hop.server.peer_id, hop.span) not in new]),
            replaced_by=describe_route([hop for hop in route if (hop.server.peer_id, hop.span) not in old]),
            **details,
        )

    def _tell(self, name: str, **details: Any) -> None:
        self._emit(SwarmEvent(name, details))


@dataclass
class _Row:
    """The text of one answer under way, split into thoughts, text and calls."""

    text: TextRow
    stops: StopFinder
    reader: Reader | None
    spelling: Spelling
    kept: frozenset[int] = frozenset()

    def spelled(self, logprob: TokenLogprob, start: int = 0) -> TokenLogprob:
        """Add the bytes of all candidate tokens and the place in the text. The answer begins at `start`."""
        tokens = {logprob.token_id, *(token for token, _ in logprob.top)}
        spelled = self.spelling.of(self.text.before, tokens, self.kept)
        return replace(logprob, spelled=spelled, offset=start + self.text.offset)

    def take(self, token: int | None, *, last: bool) -> tuple[str, str, list[CallPiece]]:
        """Add a token; returns the (thoughts, text, calls) that are certain now. `token` None: the text ended before
        it."""
        new = "" if token is None else self.text.add(token)
        new += self.text.end() if last else ""
        thoughts, said, calls = ("", new, []) if self.reader is None else self.reader.take(new, last=last)
        said = self.stops.take(said, last=last)
        return thoughts, said, calls if self.stops.stopped_by is None else []


class _Writer:
    """A stopping criterion for transformers: takes the tokens of each step, and says which rows are finished."""

    def __init__(self, generation: Generation, sampler: Sampler, ids: Tensor) -> None:
        self.sampler = sampler
        self.ids = ids
        """`[rows, so far]`: the point from which another model would go on."""
        self.num_steps = 0
        self.num_tokens = 0
        self._generation = generation
        self._rows = [generation.new_row() for _ in range(len(ids))]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.ids = input_ids
        self.num_steps += 1
        pieces = [
            self._take(row, token)
            for row, token in enumerate(input_ids[:, -1].tolist())
            if not self.sampler.finished[row]
        ]
        self.num_tokens += len(pieces)
        self._generation.on_step(pieces)
        if self._generation.stopped():
            return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return torch.tensor(self.sampler.finished, device=input_ids.device)

    def _take(self, row: int, token: int) -> TextPiece:
        generation, answer = self._generation, self._rows[row]
        has_ended, last = token in generation.ends, self.num_steps >= generation.options.max_tokens
        logprob = self.sampler.logprobs[row]
        if logprob is not None:
            logprob = answer.spelled(logprob, generation.num_echoed_chars)
        thoughts, said, calls = answer.take(None if has_ended else token, last=has_ended or last)
        stopped_by = answer.stops.stopped_by
        reason = "stop" if has_ended or stopped_by is not None else "length" if last else None
        self.sampler.finished[row] = reason is not None
        return TextPiece(
            generation.first_index + row,
            said,
            logprob,
            reason,
            reasoning=thoughts,
            calls=tuple(calls),
            stopped_by=stopped_by,
        )


@dataclass
class _HopTimes:
    hop: RouteHop
    num_steps: int = 0
    queue_us: int = 0
    compute_us: int = 0
    max_us: int = 0


@dataclass
class Trace:
    """Times of one request. `generation` fills it in: `on_route` in the client's event loop, the rest in its thread."""

    metrics: GatewayMetrics
    began_at: float = field(default_factory=time.monotonic)
    construct_s: float | None = None
    """Seconds until the first route is open: finding it, dialling servers, opening sessions."""
    first_token_s: float | None = None
    num_repairs: int = 0
    num_tokens: int = 0
    _route: Sequence[RouteHop] = ()
    _hops: dict[tuple[str, Span], _HopTimes] = field(default_factory=dict)
    _by_start: dict[int, _HopTimes] = field(default_factory=dict)
    """Times of the hops on the route, by their first block."""
    _steps_s: float = 0.0
    _last_at: float = 0.0

    def on_route(self, route: Sequence[RouteHop], seconds: float) -> bool:
        """Note a new route. Returns True if it repairs an earlier one."""
        self._route = route
        self._by_start = {
            hop.span.start: self._hops.setdefault((hop.server.peer_id, hop.span), _HopTimes(hop)) for hop in route
        }
        if self.construct_s is None:
            self.construct_s = seconds
            self.metrics.speed.construct_ms.observe(1000 * seconds)
            return False
        self.num_repairs += 1
        self.metrics.swarm.failovers.inc()
        return True

    def on_step(self, timings: Iterable[tuple[int, int, int]], num_tokens: int) -> None:
        """A step has returned that many tokens. `timings`: (first block, µs in the queue, µs computing) per server."""
        now = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now - self.began_at
            self.metrics.speed.first_token_ms.observe(1000 * self.first_token_s)
        else:
            self._steps_s += now - self._last_at
        self._last_at = now
        self.num_tokens += num_tokens
        self.metrics.tokens.inc(num_tokens)
        for start, queue_us, compute_us in timings:
            times = self._by_start.get(start)
            if times is None:
                continue
            times.num_steps += 1
            times.queue_us += queue_us
            times.compute_us += compute_us
            times.max_us = max(times.max_us, queue_us + compute_us)
            self.metrics.speed.observe_hop(times.hop.server.peer_id, (queue_us + compute_us) / 1000)

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None with fewer than two tokens."""
        return (self.num_tokens - 1) / self._steps_s if self.num_tokens > 1 and self._steps_s else None

    def as_json(self) -> dict[str, Any]:
        """The trace for JSON: milliseconds, rounded; for each hop the means of its steps."""
        hops = [
            {
                "peer_id": times.hop.server.peer_id,
                "blocks": [times.hop.span.start, times.hop.span.end],
                "num_steps": times.num_steps,
                "queue_ms": round(times.queue_us / times.num_steps / 1000, 3),
                "compute_ms": round(times.compute_us / times.num_steps / 1000, 3),
                "max_ms": round(times.max_us / 1000, 3),
            }
            for times in self._hops.values()
            if times.num_steps
        ]
        return {
            "pipeline_construct_ms": _ms(self.construct_s),
            "first_token_ms": _ms(self.first_token_s),
            "tokens_per_s": None if self.tokens_per_s is None else round(self.tokens_per_s, 2),
            "failovers": self.num_repairs,
            "route": describe_route(self._route),
            "hops": hops,
        }


def describe_route(route: Sequence[RouteHop]) -> list[dict[str, Any]]:
    """A route for JSON."""
    return [
        {
            "peer_id": hop.server.peer_id,
            "public_name": hop.server.public_name,
            "blocks": [hop.span.start, hop.span.end],
        }
        for hop in route
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
