"""Lossless speculation over a swarm: the sampling loop of `generate()` with guesses under way.

Several chunks of guessed tokens travel along the servers before the first result returns (`StepsAhead`). Results come
in order, and each gives the logits of its positions. Tokens are chosen from them one after the other, exactly as
transformers' own loop does: logits processors, argmax or a draw, stopping criteria, streamer. If the chosen token is
the guess, the next logits are valid too. If not, everything behind it is dropped, and the next step begins after the
chosen token.

Greedy text is therefore that of the plain loop, up to rounding: the servers' arithmetic may depend on the length of a
step. Sampled text has the same distribution. For guesses that are certain, the rejection rule of Leviathan et al. 2023
(algorithm 1) and Chen et al. 2023 accepts a guess x with p(x), and otherwise draws from p without x. Drawing from p,
and keeping the guess if it is the same, is that rule. It spends random numbers as the plain loop does: the same seed
gives the same text.

Called by `client/speculative_generation`; knows sessions by their protocol only.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from swarmllm.data_structures import BlockTraits
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.shell.remote_cache import RemoteCache
from swarmllm.models.shell.stack_forward import SplitForward
from swarmllm.speculation.drafters import MAX_MATCH, Drafter
from swarmllm.speculation.planner import Plan, Planner

UNIFORM = BlockTraits()


class StepsAhead(Protocol):
    """A session that takes steps before the results of earlier steps are known."""

    max_length: int

    @property
    def position(self) -> int:
        """Positions whose results have been received."""
        ...

    @position.setter
    def position(self, value: int) -> None: ...

    @property
    def timings(self) -> Sequence[tuple[int, int, int]]:
        """Times of the last step, per server: first block, µs in its queue, µs of computing."""
        ...

    @property
    def step_s(self) -> float:
        """Seconds that the last step of a plain forward took."""
        ...

    def send(self, inputs: BlockInputs, position: int) -> None:
        """Send a step. One that begins before the end of the steps under way replaces them."""
        ...

    def receive(self) -> Tensor:
        """The result of the oldest step under way."""
        ...

    def abandon(self) -> None:
        """Give up the steps under way."""
        ...


@dataclass(slots=True)
class _Step:
    """A step under way."""

    forward: SplitForward
    num_tokens: int
    alone_since: float | None
    """The time when it was sent, if nothing else was under way."""
    client_s: float


class _Text:
    """The text so far; chooses its next tokens as `GenerationMixin._sample` does for one row."""

    def __init__(
        self,
        ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self.ids = ids
        self.finished = False
        self.scores: tuple[Tensor, ...] = ()
        self.logits: tuple[Tensor, ...] = ()
        self._processor = logits_processor
        self._criteria = stopping_criteria
        self._config = generation_config
        self._streamer = streamer
        details = generation_config.return_dict_in_generate
        self._keeps_scores = details and generation_config.output_scores
        self._keeps_logits = details and generation_config.output_logits

    def take(self, logits: Tensor) -> int:
        """Choose the next token from logits `[1, vocabulary]`."""
        logits = logits.to(copy=True, dtype=torch.float32, device=self.ids.device)
        scores = self._processor(self.ids, logits)
        if self._keeps_scores:
            self.scores += (scores,)
        if self._keeps_logits:
            self.logits += (logits,)
        if self._config.do_sample:
            token = torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1)
        else:
            token = torch.argmax(scores, dim=-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=-1)
        stop = self._criteria(self.ids, self.scores if self._keeps_scores else None)
        if self._streamer is not None:
            self._streamer.put(token[:, 0].cpu())
        self.finished = bool(stop.all())
        return int(token)

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])


def kwargs_behind(model: Any, kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The inputs of the model's next forward, `num_tokens` further tokens later.

    One by one, because for several transformers doesn't repeat the last token's type.
    """
    kwargs = dict(kwargs)
    for _ in range(num_tokens):
        kwargs = model._update_model_kwargs_for_generation(CausalLMOutputWithPast(), kwargs)
    return kwargs


