"""Heads for multi-token prediction in every published layout guess what an independent formula guesses."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import PUBLISHED, WithHead, save_with_head
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmllm import embedded_model_path
from swarmllm.client.speculative_generation import (
    find_mtp_weights,
    load_mtp_head,
    small_mtp_weights,
    wanted_mtp_weights,
)
from swarmllm.demo.local_swarm import embedded_heldout_texts
from swarmllm.errors import ConfigurationError, WeightsMismatchError
from swarmllm.models.architecture import decoder_stack
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.speculation.drafters import DEEPEST, MAX_CONTEXT, MTP_KIND, MtpDrafter, note_states

VOCABULARY = 128


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WithHead:
    return save_with_head(tmp_path_factory.mktemp(request.param.replace(" ", "-")), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> WithHead:
    return save_with_head(tmp_path_factory.mktemp("beside"), "trained later")


def new_drafter(source: WithHead) -> MtpDrafter:
    weights = wanted_mtp_weights(open_checkpoint(str(source.directory)))
    head = load_mtp_head(source.model, weights, torch.float32)
    return MtpDrafter(lambda: head)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def show(drafter: MtpDrafter, model: Any, hidden: Tensor) -> None:
    """Let it see hidden states `[seq, hidden]`, as if a forward of the model had given them."""
    with drafter.following(model):
        note_states(decoder_stack(model), (), (hidden[None],))


def tell(drafter: MtpDrafter, source: WithHead, tokens: list[int], first: int, *, beyond: int = 0) -> None:
    """Have it see the forward that a step at position `first - 1` makes, whose last `beyond` guesses are wrong."""
    with torch.no_grad():
        whole = source.model.get_decoder()(torch.tensor([[*tokens[:-1], *([7] * beyond)]])).last_hidden_state
    show(drafter, source.model, whole[0, max(0, first - 1) :])


class Watched:
    """A head that notes the hidden states that it is fed."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self.fed: list[Tensor] = []

    def states(self, tokens: Any, hidden: Tensor, cache: Any) -> Tensor:
        self.fed += list(hidden)
        found: Tensor = self._head.states(tokens, hidden, cache)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


def watched_drafter(source: WithHead) -> tuple[Watched, MtpDrafter]:
    weights = wanted_mtp_weights(open_checkpoint(str(source.directory)))
    head: Any = Watched(load_mtp_head(source.model, weights, torch.float32))
    return head, MtpDrafter(lambda: head)


@pytest.mark.parametrize("length", [2, 3, 11])
def test_guesses_of_every_layout_are_those_of_the_formula(published: WithHead, length: int) -> None:
    drafter, tokens = new_drafter(published), text(length)
    tell(drafter, published, tokens, 1)
    drafter.extend(tokens[:-1])
    drafter.extend(tokens[-1:])
    assert drafter.begin()
    assert drafter.more(3) + drafter.more(2) == published.guesses(tokens, 5)


def test_guesses_go_on_from_what_the_text_has_become(llama: WithHead) -> None:
    drafter, tokens = new_drafter(llama), text(6)
    tell(drafter, llama, tokens, 1)
    drafter.extend(tokens[:-1])
    drafter.extend(tokens[-1:])
    assert drafter.begin()
    guesses = drafter.more(4)
    tokens += guesses[:2]  # two are right, and two still under way: with new hidden states they are gone through again
    tell(drafter, llama, tokens, 6)
    drafter.extend(guesses[:2])
    assert len(drafter.more(2)) == 2
    tokens += [(guesses[2] + 1) % VOCABULARY]  # the text goes another way
    tell(drafter, llama, tokens, 8, beyond=2)
    drafter.extend(tokens[-1:])
    assert drafter.begin()
    assert drafter.more(4) == llama.guesses(tokens, 4)
    assert drafter.begin()
    assert drafter.more(4) == llama.guesses(tokens, 4), "begun anew at the same place"


def test_guesses_under_way_are_gone_through_with_the_hidden_states_that_are_known(llama: WithHead) -> None:
    drafter, tokens = new_drafter(llama), text(6)
    tell(drafter, llama, tokens, 1)
    drafter.extend(tokens[:-1])
    drafter.extend(tokens[-1:])
    assert drafter.begin()
    guesses = drafter.more(1)
    tokens += guesses
    tell(drafter, llama, tokens, 6)
    drafter.extend(guesses)
    assert drafter.more(3) == llama.guesses(tokens, 3), "all that was guessed is known: the same as a new beginning"


def test_kinds_count_from_the_last_known_hidden_state(llama: WithHead) -> None:
    drafter, tokens = new_drafter(llama), text(4)
    assert not drafter.begin(), "it has seen nothing"
    tell(drafter, llama, tokens, 1)
    drafter.extend(tokens[:-1])
    drafter.extend(tokens[-1:])
    assert drafter.begin()
    assert [kind for kind, _ in drafter.kinds(2)] == [MTP_KIND, MTP_KIND - 1]
    drafter.more(3)
    assert drafter.kinds(1)[0][0] == MTP_KIND - 3
    assert drafter.kinds(40)[-1][0] == MTP_KIND - DEEPEST


