"""Models with an encoder and a decoder, both on real servers, one of which has blocks of both."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import OPTIONS, metric, wait_until
from tests.numerics.architectures import REFUSED_ENCODER_DECODERS
from tests.numerics.tiny_encoder_decoders import save_tiny_model, tiny_config, tiny_model
from transformers import BartForSequenceClassification, PreTrainedModel, T5ForConditionalGeneration

from swarmllm import AutoDistributedModel, AutoDistributedModelForCausalLM, ClientConfig, LocalSwarm
from swarmllm.commands.status import ModelStatus
from swarmllm.data_structures import BlockTraits, ModelRecord, ServedBlocks
from swarmllm.errors import CacheFullError, ConfigurationError, SwarmError, UnsupportedModelError
from swarmllm.network.p2p import verified_peers

pytestmark = pytest.mark.rotates(3, whole_file=True)

SPANS = [(0, 2), (2, 5), (5, 7)]
"""Spans of 4 blocks of the encoder and 3 of the decoder."""


@pytest.fixture(scope="module")
def local() -> PreTrainedModel:
    return tiny_model("t5")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("t5", tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def model(directory: Path, local: PreTrainedModel) -> Iterator[Any]:
    with (
        LocalSwarm(str(directory), spans=SPANS, **OPTIONS) as swarm,
        AutoDistributedModel.from_pretrained(str(directory), initial_peers=swarm.initial_peers) as model,
    ):
        model.generation_config = copy.deepcopy(local.generation_config)
        yield model


def source(batch: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    """Texts of different lengths, padded on the right."""
    ids = torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_masks_of_floats(model: Any, local: PreTrainedModel) -> None:
    """As peft makes them for soft prompts."""
    labels = torch.arange(3, 9)[None].repeat(2, 1)
    given = {**source(), "attention_mask": source()["attention_mask"].float(), "labels": labels}
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, local(**given).logits)
    with pytest.raises(ConfigurationError, match="leave output_hidden_states and output_attentions out"):
        model(**given, output_attentions=True)


@pytest.mark.parametrize(
    "options", [{"do_sample": True, "temperature": 2.0}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_tokens_are_those_of_the_local_model(model: Any, local: PreTrainedModel, options: dict[str, Any]) -> None:
    given = source(1 if "prompt_lookup_num_tokens" in options else 2)
    results = []
    for one in (local, model):
        torch.manual_seed(3)
        results.append(one.generate(**given, max_new_tokens=12, **options))
    assert results[1].tolist() == results[0].tolist()
    assert isinstance(model, T5ForConditionalGeneration)


def test_several_texts_at_once(model: Any, local: PreTrainedModel) -> None:
    """Sources of different lengths and rows, whose decode steps servers run together."""
    random = torch.Generator().manual_seed(3)
    sources = [torch.randint(3, 100, (rows, length), generator=random) for rows, length in ((1, 9), (2, 4), (1, 17))]
    options = {"do_sample": False, "max_new_tokens": 12, "num_beams": 2}
    wanted = [local.generate(input_ids=source, **options).tolist() for source in sources]
    with ThreadPoolExecutor(len(sources)) as pool:
        found = pool.map(lambda source: model.generate(input_ids=source, **options).tolist(), sources)
    assert list(found) == wanted


def test_forward_and_continued_forward(model: Any, local: PreTrainedModel) -> None:
    first, second = torch.tensor([[1, 5, 6], [1, 7, 8]]), torch.tensor([[9], [10]])
    logits = []
    with torch.no_grad():
        for one in (local, model):
            begun = one(**source(), decoder_input_ids=first, use_cache=True)
            more = {"encoder_outputs": (begun.encoder_last_hidden_state,), "past_key_values": begun.past_key_values}
            logits.append((begun.logits, one(**source(), decoder_input_ids=second, **more).logits))
    for got, want in zip(logits[1], logits[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_gradients_flow_through_both_stacks(model: Any, local: PreTrainedModel) -> None:
    labels = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(2))
    grads = []
    for one in (local, model):
        one.zero_grad()
        one(**source(), labels=labels).loss.backward()
        grads.append(one.get_input_embeddings().weight.grad.clone())
    want, got = grads
    assert float((got - want).norm()) <= 1e-4 * float(want.norm())


def test_lora_in_both_stacks_trains_as_locally(model: Any, directory: Path) -> None:
    labels = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(2))
    grads = []
    for base in (T5ForConditionalGeneration.from_pretrained(directory), model):
        torch.manual_seed(4)
        tuned = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q", "v"], r=2, init_lora_weights=False))
        tuned(**source(), labels=labels).loss.backward()
        grads.append({name: one.grad for name, one in tuned.named_parameters() if one.requires_grad})
        tuned.unload() if base is model else None
    want, got = grads
    assert got.keys() == want.keys()
    assert any(".encoder." in name for name in got)
    assert any(".decoder." in name for name in got)
    for name, grad in got.items():
        assert float((grad - want[name]).norm()) <= 1e-3 * float(want[name].norm()), name


def test_slices_of_blocks_are_numbered_through(model: Any) -> None:
    assert str(model.remote_encoder_blocks.span) == "0:4"
    assert str(model.remote_blocks.span) == "4:7"
    hidden = torch.randn(1, 4, 64)
    whole, parts = model.remote_encoder_blocks(hidden), hidden
    for part in (model.remote_encoder_blocks[0:1], model.remote_encoder_blocks[1:4]):
        parts = part(parts)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)


def test_what_an_encoder_decoder_cant_do_is_refused(model: Any, directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="opens a session for each text"):
        model.inference_session()
    with pytest.raises(ConfigurationError, match="leave output_hidden_states"):
        model(**source(), decoder_input_ids=torch.ones(2, 1, dtype=torch.long), output_hidden_states=True)
    with pytest.raises(UnsupportedModelError, match="AutoDistributedModelForSeq2SeqLM"):
        AutoDistributedModelForCausalLM.from_pretrained(str(directory))
    with pytest.raises(ConfigurationError, match="the decoder needs encoder outputs"):
        model(encoder_outputs=(torch.randn(3, 4, 64),), decoder_input_ids=torch.ones(2, 1, dtype=torch.long))


def test_status_says_where_the_decoder_begins(model: Any) -> None:
    snapshot = model.swarm.loop.run_coroutine(_look(model))
    assert snapshot.encoder_blocks == 4
    record = ModelRecord(name="tiny", fingerprint=model.swarm.fingerprint, num_blocks=7, encoder_blocks=4)
    text = ModelStatus(record, snapshot).as_text()
    assert "encoder 0:4 is --block_indices 0:4, decoder 0:3 is --block_indices 4:7" in text
    assert "··██│█··" in text
    assert "encoder 2:4, decoder 0:1" in text
    assert "encoder 2:4, decoder 0:1 …" in str(model.swarm.route()) or "decoder 0:1 …" in str(model.swarm.route())


def test_older_servers_are_refused_before_anything_is_computed(
    model: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They greet without a word of stacks."""
    parse = verified_peers.parse

    def as_an_old_one(*args: Any) -> ServedBlocks:
        return parse(*args).model_copy(update={"traits": BlockTraits()})

    monkeypatch.setattr(verified_peers, "parse", as_an_old_one)
    config = ClientConfig(initial_peers=model.swarm.config.initial_peers, route_timeout_s=1)
    with pytest.raises(
        SwarmError, match="version that serves no models with an encoder and a decoder: update swarmllm"
    ):
        AutoDistributedModel.from_pretrained(str(directory), client_config=config)


