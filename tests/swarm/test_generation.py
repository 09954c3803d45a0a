"""Generation over real server processes gives the tokens of the local model, whatever way it takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, assert_same_tokens, connected, load_local, prompt, save_llama
from tests.selection import sampled
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from swarmllm import AutoDistributedModel, ClientConfig, DistributedModelForCausalLM, LocalSwarm, embedded_model_path
from swarmllm.data_structures import Span

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_p": 0.9, "temperature": 0.8},
    "beam": {"num_beams": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}
SPANS = [(0, 8), (0, 5), (5, 8), (2, 5), *((block, block + 1) for block in range(NUM_BLOCKS))]
SERVERS_OF = {1: [(0, 8)], 2: [(0, 5), (5, 8)], 4: [(0, 1), (1, 2), (2, 5), (5, 8)], 8: SPANS[4:]}
"""How 12 servers form chains of 1, 2, 4 and 8."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"ids": prompt()},
    "beam": {"ids": prompt(), "num_beams": 3},
    "left_padded": {"ids": prompt(3, 8), "padding": [0, 3, 5]},
    "long_prompt": {"ids": prompt(1, 150)},
}
ARCHITECTURES = [
    "gemma3_text",  # always: two kinds of attention
    *sampled(["bloom", "qwen3_next", "gpt_oss"], 3),  # no rotary embeddings, recurrent states, experts and sinks
]


@pytest.fixture(scope="module")
def embedded() -> PreTrainedModel:
    """The trained model that comes along, in this process."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def many_servers() -> Iterator[LocalSwarm]:
    with LocalSwarm(embedded_model_path(), spans=SPANS, dtype="float32", **OPTIONS) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def two_servers() -> Iterator[LocalSwarm]:
    with LocalSwarm(embedded_model_path(), spans=SERVERS_OF[2], dtype="float32", **OPTIONS) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def chain_model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client of one chain of servers."""
    swarm = request.getfixturevalue("two_servers" if request.param == 2 else "many_servers")
    with embedded_client(swarm, SERVERS_OF[request.param]) as model:
        assert len(model.swarm.route()) == request.param
        yield model