def test_only_the_end_of_a_long_prompt_is_shown_to_the_head(llama: WithHead) -> None:
    head, drafter = watched_drafter(llama)
    hidden = torch.randn(MAX_CONTEXT + 9, 64)
    show(drafter, llama.model, hidden)
    drafter.extend(text(MAX_CONTEXT + 9))
    drafter.extend([5])
    assert drafter.begin()
    drafter.more(1)
    assert torch.equal(torch.stack(head.fed), hidden[-MAX_CONTEXT:])


def test_a_checkpoint_with_a_head_is_to_a_swarm_what_it_is_without(llama: WithHead, tmp_path: Path) -> None:
    bare = save_with_head(tmp_path / "bare", "trained later").directory
    (bare / "mtp.safetensors").unlink()
    assert fingerprint(open_checkpoint(str(bare))) == fingerprint(open_checkpoint(str(llama.directory)))
    assert find_mtp_weights(open_checkpoint(str(bare))) is None
    with pytest.raises(ConfigurationError, match="has no head for multi-token prediction"):
        wanted_mtp_weights(open_checkpoint(str(bare)))


def test_a_large_head_is_not_read_unasked(llama: WithHead, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(llama.directory))
    assert small_mtp_weights(checkpoint, torch.float32) is not None
    monkeypatch.setattr("swarmllm.client.speculative_generation.AUTO_BYTES", 1000)
    assert small_mtp_weights(checkpoint, torch.float32) is None


def test_a_text_sees_its_own_forwards_alone(llama: WithHead) -> None:
    """While other threads generate on the same model, and other models in this one."""
    other = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    (first, second), drafters = zip(*(watched_drafter(llama) for _ in range(2)), strict=True)
    both_follow = threading.Barrier(2, timeout=60)

    def follow(drafter: MtpDrafter, tokens: list[int]) -> Tensor:
        with drafter.following(llama.model), torch.no_grad():
            both_follow.wait()
            other(torch.tensor([tokens]))
            return llama.model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]

    with ThreadPoolExecutor(2) as threads:
        shown = list(threads.map(follow, drafters, (text(5, 1), text(7, 2))))
    llama.model(torch.tensor([text(3)]))
    for head, drafter, expected in zip((first, second), drafters, shown, strict=True):
        drafter.extend(text(len(expected)))
        drafter.extend([5])
        assert drafter.begin()
        drafter.more(1)
        torch.testing.assert_close(torch.stack(head.fed), expected)


def test_threads_share_a_head(llama: WithHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that one of them moved in place would vanish under the others: Python crashed so."""
    head = load_mtp_head(llama.model, wanted_mtp_weights(open_checkpoint(str(llama.directory))), torch.float32)
    tokens, random = text(5), torch.Generator().manual_seed(1)
    hidden = torch.randn(5, llama.model.config.hidden_size, generator=random)
    wanted = head.states(tokens, hidden, head.new_cache())
    with monkeypatch.context() as fixed:
        fixed.setattr(torch.nn.Module, "to", lambda *_, **__: pytest.fail("weights move"))
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: head.states(tokens, hidden, head.new_cache()), range(100)))
    assert all(torch.equal(one, wanted) for one in found)
    parts = head._parts
    assert head._parts_for(hidden.double()) is not parts
    assert all(weight.dtype == torch.float32 for weight in parts.parameters()), "those in use stay as they are"


def test_without_a_head_nothing_is_guessed(llama: WithHead) -> None:
    drafter = MtpDrafter(lambda: None)
    show(drafter, llama.model, torch.randn(3, 64))
    drafter.extend([5, 6, 7])
    assert not drafter.begin()


def test_the_embedded_model_has_a_head_that_is_worth_it() -> None:
    """On a held-out text, its first guess is often the model's likeliest token."""
    checkpoint = open_checkpoint(embedded_model_path())
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    head = load_mtp_head(model, wanted_mtp_weights(checkpoint), torch.float32)
    drafter = MtpDrafter(lambda: head)
    tokens = AutoTokenizer.from_pretrained(embedded_model_path())(embedded_heldout_texts()[0]).input_ids
    with torch.no_grad():
        hidden = model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]
        best = model.lm_head(hidden).argmax(-1).tolist()
    right = 0
    for position in range(len(tokens) - 1):
        show(drafter, model, hidden[position : position + 1])
        drafter.extend(tokens[position + 1 : position + 2])
        assert drafter.begin()
        right += drafter.more(1) == [best[position + 1]]
    assert right / (len(tokens) - 1) > 0.7


def test_a_head_of_another_size_is_refused(llama: WithHead) -> None:
    weights = wanted_mtp_weights(open_checkpoint(str(llama.directory)))
    tensors: Any = weights.checkpoint.tensors

    def wrong(names: Any, **options: Any) -> dict[str, Any]:
        found = tensors(names, **options)
        return {name: torch.ones(64, 64) if "eh_proj" in name else lazy for name, lazy in found.items()}

    weights.checkpoint.tensors = wrong  # type: ignore[method-assign]
    with pytest.raises(WeightsMismatchError, match=r"eh_proj\.weight should be \[64, 128\]"):
        load_mtp_head(llama.model, weights, torch.float32)