async def _look(model: Any) -> Any:
    return model.swarm.look_ups.snapshot


def test_servers_and_clients_refuse_with_the_reason(tmp_path: Path) -> None:
    """Before anything is computed; `test_architectures` has all that are refused."""
    name = REFUSED_ENCODER_DECODERS[0]
    directory = str(save_tiny_model(name, tmp_path))
    with pytest.raises(SwarmError, match=f"{name} can't be split over servers: it"):
        LocalSwarm(directory, spans=[(0, 2)], **OPTIONS).start()
    with pytest.raises(UnsupportedModelError, match=f"{name} can't be split over servers: it"):
        AutoDistributedModel.from_pretrained(directory, initial_peers=["/ip4/127.0.0.1/tcp/9/p2p/12D3KooW"])


def test_what_an_encoder_gave_is_leased_bounded_and_freed(tmp_path: Path) -> None:
    directory = str(save_tiny_model("bart", tmp_path))
    with (
        LocalSwarm(directory, spans=[(0, 7)], metrics_port=0, attn_cache_tokens=256, **OPTIONS) as swarm,
        AutoDistributedModel.from_pretrained(
            directory, client_config=ClientConfig(initial_peers=swarm.initial_peers, route_timeout_s=1)
        ) as model,
    ):
        (server,) = swarm.servers
        sources = [torch.randint(3, 100, (1, length)) for length in (10, 100)]
        leased = []
        for source in sources:
            with torch.no_grad():
                cache = model(input_ids=source, decoder_input_ids=torch.ones(1, 1, dtype=torch.long), use_cache=True)
            leased.append(metric(server, "cache_leased_bytes"))
            del cache
            wait_until(lambda: metric(server, "cache_leased_bytes") == 0, "the lease's end")
            model.generate(input_ids=source, max_new_tokens=4)
            wait_until(lambda: metric(server, "cache_leased_bytes") == 0, "the lease's end")
        assert leased[1] > leased[0] > 0
        with pytest.raises(CacheFullError):
            model.generate(input_ids=torch.randint(3, 100, (64, 120)), max_new_tokens=4)
        assert metric(server, "cache_leased_bytes") == 0


def test_a_class_for_a_sequence_through_both_stacks(tmp_path: Path) -> None:
    """A checkpoint saved for it loads as what it is, and what needs one stack is refused."""
    config = tiny_config("bart")
    torch.manual_seed(0)
    local: Any = BartForSequenceClassification(config).eval()
    local.save_pretrained(tmp_path)
    ids = torch.randint(3, 100, (2, 9))
    ids[:, -1] = config.eos_token_id
    with (
        LocalSwarm(str(tmp_path), spans=SPANS, **OPTIONS) as swarm,
        AutoDistributedModel.from_pretrained(str(tmp_path), initial_peers=swarm.initial_peers) as classifier,
    ):
        assert isinstance(classifier, BartForSequenceClassification)
        with torch.no_grad():
            torch.testing.assert_close(classifier(ids).logits, local(ids).logits, rtol=1e-4, atol=1e-5)
        with pytest.raises(ConfigurationError, match="call this model as transformers does"):
            classifier.embed(ids)
