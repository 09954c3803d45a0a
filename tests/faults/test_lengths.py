"""Models that compute a long call otherwise than a short one, in a swarm: everything gives what the local model gives.

Prompts, sessions, guesses, beams, repairs, shared pages and batches, whoever cuts the call.

In process, with chunks and pieces that are shorter than the border. The judge is a local model that has seen nothing
before: transformers' own module for dynamic NTK keeps the frequencies of its longest call.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_in_process import Blocks, InProcessSwarm, Server
from tests.numerics.rope_models import BORDER, KINDS, NUM_BLOCKS, VOCABULARY, save_rope
from tests.planners import FixedPlanner
from tests.selection import sampled
from tests.swarm.test_conversations import continued_locally, words
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import ClientConfig
from swarmllm.client.distributed_model import DistributedModelForCausalLM
from swarmllm.client.remote_blocks import RemoteBlocks
from swarmllm.client.speculative_generation import Speculator
from swarmllm.client.text_generation import Conversation
from swarmllm.data_structures import Span
from swarmllm.models.architecture import Task, task_class
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.shell.loading import load_client_shell
from swarmllm.network.wire.protocol import Message, MessageType
from swarmllm.server.device.device_thread import DeviceThread
from swarmllm.server.device.scheduler import Budget
from swarmllm.server.sessions import prefix_cache
from swarmllm.server.sessions.prefix_cache import PrefixCache

PIECE = 6
"""Most tokens of one forward of a server."""
CHUNK = 20
"""Tokens of a chunk, of which a server makes pieces."""
NEW = 8
LAYOUT = [(0, 2), (2, NUM_BLOCKS)]
SPARE = [(0, NUM_BLOCKS), (1, 3), *LAYOUT]


class SmallPieces(Blocks):
    async def _new_device_thread(self) -> DeviceThread:
        return DeviceThread(Budget(pause_s=0.0, max_tokens=PIECE))

    @contextmanager
    def larger(self) -> Iterator[None]:
        """Within, a server computes whatever it is asked for at once, if it may."""
        scheduler = self.device_thread._scheduler
        small, scheduler.budget = scheduler.budget, replace(scheduler.budget, max_tokens=1024)
        try:
            yield
        finally:
            scheduler.budget = small


class Case:
    """A checkpoint, its blocks, and local models of it."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self._untouched = save_rope(kind, directory)
        self.checkpoint: Checkpoint = open_checkpoint(str(directory))
        self.blocks = SmallPieces(directory)

    @property
    def local(self) -> PreTrainedModel:
        """One that has computed nothing yet."""
        return copy.deepcopy(self._untouched)

    @contextmanager
    def swarm(self, *, spare: bool = False, **config: Any) -> Iterator[InProcessSwarm]:
        options = {"prefill_chunk_tokens": CHUNK, "max_retries": 20, "ban_s": 0.05, **config}
        layout = [*LAYOUT, *SPARE] if spare else LAYOUT
        speeds = [{"decode_ms_per_block": 1.0}] * len(LAYOUT) + [{"decode_ms_per_block": 5.0}] * len(SPARE)
        with InProcessSwarm(self.blocks, layout, announced=speeds[: len(layout)], **options) as swarm:
            yield swarm

    def client(self, swarm: InProcessSwarm, *, guesses: bool = False) -> Any:
        runner = RemoteBlocks(swarm.view, swarm.batches, swarm.traits, Span(0, NUM_BLOCKS))
        model: Any = load_client_shell(
            self.checkpoint,
            model_class=task_class(self.checkpoint.config, Task.CAUSAL_LM),
            mixin=DistributedModelForCausalLM,
            dtype="auto",
            runner=runner,
            traits=swarm.traits,
            progress=False,
        )
        model.remote_blocks, model.swarm, model.local_fallback = runner, swarm.view, None
        if guesses:
            model.speculator = Speculator(ClientConfig(speculation="ngram"), self.checkpoint, model)
            model.speculator.planner = FixedPlanner()
        return model


@pytest.fixture(scope="module", params=sampled(KINDS, 8, always=("phi3",)))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(request.param, tmp_path_factory.mktemp(request.param))
    yield case
    case.blocks.close()


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def written(model: Any, ids: Tensor, new: int = NEW, **options: Any) -> tuple[Tensor, Tensor]:
    """The text and its logits."""
    settings = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    settings["attention_mask"] = torch.ones_like(ids)  # a token of padding that the model has written is text
    output = model.generate(ids, **{**settings, **options})
    return output.sequences, torch.stack(output.logits)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("guesses", [False, True])
def test_texts(case: Case, guesses: bool) -> None:
    """Prompts on both sides of the border, and texts that pass it."""
    with case.swarm() as swarm:
        model = case.client(swarm, guesses=guesses)
        for length in (BORDER - 4, BORDER, BORDER + 1, 2 * BORDER):
            assert_same(written(model, text(length)), written(case.local, text(length)))


@pytest.mark.parametrize("guesses", [False, True])
def test_sessions(case: Case, guesses: bool) -> None:
    """A conversation: each turn is what it is without a session."""
    with case.swarm() as swarm:
        model = case.client(swarm, guesses=guesses)
        with model.inference_session(max_length=4 * BORDER) as session:
            said = text(BORDER - 12)
            for turn in range(4):
                ids, logits = written(model, said)
                assert_same((ids, logits), written(case.local, said))
                assert session.position == ids.shape[1] - 1
                said = torch.cat([ids, text(3, seed=turn)], dim=1)
            for length in (BORDER - 6, 2 * BORDER):  # it goes back, and on again
                assert_same(written(model, said[:, :length]), written(case.local, said[:, :length]))


