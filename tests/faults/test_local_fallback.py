"""A swarm that can't be repaired any more: a model of the client's own machine goes on with the text."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_tools import Faulty, at_token
from swarm_models import connected, generate_seeded, prompt, save_llama
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from swarmllm import AutoDistributedModelForSequenceClassification, ClientConfig
from swarmllm.data_structures import Span
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.errors import ConfigurationError, MissingBlocksError

pytestmark = pytest.mark.rotates(6, whole_file=True)

LAST = (4, 6)
NUM_TOKENS = 12


class Streamed(BaseStreamer):
    """The tokens as a reader gets them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


@pytest.fixture(scope="module")
def swarm(llama: Path) -> Iterator[Faulty]:
    """One server for each span, so that no block is served any more when one dies."""
    with Faulty(llama, [(0, 4), LAST]) as swarm:
        yield swarm


@pytest.fixture
def kill_last(swarm: Faulty) -> Callable[[], None]:
    """The only server of the last span; the next test finds it mended."""

    def kill() -> None:
        (server,) = [one for one in swarm.living if one.span.end == 6]
        server.kill()

    return kill


@pytest.fixture
def twin(swarm: Faulty) -> Iterator[LocalServer]:
    """A second server of the last span, which ends with the test: whichever of the two that kills, none is left."""
    server = swarm.add(Span(*LAST))
    yield server
    server.stop()


