"""What is guessed, and when nothing is."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swarmllm.speculation.drafters import RESUMED_KIND, ModelDrafter, NGramDrafter, SilentDrafter


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


def test_a_model_guesses_its_likeliest_tokens() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)
    ids = torch.tensor([[3, 8, 5]])
    expected = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, 3:].tolist()

    guessing = ModelDrafter(model, 32)
    guessing.extend([3, 8, 5])
    assert guessing.begin()
    assert guessing.more(2) + guessing.more(4) == expected
    guessing.extend([*expected[:2], (expected[2] + 1) % 32])  # the text goes another way
    assert guessing.begin()
    ids = torch.tensor([[3, 8, 5, *expected[:2], (expected[2] + 1) % 32]])
    again = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)[0, 6:].tolist()
    assert guessing.more(3) == again


def test_a_model_never_guesses_what_the_other_does_not_know() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    guessing = ModelDrafter(model, 0)
    guessing.extend([3])
    assert guessing.begin()
    assert guessing.more(4) == []


def test_silence() -> None:
    silent = SilentDrafter()
    silent.extend([1, 1, 1, 1])
    assert not silent.begin()
    assert silent.more(3) == silent.kinds(3) == []