def test_a_chat(case: Case) -> None:
    """As `swarmllm chat` has one."""
    options, said = {"max_new_tokens": 6, "do_sample": False}, ""
    with case.swarm() as swarm:
        model = case.client(swarm)
        with model.inference_session(max_length=4 * BORDER) as session:
            conversation = Conversation(model, words(), session, options)
            for turn in range(4):
                new = " ".join(f"w{20 + 5 * turn + place}" for place in range(5))
                said = f"{said} {new}".strip()
                answer = conversation.reply(new)
                assert answer == continued_locally(case.local, said)
                said = f"{said} {answer}"


def test_beams(case: Case) -> None:
    options = {"num_beams": 3, "output_logits": False, "output_scores": True}
    with case.swarm() as swarm:
        model = case.client(swarm)
        for length in (BORDER - 4, BORDER + 9):
            settings = {"max_new_tokens": NEW, "do_sample": False, **options, "return_dict_in_generate": True}
            ids = text(length)
            got, want = (
                one.generate(ids, attention_mask=torch.ones_like(ids), **settings) for one in (model, case.local)
            )
            assert torch.equal(got.sequences, want.sequences)
            torch.testing.assert_close(got.sequences_scores, want.sequences_scores, rtol=1e-4, atol=1e-4)


class Fate:
    """Kills a server of the route at its so many-th step."""

    def __init__(self, swarm: InProcessSwarm, victim: int, step: int) -> None:
        self._swarm, self._victim, self._left = swarm, victim, step
        swarm.on_message = self

    def __call__(self, server: Server, message: Message) -> None:
        if message.type is MessageType.STEP and server is self._swarm.servers[self._victim]:
            self._left -= 1
            if self._left == 0:
                server.die()


@pytest.mark.parametrize(
    ("victim", "step", "at_once"),
    [
        pytest.param(*death, marks=() if death == (1, 9, True) else pytest.mark.slow)
        for death in product((0, 1), (6, 9), (True, False))
    ],
)
def test_repairs(case: Case, victim: int, step: int, at_once: bool) -> None:
    """The replay was computed partly before the border and partly behind it."""
    pieces = case.blocks.larger() if at_once else nullcontext()
    with pieces, case.swarm(spare=True) as swarm:
        Fate(swarm, victim, step)
        model = case.client(swarm)
        assert_same(written(model, text(BORDER - 4), 2 * NEW), written(case.local, text(BORDER - 4), 2 * NEW))
        assert not swarm.servers[victim].alive


def test_a_session_that_goes_back_over_the_border(case: Case) -> None:
    """The rest of a long text is computed as a short text, in the session and after a repair."""
    embeds = case.local.get_input_embeddings()(text(BORDER + 9)).detach()
    with case.swarm(spare=True) as swarm:
        model = case.client(swarm)
        hidden = model.embed(text(BORDER + 9)).detach()
        wanted = _steps(case, embeds, [BORDER - 8, 2, 1])
        for kill in (False, True):
            with swarm.session(max_length=2 * BORDER) as session:
                session.step(hidden)
                session.position = BORDER - 8
                if kill:
                    swarm.kill(swarm.servers[0])
                got = [
                    session.step(hidden[:, BORDER - 8 : BORDER - 6]),
                    session.step(hidden[:, BORDER - 6 : BORDER - 5]),
                ]
            for one, want in zip(got, wanted[1:], strict=True):
                torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-4)


def _steps(case: Case, embeds: Tensor, lengths: list[int]) -> list[Tensor]:
    """The same steps on a local stack, before its final norm."""
    local, found, start, past = case.local, [], 0, None
    last = local.model.layers[-1]
    outputs: list[Tensor] = []
    hook = last.register_forward_hook(
        lambda _, __, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        for length in lengths:
            result = local.model(inputs_embeds=embeds[:, start : start + length], past_key_values=past, use_cache=True)
            past, start = result.past_key_values, start + length
            found.append(outputs[-1])
    hook.remove()
    return found


def test_shared_prefixes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a short prompt is no page of a long one that begins with the same tokens."""
    monkeypatch.setattr(prefix_cache, "PAGE_TOKENS", 8)
    monkeypatch.setattr(prefix_cache, "MIN_STEP_TOKENS", 2)
    with case.swarm() as swarm:
        for server in swarm.servers:
            server.sessions.pages = PrefixCache(1 << 20)
        model = case.client(swarm)
        for length in (BORDER, 2 * BORDER, BORDER, 2 * BORDER, BORDER + 9):
            assert_same(
                written(model, text(2 * BORDER)[:, :length], 3), written(case.local, text(2 * BORDER)[:, :length], 3)
            )
        pages = [server.sessions.pages for server in swarm.servers]
        assert case.kind == "gemma3" or all(one and one.num_reused_tokens for one in pages), "sliding layers have none"


@pytest.mark.parametrize("long_row", [0, 3])
def test_batches_with_position_ids(case: Case, long_row: int) -> None:
    """The longest row decides how all others are computed, in whatever micro-batches they go; so do gradients."""
    rows = torch.cat([text(BORDER + 6, seed) for seed in range(6)])
    mask = torch.ones_like(rows)
    mask[torch.arange(6) != long_row, 9:] = 0
    more = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
    with case.swarm(max_batch_tokens=2 * (BORDER + 6), max_parallel_routes=2) as swarm:
        found = []
        for model in (case.client(swarm), case.local):
            embeds = model.get_input_embeddings()(rows).detach().requires_grad_()
            logits = model(inputs_embeds=embeds, **more).logits
            logits[mask.bool()].square().mean().backward()
            found.append((logits.detach()[mask.bool()], embeds.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