def embedded_client(swarm: LocalSwarm, spans: list[tuple[int, int]]) -> Any:
    """A client that is allowed to use only the servers of these spans."""
    ids = [server.peer_id for server in swarm.servers if (server.span.start, server.span.end) in spans]
    return AutoDistributedModel.from_pretrained(
        embedded_model_path(),
        initial_peers=swarm.initial_peers,
        client_config=ClientConfig(allowed_servers=ids),
        dtype="float32",
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("chain_model", "num_tokens"),
    [(2, 50), *(pytest.param(chain, 200, marks=pytest.mark.slow) for chain in (2, 1, 4, 8))],
    indirect=["chain_model"],
)
@pytest.mark.rotates(3)
def test_a_story_over_1_to_8_servers(chain_model: Any, embedded: PreTrainedModel, num_tokens: int, mode: str) -> None:
    text = AutoTokenizer.from_pretrained(embedded_model_path())("Once upon a time", return_tensors="pt").input_ids
    options = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens, **MODES[mode]}

    generated = assert_same_tokens(chain_model, embedded, text, **options)

    assert generated.shape == (1, text.shape[1] + num_tokens)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A client and the local model; two servers hold two of its four blocks each."""
    directory = tmp_path_factory.mktemp(request.param)
    local = save_tiny(request.param, directory)
    with (
        LocalSwarm(directory, spans=[(0, 2), (2, 4)], **OPTIONS) as swarm,
        connected(directory, swarm.initial_peers, prefill_chunk_tokens=40) as model,
    ):
        yield model, local


@pytest.mark.parametrize("kind", KINDS)
def test_architectures_over_two_servers(architecture: tuple[Any, Any], kind: str) -> None:
    model, local = architecture
    options = dict(KINDS[kind])
    ids = options.pop("ids")
    if padding := options.pop("padding", None):
        mask = torch.ones_like(ids)
        for row, count in enumerate(padding):
            ids = ids.clone()
            ids[row, :count], mask[row, :count] = 0, 0
        options["attention_mask"] = mask

    generated = assert_same_tokens(model, local, ids, min_new_tokens=30, max_new_tokens=30, **options)

    assert generated.shape[1] == ids.shape[1] + 30
    assert [len(hop.span) for hop in model.swarm.route()] == [2, 2]


def test_assisted_generation(model: Any, local: PreTrainedModel, tmp_path: Path) -> None:
    assistant = load_local(save_llama(tmp_path, seed=1, num_blocks=1))

    assert_same_tokens(model, local, prompt(), max_new_tokens=40, assistant_model=assistant)


def test_a_long_prompt_flows_in_chunks(model: Any, local: PreTrainedModel) -> None:
    assert_same_tokens(model, local, prompt(1, 700), max_new_tokens=10)
    assert_same_tokens(model, local, prompt(3, 300), max_new_tokens=10)


@pytest.fixture(scope="module")
def relaying(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    with connected(llama, swarm.initial_peers, push=False) as model:
        yield model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.rotates(3)
def test_relaying_through_the_client(relaying: Any, local: PreTrainedModel, mode: str) -> None:
    assert_same_tokens(relaying, local, prompt(1, 300), max_new_tokens=20, **MODES[mode])


@pytest.mark.slow
def test_a_part_of_a_span_is_used_where_spans_overlap(many_servers: LocalSwarm, embedded: PreTrainedModel) -> None:
    ids = prompt()
    with embedded_client(many_servers, [(0, 5), (2, 5), (5, 6), (6, 7), (7, 8)]) as model:
        stack = embedded.model
        hidden = expected = stack.embed_tokens(ids)
        with torch.no_grad():
            for block in stack.layers[1:4]:
                positions = stack.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
                expected = block(expected, position_embeddings=positions)
            torch.testing.assert_close(model.remote_blocks[1:4](hidden), expected)
        assert_same_tokens(model, embedded, ids, max_new_tokens=20)


def test_several_prompts_sampled_in_one_batch(model: Any, local: PreTrainedModel) -> None:
    assert_same_tokens(
        model, local, prompt(2), max_new_tokens=20, do_sample=True, num_return_sequences=3, top_k=20, num_beams=1
    )
    assert_same_tokens(model, local, prompt(2), max_new_tokens=20, num_beams=4, num_return_sequences=2)


LENGTHS = (1, 17, 65, 130, 257, 1000)
"""At and beside the boundaries that servers have: pages of 64 positions, steps of up to 16, pieces of a prefill."""


@pytest.mark.parametrize("chunk", [128, pytest.param(65, marks=pytest.mark.slow)])
@pytest.mark.rotates(3)
def test_prompts_of_many_lengths(llama: Path, swarm: LocalSwarm, local: PreTrainedModel, chunk: int) -> None:
    """Every length is tried in one process, in numerics/test_every_length."""
    with connected(llama, swarm.initial_peers, prefill_chunk_tokens=chunk) as model:
        for length in LENGTHS:
            ids = prompt(1, length, seed=chunk)
            assert_same_tokens(model, local, ids, max_new_tokens=2)
            logits = local(ids).logits
            torch.testing.assert_close(model(ids).logits, logits)
            with torch.no_grad(), model.inference_session(max_length=length) as session:
                torch.testing.assert_close(model.head(session.step(model.embed(ids))), logits)
            padded, mask = prompt(3, length), torch.ones(3, length, dtype=torch.int64)
            for row in range(3):
                mask[row, : min(row, length - 1)] = 0
            assert_same_tokens(model, local, padded, attention_mask=mask, max_new_tokens=2)


def test_a_server_of_its_own_choice_completes_the_swarm(llama: Path, local: PreTrainedModel) -> None:
    with LocalSwarm(llama, spans=[(0, 6)], **OPTIONS) as swarm:
        chosen = swarm.add_server(num_blocks=2)
        assert chosen.span == Span(6, 8)
        with connected(llama, swarm.initial_peers) as model:
            assert_same_tokens(model, local, prompt(), max_new_tokens=5)


def test_the_class_of_all_causal_models_opens_one(llama: Path, swarm: LocalSwarm, local: PreTrainedModel) -> None:
    with DistributedModelForCausalLM.from_pretrained(str(llama), initial_peers=swarm.initial_peers) as model:
        assert isinstance(model, type(local))
        assert isinstance(model, DistributedModelForCausalLM)
        assert_same_tokens(model, local, prompt(), max_new_tokens=8)