@pytest.fixture
def backed(llama: Path, swarm: Faulty, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client with the same model as its fallback."""
    options = {"fallback_to_local": str(llama), "route_timeout_s": 1.0, **getattr(request, "param", {})}
    living = [server.peer_id for server in swarm.living]
    with connected(llama, swarm.initial_peers, allowed_servers=living, **options) as model:
        yield model


@pytest.mark.parametrize("backed", [{}, {"speculation": "ngram"}], indirect=True, ids=["plain", "speculating"])
@pytest.mark.parametrize("length", [1, 9])
def test_goes_on_from_the_last_token(
    backed: Any, local: PreTrainedModel, kill_last: Callable[[], None], length: int, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(1, length)
    expected = generate_seeded(local, ids, max_new_tokens=NUM_TOKENS).tolist()
    streamer = Streamed()
    with caplog.at_level(logging.WARNING):
        got = generate_seeded(
            backed, ids, max_new_tokens=NUM_TOKENS, streamer=streamer, logits_processor=at_token(5, kill_last)
        )
    assert got.tolist() == expected
    assert (streamer.ids, streamer.ended) == (expected[0], 1)
    assert "the local model goes on" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 5},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"max_length": 9 + NUM_TOKENS, "max_new_tokens": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_way_to_generate(
    backed: Any, local: PreTrainedModel, kill_last: Callable[[], None], options: dict[str, Any], batch_size: int
) -> None:
    """Rows of different lengths, of which some end early; nothing is lost or repeated."""
    ids, mask = prompt(batch_size, 9), torch.ones(batch_size, 9, dtype=torch.long)
    mask[0, : 3 * (batch_size - 1)] = 0
    given = {"attention_mask": mask, "max_new_tokens": NUM_TOKENS, **options}
    expected = generate_seeded(local, ids, **given)
    got = generate_seeded(backed, ids, **given, logits_processor=at_token(5, kill_last))
    if options.get("do_sample"):  # from where the local model goes on, other numbers are drawn
        assert got.shape == expected.shape
        assert got[:, :9].equal(ids)
        if batch_size == 1:
            assert got[:, : 9 + 4].equal(expected[:, : 9 + 4])
    else:
        assert got.equal(expected)


def test_details_are_those_of_one_model(backed: Any, local: PreTrainedModel, kill_last: Callable[[], None]) -> None:
    wanted = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True, "output_scores": True, "do_sample": False}
    expected = local.generate(prompt(), **wanted)
    got = backed.generate(prompt(), **wanted, logits_processor=at_token(5, kill_last))
    assert got.sequences.equal(expected.sequences)
    torch.testing.assert_close(got.scores, expected.scores)


def test_hidden_states_are_those_of_one_model(
    backed: Any, local: PreTrainedModel, kill_last: Callable[[], None]
) -> None:
    wanted: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True, "do_sample": False}
    wanted["output_hidden_states"] = True
    expected = local.generate(prompt(), **wanted)
    got = backed.generate(prompt(), **wanted, logits_processor=at_token(5, kill_last))
    assert got.sequences.equal(expected.sequences)
    assert len(got.hidden_states) == NUM_TOKENS
    torch.testing.assert_close(got.hidden_states, expected.hidden_states)


def test_rows_that_have_ended_stay_so(backed: Any, local: PreTrainedModel, kill_last: Callable[[], None]) -> None:
    ids = prompt(3, 6)
    plain = generate_seeded(local, ids, max_new_tokens=NUM_TOKENS)
    given = {"max_new_tokens": NUM_TOKENS, "eos_token_id": int(plain[1, 8]), "pad_token_id": 0}
    expected = generate_seeded(local, ids, **given)
    assert generate_seeded(backed, ids, **given, logits_processor=at_token(6, kill_last)).equal(expected)


@pytest.mark.parametrize("backed", [{"fallback_after": 1}], indirect=True)
def test_enough_repairs(
    twin: LocalServer, backed: Any, swarm: Faulty, local: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """One of two servers dies; what the other could still do isn't waited for."""
    expected = generate_seeded(local, prompt(), max_new_tokens=NUM_TOKENS)

    def strike() -> None:
        swarm.on_route(session.route, "last").kill()

    with backed.inference_session(max_length=100) as session, caplog.at_level(logging.WARNING):
        got = generate_seeded(backed, prompt(), max_new_tokens=NUM_TOKENS, logits_processor=at_token(5, strike))
        assert session.num_repairs >= 1  # a busy machine may need two for one token; between tokens they are counted
    assert got.equal(expected)
    assert "as often as fallback_after allows" in caplog.text
    caplog.clear()
    assert generate_seeded(backed, prompt(), max_new_tokens=NUM_TOKENS).equal(expected)
    assert "the local model" not in caplog.text


def test_what_it_can_not_do_is_raised(backed: Any, kill_last: Callable[[], None]) -> None:
    """Forward; embeddings, of which the local model may have others; scores of a text that somebody reads already."""
    kill_last()
    ids = prompt()
    with pytest.raises(MissingBlocksError):
        backed(ids)
    with pytest.raises(MissingBlocksError):
        backed.generate(inputs_embeds=backed.get_input_embeddings()(ids), max_new_tokens=3)
    with pytest.raises(MissingBlocksError):
        backed.generate(ids, max_new_tokens=3, streamer=Streamed(), return_dict_in_generate=True)


def test_refused(llama: Path, swarm: Faulty, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "other", num_blocks=1, vocab_size=77)

    def open_backed(name: str) -> None:
        with connected(llama, swarm.initial_peers, fallback_to_local=name):
            pass

    with pytest.raises(ConfigurationError, match="has another tokenizer than the swarm's model"):
        open_backed(str(other))
    with pytest.raises(ConfigurationError, match="and the directory '/nowhere' does not exist"):
        open_backed("/nowhere")
    with pytest.raises(ConfigurationError, match="fallback_after needs fallback_to_local"):
        ClientConfig(fallback_after=2)
    with pytest.raises(ConfigurationError, match="fallback_after must be at least 1, not 0"):
        ClientConfig(fallback_to_local=str(llama), fallback_after=0)
    config = ClientConfig(initial_peers=tuple(swarm.initial_peers), fallback_to_local=str(llama))
    with pytest.raises(ConfigurationError, match="fallback_to_local is for text generation"):
        AutoDistributedModelForSequenceClassification.from_pretrained(str(llama), client_config=config)
