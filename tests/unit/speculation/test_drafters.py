"""Guesses of drafters, and texts for which they have none."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from swarmllm.speculation.drafters import RESUMED_KIND, BestDrafter, ModelDrafter, NGramDrafter, SilentDrafter
from swarmllm.speculation.planner import Planner


def drafter(*tokens: int) -> NGramDrafter:
    drafter = NGramDrafter()
    drafter.extend(tokens)
    return drafter


def test_copies_what_followed_the_longest_match() -> None:
    guessing = drafter(5, 1, 2, 3, 4, 9, 2, 3, 7, 8, 1, 2, 3)
    assert guessing.begin()
    assert guessing.more(2) == [4, 9], "1 2 3 stands at the beginning, 2 3 alone later"
    assert guessing.more(2) == [2, 3], "and goes on where it stopped"


def test_of_equal_matches_the_latest_counts() -> None:
    guessing = drafter(1, 5, 1, 6, 1)
    assert guessing.begin()
    assert guessing.more(1) == [6]


def test_a_copy_may_run_into_itself() -> None:
    guessing = drafter(7, 1, 2, 7, 1, 2)
    assert guessing.begin()
    assert guessing.more(8) == [7, 1, 2, 7, 1, 2, 7, 1]


def test_what_was_never_seen_has_no_guess() -> None:
    assert not drafter().begin()
    assert not drafter(1, 2, 3).begin()


def test_a_copy_is_resumed_behind_what_was_replaced() -> None:
    guessing = drafter(1, 2, 3, 4, 5, 6, 1, 2)
    assert guessing.begin()
    assert guessing.more(2) == [3, 4]
    guessing.extend([99])  # instead of 3, and never seen before
    assert guessing.begin()
    assert guessing.kinds(1)[0][0] == RESUMED_KIND
    assert guessing.more(3) == [4, 5, 6]


def test_a_copy_that_is_always_wrong_is_given_up() -> None:
    guessing = drafter(1, 2, 3, 4, 5, 6, 7, 8, 1, 2)
    for token in (90, 91, 92):
        assert guessing.begin()
        guessing.more(1)
        guessing.extend([token])
    assert not guessing.begin()


def test_longer_matches_are_of_other_kinds() -> None:
    kinds = drafter(1, 2, 3, 4, 1, 2, 3, 4)
    assert kinds.begin()
    (first, first_prior), *_, (last, last_prior) = kinds.kinds(32)
    assert first < last
    assert first_prior < last_prior < 1


TEXT = [3, 8, 5]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """It is sure of its guesses."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)
    return model


def written(model: LlamaForCausalLM, text: list[int], count: int) -> list[int]:
    ids = model.generate(torch.tensor([text]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return ids[0, len(text) :].tolist()


def test_a_model_guesses_its_likeliest_tokens(model: LlamaForCausalLM) -> None:
    expected = written(model, TEXT, 6)
    guessing = ModelDrafter(model, 32)
    guessing.extend(TEXT)
    assert guessing.begin()
    assert guessing.more(2) + guessing.more(4) == expected
    changed = [*expected[:2], (expected[2] + 1) % 32]  # the text goes another way
    guessing.extend(changed)
    assert guessing.begin()
    assert guessing.more(3) == written(model, [*TEXT, *changed], 3)


def test_a_model_goes_on_from_guesses_that_the_text_has_by_now(model: LlamaForCausalLM) -> None:
    guessing = ModelDrafter(model, 32)
    guessing.extend(TEXT)
    assert guessing.begin()
    first = guessing.more(3)
    guessing.extend(first[:2])
    assert first + guessing.more(3) == written(model, TEXT, 6)


def test_a_model_never_guesses_what_the_other_does_not_know() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    guessing = ModelDrafter(model, 0)
    guessing.extend([3])
    assert guessing.begin()
    assert guessing.more(4) == []


def test_a_model_is_not_asked_for_more_positions_than_it_has() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    )
    guessing = ModelDrafter(model, 32)
    guessing.extend([3, 4, 5, 6, 7, 8])
    assert guessing.begin()
    assert len(guessing.more(5)) == 3
    guessing.extend([1, 2, 3])
    assert not guessing.begin()


def test_a_model_guesses_behind_tokens_that_it_lacks(model: LlamaForCausalLM) -> None:
    guessing = ModelDrafter(model, 32)
    guessing.extend([*TEXT, 33])
    assert guessing.begin()
    assert guessing.more(3) == written(model, [*TEXT, 31], 3)


class Sure(SilentDrafter):
    """Guesses one token, of one kind."""

    def __init__(self, name: str, token: int, prior: float, *, ready: bool = True) -> None:
        self.name, self.token, self.prior, self.ready = name, token, prior, ready

    def begin(self) -> bool:
        return self.ready

    def more(self, count: int) -> list[int]:
        return [self.token] * count

    def kinds(self, count: int) -> list[tuple[int, float]]:
        return [(self.token, self.prior)] * count


def seasoned(**draft_s: float) -> Planner:
    planner = Planner()
    for _ in range(3):
        planner.saw_step(1, [0.001, 0.001], took_s=0.25, client_s=0.001)
    for name, seconds in draft_s.items():
        planner.drafter = name
        planner.saw_draft(1, seconds)
    return planner


def test_of_several_drafters_the_surest_guesses() -> None:
    for planner in (Planner(), seasoned()):
        best = BestDrafter([Sure("a", 1, 0.4), Sure("b", 2, 0.9), Sure("c", 3, 0.95, ready=False)], planner)
        assert best.begin()
        assert (best.name, best.more(2)) == ("b", [2, 2])
    assert not BestDrafter([Sure("c", 3, 0.95, ready=False)], Planner()).begin()


def test_of_several_drafters_one_that_takes_long_does_not_guess() -> None:
    best = BestDrafter([Sure("a", 1, 0.8), Sure("b", 2, 0.9)], seasoned(a=0.0001, b=0.2))
    assert best.begin()
    assert best.name == "a"


def test_a_drafter_that_is_always_wrong_gives_way() -> None:
    planner = seasoned()
    best = BestDrafter([Sure("a", 1, 0.5), Sure("b", 2, 0.9)], planner)
    planner.saw_verdict(2, 0, 20)
    assert best.begin()
    assert best.name == "a"


def test_an_unasked_copy_is_judged_by_what_it_would_have_said() -> None:
    guessing = drafter(1, 2, 3, 4, 5, 6, 7, 8, 1, 2)
    for token in (3, 4, 5):
        assert guessing.begin()  # somebody else guesses
        guessing.extend([token])
    guessing.extend([99])
    assert guessing.begin()
    assert guessing.more(2) == [7, 8]


def test_silence() -> None:
    silent = SilentDrafter()
    silent.extend([1, 1, 1, 1])
    assert not silent.begin()
    assert silent.more(3) == silent.kinds(3) == []
