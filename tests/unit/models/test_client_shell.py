"""The model without its blocks, run through blocks that only add one."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from swarmllm.data_structures import BlockTraits
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.shell.client_shell import embed, head
from swarmllm.models.shell.loading import load_client_shell
from swarmllm.models.shell.remote_cache import RemoteCache

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, head_dim=4
)
IDS = torch.tensor([[3, 4, 5]])


class FakeSession:
    is_generating = False

    def __init__(self, runner: "AddsOne") -> None:
        self.position = 0
        self.runner = runner

    def run_step(self, inputs: BlockInputs, part: Any = None) -> Tensor:
        self.runner.steps += 1
        self.position += inputs.seq_len
        return self.runner.run_blocks(inputs).detach()

    def select_batch(self, indices: Sequence[int]) -> None: ...
    def record_past(self) -> None: ...
    def remember(self, inputs: BlockInputs, part: Any = None) -> None:
        self.position += inputs.seq_len


class AddsOne:
    """Blocks of a kind; keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[BlockInputs] = []
        self.sessions: list[tuple[int, int | None]] = []
        self.steps = 0
        """Calls with a session."""

    def run_blocks(self, inputs: BlockInputs, part: Any = None) -> Tensor:
        self.calls.append(inputs)
        return inputs.hidden_states + 1

    def new_cache_session(self, batch_size: int, max_length: int | None) -> FakeSession:
        self.sessions.append((batch_size, max_length))
        return FakeSession(self)

    def longest_row(self) -> int:
        return 100


class Mixin:
    is_distributed = True


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).save_pretrained(directory, max_shard_size="2KB")
    return directory


@pytest.fixture
def runner() -> AddsOne:
    return AddsOne()


def load(directory: Path, runner: AddsOne, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "model_class": LlamaForCausalLM,
        "mixin": Mixin,
        "dtype": "auto",
        "runner": runner,
        "traits": BlockTraits(),
        "progress": False,
    }
    return load_client_shell(open_checkpoint(str(directory)), **{**arguments, **options})


@pytest.fixture
def model(saved: Path, runner: AddsOne) -> Any:
    return load(saved, runner)


def test_is_the_class_of_its_architecture(model: Any) -> None:
    assert isinstance(model, LlamaForCausalLM)
    assert model.is_distributed
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sorted(model.state_dict()) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_opens_no_shard_that_holds_only_blocks(saved: Path, tmp_path: Path, runner: AddsOne) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    checkpoint = open_checkpoint(str(copy))
    kept = {file for name, file in checkpoint.weight_map().items() if ".layers." not in name}
    broken = [file for file in copy.glob("*.safetensors") if file.name not in kept]
    assert broken
    for file in broken:
        file.write_bytes(b"\xff" * file.stat().st_size)
    assert load(copy, runner)


def test_blocks_get_what_the_caller_gave(model: Any, runner: AddsOne) -> None:
    mask, positions = torch.ones(1, 3, dtype=torch.long), torch.tensor([[5, 6, 7]])
    model(IDS, mask, positions)
    (inputs,) = runner.calls
    assert (inputs.batch_size, inputs.seq_len) == (1, 3)
    assert inputs.attention_mask is mask
    assert inputs.position_ids is positions
    assert inputs.input_ids is None, "these blocks don't need it"