class Speculation:
    """The loop for one text of one row."""

    def __init__(
        self,
        model: Any,
        cache_name: str,
        session: StepsAhead,
        drafter: Drafter,
        planner: Planner,
        traits: BlockTraits = UNIFORM,
    ) -> None:
        self._model: PreTrainedModel = model
        self._cache_name = cache_name
        self._session = session
        self._drafter = drafter
        self._planner = planner
        self._traits = traits
        self._may_roll_back = True
        self._text: _Text
        self._kwargs: dict[str, Any] = {}
        """Inputs of the model, renewed at each step: they fit the text when its last token is about to be fed."""
        self._under_way: deque[_Step] = deque()
        self._guesses: deque[tuple[int, int]] = deque()
        """(token, kind) of all guesses that have been sent and not been compared."""

    def write_text(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
    ) -> Any:
        """Generate the text; returns the same as `GenerationMixin._sample`. `model_kwargs` hold the session's cache."""
        self._text = text = _Text(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        self._kwargs = model_kwargs
        with self._drafter.following(self._model):
            self._generate(input_ids, generation_config)
        if streamer is not None:
            streamer.end()
        if not generation_config.return_dict_in_generate:
            return text.ids
        return GenerateDecoderOnlyOutput(
            sequences=text.ids,
            scores=text.scores if generation_config.output_scores else None,
            logits=text.logits if generation_config.output_logits else None,
            past_key_values=self._cache,
        )

    def _generate(self, input_ids: Tensor, generation_config: GenerationConfig) -> None:
        text = self._text
        outputs = self._model._prefill(input_ids, generation_config, self._kwargs, is_first_iteration=True)
        self._advance(outputs)
        self._follow_cache()
        # Of a text whose beginning only the cache knows, the tokens don't tell the positions.
        self._may_roll_back = self._may_roll_back and self._session.position == text.length
        self._drafter.extend(input_ids[0].tolist())
        self._drafter.extend([text.take(outputs.logits[:, -1])])
        self._planner.new_text()
        try:
            while not text.finished:
                if self._may_run_ahead() and self._drafter.begin() and (plan := self._first_plan()):
                    self._run_ahead(plan)
                else:
                    self._step()
        finally:
            self._leave()

    @property
    def _cache(self) -> RemoteCache:
        cache: RemoteCache = self._kwargs[self._cache_name]
        return cache

    def _follow_cache(self) -> None:
        """Go on with the cache that the model has returned: with LongRoPE it may be a new one."""
        session: Any = self._cache.session
        if session is not self._session:
            self._session = session
            self._may_roll_back = self._may_roll_back and not self._cache.forgets_early

    def _room(self) -> int:
        """The number of guesses that may still be sent: at most as far as the plain loop would go.

        A step of several tokens must compute each as a step of one token would, although its length is another.
        """
        length = self._text.length + len(self._guesses)
        limit, alike = self._text._config.max_length, self._traits.last_alike(self._text.length)
        most = min(limit - 1 if limit is not None else length + MAX_MATCH, self._session.max_length, alike)
        return int(most - length)

    def _may_run_ahead(self) -> bool:
        """True if guesses can be taken back, and the next token is computed by the same arithmetic."""
        arithmetic = self._traits.arithmetic
        is_alike = arithmetic(self._text.length) == arithmetic(max(1, self._session.position))
        return self._may_roll_back and is_alike and self._planner.latency_pays

    def _first_plan(self) -> Plan:
        self._planner.drafter = self._drafter.name
        return self._plan(0)

    def _plan(self, room_taken: int) -> Plan:
        kinds = self._drafter.kinds(MAX_MATCH + 1)
        acceptance = [self._planner.acceptance(kind, prior) for kind, prior in kinds]
        return self._planner.plan(acceptance, self._room() + room_taken)

    def _step(self) -> None:
        """Generate one token without guesses."""
        inputs = self._model.prepare_inputs_for_generation(self._text.ids, next_sequence_length=1, **self._kwargs)
        began_at = time.perf_counter()
        outputs = self._model(**inputs, return_dict=True)
        self._advance(outputs)
        self._follow_cache()
        self._drafter.extend([self._text.take(outputs.logits[:, -1])])
        step_s = self._session.step_s
        client_s = time.perf_counter() - began_at - step_s
        self._planner.saw_step(1, self._computes_s(), took_s=step_s, client_s=client_s)

    def _advance(self, outputs: Any) -> None:
        self._kwargs = self._model._update_model_kwargs_for_generation(outputs, self._kwargs)

    def _computes_s(self) -> list[float]:
        return [compute_us / 1e6 for _, _, compute_us in self._session.timings]

    # ------------------------------------------------------------------ running ahead

    def _run_ahead(self, plan: Plan) -> None:
        """Send guesses until one is wrong, or there are no more."""
        self._send(plan.chunk)
        while self._under_way:
            while plan and len(self._under_way) < plan.depth and self._send(plan.chunk):
                pass
            if not self._judge():
                break
            plan = self._plan(len(self._guesses))
        self._leave()

    def _leave(self) -> None:
        """Forget the guesses. The session has seen all of the text but its last token then."""
        if self._under_way:
            self._session.abandon()
        self._under_way.clear()
        self._guesses.clear()
        if self._may_roll_back:
            self._session.position = min(self._session.position, self._text.length - 1)

    def _send(self, count: int) -> bool:
        """Send `count` more guesses; the first step of a run begins with the last token of the text."""
        began_at = time.perf_counter()
        count = min(count, self._room())
        kinds = self._drafter.kinds(count)
        tokens = self._drafter.more(count) if count > 0 else []
        guessed_at = time.perf_counter()
        if tokens:
            self._planner.saw_draft(len(tokens), guessed_at - began_at)
        first = not self._under_way and not self._guesses
        if not tokens and not first:
            return False
        text = self._text
        self._guesses.extend((token, kind) for token, (kind, _) in zip(tokens, kinds, strict=False))
        guesses = torch.tensor([[token for token, _ in self._guesses]], dtype=text.ids.dtype, device=text.ids.device)
        ids = torch.cat([text.ids, guesses], dim=-1)
        num_tokens = len(tokens) + first
        kwargs = kwargs_behind(self._model, self._kwargs, guesses.shape[1])
        position = ids.shape[1] - num_tokens
        forward = SplitForward(self._model, position, self._kwargs[self._cache_name])
        kwargs[self._cache_name] = forward.cache
        model_inputs = self._model.prepare_inputs_for_generation(ids, next_sequence_length=num_tokens, **kwargs)
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = num_tokens
        block_inputs = forward.begin(model_inputs)
        alone = not self._under_way
        sent_at = time.perf_counter()
        self._session.send(block_inputs, position)
        client_s = time.perf_counter() - guessed_at
        self._under_way.append(_Step(forward, num_tokens, sent_at if alone else None, client_s))
        return True

    def _judge(self) -> bool:
        """Take the next result and choose its tokens; False if a guess was wrong."""
        step = self._under_way.popleft()
        hidden = self._session.receive()
        received_at = time.perf_counter()
        took_s = None if step.alone_since is None else received_at - step.alone_since
        logits = step.forward.finish(hidden).logits
        text, taken, agrees = self._text, [], True
        for idx in range(step.num_tokens):
            token = text.take(logits[:, idx - step.num_tokens])
            taken.append(token)
            agrees = bool(self._guesses) and self._agrees(token)
            if text.finished or not agrees:
                break
        self._drafter.extend(taken)
        self._kwargs = kwargs_behind(self._model, self._kwargs, len(taken))
        client_s = step.client_s + time.perf_counter() - received_at
        self._planner.saw_step(step.num_tokens, self._computes_s(), took_s=took_s, client_s=client_s)
        return agrees and not text.finished

    def _agrees(self, token: int) -> bool:
        guess, kind = self._guesses.popleft()
        self._planner.saw_verdict(kind, int(guess == token), int(guess != token))
        return guess == token