def test_blocks_get_the_extra_inputs_that_they_need(saved: Path, runner: AddsOne) -> None:
    traits = BlockTraits(extra_inputs=("input_ids", "inputs_embeds"))
    model = load(saved, runner, traits=traits)
    model(IDS)
    assert runner.calls[0].input_ids is IDS
    assert torch.equal(runner.calls[0].inputs_embeds, model.model.embed_tokens(IDS))
    with pytest.raises(ConfigurationError, match="input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 8))


def test_embed_and_head_are_the_two_halves(model: Any) -> None:
    hidden = embed(model, IDS)
    assert torch.equal(hidden, model.model.embed_tokens(IDS))
    assert torch.equal(head(model, hidden + 1), model(IDS).logits)


def test_the_call_of_the_stack_alone_works_too(model: Any, runner: AddsOne) -> None:
    model.model.forward(IDS)
    assert len(runner.calls) == 1


@pytest.mark.parametrize("use_cache", [True, None])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_cache_is_returned_and_continued(
    model: Any, runner: AddsOne, use_cache: bool | None, with_gradients: bool
) -> None:
    """Only who asks for a cache, and wants no gradients, has the prompt computed on a session at once."""
    with torch.set_grad_enabled(with_gradients):
        cache = model(IDS, use_cache=use_cache).past_key_values
        assert isinstance(cache, RemoteCache)
        assert runner.steps == int(bool(use_cache) and not with_gradients)
        assert cache.get_seq_length() == 3
        before = runner.steps
        assert model(IDS[:, :1], past_key_values=cache, use_cache=use_cache).past_key_values is cache
        assert runner.steps == before + 1
        assert cache.get_seq_length() == 4
        assert model(IDS, use_cache=False).past_key_values is None
    assert runner.sessions == [(1, None)]


def test_a_text_too_long_for_one_request_takes_a_session(model: Any, runner: AddsOne) -> None:
    with torch.no_grad():
        model(IDS.expand(1, -1).repeat(1, 34))
    assert runner.steps == 1


def test_a_batch_with_gradients_takes_no_session(model: Any, runner: AddsOne) -> None:
    model(IDS, labels=IDS).loss.backward()
    assert runner.steps == 0
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0


def test_the_cache_of_another_model_is_refused(model: Any, saved: Path) -> None:
    cache = model(IDS).past_key_values
    with pytest.raises(ConfigurationError, match="another model"):
        load(saved, AddsOne())(IDS, past_key_values=cache)


def test_what_a_cache_holds_cannot_be_read(model: Any) -> None:
    cache = model(IDS).past_key_values
    for use in (list, lambda cache: cache.update(IDS, IDS, 0)):
        with pytest.raises(ConfigurationError, match="on the servers"):
            use(cache)


def test_a_plain_forward_inside_a_session_is_refused(
    saved: Path, runner: AddsOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would forget the text so far, other libraries would continue it."""
    model = load(saved, runner)
    monkeypatch.setattr(Mixin, "active_cache_session", lambda self: FakeSession(AddsOne()), raising=False)
    with pytest.raises(ConfigurationError, match="use_cache=False"):
        model(IDS)
    assert model(IDS, use_cache=False).past_key_values is None


def test_gradients_through_a_session_are_refused(model: Any) -> None:
    with torch.no_grad():
        cache = model(IDS).past_key_values
    logits = model(IDS[:, :1], past_key_values=cache).logits
    with pytest.raises(ConfigurationError, match="use_cache=False"):
        logits.sum().backward()


def test_gradients_to_what_came_before_are_refused(model: Any) -> None:
    """Locally they would flow through the cache, though nothing of the second call itself wants any."""
    model.requires_grad_(False)
    cache = model(inputs_embeds=torch.zeros(1, 3, 8, requires_grad=True)).past_key_values
    with pytest.raises(ConfigurationError, match="use_cache=False"):
        model(IDS[:, :1], past_key_values=cache).logits.sum().backward()
    cache = model(IDS).past_key_values
    model.lm_head.requires_grad_(True)
    model(IDS[:, :1], past_key_values=cache).logits.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0, "a head alone needs nothing of the cache"


def test_a_deferred_cache_keeps_what_callers_change_later(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered: list[BlockInputs] = []
    monkeypatch.setattr(FakeSession, "remember", lambda self, inputs, part: remembered.append(inputs))
    embeds, mask = torch.ones(1, 3, 8), torch.ones(1, 3, dtype=torch.long)
    model(inputs_embeds=embeds, attention_mask=mask)
    embeds.zero_()
    mask.zero_()
    assert remembered[0].hidden_states.all()
    assert remembered[0].attention_mask is not None
    assert remembered[0].attention_mask.all()
    assert not remembered[0].hidden_states.requires_grad


def test_generate_opens_one_session_of_known_length(model: Any, runner: AddsOne) -> None:
    model.generate(IDS.expand(2, -1), max_new_tokens=4, num_beams=3, do_sample=False)
    assert runner.sessions[0][0] == 6
    assert runner.sessions[0][1] is not None
    assert runner.sessions[0][1] >= 6
    assert len(runner.sessions) == 1


def test_generate_continues_the_active_session(saved: Path, runner: AddsOne, monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession(runner)
    monkeypatch.setattr(Mixin, "active_cache_session", lambda self: session, raising=False)
    load(saved, runner).generate(IDS, max_new_tokens=2, do_sample=False)
    assert runner.sessions == []
    assert session.position == 4


@pytest.mark.parametrize("name", ["output_router_logits", "output_attentions"])
def test_what_stays_on_the_servers_is_refused(model: Any, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        model(IDS, **{name: True})


def test_local_caches_are_refused(model: Any) -> None:
    for call in (
        lambda: model(IDS, past_key_values=DynamicCache()),
        lambda: model.generate(IDS, past_key_values=DynamicCache(), max_new_tokens=2),
    ):
        with pytest.raises(ConfigurationError, match="past_key_values"):
            call()


def test_a_mask_that_is_no_tensor_is_refused(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="attention_mask"):
        model(IDS, attention_mask={"full_attention": None})


def test_dtype(saved: Path, runner: AddsOne) -> None:
    assert load(saved, runner, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    assert load(saved, runner, dtype="float16").lm_head.weight.dtype == torch.float16
    assert load(saved, runner).lm_head.weight.dtype == torch.float32
